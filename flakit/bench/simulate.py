"""One sequence over more GPUs than were measured: how long ranks compute, what they send, how long they wait.

    python -m flakit.bench.simulate [--operator rwkv7] [--tokens 1048576] [--head-size 64]

A rank computes for h + c T / R on T tokens over R ranks, forward and all gradients in bfloat16. For R = 1 this is the
time recorded in data/h200_ranks.json. The fixed part h is the host's time to issue such a call, from
data/h200_speed.json. Message sizes are counted in the operators (`ops/common/ranks.py`). Message times within a host
come from messages alone, data/h200_messages.json (`network`); those between hosts are parameters of `Network`, by
keyword or flag. So the simulation predicts the recorded times over several GPUs without being fitted to them;
`foretold` gives its errors, for H100s too.

Algorithms to compute the state that enters each rank, where each rank maps a state S to M S + N:

    gather  all ranks get all maps, and each applies those before it: what flakit.ops does
    chain   a rank waits for the state of the previous one, applies its map and sends the result on
    tree    in round i a rank composes its map with that of the rank 2^i before, ceil(log2 R) rounds
    levels  a gather within each host and one between hosts, which all GPUs of a host share; one kernel applies all
            maps of a gather. Not implemented in flakit.ops
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
    """Times of messages and small kernels. `network` fills in the measured fields; the defaults are for 8 GPUs per
    host.

    start_us: from the issue of a message until its first byte leaves. hop_us: latency from one GPU to the next; between
    hosts through two network cards and a switch. gb_s: bandwidth one way, 10^9 bytes per second; between hosts by a
    network card of 400 Gbit/s per GPU. small_us: a small kernel, as in decoding a token (6.0 in
    data/h200_speed.json)."""

    start_us: float
    gb_s: float
    hop_us: float = 1.5
    hop_us_between_hosts: float = 6.0
    gb_s_between_hosts: float = 50.0
    gpus_a_host: int = 8
    small_us: float = 6.0

    def ms(self, a: int, b: int, bytes: float) -> float:
        """Return the milliseconds of a message of so many bytes from rank a to rank b, without start_us."""
        inside = a // self.gpus_a_host == b // self.gpus_a_host
        hop, rate = (self.hop_us, self.gb_s) if inside else (self.hop_us_between_hosts, self.gb_s_between_hosts)
        return hop / 1e3 + bytes / rate / 1e6


def network(**declared: float) -> Network:
    """Return a `Network` with times within a host from data/h200_messages.json. declared: fields to override."""
    latency, rate, _ = fit(recorded.read("h200_messages").rows)
    return Network(**{"start_us": latency - Network.hop_us, "gb_s": rate} | declared)


@dataclass(frozen=True)
class Messages:
    """The messages and small kernels of one pass, forward or backward.

    gathered, map, state: bytes that a gather sends per rank, of a full map (M and N), and of a state. In the backward a
    gather sends N only: all ranks have every M from the forward. apply, join: number of small kernels that apply a map
    to a state, and that compose two maps."""

    gathered: int
    map: int
    state: int
    apply: int
    join: int


def gather(ranks: int, sent: Messages, net: Network) -> float:
    """Return the milliseconds until the last rank has its entering state. Messages go around a ring of ranks, each step
    at its slowest link's speed."""
    slowest = max(net.ms(r, (r + 1) % ranks, sent.gathered) for r in range(ranks))
    return net.start_us / 1e3 + (ranks - 1) * (slowest + sent.apply * net.small_us / 1e3)


def chain(ranks: int, sent: Messages, net: Network) -> float:
    applied = sent.apply * net.small_us / 1e3
    return sum(net.start_us / 1e3 + net.ms(r - 1, r, sent.state) + applied for r in range(1, ranks))


def tree(ranks: int, sent: Messages, net: Network) -> float:
    ready_ms = [0.0] * ranks
    distance = 1
    while distance < ranks:
        ready_ms = [
            ready_ms[r] if r < distance else
            max(ready_ms[r], ready_ms[r - distance]) + (net.start_us + sent.join * net.small_us) / 1e3
            + net.ms(r - distance, r, sent.map)
            for r in range(ranks)
        ]  # fmt: skip
        distance *= 2
    return max(ready_ms)


