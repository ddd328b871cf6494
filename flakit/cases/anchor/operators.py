"""RWKV6, RWKV7 and GSA in chunks, built on `schemes.Products` alone, so that every anchor scheme serves all of them.

They differ in whether a read comes before or after its token's decay, which decides at which anchors it fails:

    RWKV6   r reads before its token decays anything: exclusive
    RWKV7   r reads after it: inclusive; a reads the state before it: exclusive
    GSA     both passes read after their token's gate: inclusive

All compute the decay's gradient from running sums: each read times its gradient, minus each key times its own. Between
chunks there is no anchor: every exponent there is a sum of decays, hence <= 0.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ...numerics import operators as numerics
from ...numerics.arguments import one_of
from ...ops.common.chunks import carry_states, join_chunks, split_chunks
from ...ops.common.decay import sum_after, sum_before
from ...ops.rwkv7 import chunk_torch
from .schemes import Products

Reads = Callable[[Tensor, bool], Products]
"""reads(w [B, H, N, C, K], inclusive) -> the `Products` of all chunks, of reads after (inclusive) or before decay."""


class Meeting(NamedTuple):
    """The operands of one product of queries and keys with decay between them; `law.limits` takes their sizes.

    scaled, query, key: [B, H, N, C, K]. `scaled` is the query as the scores multiply it, with the operator's scale if
        they have one; `query` is the factor in the key's gradient.
    arriving: [B, H, N, C, C], the matrix that `Products.read` and `Products.written` multiply.
    """

    scaled: Tensor
    query: Tensor
    key: Tensor
    arriving: Tensor


class Reach(NamedTuple):
    """For each product of a `Meeting`, the factor on the decay up to which it is finite: the scores as summed by row
    and by column, `Products.read`, `Products.written`."""

    rows: float
    columns: float
    read: float
    written: float


def _split(x: Mapping[str, Tensor], names: str, chunk: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [split_chunks(x[name].detach(), chunk, dtype) for name in names]


def scale(of: type, x: Mapping[str, Tensor]) -> float:
    """Return the scale in the inputs x, by default that of the operator's class `of`."""
    return x["k"].shape[-1] ** of.scale_power if x.get("scale") is None else x["scale"]


def _of_tokens(x: Tensor, length: Tensor | None) -> Tensor:
    """Return x [B, H, N, C, K] with zeros in the padding, the rows from `length` on; unchanged without a length."""
    if length is None:
        return x
    N, C = x.shape[2:4]
    return torch.where(torch.arange(N * C).view(N, C, 1) < length, x, 0.0)


def _from_here_on(x: Tensor, T: int, length: Tensor | None) -> Tensor:
    """Return sums over t and all later tokens, [B, H, N, C, K] -> [B, T, H, K]. length: as in `_of_tokens`."""
    return join_chunks(_of_tokens(x, length), T).flip(1).cumsum(1).flip(1)


def _diagonal(A: Tensor) -> Tensor:
    return A.diagonal(0, -2, -1)[..., None]


class Chunks:
    """Base class: an operator in chunks. The constructor computes `outputs` (o and the final states) and the scores A;
    `backward` takes do [B, H, N, C, V] and returns the gradients by name.

    names: the arguments in the operator's order; finals: the final states; decay: the decay's argument, "w" or "g";
        chunked: the module of flakit's own form; scale_power: the default scale is K to this power.
    reads: by the name of each tensor that reads with decay, whether it reads inclusively, after its token's decay;
        meets: the same for each entry of `meetings`, the operands of the products.
    """

    names: tuple[str, ...]
    finals: tuple[str, ...]
    decay: str
    chunked: ModuleType
    scale_power: float
    reads: Mapping[str, bool]
    meets: tuple[bool, ...]

    def __init_subclass__(cls, op: str | None = None) -> None:
        """Set the class attributes names, finals, decay, … from the entry `op` of `numerics.operators.OPERATORS`."""
        if op is not None:
            of = numerics.OPERATORS[op]
            cls.names, cls.finals, cls.decay, cls.chunked = of.tensors, of.outputs[1:], of.decay, of.chunked
            cls.scale_power, cls.reads = of.scale_exponent, of.reads


