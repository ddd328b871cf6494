"""What panels that serve several operators share: knobs that only some have, and options and defaults of their own."""

from collections.abc import Callable, Collection, Iterable, Mapping

import ipywidgets as widgets

from .base import Panel


def only_for(panel: Panel, op: widgets.Widget, knob: widgets.Widget, operators: Collection[str]) -> None:
    """Show a knob where the chosen operator is one of these, hide it elsewhere."""

    def show(_, name: str) -> None:
        knob.layout.display = "" if name in operators else "none"

    panel.when(op, show)
    show(None, op.value)


def own_default(panel: Panel, op: widgets.Widget, knob: widgets.Widget, defaults: Mapping[str, object]) -> None:
    """A knob that stands at the default of the operator before goes to that of the one now chosen."""

    def follow(before: str, name: str) -> None:
        if knob.value == defaults[before]:
            knob.value = defaults[name]

    panel.when(op, follow)


def own_options(
    panel: Panel,
    op: widgets.Widget,
    knob: widgets.Widget,
    options: Callable[[str], Iterable[str]],
    otherwise: Mapping[str, str],
) -> None:
    """Offer each operator's own options; the one chosen stays where it is still there, `otherwise` takes over."""

    def offer(_, name: str) -> None:
        kept, offered = knob.value, tuple(options(name))
        knob.options = offered
        knob.value = kept if kept in offered else otherwise[name]

    panel.when(op, offer)
