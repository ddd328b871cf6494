"""The settings of the probes, a function for each: it takes the examiner of a subject and returns a list of `Setting`.

The most telling setting comes first, since slow kernels run out of time.
"""

from torch import Tensor

from ..numerics.operators import Operator
from .examiner import Examiner
from .learn import STATES
from .setting import EXPANDED, TRANSPOSED, Setting

SIZES = {"B": 2, "H": 3}
BOTH = {**STATES, "loss": "both"}
MIXED = (-6.0, -0.05)
BATCH = 16
SWEEP = (-8.0, -1.5, -20.0, -3.0, -90.0, -0.5, -6.0, -12.0, -1e3, -2.0, -50.0, -1.0, -0.1, -1e-4)


def truth(x: Examiner) -> list[Setting]:
    p = x.plain
    settings = [
        *x.learnt.crashed,
        p.without(T=100, **SIZES, **BOTH),
        p,
        p.without(T=17, **SIZES),
        p.without(T=100, **SIZES, **BOTH, decay="rwkv6-init", seed=p.seed + 1),
        p.without(T=96, **SIZES, **BOTH, decay="none"),
        p.without(T=70, **SIZES, **BOTH, decay="uniform"),
        p.without(T=1, **SIZES, **BOTH),
        p.without(T=2, **BOTH),
        p.without(T=257, H=2, **BOTH, decay="gsa"),
    ]
    settings[3:3] = [p.without(T=40, **SIZES, **BOTH, groups=2)] * (x.supports["groups"] is None)
    settings[3:3] = [p.without(T=40, **SIZES, no_decay=True)] * (x.supports["None as decay"] is None)
    if x.full:
        settings += [p.without(T=T, **SIZES, **BOTH, decay="rwkv6-init") for T in (1000, 4096)]
    return settings


def half(x: Examiner) -> list[Setting]:
    return [
        x.plain.without(dtype=dtype, **fields)
        for fields in (
            {"T": 64},
            {"T": 256, "H": 2, "decay": "logsigmoid"},
            {"T": 200, "H": 2, "decay": "rwkv6-init", **BOTH},
            {"T": 256, "decay": -2.0},
        )
        for dtype in x.short_dtypes
    ]


def sweep(x: Examiner) -> list[Setting]:
    values = SWEEP if not x.full else [-(10 ** (n / 8)) for n in range(-32, 33)]
    return [x.plain.without(T=128, decay=w, **BOTH) for w in values]


def spikes(x: Examiner) -> list[Setting]:
    rows = sorted(range(64), key=lambda p: (p % 16 not in (0, 15, 1, 8), p < 16, p))
    lengths = {p: 66 + 14 * (p % 2) for p in rows} | dict.fromkeys((64, 65, 80, 96, 127, 128), 130)
    alone = [x.plain.without(T=T, decay=-0.01, spike=(p, -100.0)) for p, T in lengths.items()]
    if x.learnt.interpreted or x.supports["batches"] is not None:
        return alone
    together = []  # many rows in one call, a sequence for each: 6 calls instead of 70
    for T in dict.fromkeys(lengths.values()):
        same = [p for p in lengths if lengths[p] == T]
        for some in (tuple(same[n : n + BATCH]) for n in range(0, len(same), BATCH)):
            together.append(x.plain.without(B=len(some), T=T, decay=-0.01, spike=(some[0], -100.0), rows=some))
    return alone[:1] + together


def tails(x: Examiner) -> list[Setting]:
    lengths = (100, 17, 15, 1, 63, 65, 33, 113, 127, 129, 2, 3, 16, 31, 32, 47, 48, 49, 80, 81, 97, 120)
    return [x.plain.without(T=T, decay=MIXED, **BOTH) for T in (range(1, 200) if x.full else lengths)]


def suffixes(x: Examiner) -> list[Setting]:
    places = [(64, P) for P in (5, 8, 16, 20, 24, 31, 32, 33, 40, 48, 56, 63)]
    places += [(6, 5), (16, 7), (23, 20), (50, 45), (80, 64), (80, 70), (130, 3), (130, 100)]
    return [x.plain.without(T=T, changed=P, K=max(32, x.plain.K), V=max(32, x.plain.V)) for T, P in places]


