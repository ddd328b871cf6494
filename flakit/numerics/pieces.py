"""Runs an operator on a sequence in pieces, each of which starts from the final state of the one before.

The state is all that the future sees of the past, so pieces must give the results of the full sequence: outputs, final
state, and every gradient, which flows back through the states.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from .arguments import listed, one_of, whole_number
from .described import Output
from .operators import Operator, operator

HANDED = ("state", "detached", "nothing")


def in_pieces(op: str | Operator, cuts: Sequence[int], *, handed: str = "state") -> Operator:
    """Return the operator with every form computed in pieces; `evaluate(in_pieces("rwkv6", [30]), inputs)` runs it.

    cuts: first tokens of the later pieces, 0 < t < T, ascending; every piece has a token. handed: what a piece passes
    to the next: the "state"; the state "detached", so that no gradient flows back, as in truncated backpropagation; or
    "nothing", so that every piece but the first starts from zeros. Raises ValueError for other cuts or another
    `handed`, and when it runs, for cuts beyond T.
    """
    op = operator(op)
    one_of("handed", handed, HANDED)
    cuts = [whole_number("cuts", cut) for cut in listed(cuts)]
    if sorted(set(cuts)) != cuts:
        raise ValueError(f"cuts: expected ascending numbers of tokens from 1, got {cuts}")
    return dataclasses.replace(op, forms={name: _pieces(op, form, cuts, handed) for name, form in op.forms.items()})


def _pieces(op: Operator, form: Callable, cuts: list[int], handed: str) -> Callable:
    def call(*, initial_state=None, output_final_state: bool = True, **rest) -> Output:
        rows = {name: rest.pop(name) for name in op.sequences}
        T = rows[op.sequences[0]].shape[1]
        if cuts and cuts[-1] >= T:
            raise ValueError(f"cuts: expected cuts below T = {T}, got {cuts}")
        outputs, state = [], initial_state
        for start, end in zip([0, *cuts], [*cuts, T], strict=True):
            if start and handed != "state":
                state = None if handed == "nothing" else op.state([part.detach() for part in op.parts(state)])
            piece = {name: x[:, start:end] for name, x in rows.items()}
            o, state = form(**piece, **rest, initial_state=state, output_final_state=True)
            outputs.append(o)
        return Output(torch.cat(outputs, 1), state)

    return call
