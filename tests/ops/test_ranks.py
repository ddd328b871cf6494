"""One sequence over several processes: all that one process gives, and what ranks tell each other."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import flakit
from flakit.numerics.operators import OPERATORS
from flakit.ops.common import ranks
from flakit.ops.common.ranks import NOTE, Piece, packed_pieces
from tests.models import over_ranks as language_models
from tests.ops.checking import measure, true_values
from tests.ops.over_ranks import Case, counted, fla_context, joined, over_ranks, run_each
from tests.ops.settings import Setting

OPS = pytest.mark.parametrize("op", OPERATORS)
SETTING = Setting(T=37, K=16, V=24, decay="rwkv6-wide", states="both")


def of(op: str, **changes) -> Setting:
    slots = dict(M=16, group=2) if op == "gsa" else {}
    return replace(SETTING, op=op, **(slots | changes))


def cases(op: str, *cuts: tuple[int, ...]) -> list[Case]:
    """Every decay, dtype, packing, form, and kind of states, over slices of unlike lengths."""
    settings = [
        *(of(op, decay=decay) for decay in ("none", "-1e-2", "-5", "-20", "inf-spikes", "forget")),
        of(op, dtype="float64", B=2),
        of(op, dtype="bfloat16", decay_dtype="float32"),
        of(op, dtype="float16", packing="ragged", layout="strided"),
        of(op, packing="packed", chunk_size="16"),
        of(op, packing="ragged", dtype="float64"),
        of(op, states="none", packing="ragged"),
        of(op, states="initial"),
        of(op, states="final", scale="0.05"),
    ]
    found = [Case(setting, cuts[n % len(cuts)]) for n, setting in enumerate(settings)]
    found.append(Case(of(op, packing="ragged"), cuts[0], form="recurrent"))
    found.append(Case(of(op), cuts[-1], backend="reference"))
    return found


def wrong(case: Case, found: list[dict[str, torch.Tensor]]) -> list[str]:
    made, arriving = replace(case, device="cpu").make()
    _, lines = measure(joined(case, found), true_values(made, arriving, case.setting.op), made)
    return [f"{case}: {line}" for line in lines]


def check(ranks: int, chosen: list[Case], *then: Callable, backend: str = "gloo") -> list:
    """What each rank gives of the cases, which is right, and of what it does then."""
    found = over_ranks(ranks, run_each, chosen, *then, backend=backend)
    for x in found:
        if isinstance(x, Exception):
            raise x
    each = zip(*(x[0] for x in found), strict=True)
    lines = [line for case, parts in zip(chosen, each, strict=True) for line in wrong(case, parts)]
    assert not lines, "\n".join(lines)
    return found


TWO = (20, 17), (3, 34), (37, 0), (33, 4), (0, 37)
"""Not of equal lengths, one shorter than a chunk, one of no tokens."""
MORE = {
    3: ((11, 1, 25), (0, 12, 25), (30, 0, 7)),
    4: ((9, 10, 8, 10), (0, 5, 0, 32), (20, 9, 8, 0)),
}
ROWS = 16 * 2
"""Of the states of all heads."""
SENT = {
    "rwkv6": ([ROWS, ROWS * 24], [ROWS * 24]),
    "rwkv7": ([ROWS * 16, ROWS * 24], [ROWS * 24]),
    "gsa": ([ROWS, ROWS * 16, ROWS * 24], [ROWS * 16, ROWS * 24]),
}
"""Numbers in the one message of the forward, (M, N), and in that of the backward, dN; of the states of `SETTING`."""


def test_two_processes_give_what_one_does_and_tell_each_other_what_differs():
    chosen = [case for op in OPERATORS for case in cases(op, *TWO)]
    then = refused, refused_at_first, in_a_context, language_models.models, language_models.refused
    found, told, *_ = zip(*check(2, chosen, *then), strict=True)
    for case, x in zip(chosen, found[0], strict=True):
        if case.setting.packing == "none" and case.setting.B == 1 and case.setting.dtype != "float64":
            forward, backward = SENT[case.setting.op]
            assert x["messages"].tolist() == [NOTE, 4 * sum(forward), 4 * sum(backward)], case
    assert [sorted(x) for x in told] == [sorted(REFUSED)] * 2
    for name, (of_first, of_second) in REFUSED.items():
        assert of_first in told[0][name], name
        assert of_second in told[1][name], name


@pytest.mark.full
@pytest.mark.parametrize("ranks", MORE)
def test_more_processes_give_what_one_does(ranks):
    check(ranks, [case for op in OPERATORS for case in cases(op, *MORE[ranks])], in_a_context, language_models.models)


@pytest.mark.full
def test_gradients_that_are_averaged():
    found = over_ranks(2, language_models.averaged)
    assert found == [None, None], found


# --- what ranks tell each other --------------------------------------------------------------------------------------

SAME = "expected the same on every rank of the group"
BOTH = {
    "another K": (f"r: {SAME}, got float32 [1, T, 2, 16] on rank 0 and float32 [1, T, 2, 8] on rank 1",) * 2,
    "another dtype": (f"r: {SAME}, got float32 [1, T, 2, 16] on rank 0 and bfloat16 [1, T, 2, 16] on rank 1",) * 2,
    "another scale": (f"scale: {SAME}, got 0.25 on rank 0 and 1.0 on rank 1",) * 2,
    "other offsets": (f"cu_seqlens: {SAME}, got 3 offsets",) * 2,
    "gradients on one": (f"requires_grad of any input: {SAME}, got True on rank 0 and False on rank 1",) * 2,
    "offsets behind the end": ("cu_seqlens: ",) * 2,
    "no gate": ("g: expected a tensor beside group, got None; ABC's normaliser is of one process",) * 2,
    "a context in a zigzag": ("cp_context: expected layout 'contiguous', a slice of T on each rank, got 'zigzag'",) * 2,
    "a context of a graph": ("cp_context: expected pre_num_ranks and post_num_ranks as numbers",) * 2,
    "a context and offsets": ("cu_seqlens: expected None beside a cp_context, which has its own, got Tensor",) * 2,
    "a context and a state": ("initial_state: expected None beside a cp_context",) * 2,
    "a context and its state": ("output_final_state: expected False beside a cp_context",) * 2,
    "a context of other tokens": ("cp_context: expected a slice of 6 tokens, as its offsets, got 5",) * 2,
    "a context of another rank": ("cp_context: expected the sequence that goes on behind rank 0 to enter rank 1",) * 2,
}
ONE = {
    "a growing state": "w: expected a natural-log decay <= 0, got 1 at",
    "a growing state, packed": "w: expected a natural-log decay <= 0, got 1 at",
    "a wrong shape": "k: expected [1, 5, 2, 16] like r, got [1, 4, 2, 16]",
    "a wrong factor": "kk: expected [1, 5, 2, 16] like r, got [1, 4, 2, 16]",
    "a wrong backend": "backend: expected one of triton, torch, reference or None, got 'cuda'",
}
NO_RANK = "group: no rank runs, since rank 1 was refused its arguments: ValueError: "
REFUSED = BOTH | {name: (NO_RANK + text, text) for name, text in ONE.items()}


def refused(rank: int) -> dict[str, str]:
    """What each rank is told of a call that does not fit; after each, one that does still runs."""
    made = flakit.inputs("rwkv6", T=5, K=16, V=8, H=2)
    edit = {n: x for n, x in flakit.inputs("rwkv7", T=5, K=16, V=8, H=2).items() if n not in "ab"}
    edit |= {"kk": edit["k"], "a": edit["k"].sigmoid()}
    narrow = flakit.inputs("rwkv6", T=5, K=8, V=8, H=2)
    growing = made | {"w": made["w"].clone().fill_(1)}
    whole = {"cu_seqlens": torch.tensor([0, 7, 10])}
    of_rank_1 = {
        "another K": narrow,
        "another dtype": {n: x.bfloat16() for n, x in made.items()},
        "another scale": made | {"scale": 1.0},
        "a growing state": growing,
        "a growing state, packed": growing | whole,
        "a wrong shape": made | {"k": made["k"][:, :4]},
        "a wrong factor": edit | {"kk": edit["kk"][:, :4]},
        "a wrong backend": made | {"backend": "cuda"},
        "other offsets": made | {"cu_seqlens": torch.tensor([0, 8, 10])},
        "gradients on one": made,
    }
    of_rank_0 = {
        "a wrong factor": edit,
        "a growing state, packed": made | whole,
        "other offsets": made | whole,
        "gradients on one": made | {"u": made["u"].clone().requires_grad_()},
    }
    whole_7 = flakit.inputs("rwkv7", T=5, K=16, V=8, H=2)
    context = fla_context([0, 7, 10], rank, 2, dist.group.WORLD)
    zigzag = SimpleNamespace(**vars(context) | {"layout": "zigzag"})
    captured = SimpleNamespace(**vars(context) | {"pre_num_ranks_dev": torch.zeros(1)})
    contexts = {
        "a context in a zigzag": {"cp_context": zigzag},
        "a context of a graph": {"cp_context": captured},
        "a context and offsets": {"cp_context": context, **whole},
        "a context and a state": {"cp_context": context, "initial_state": torch.zeros(2, 2, 16, 8)},
        "a context and its state": {"cp_context": context, "output_final_state": True},
        "a context of other tokens": {"cp_context": fla_context([0, 7, 12], rank, 2, dist.group.WORLD)},
        "a context of another rank": {"cp_context": fla_context([0, 7, 10], 0, 2, dist.group.WORLD)},
    }
    both = {name: whole_7 | x for name, x in contexts.items()}
    both |= {
        "offsets behind the end": made | {"cu_seqlens": torch.tensor([0, 7, 11])},
        "no gate": flakit.inputs("gsa", T=5, K=16, V=8, M=4) | {"g": None},
    }
    told = {}
    for name in REFUSED:
        given = both.get(name) or (of_rank_1[name] if rank == 1 else of_rank_0.get(name, made))
        others = {"no gate": flakit.chunk_gsa, "a wrong factor": flakit.fused_mul_recurrent_rwkv7}
        call = others.get(name, flakit.chunk_rwkv7 if name in contexts else flakit.chunk_rwkv6)
        group = {} if name in contexts else {"group": dist.group.WORLD}
        try:
            call(**given, **group)
        except Exception as error:
            told[name] = str(error)
        o, final = flakit.chunk_rwkv6(**made, group=dist.group.WORLD)
        assert o.shape == (1, 5, 2, 8) and final is None
    return told


def refused_at_first(rank: int) -> None:
    """On a GPU ranks compare the first call of each kind: an operator's first one tells of a refusal."""
    always, ranks._always_compares = ranks._always_compares, lambda x, packed: False
    group, made = dist.new_group(), flakit.inputs("rwkv6", T=5, K=16, V=8, H=2)
    wrong = made | {"k": made["k"][:, :4]} if rank == 1 else made
    with pytest.raises(ValueError, match=r"k: expected \[1, 5, 2, 16\] like r, got \[1, 4, 2, 16\]"):
        flakit.chunk_rwkv6(**wrong, group=group)
    with counted() as sent:
        for _ in range(2):
            flakit.chunk_rwkv6(**made, group=group)
    state = 4 * 2 * (16 + 16 * 8)
    assert sent == [NOTE, state, state]
    ranks._always_compares = always