class RWKV6(Chunks, op="rwkv6"):
    """RWKV6 in chunks, float32. x: inputs as of `flakit.chunk_rwkv6`; chunk: tokens per chunk."""

    meets = (False,)

    def __init__(self, x: Mapping[str, Tensor], reads: Reads, chunk: int):
        self.T, self.length = x["r"].shape[1], x.get("length")
        self.r, self.k, self.v, w = _split(x, "rkvw", chunk)
        self.u, self.scale = x["u"].detach().float()[:, None, None], scale(RWKV6, x)
        self.products, self.q = reads(w, False), self.r * self.scale
        self.A = torch.diag_embed((self.q * self.u * self.k).sum(-1)) + self.products.scores(self.q, self.k)
        self.before, self.after, self.total = sum_before(w).exp(), sum_after(w).exp(), w.sum(-2).exp()
        self.S, last = carry_states(self.total, (self.k * self.after).mT @ self.v, x.get("initial_state"))
        o = self.A @ self.v + (self.q * self.before) @ self.S
        self.outputs = {"o": join_chunks(o, self.T), "final_state": last}

    def backward(self, do: Tensor) -> dict[str, Tensor]:
        r, k, u, T = self.r, self.k, self.u, self.T
        D, dinitial_state = carry_states(self.total, (self.q * self.before).mT @ do, None, reverse=True)
        dA = self.scale * (do @ self.v.mT)
        dr = self.products.read(dA, k) + self.scale * (do @ self.S.mT) * self.before
        dk = self.products.written(dA, r) + (self.v @ D.mT) * self.after
        dv = self.A.mT @ do + (k * self.after) @ D
        dw = _from_here_on(r * dr - k * dk, T, self.length) - join_chunks(r * dr, T)
        own = _diagonal(dA)
        dr, dk, du = dr + own * u * k, dk + own * u * r, (own * r * k).sum((0, 2, 3))
        rows = {name: join_chunks(y, T) for name, y in (("dr", dr), ("dk", dk), ("dv", dv))}
        return rows | {"dw": dw, "du": du, "dinitial_state": dinitial_state}

    @staticmethod
    def meetings(x: Mapping[str, Tensor], do: Tensor, chunk: int) -> list[Meeting]:
        r, k, v = _split(x, "rkv", chunk, torch.float64)
        factor = scale(RWKV6, x)
        return [Meeting(factor * r, r, k, factor * (do @ v.mT))]

    @staticmethod
    def reached(limits: Sequence[Reach]) -> dict[str, float]:
        """Return, by tensor, the factor on the decay up to which it is finite, from the `Reach` of each entry of
        `meetings`. A tensor that is missing is always finite."""
        (m,) = limits
        return {"o": m.rows, "dv": m.columns, "dr": m.read, "dk": m.written, "dw": min(m.read, m.written)}


