"""The sketches of 12_states_and_shapes."""

import functools

from ...figures.sketches.states_and_shapes import Pieces, PiecesShown
from ...numerics.errors import relative_l2
from ...numerics.evaluate import evaluate, truth
from ...numerics.gradients import along_time
from ...numerics.inputs import inputs
from ...numerics.operators import OPERATORS
from ...numerics.pieces import HANDED, in_pieces
from ..knobs import operator_choice, steps
from .sketch import Sketch

_T, _CUT = 96, 48


@functools.cache
def _uncut(op: str) -> tuple[dict, dict]:
    """Return inputs, and the float64 results of the uncut sequence."""
    x = inputs(op, T=_T, H=2, K=16)
    return x, truth(op, x, recurrence=False)


def _pieces(handed: str, op: str) -> PiecesShown:
    x, exact = _uncut(op)
    results = evaluate(in_pieces(op, [_CUT], handed=handed), x)
    return PiecesShown(
        op=OPERATORS[op].label,
        handed=handed,
        cut=_CUT,
        **{name: along_time(results[name], exact[name]).numpy() for name in ("o", "dv")},
        o_second=relative_l2(results["o"][:, _CUT:], exact["o"][:, _CUT:]),
        dv_first=relative_l2(results["dv"][:, :_CUT], exact["dv"][:, :_CUT]),
        worst=max(relative_l2(results[name], exact[name]) for name in exact),
    )


SKETCHES = {
    "pieces": Sketch(
        {
            "handed": lambda: steps("nothing", {each: each for each in HANDED}, "handed on"),
            "op": lambda: operator_choice("rwkv6"),
        },
        _pieces,
        Pieces,
        {"the state": {"handed": "state"}, "detached": {"handed": "detached"}, "nothing": {"handed": "nothing"}},
        """import flakit
from flakit.numerics.errors import relative_l2
from flakit.numerics.evaluate import evaluate, truth
from flakit.numerics.pieces import in_pieces

x = flakit.inputs({op}, T=96, H=2, K=16)
exact = truth({op}, x, recurrence=False)
results = evaluate(in_pieces({op}, [48], handed={handed}), x)
for name in exact:
    print(f"{{name:12}} off by {{relative_l2(results[name], exact[name]):.1e}}")
""",
    ),
}