def in_a_context(rank: int) -> None:
    """flash-linear-attention's context means the same as a group and the offsets of all."""
    world = dist.get_world_size()
    offsets = [0, 7, 31, 31, 32, 36]
    context, own = (
        fla_context(offsets, rank, world, dist.group.WORLD),
        slice(36 // world * rank, 36 // world * (rank + 1)),
    )
    for op, described in OPERATORS.items():
        made = flakit.inputs(op, T=36, K=16, V=8, H=1, dtype=torch.float64)
        leaves = {n: x.requires_grad_() for n, x in described.leaves(made).items()}
        call, do = described.forms["chunk"], torch.rand_like(made["v"])
        dist.broadcast(do, 0)
        whole = call(**leaves, cu_seqlens=torch.tensor(offsets)).o
        true = whole[:, own], *torch.autograd.grad(whole, list(leaves.values()), do)
        mine = {n: x[:, own].detach().requires_grad_() if n in described.sequences else x for n, x in leaves.items()}
        for how in ({"group": context}, {"cp_context": context, "cu_seqlens": context.cu_seqlens}):
            if "cp_context" in how and op != "rwkv7":
                continue
            o = call(**mine, **how).o
            grads = torch.autograd.grad(o, list(mine.values()), do[:, own])
            for name, x, y in zip(("o", *mine), (o, *grads), true, strict=True):
                if name in described.sequences:
                    y = y[:, own]
                elif name != "o":
                    dist.all_reduce(x)
                assert torch.allclose(x, y, rtol=1e-10, atol=1e-12), (op, name)
    alone = SimpleNamespace(**vars(context) | {"group": None})
    assert torch.equal(
        flakit.chunk_rwkv7(**(made := flakit.inputs("rwkv7", T=36 // world, K=16, V=8)), cp_context=alone).o,
        flakit.chunk_rwkv7(**made, cu_seqlens=alone.cu_seqlens).o,
    )


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_contexts_of_these_tests_are_those_of_flash_linear_attention(ranks):
    theirs = pytest.importorskip("fla.ops.cp.context", reason="needs flash-linear-attention")
    for offsets in ([0, 36], [0, 7, 31, 31, 32, 36], [0, 9, 12, 18, 27, 36], [0, 1, 35, 36]):
        for rank in range(ranks):
            mine = vars(fla_context(offsets, rank, ranks, None))
            found = theirs.get_cp_cu_seqlens(torch.tensor(offsets), world_size=ranks, rank=rank)
            assert {n: getattr(found, n) for n in mine if "cu_" not in n} == {
                n: x for n, x in mine.items() if "cu_" not in n
            }
            assert found.cu_seqlens.tolist() == mine["cu_seqlens"].tolist() == mine["cu_seqlens_cpu"].tolist()


@OPS
def test_not_a_group(op):
    made = flakit.inputs(op, T=5, K=16, V=8)
    with pytest.raises(TypeError, match="group: expected a process group of torch.distributed or None, got str"):
        OPERATORS[op].forms["chunk"](**made, group="all of them")


@pytest.mark.full
@OPS
def test_what_is_compiled_has_one_process(op):
    made = flakit.inputs(op, T=5, K=16, V=8)
    compiled = torch.compile(OPERATORS[op].forms["chunk"], fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="group: a sequence over several ranks cannot be compiled"):
        compiled(**made, group="any")


@pytest.mark.full
def test_a_process_that_dies_ends_the_others():
    alive, dead = over_ranks(2, without_the_second, timeout=timedelta(seconds=10))
    assert isinstance(alive, RuntimeError), alive


def without_the_second(rank: int) -> None:
    if rank == 0:
        flakit.chunk_rwkv6(**flakit.inputs("rwkv6", T=5, K=16, V=8), group=dist.group.WORLD)
    raise RuntimeError("dead")


# --- which sequences lie where ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "cu_seqlens", "pieces"),
    [
        ([4, 4], [0, 8], [Piece(0, [0, 4], False, True), Piece(0, [0, 4], True, False)]),
        ([4, 4], [0, 4, 8], [Piece(0, [0, 4], False, False), Piece(1, [0, 4], False, False)]),
        ([4, 4], [0, 3, 6, 8], [Piece(0, [0, 3, 4], False, True), Piece(1, [0, 2, 4], True, False)]),
        ([4, 4], [0, 4, 4, 8, 8], [Piece(0, [0, 4], False, False), Piece(1, [0, 0, 4, 4], False, False)]),
        (
            [4, 0, 4],
            [0, 8],
            [Piece(0, [0, 4], False, True), Piece(0, [0], False, False), Piece(0, [0, 4], True, False)],
        ),
        ([8, 0], [0, 8, 8], [Piece(0, [0, 8], False, False), Piece(1, [0, 0], False, False)]),
        ([4, 4], [0, 3], [Piece(0, [0, 3], False, False), Piece(0, [0], False, False)]),
        ([4, 4], [0, 0, 6], [Piece(0, [0, 0, 4], False, True), Piece(1, [0, 2], True, False)]),
    ],
    ids=str,
)
def test_where_packed_sequences_lie(lengths, cu_seqlens, pieces):
    assert packed_pieces(lengths, cu_seqlens) == pieces


# --- kernels ---------------------------------------------------------------------------------------------------------

WIDE = dict(K=40, V=40)
"""Heads that RWKV6's and RWKV7's fused kernels take."""


def kernel_cases(op: str, ranks: int) -> list[Case]:
    """Of kernels that know M and N on their way, in parts and whole, and of those that do not."""
    settings = {
        of(op, T=50, H=1, decay="inf-spikes"): ((33, 17), (20, 13, 17)),
        of(op, T=300, H=1, dtype="float16", **WIDE): ((263, 37), (20, 263, 17)),  # 263 tokens are two parts
        of(op, packing="packed", dtype="float16"): ((20, 17), (10, 20, 7)),
    }
    return [Case(setting, lengths[ranks - 2], backend="triton") for setting, lengths in settings.items()]


@pytest.mark.interpret
@OPS
@pytest.mark.parametrize("ranks", [2, 3])
def test_kernels_over_processes_give_what_one_does(op, ranks):
    check(ranks, kernel_cases(op, ranks))


def test_rwkv6_finds_its_scores_while_ranks_meet():
    """Of all kernels that come after a message these alone need no state."""
    launches = pytest.importorskip("flakit.bench.launches", reason="needs Triton", exc_type=ImportError)
    from flakit.ops.common.kernel_triton import Memory
    from flakit.ops.rwkv6 import fused_chunk_triton

    made = flakit.inputs("rwkv6", T=300, K=40, V=40, dtype=torch.bfloat16)
    launched = {}

    def asked(M, N):
        launched["sent"] = [x.kernel.fn.__name__ for x in found]

        def arrived():
            launched["awaited"] = [x.kernel.fn.__name__ for x in found]
            return N

        return arrived

    with launches.watched(run=False) as found:
        fused_chunk_triton.forward(Memory(), *made.values(), 1.0, asked, False, None, 0, False)
    assert "scores_kernel" not in launched["sent"]
    assert launched["awaited"] == [*launched["sent"], "scores_kernel"]
    assert found[-1].kernel.fn.__name__ == "forward_kernel"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@OPS
def test_two_gpus_give_what_one_process_does(op):
    """By NCCL. Few kinds of calls: each is compiled anew in both processes, and kernels know nothing of ranks."""
    chosen = [
        Case(of(op, decay="inf-spikes"), (37, 0)),
        Case(of(op, packing="ragged", dtype="float64"), (20, 17)),
        Case(of(op, packing="packed", dtype="bfloat16"), (3, 34)),
        Case(of(op, T=1000, K=64, V=64, dtype="bfloat16", decay="model"), (500, 500)),
        Case(of(op, T=1000, K=64, V=64, decay="model"), (511, 489)),
    ]
    check(2, [replace(case, device="cuda") for case in chosen], backend="nccl")