def levels(ranks: int, sent: Messages, net: Network) -> float:
    inside = min(ranks, net.gpus_a_host)
    hosts, small = -(-ranks // inside), net.small_us / 1e3
    start, within = net.start_us / 1e3, (inside - 1) * net.ms(0, 0, sent.gathered)
    if hosts == 1:
        return start + within + small
    between = (hosts - 1) * net.ms(0, net.gpus_a_host, sent.gathered / inside)
    return 3 * start + 2 * within + between + 2 * small  # the third: the GPUs of a host exchange their parts


WAYS: Mapping[str, Callable[[int, Messages, Network], float]] = {
    way.__name__: way for way in (gather, chain, tree, levels)
}


@functools.cache
def messages(case: Case) -> tuple[Messages, Messages]:
    """Return the messages of the operator's forward and of its backward, with float32 states."""
    registered, inputs = _registered(case.op), replace(case, T=1).inputs("cpu")
    tensors = [inputs[name].detach() for name in case.operator.tensors]
    factor = torch.Size(registered.linear_map.shape(tensors)).numel()
    state = sum(torch.Size(shape).numel() for shape in registered.shapes(*tensors, case.B)[1])
    apply, join = _small_kernels(case.op)
    sizes = 4 * (factor + state), 4 * state, apply, join
    return Messages(sizes[0], *sizes), Messages(4 * state, *sizes)


def _registered(op: str):
    return importlib.import_module(f"flakit.ops.{op}.api")._registered


@functools.cache
def _small_kernels(op: str) -> tuple[int, int]:
    """Count the kernels that launch for one map M S + N of a state S, and for composing two such maps, by PyTorch's
    dispatch."""
    registered, inputs = _registered(op), sized(op, 1).inputs("cpu")
    tensors = [inputs[name].detach() for name in operator(op).tensors]
    _, shapes = registered.shapes(*tensors, 1)
    M = torch.zeros(registered.linear_map.shape(tensors), dtype=torch.float64)
    S, piece = [torch.zeros(shape, dtype=torch.float64) for shape in shapes], ranks.batch_pieces(3)[1]
    with _LaunchCounter() as counter:
        ranks._next(registered.linear_map, piece, M, S, S, False)
    return counter.launches, counter.launches + 1  # composing adds the product M' M


class _LaunchCounter(TorchDispatchMode):
    """Counts the PyTorch operations inside its context that launch a kernel: all but views."""

    def __init__(self):
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.launches += not func.is_view and "detach" not in func.name() and "unsafe_view" not in func.name()
        return func(*args, **(kwargs or {}))


# --- one call --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """The time that a rank computes: fixed_ms + ms_a_token * tokens."""

    fixed_ms: float
    ms_a_token: float

    def ms(self, tokens: float) -> float:
        return self.fixed_ms + self.ms_a_token * tokens


CARDS = "h200", "h100"
"""GPUs with recordings of operators over ranks; the first is the one simulated."""


def measured(op: str, card: str = CARDS[0]) -> list[Mapping]:
    """Return the recorded rows of an operator over ranks on a card of `CARDS`."""
    return recorded.read(f"{card}_ranks").select(operator=op)


def own(case: Case, fixed_ms: float | None = None, card: str = CARDS[0]) -> Rank:
    """Return a rank's compute time for a case: the recorded time per token, scaled by the ratio of roofline times.

    fixed_ms: default the host's recorded time to issue a call. The scaling assumes that kernels are as far from their
    roofline for these head sizes as for the recorded ones."""
    speed = recorded.read("h200_speed")
    if fixed_ms is None:
        rows = speed.select(op=case.op, who="flakit", form="chunk", B=1, T=32_768, dtype="bfloat16")
        fixed_ms = rows[0]["host_both_ms"]
    row, recorded_case = measured(case.op, card)[0], sized(case.op, case.T)
    floor, recorded_floor = (_floor(c, speed.meta) for c in (case, recorded_case))
    return Rank(fixed_ms, (row["alone_ms"] - fixed_ms) / row["T"] * floor / recorded_floor)


def _floor(case: Case, meta: Mapping) -> float:
    """Return the roofline time of 4096 tokens, in milliseconds. meta: a recording's, with copy_tb_s and tflops."""
    row = {field.name: getattr(case, field.name) for field in fields(case)} | {"T": 4096, "dtype": "bfloat16"}
    return work(row).floor_ms(meta["copy_tb_s"], meta["tflops"])


def together_ms(case: Case, ranks: int, way: str = "gather", net: Network | None = None, rank: Rank | None = None):
    """Return the milliseconds of forward and all gradients of a case over ranks. way: an algorithm of `WAYS`."""
    net, rank = net or network(), rank or own(case)
    wait_ms = sum(WAYS[way](ranks, sent, net) for sent in messages(case)) if ranks > 1 else 0.0
    return rank.ms(case.T / ranks) + wait_ms


def efficiency(case: Case, ranks: int, way: str = "gather", net: Network | None = None, rank: Rank | None = None):
    """Return the parallel efficiency: the time on one GPU / (ranks * the time on that many). way: as in
    `together_ms`."""
    rank = rank or own(case)
    return rank.ms(case.T) / (ranks * together_ms(case, ranks, way, net, rank))


def foretold(net: Network | None = None) -> list[dict]:
    """Predict every recorded row's together_ms from its alone_ms; return the rows with simulated_ms, simulated_bytes
    per rank, off (relative error of simulated_ms), off_without_fixed (that with fixed_ms = 0) and card."""
    rows = []
    for card, row in [(each, row) for each in CARDS for row in recorded.read(f"{each}_ranks").rows]:
        case = sized(row["operator"], row["T"])
        ms, no_fixed = (together_ms(case, row["ranks"], "gather", net, own(case, fixed, card)) for fixed in (None, 0.0))
        errors = {"off": ms / row["together_ms"] - 1, "off_without_fixed": no_fixed / row["together_ms"] - 1}
        sent = sum(x.gathered for x in messages(case))
        rows.append(dict(row, card=card, simulated_ms=ms, simulated_bytes=sent, **errors))
    return rows


def fastest(
    case: Case, ways: Iterable[str] = tuple(WAYS), most: int = 1024, net: Network | None = None, by: float = 0.02
) -> list[tuple[str, int]]:
    """Return (way, ranks) pairs: the fastest algorithm of `WAYS` from that number of ranks on.

    by: a way counts as fastest if no other is faster by more than this fraction; earlier ways win ties. most: the
    largest number of ranks."""
    choices = []
    for r in counts(most)[1:]:
        times = {way: together_ms(case, r, way, net) for way in ways}
        way = next(way for way, ms in times.items() if (1 - by) * ms <= min(times.values()))
        if not choices or choices[-1][0] != way:
            choices.append((way, r))
    return choices


def tokens_a_rank(op: str, ranks: int, way: str, least: float, net: Network | None = None) -> int:
    """Return the fewest tokens per rank, a power of two, with an efficiency of at least `least`."""
    n = 1
    while efficiency(sized(op, n * ranks), ranks, way, net) < least:
        n *= 2
    return n


def counts(most: int = 1024) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def sized(op: str, T: int, head_size: int | None = None) -> Case:
    """Return the recorded case of an operator with T tokens and another head size, with the same number of channels."""
    case = next(c for c in CASES if c.op == op)
    size = head_size or case.K
    return replace(case, T=T, H=case.H * case.K // size, K=size, V=size)


def table(case: Case, most: int = 1024, net: Network | None = None) -> list[dict]:
    """Return a row per number of ranks: milliseconds and efficiency of each algorithm of `WAYS`, and the bytes that a
    rank receives in a gather."""
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
    args = parser.parse_args()
    net = Network(**{field.name: getattr(args, field.name) for field in fields(Network)})
    case = sized(args.operator, args.tokens, args.head_size)

    print("Measured and foretold, milliseconds:")
    for row in foretold(net):
        one, many, ms = (f"{row[x]:.2f}" for x in ("alone_ms", "together_ms", "simulated_ms"))
        what = f"{row['operator']:>8} on {row['card'].upper()}s, T {row['T']}"
        print(f"{what}: 1 GPU {one}, {row['ranks']} {many}, foretold {ms}, {row['off']:+.1%}")
    print(f"\n{args.operator}, {case.T} tokens, {case.H} heads of {case.K}: milliseconds and efficiency by ranks")
    print("".join(f"{x:>10}" for x in ("ranks", "tokens", *(x for way in WAYS for x in (way, "")), "MiB in")))
    for row in table(case, args.ranks, net):
        each = "".join(f"{row[f'{way}_ms']:>10.3g}{row[way]:>10.0%}" for way in WAYS)
        print(f"{row['ranks']:>10}{row['tokens']:>10.0f}{each}{row['received'] / 2**20:>10.1f}")


def drawn(op: str = "rwkv7", net: Network | None = None, most: int = 1024) -> tuple[str, list[int], dict, dict]:
    """Return the arguments of `figures.over_ranks`: title, ranks, panels of named lines, and the measured points."""
    rank_counts, T = counts(most), 2**20

    def line(T: int, size: int | None = None, way: str = "gather") -> list[float]:
        return [efficiency(sized(op, T, size), r, way, net) for r in rank_counts]

    panels = {
        "gather, tokens in all": {power_of_two(2**n): line(2**n) for n in (16, 18, 20, 22, 26)},
        f"ways, {power_of_two(T)} tokens": {way: line(T, way=way) for way in WAYS},
        f"gather, {power_of_two(T)} tokens": {f"K {size}": line(T, size) for size in (32, 64, 128, 256)},
    }
    points = {}
    for card in CARDS:
        for row in measured(op, card):
            ratio = row["alone_ms"] / row["together_ms"] / row["ranks"]
            points.setdefault(power_of_two(row["T"]), []).append((row["ranks"], ratio, card == CARDS[0]))
    return f"{operator(op).label} over ranks, forward and all gradients, simulated", rank_counts, panels, points


def power_of_two(n: int) -> str:
    return f"$2^{{{n.bit_length() - 1}}}$"


if __name__ == "__main__":
    main()