class RWKV7(Chunks, op="rwkv7"):
    """RWKV7 in chunks, float32. v2 is what a reads and y its gradient; each solves one triangular system per chunk."""

    inverse = staticmethod(chunk_torch.inverse)
    meets = (True, True, False, False)

    def __init__(self, x: Mapping[str, Tensor], reads: Reads, chunk: int):
        self.T, self.length = x["r"].shape[1], x.get("length")
        self.r, w, k, self.v, self.a, b = _split(x, "rwkvab", chunk)
        self.scale, self.keys = scale(RWKV7, x), torch.stack((k, b))
        self.by_r, self.by_a = reads(w, True), reads(w, False)
        self.A_rk, self.A_rb = self.by_r.scores(self.r * self.scale, self.keys)
        self.A_ak, A_ab = self.by_a.scores(self.a, self.keys)
        self.A, self.U = self.A_rk, self.inverse(A_ab)
        self.before, self.through, self.after = sum_before(w).exp(), w.cumsum(-2).exp(), sum_after(w).exp()
        self.q_in, self.a_in = self.r * self.scale * self.through, self.a * self.before
        self.k_out, self.b_out = self.keys * self.after
        self.total = w.sum(-2).exp()[..., None]

        read_a, transfer = self.U @ (self.A_ak @ self.v), self.U @ self.a_in
        written = self.k_out.mT @ self.v
        S = x.get("initial_state")
        S = torch.zeros_like(written[:, :, 0]) if S is None else S.detach().float()
        self.S, self.v2 = torch.empty_like(written), torch.empty_like(self.v)
        for n in range(written.shape[2]):
            self.S[:, :, n], self.v2[:, :, n] = S, read_a[:, :, n] + transfer[:, :, n] @ S
            S = self.total[:, :, n] * S + written[:, :, n] + self.b_out[:, :, n].mT @ self.v2[:, :, n]
        o = self.A_rk @ self.v + self.A_rb @ self.v2 + self.q_in @ self.S
        self.outputs = {"o": join_chunks(o, self.T), "final_state": S}

    def backward(self, do: Tensor) -> dict[str, Tensor]:
        dread_a, transfer = self.U.mT @ (self.A_rb.mT @ do), self.U.mT @ self.b_out
        read = self.q_in.mT @ do
        D, leaving, y = torch.zeros_like(self.S[:, :, 0]), torch.empty_like(self.S), torch.empty_like(do)
        for n in reversed(range(self.S.shape[2])):
            leaving[:, :, n], y[:, :, n] = D, dread_a[:, :, n] + transfer[:, :, n] @ D
            D = self.total[:, :, n] * D + read[:, :, n] + self.a_in[:, :, n].mT @ y[:, :, n]

        written = torch.stack((self.v, self.v2)).mT
        dA_r, dA_a = self.scale * (do @ written), y @ written
        dr = self.by_r.read(dA_r, self.keys).sum(0) + self.scale * (do @ self.S.mT) * self.through
        da = self.by_a.read(dA_a, self.keys).sum(0) + (y @ self.S.mT) * self.before
        dkeys = self.by_r.written(dA_r, self.r) + self.by_a.written(dA_a, self.a)
        dkeys = dkeys + (written.mT @ leaving.mT) * self.after
        dv = self.A_rk.mT @ do + self.A_ak.mT @ y + self.k_out @ leaving
        T, reads_a = self.T, self.a * da
        dw = _from_here_on(self.r * dr + reads_a - (self.keys * dkeys).sum(0), T, self.length) - join_chunks(reads_a, T)
        rows = zip(("dr", "dk", "dv", "da", "db"), (dr, dkeys[0], dv, da, dkeys[1]), strict=True)
        return {name: join_chunks(x, T) for name, x in rows} | {"dw": dw, "dinitial_state": D}

    @staticmethod
    def meetings(x: Mapping[str, Tensor], do: Tensor, chunk: int) -> list[Meeting]:
        r, k, v, a, b = _split(x, "rkvab", chunk, torch.float64)
        scaled, N = scale(RWKV7, x), r.shape[2]
        # At strong decay a reads only the previous token.
        reading, *last = a.flatten(2, 3)[:, :, 1:], *(z.flatten(2, 3)[:, :, :-1] for z in (k, b, v))
        ak, ab = ((reading * z).sum(-1, keepdim=True) for z in last[:2])
        read_a = torch.nn.functional.pad(ak * last[2], (0, 0, 1, 0))
        dread_a = scaled * ((r * b).sum(-1, keepdim=True) * do).flatten(2, 3)
        steps = torch.eye(N * chunk, dtype=ab.dtype, device=ab.device) - torch.diag_embed(ab[..., 0], -1)
        v2 = torch.linalg.solve_triangular(steps, read_a, upper=False, unitriangular=True)
        y = torch.linalg.solve_triangular(steps.mT, dread_a, upper=True, unitriangular=True)
        v2, y = (z.unflatten(2, (N, chunk)) for z in (v2, y))
        return [
            Meeting(factor * read, read, key, factor * (at @ written.mT))
            for read, at, factor in ((r, do, scaled), (a, y, 1.0))
            for key, written in ((k, v), (b, v2))
        ]

    @staticmethod
    def reached(limits: Sequence[Reach]) -> dict[str, float]:
        rk, rb, ak, ab = limits
        v2 = min(ak.rows, ak.columns, ab.rows, ab.columns)
        y = min(rb.columns, ab.rows, ab.columns)
        grads = {
            "dr": min(rk.read, rb.read, v2),
            "dk": min(rk.written, ak.written, y),
            "da": min(ak.read, ab.read, v2, y),
            "db": min(rb.written, ab.written, v2, y),
        }
        dw, dv, o = min(grads.values()), min(rk.columns, ak.columns, y), min(rk.rows, rb.rows, v2)
        return grads | {"dw": dw, "dv": dv, "o": o, "final_state": v2}