def repeated(x: Examiner) -> list[Setting]:
    lengths = (32, 16, 64, 8)
    decays = (-1e-3, "none")
    dtypes = ["float32", *reversed(x.short_dtypes)]
    return [x.plain.without(T=T, decay=w, repeated=True, dtype=d) for d in dtypes for w in decays for T in lengths]


def layouts(x: Examiner) -> list[Setting]:
    p = x.plain.without(T=37, **SIZES)
    return [
        p.without(arriving=EXPANDED),
        p.without(layout="heads first, transposed"),
        p.without(layout="slice of a fused projection"),
        p.without(arriving="heads first, transposed"),
        p.without(arriving="slice of a fused projection"),
        p.without(T=130, layout="heads first, transposed", decay=(-0.5, -0.05), **BOTH),
    ]


def state_layout(x: Examiner) -> list[Setting]:
    p = x.plain.without(T=20, B=2, H=2, **BOTH)
    return [p.without(states=TRANSPOSED, V=2 * p.K), p.without(states=EXPANDED), p.without(states=TRANSPOSED)]


def wanted(x: Examiner) -> list[Setting]:
    """Return settings in which only some inputs require a gradient: one of them, all but one, or the initial state."""
    op, p = x.op, x.plain.without(T=37, B=2, H=2)
    second = op.decay or op.tensors[1]
    subsets = [(op.tensors[0],), (second,), tuple(y for y in op.tensors if y != second), op.tensors[-1:]]
    subsets += [(name,) for name in op.tensors[1:]]
    into = [p.without(initial_state=True, wanted=op.states)] * (x.supports["initial state"] is None)
    return (
        [p.without(wanted=names) for names in subsets[:2]] + into + [p.without(wanted=names) for names in subsets[2:]]
    )


def constant(x: Examiner) -> list[Setting]:
    # Sums over so many tokens exceed float16's 65504, dw first: scale down the arriving gradients.
    p, smaller = x.plain.without(decay="none", constant=True), {"float16": 2.0**-6}
    lengths = (520, 3000)[: 2 if x.full else 1]
    return [p.without(T=T, dtype=d, cotangent=smaller.get(d, 1.0)) for d in x.short_dtypes for T in lengths]


def ranks(x: Examiner) -> list[Setting]:
    """Return settings over two ranks with slices of different lengths, some shorter than a chunk."""

    def over(*slices: int, **fields) -> Setting:
        return x.plain.without(T=sum(slices), slices=slices, **BOTH | fields)

    return [
        over(37, 27, H=4, decay=-0.05, per_head=1.0),  # heads that decay faster than the first
        over(33, 4, H=2),
        over(40, 30, H=2, decay="inf-spikes"),
        over(20, 17, H=2, decay=-20.0),
        over(30, 20, H=4, decay=-0.05, per_head=1.0, initial_state=False, final_state=False, loss="o"),
    ]


def chain(x: Examiner) -> list[Setting]:
    """Return a setting over two ranks with nearly no decay and tiny writes. The state after the first slice is then the
    product of its chunks' transitions, in which the rounding errors of TensorFloat-32 add up."""
    wide = {name: max(64, getattr(x.plain, name)) for name in "KVM"}
    return [x.plain.without(T=256, slices=(192, 64), H=2, decay=-1e-4, written=2.0**-8, **wide, **BOTH)]


def trained(x: Examiner) -> list[Setting]:
    sizes = ((64, 64), (16, 256), *([(128, 128)] if x.full else []))
    return [x.plain.without(T=70, K=K, V=V, **BOTH) for K, V in sizes]


LENGTHS = (20, 1, 37, 64, 9)


def decays(op: Operator, setting: Setting) -> Tensor:
    return setting.make(op)[0][op.decay]


def strided(op: Operator, setting: Setting) -> bool:
    x, (do, _) = setting.laid_out(*setting.make(op), op)
    return not all(y.is_contiguous() for y in (*(x[name] for name in op.sequences), do))
