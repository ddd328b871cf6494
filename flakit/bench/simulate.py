"""One sequence over more GPUs than were measured: how long ranks compute, what they send, how long they wait.

    python -m flakit.bench.simulate [--operator rwkv7] [--tokens 1048576] [--head-size 64]

A rank's own time is h + c T / R of T tokens over R ranks, forward and all gradients in bfloat16: alone, R = 1, it is
what data/h200_ranks.json has; h, which no rank gets rid of, is what the host takes to issue such a call in
data/h200_speed.json. Sizes of messages are those of the operators (`ranks.py` there), counted. What a message takes
within a host is measured of messages and nothing else, data/h200_messages.json (`network`); what it takes between hosts
is declared: `Network`, by keyword or flag. So the simulation foretells what operators were measured to take over
several GPUs without having seen it, and `foretold` says how well, of H100s too.

Ways to find what enters each rank, where each has a map, the state S to M S + N:

    gather  all ranks get all maps, and each goes through those before it: what flakit.ops does
    chain   a rank waits for the state of the one before, applies its map to it and sends it on
    tree    in round i a rank joins its map with that of 2^i ranks before, ceil(log2 R) rounds
    levels  a gather within each host and one between hosts, of which each GPU of a host carries its part; one kernel
            goes through all maps of a gather. Nobody has built it here
"""

import argparse
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..numerics import recorded
from ..numerics.operators import operator
from ..numerics.work import work
from ..ops.common import ranks
from .messages import fit
from .ranks import CASES, Case


@dataclass(frozen=True)
class Network:
    """Messages and small kernels: `network` has what was measured, these defaults the rest, of eight GPUs a host.

    start_us: from the issue of a message until its first byte leaves. hop_us: a byte from one GPU to the next; between
    hosts through two network cards and a switch. gb_s: 10^9 bytes a second one way; between hosts by a network card of
    400 Gbit/s for each GPU. small_us: one small kernel, as a token's decode takes (6.0 in data/h200_speed.json).
    """

    start_us: float
    gb_s: float
    hop_us: float = 1.5
    hop_us_between_hosts: float = 6.0
    gb_s_between_hosts: float = 50.0
    gpus_a_host: int = 8
    small_us: float = 6.0

    def ms(self, a: int, b: int, bytes: float) -> float:
        """A message of so many bytes on its way from rank a to rank b, once begun."""
        inside = a // self.gpus_a_host == b // self.gpus_a_host
        hop, rate = (self.hop_us, self.gb_s) if inside else (self.hop_us_between_hosts, self.gb_s_between_hosts)
        return hop / 1e3 + bytes / rate / 1e6


def network(**declared: float) -> Network:
    """Messages within a host as data/h200_messages.json has them, and what is declared in the place of any field."""
    begin, rate, _ = fit(recorded.read("h200_messages").rows)
    return Network(**{"start_us": begin - Network.hop_us, "gb_s": rate} | declared)


@dataclass(frozen=True)
class Messages:
    """Of one direction: bytes that a gather sends, of a whole map, M and N, and of a state alone; and the small kernels
    that apply a map to a state and that join two maps. In the backward all ranks have every M that a gather sent."""

    gathered: int
    map: int
    state: int
    apply: int
    join: int


def gather(ranks: int, sent: Messages, net: Network) -> float:
    """Milliseconds until the last rank knows what enters it: a ring, each step as slow as its slowest link."""
    slowest = max(net.ms(r, (r + 1) % ranks, sent.gathered) for r in range(ranks))
    return net.start_us / 1e3 + (ranks - 1) * (slowest + sent.apply * net.small_us / 1e3)


def chain(ranks: int, sent: Messages, net: Network) -> float:
    applied = sent.apply * net.small_us / 1e3
    return sum(net.start_us / 1e3 + net.ms(r - 1, r, sent.state) + applied for r in range(1, ranks))


def tree(ranks: int, sent: Messages, net: Network) -> float:
    known = [0.0] * ranks
    distance = 1
    while distance < ranks:
        known = [
            known[r] if r < distance else
            max(known[r], known[r - distance]) + (net.start_us + sent.join * net.small_us) / 1e3
            + net.ms(r - distance, r, sent.map)
            for r in range(ranks)
        ]  # fmt: skip
        distance *= 2
    return max(known)