class GSA(Chunks, op="gsa"):
    """GSA in chunks, float32. A has the scores of the second pass, p and s; in the first, q k^T has no decay, its sums
    over s do. Raises ValueError if q has more heads than k."""

    meets = (True, True)

    def __init__(self, x: Mapping[str, Tensor], reads: Reads, chunk: int):
        if x["q"].shape[2] != x["k"].shape[2]:
            raise ValueError(f"q: expected {x['k'].shape[2]} heads like k, got {x['q'].shape[2]}")
        self.T, self.length = x["q"].shape[1], x.get("length")
        q, self.k, self.v, self.s, g = _split(x, "qkvsg", chunk)
        self.scale = scale(GSA, x)
        self.products, self.q = reads(g, True), q * self.scale
        self.through, self.after, self.total = g.cumsum(-2).exp(), sum_after(g).exp(), g.sum(-2).exp()
        hk, hv = (None, None) if x.get("initial_state") is None else x["initial_state"]
        self.s_out = self.s * self.after
        self.hk, hk = carry_states(self.total, self.s_out.mT @ self.k, None if hk is None else hk.mT)
        self.hv, hv = carry_states(self.total, self.s_out.mT @ self.v, hv)

        self.qk = self.q @ self.k.mT
        self.scores = self.products.read(self.qk, self.s) + (self.q @ self.hk.mT) * self.through
        self.p = _of_tokens(self.scores.softmax(-1), self.length)
        self.A = self.products.scores(self.p, self.s)
        o = self.A @ self.v + (self.p * self.through) @ self.hv
        self.outputs = {"o": join_chunks(o, self.T), "final_hk": hk.mT, "final_hv": hv}

    def backward(self, do: Tensor) -> dict[str, Tensor]:
        s, p, T = self.s, self.p, self.T
        dhv, dhv_0 = carry_states(self.total, (p * self.through).mT @ do, None, reverse=True)
        dA = do @ self.v.mT
        dp = self.products.read(dA, s) + (do @ self.hv.mT) * self.through
        dscores = _of_tokens(p * (dp - (p * dp).sum(-1, keepdim=True)), self.length)
        dhk, dhk_0 = carry_states(self.total, (dscores * self.through).mT @ self.q, None, reverse=True)

        dqk = self.products.scores(dscores, s)
        dq = self.scale * (dqk @ self.k + (dscores * self.through) @ self.hk)
        dk = dqk.mT @ self.q + self.s_out @ dhk
        dv = self.A.mT @ do + self.s_out @ dhv
        ds = self.products.written(dA, p) + self.products.written(self.qk, dscores)
        ds = ds + (self.v @ dhv.mT + self.k @ dhk.mT) * self.after
        dg = _from_here_on(p * dp + self.scores * dscores - s * ds, T, self.length)
        rows = zip(("dq", "dk", "dv", "ds"), (dq, dk, dv, ds), strict=True)
        return {name: join_chunks(x, T) for name, x in rows} | {"dg": dg, "dinitial_hk": dhk_0.mT, "dinitial_hv": dhv_0}

    @staticmethod
    def meetings(x: Mapping[str, Tensor], do: Tensor, chunk: int) -> list[Meeting]:
        q, k, v, s = _split(x, "qkvs", chunk, torch.float64)
        qk, dA = scale(GSA, x) * (q @ k.mT), do @ v.mT
        # At strong decay a token reads only itself.
        p, dp = (_diagonal(qk) * s).softmax(-1), _diagonal(dA) * s
        dscores = p * (dp - (p * dp).sum(-1, keepdim=True))
        return [Meeting(dscores, dscores, s, qk), Meeting(p, p, s, dA)]

    @staticmethod
    def reached(limits: Sequence[Reach]) -> dict[str, float]:
        first, second = limits
        dscores = min(first.read, second.read)
        ds = min(dscores, first.written, second.written)
        return {
            "o": min(first.read, second.rows),
            "dv": min(first.read, second.columns),
            "dq": min(dscores, first.rows),
            "dk": min(dscores, first.columns),
            "ds": ds,
            "dg": ds,
        }


OPERATORS = {"rwkv6": RWKV6, "rwkv7": RWKV7, "gsa": GSA}

TENSORS = {op: ("o", *(f"d{name}" for name in of.names), *of.finals) for op, of in OPERATORS.items()}
"""By operator, the tensors that `run` returns: o, gradients in the order of the arguments, final states."""


def find_operator(op: str) -> type:
    """Return the subclass of `Chunks` for op: "rwkv6", "rwkv7" or "gsa". Raises ValueError if it is unknown."""
    return OPERATORS[one_of("op", op, OPERATORS)]