def levels(ranks: int, sent: Messages, net: Network) -> float:
    inside = min(ranks, net.gpus_a_host)
    hosts, small = -(-ranks // inside), net.small_us / 1e3
    start, within = net.start_us / 1e3, (inside - 1) * net.ms(0, 0, sent.gathered)
    if hosts == 1:
        return start + within + small
    between = (hosts - 1) * net.ms(0, net.gpus_a_host, sent.gathered / inside)
    return 3 * start + 2 * within + between + 2 * small  # and the parts of a host put together


WAYS: Mapping[str, Callable[[int, Messages, Network], float]] = {
    "gather": gather,
    "chain": chain,
    "tree": tree,
    "levels": levels,
}


def messages(case: Case) -> tuple[Messages, Messages]:
    """What the operator sends in the forward and in the backward, for float32 states."""
    return _messages(replace(case, T=1))


@functools.cache
def _messages(case: Case) -> tuple[Messages, Messages]:
    registered, made = _registered(case.op), case.inputs("cpu")
    tensors = [made[name].detach() for name in operator(case.op).tensors]
    M = registered.passing.shape(tensors)
    _, states = registered.shapes(*tensors, case.B)
    factor, state = _numbers([M]), _numbers(states)
    apply, join = _small_kernels(case.op)
    whole = 4 * (factor + state), 4 * state, apply, join
    return Messages(whole[0], *whole), Messages(4 * state, *whole)


def _registered(op: str):
    return importlib.import_module(f"flakit.ops.{op}.api")._registered


def _numbers(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


@functools.cache
def _small_kernels(op: str) -> tuple[int, int]:
    """Launches of M S + N, and of M' (M S + N) + N' as one map: counted where PyTorch dispatches them."""
    registered, made = _registered(op), replace(next(c for c in CASES if c.op == op), T=1).inputs("cpu")
    tensors = [made[name].detach() for name in operator(op).tensors]
    _, shapes = registered.shapes(*tensors, 1)
    M = torch.zeros(registered.passing.shape(tensors), dtype=torch.float64)
    S, piece = [torch.zeros(shape, dtype=torch.float64) for shape in shapes], ranks.batch_pieces(3)[1]
    with _Counted() as one:
        ranks._next(registered.passing, piece, M, S, S, False)
    return one.launches, one.launches + 1  # and the product of the two factors


class _Counted(TorchDispatchMode):
    """What launches a kernel: whatever makes numbers, and not another view of them."""

    def __init__(self):
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.launches += not func.is_view and "detach" not in func.name() and "unsafe_view" not in func.name()
        return func(*args, **(kwargs or {}))


# --- one call --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """A rank's own time: fixed_ms + ms_a_token times its tokens."""

    fixed_ms: float
    ms_a_token: float

    def ms(self, tokens: float) -> float:
        return self.fixed_ms + self.ms_a_token * tokens


CARDS = "h200", "h100"
"""Of which GPUs operators over ranks are recorded; the first is the one that is simulated."""


def measured(op: str, card: str = CARDS[0]) -> list[Mapping]:
    """The recorded rows of an operator over ranks."""
    return recorded.read(f"{card}_ranks").select(operator=op)


def own(case: Case, fixed_ms: float | None = None, card: str = CARDS[0]) -> Rank:
    """Of a case: as recorded for the operator's own sizes, times what the least work of a token is by that of these.

    That takes kernels to be as far from their floor for other heads as for the measured ones.
    """
    speed = recorded.read("h200_speed")
    if fixed_ms is None:
        of_one = speed.select(op=case.op, who="flakit", form="chunk", B=1, T=32_768, dtype="bfloat16")
        fixed_ms = of_one[0]["host_both_ms"]
    row, same = measured(case.op, card)[0], next(c for c in CASES if c.op == case.op)
    floor, own_floor = (_floor(c, speed.meta) for c in (case, same))
    return Rank(fixed_ms, (row["alone_ms"] - fixed_ms) / row["T"] * floor / own_floor)


def _floor(case: Case, meta: Mapping) -> float:
    row = {field.name: getattr(case, field.name) for field in fields(case)} | {"T": 4096, "dtype": "bfloat16"}
    return work(row).floor_ms(meta["copy_tb_s"], meta["tflops"])


def together_ms(case: Case, ranks: int, way: str = "gather", net: Network | None = None, rank: Rank | None = None):
    """Forward and all gradients of a case over so many ranks, in milliseconds."""
    net, rank = net or network(), rank or own(case)
    waits = sum(WAYS[way](ranks, sent, net) for sent in messages(case)) if ranks > 1 else 0.0
    return rank.ms(case.T / ranks) + waits


def efficiency(case: Case, ranks: int, way: str = "gather", net: Network | None = None, rank: Rank | None = None):
    """The time of one GPU by that of so many times as many."""
    rank = rank or own(case)
    return rank.ms(case.T) / (ranks * together_ms(case, ranks, way, net, rank))


def foretold(net: Network | None = None) -> list[dict]:
    """Beside every recorded row what is simulated of it, which knows alone_ms and not together_ms; and how far off that
    is, also if nothing stayed as T shrinks."""
    rows = []
    recordings = {card: recorded.read(f"{card}_ranks").rows for card in CARDS}
    for card, row in [(card, row) for card, table in recordings.items() for row in table]:
        case = replace(next(c for c in CASES if c.op == row["operator"]), T=row["T"])
        ms, bare = (together_ms(case, row["ranks"], "gather", net, own(case, fixed, card)) for fixed in (None, 0.0))
        off = {"off": ms / row["together_ms"] - 1, "off_without_fixed": bare / row["together_ms"] - 1}
        sent = sum(x.gathered for x in messages(case))
        rows.append(dict(row, card=card, simulated_ms=ms, simulated_bytes=sent, **off))
    return rows


def fastest(
    case: Case, ways: Iterable[str] = tuple(WAYS), most: int = 1024, net: Network | None = None, by: float = 0.02
) -> list[tuple[str, int]]:
    """Which way to take from which number of ranks on: the first of the ways that none beats by more than that part."""
    found = []
    for r in counts(most)[1:]:
        times = {way: together_ms(case, r, way, net) for way in ways}
        way = next(way for way, ms in times.items() if (1 - by) * ms <= min(times.values()))
        if not found or found[-1][0] != way:
            found.append((way, r))
    return found


def tokens_a_rank(op: str, ranks: int, way: str, least: float, net: Network | None = None) -> int:
    """The fewest tokens a rank, a power of two, with at least that efficiency."""
    n = 1
    while efficiency(sized(op, n * ranks), ranks, way, net) < least:
        n *= 2
    return n


def counts(most: int = 1024) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def sized(op: str, T: int, head_size: int | None = None) -> Case:
    """The recorded case of an operator with T tokens, and as many channels in heads of another size."""
    case = next(c for c in CASES if c.op == op)
    size = head_size or case.K
    return replace(case, T=T, H=case.H * case.K // size, K=size, V=size)


def table(case: Case, most: int = 1024, net: Network | None = None) -> list[dict]:
    """A row for each number of ranks: the time and the efficiency of each way, and what a rank takes in by a gather."""
    forward, backward = messages(case)
    rows = []
    for r in counts(most):
        row = {"ranks": r, "tokens": case.T / r, "received": (r - 1) * (forward.gathered + backward.gathered)}
        row |= {f"{way}_ms": together_ms(case, r, way, net) for way in WAYS}
        rows.append(row | {way: efficiency(case, r, way, net) for way in WAYS})
    return rows


# --- on the command line ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flakit.bench.simulate", description=__doc__.partition("\n")[0])
    parser.add_argument("--operator", choices=[c.op for c in CASES], default="rwkv7")
    parser.add_argument("--tokens", type=int, default=1_048_576)
    parser.add_argument("--head-size", type=int, help="of K and V, with as many channels in all; default as recorded")
    parser.add_argument("--ranks", type=int, default=1024, help="up to so many")
    for name, x in asdict(network()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(x), default=x, help="default %(default).4g")
    given = parser.parse_args()
    net = Network(**{field.name: getattr(given, field.name) for field in fields(Network)})
    case = sized(given.operator, given.tokens, given.head_size)

    print("Measured and foretold, milliseconds:")
    for row in foretold(net):
        one, many, ms = (f"{row[x]:.2f}" for x in ("alone_ms", "together_ms", "simulated_ms"))
        what = f"{row['operator']:>8} on {row['card'].upper()}s, T {row['T']}"
        print(f"{what}: 1 GPU {one}, {row['ranks']} {many}, foretold {ms}, {row['off']:+.1%}")
    print(f"\n{given.operator}, {case.T} tokens, {case.H} heads of {case.K}: milliseconds and efficiency by ranks")
    print("".join(f"{x:>10}" for x in ("ranks", "tokens", *(x for way in WAYS for x in (way, "")), "MiB in")))
    for row in table(case, given.ranks, net):
        each = "".join(f"{row[f'{way}_ms']:>10.3g}{row[way]:>10.0%}" for way in WAYS)
        print(f"{row['ranks']:>10}{row['tokens']:>10.0f}{each}{row['received'] / 2**20:>10.1f}")


def drawn(op: str = "rwkv7", net: Network | None = None, most: int = 1024) -> tuple[str, list[int], dict, dict]:
    """What `figures.over_ranks` takes: a title, the ranks, panels of named lines, and what was measured of a line."""
    many = counts(most)
    T, K = 2**20, next(c for c in CASES if c.op == op).K

    def line(T: int, size: int = K, way: str = "gather") -> list[float]:
        return [efficiency(sized(op, T, size), r, way, net) for r in many]

    panels = {
        "gather, tokens in all": {power_of_two(2**n): line(2**n) for n in (16, 18, 20, 22, 26)},
        f"ways, {power_of_two(T)} tokens": {way: line(T, way=way) for way in WAYS},
        f"gather, {power_of_two(T)} tokens": {f"K {size}": line(T, size) for size in (32, 64, 128, 256)},
    }
    seen = {}
    for row in measured(op):
        ratio = row["alone_ms"] / row["together_ms"] / row["ranks"]
        seen.setdefault(power_of_two(row["T"]), []).append((row["ranks"], ratio))
    return f"{operator(op).label} over ranks, forward and all gradients, simulated", many, panels, seen


def power_of_two(n: int) -> str:
    return f"$2^{{{n.bit_length() - 1}}}$"


if __name__ == "__main__":
    main()
