"""A small language model: an embedding, blocks of time mix and channel mix, and a head.

    model = LanguageModel(vocab=256, dim=128, layers=4, mixer="rwkv7")
    logits = model(tokens)  # [B, T] -> [B, T, vocab]
    logits, state = model(tokens, output_final_state=True)
    logits, state = model(more, initial_state=state, output_final_state=True)  # as if tokens and more were one row

Models differ only in their mixer, so that comparing two models compares their operators.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.common import ranks
from ..ops.common import validation as check
from ..ops.common.registration import plain_eager
from .attention import Attention
from .gsa import GSA
from .layers import ChannelMix, whole
from .ranks import Slice
from .rwkv6 import RWKV6
from .rwkv7 import RWKV7
from .stream import WHOLE, Layout, Stream

MIXERS: dict[str, Callable[..., nn.Module]] = {"rwkv7": RWKV7, "rwkv6": RWKV6, "gsa": GSA, "attention": Attention}
INITIALISATIONS = ("published", "normal")
SPREAD = 0.02
"""The standard deviation of the weights with initialisation "normal"."""


class Block(nn.Module):
    def __init__(
        self, dim: int, layer: int, layers: int, mixer: Callable[..., nn.Module], options: dict, channels: dict
    ):
        super().__init__()
        self.norm_time, self.norm_channels = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.time = mixer(dim, layer, layers, **options)
        self.channels = ChannelMix(dim, layer, layers, **channels)

    def forward(self, x: Tensor, first_value: Tensor | None, stream: Stream = WHOLE) -> tuple[Tensor, Tensor | None]:
        y, first_value = self.time(self.norm_time(x), first_value, stream.inside("time"))
        x = x + y
        return x + self.channels(self.norm_channels(x), stream.inside("channels")), first_value


class Embedding(nn.Embedding):
    """An embedding with a deterministic gradient on a GPU, so that a resumed training has the same bits as an
    uninterrupted one.

    The backward of `F.embedding` sums the gradients of a repeated token in any order; that of indexing sorts them."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens] if tokens.is_cuda else super().forward(tokens)


class LanguageModel(nn.Module):
    """Causal language model: tokens [B, T], int64 or int32, to logits [B, T, vocab]; position t sees tokens 0 … t.

    vocab: vocabulary size. dim: width, a multiple of the mixer's head_size (default 32, or dim if smaller).
    mixer: one of `MIXERS`. options: keyword arguments of that mixer, such as head_size, operator or RWKV7's edit.
    hidden: width inside the channel mix, default 4 dim. gated: use RWKV6's gated channel mix.
    initialisation: "published", as in RWKV's papers (values depend on layer and channel, each layer's output is 0 at
        first), or "normal", Transformers' default: each matrix normal with standard deviation `SPREAD`.
    seed: of the weights; PyTorch's global random state is not changed.

    Raises ValueError naming the argument, the expected and the actual value.
    """

    def __init__(
        self,
        vocab: int,
        dim: int = 64,
        layers: int = 2,
        mixer: str = "rwkv7",
        *,
        hidden: int | None = None,
        gated: bool = False,
        initialisation: str = "published",
        seed: int = 0,
        **options,
    ):
        super().__init__()
        if mixer not in MIXERS:
            raise ValueError(f"mixer: expected one of {', '.join(MIXERS)}, got {mixer!r}")
        if initialisation not in INITIALISATIONS:
            raise ValueError(f"initialisation: expected one of {', '.join(INITIALISATIONS)}, got {initialisation!r}")
        for name, size in (("vocab", vocab), ("dim", dim), ("layers", layers)):
            whole(name, size)
        channels = {"hidden": None if hidden is None else whole("hidden", hidden), "gated": gated}
        head_size = whole("head_size", options.setdefault("head_size", min(32, dim)))
        if dim % head_size:
            raise ValueError(f"dim: expected a multiple of head_size = {head_size}, got {dim}")
        if mixer == "attention" and head_size % 2:
            raise ValueError(f"head_size: expected an even number, whose pairs of channels are turned, got {head_size}")
        self.vocab, self.mixer = vocab, mixer
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.embedding = Embedding(vocab, dim)
            self.norm_in, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.blocks = nn.ModuleList(Block(dim, n, layers, MIXERS[mixer], options, channels) for n in range(layers))
            self.head = nn.Linear(dim, vocab, bias=False)
            nn.init.uniform_(self.embedding.weight, -1e-4, 1e-4)
            nn.init.orthogonal_(self.head.weight, gain=0.5 * max(1.0, vocab / dim) ** 0.5)
            if initialisation == "normal":
                for module in self.modules():
                    if isinstance(module, (nn.Linear, nn.Embedding)):
                        nn.init.normal_(module.weight, std=SPREAD)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        initial_state: Mapping[str, Tensor] | None = None,
        output_final_state: bool = False,
        group: "torch.distributed.ProcessGroup | None" = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return logits [B, T, vocab], or (logits, final_state) with output_final_state.

        mask: [B, T], bool or integers 0 and 1, False or 0 for padding, which may be on the left, on the right, or
            anywhere. Padding does not change the results at a row's tokens; the logits at padding are meaningless, and
            its values in `tokens` are ignored.
        cu_seqlens: offsets [N + 1] of N sequences packed into a batch of one, as in the operators.
        initial_state: the final state of an earlier call, by name, with N = B rows, or one row per packed sequence.
            This call continues from it; gradients flow back through it.
        output_final_state: also return the state for the next call, all that later tokens depend on, by name, such as
            "blocks.0.time.state" [N, H, K, V], float32, and "blocks.0.time.shift" [N, dim], the last token. Rows are
            those of the batch: {name: x[rows] for name, x in state.items()} selects some of them.
        group: a torch.distributed process group whose ranks each hold a slice of T, in the order of ranks. Slices may
            have any length, also 0. tokens, mask and logits are those of the slice; cu_seqlens spans all ranks.
            States have all rows: a row is read on the rank where it begins and returned on the rank where it ends,
            zeros elsewhere. All ranks must call, and all or none must differentiate. A gradient is that of the slice's
            own loss; `sum_gradients` adds them up. Not for mixer "attention".

        Raises TypeError or ValueError, naming the argument, the expected and the actual value.
        """
        x, final, _ = self._features(tokens, mask, cu_seqlens, initial_state, output_final_state, group)
        logits = self.head(x)
        return logits if final is None else (logits, final)

    def _features(
        self, tokens, mask=None, cu_seqlens=None, initial_state=None, output_final_state=False, group=None
    ) -> tuple[Tensor, dict[str, Tensor] | None, Layout | None]:
        """Return the head's input [B, T, dim], the final state (None unless requested), and the layout of the tokens
        (None without mask or cu_seqlens). Arguments and errors: as in `forward`."""
        packed, in_slices = cu_seqlens is not None, group is not None
        with ranks.refusals("LanguageModel", group, (tokens,), packed) if in_slices else nullcontext():
            mask = self._check(tokens, mask, cu_seqlens, in_slices)
            final = {} if check.check_flag("output_final_state", output_final_state) else None
            initial = self._check_state(initial_state)
            over = self._slice(tokens, mask, cu_seqlens, final is not None, group) if in_slices else None
        layout, own = None, cu_seqlens
        if over is not None and over.packed:
            own = torch.tensor(over.piece.offsets if over.piece.sequences else [0, 0], device=tokens.device)
        if (mask is not None or own is not None) and tokens.shape[1]:
            layout = Layout(*tokens.shape, tokens.device, mask, own)
        if mask is not None:
            tokens = tokens.masked_fill(~mask, 0)
        stream = WHOLE if layout is final is initial is over is None else Stream(layout, initial, final, over=over)
        x, first_value = self.norm_in(self.embedding(tokens)), None
        for n, block in enumerate(self.blocks):
            x, first_value = block(x, first_value, stream.inside(f"blocks.{n}"))
        return self.norm_out(x), final, layout

    def _slice(self, tokens, mask, cu_seqlens, keeps: bool, group) -> Slice:
        """Compare the arguments over ranks and return this rank's part of the sequences.

        Raise ValueError, on every rank, for arguments that differ, and for mixer "attention". keeps:
        output_final_state."""
        if self.mixer == "attention":
            raise ValueError(
                "group: expected None with mixer 'attention', where each token reads all before it and no state of one "
                "size tells a rank of them; mixers over ranks are rwkv7, rwkv6 and gsa"
            )
        packed, (B, T) = cu_seqlens is not None, tokens.shape
        ends = cu_seqlens.tolist() if packed else None
        arguments = {
            "call": "LanguageModel",
            "model": f"{self.mixer}, vocab {self.vocab}, {len(self.blocks)} layers of {self.embedding.embedding_dim}",
            "tokens": f"[{B}, T]",
            "mask": mask is not None,
            "cu_seqlens": f"{len(ends)} offsets, CRC {crc32(str(ends).encode())}" if packed else None,
            "output_final_state": keeps,
        }
        notes = ranks.compared(group, tokens, packed, arguments, T=T)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if not packed:
            return Slice(group, ranks.batch_pieces(size)[rank], B, None, None)
        lengths = [x["T"] for x in notes]
        check.check_offsets(torch.tensor(ends), None, sum(lengths), reads_values=True)
        piece = ranks.packed_pieces(lengths, ends)[rank]
        return Slice(group, piece, len(ends) - 1, cu_seqlens, torch.tensor(ends))

    def _check(self, tokens: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, in_slices: bool) -> Tensor | None:
        """Return the mask as bool (None without one), after checking tokens, mask and offsets; raise TypeError or
        ValueError.

        Values are checked on a CPU or under `flakit.checked()`, never in compiled code. in_slices: T may be 0, and the
        offsets span all ranks."""
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens: expected an integer tensor [B, T], got {type(tokens).__name__}")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"tokens: expected int64 or int32, got {check.dtype_name(tokens.dtype)}")
        if tokens.ndim != 2:
            cure = "; of one sequence make tokens[None]" if tokens.ndim == 1 else ""
            raise ValueError(f"tokens: expected [B, T], got {list(tokens.shape)}{cure}")
        if 0 in (tokens.shape[:1] if in_slices else tokens.shape):
            raise ValueError(f"tokens: expected B and T of at least 1, got {list(tokens.shape)}")
        device = self.embedding.weight.device
        check.check_device("tokens", tokens, device, "the model")
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask: expected None with cu_seqlens, whose rows behind the last offset are padding")
            mask = self._check_mask(mask, tokens)
        check.check_packing(cu_seqlens, None, len(tokens), device, "tokens")
        if plain_eager([tokens]) and check.looks_at_values(tokens):
            if not in_slices:
                check.check_offsets(cu_seqlens, None, tokens.shape[1])
            wrong = (tokens < 0) | (tokens >= self.vocab)
            wrong = wrong if mask is None else wrong & mask
            if wrong.any():
                b, t = wrong.nonzero()[0].tolist()
                raise ValueError(
                    f"tokens: expected 0 to {self.vocab - 1}, as vocab = {self.vocab}, got {tokens[b, t].item()} "
                    f"at [{b}, {t}]"
                )
        return mask

    def _check_mask(self, mask: Tensor, tokens: Tensor) -> Tensor:
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask: expected a tensor [B, T], got {type(mask).__name__}")
        if mask.dtype not in (torch.bool, torch.int64, torch.int32, torch.uint8):
            raise TypeError(
                f"mask: expected bool, or whole numbers 0 and 1, got {check.dtype_name(mask.dtype)}; a mask that is "
                f"added to scores is another thing"
            )
        if mask.shape != tokens.shape:
            raise ValueError(f"mask: expected {list(tokens.shape)} like tokens, got {list(mask.shape)}")
        check.check_device("mask", mask, tokens.device, "tokens")
        if mask.dtype != torch.bool:
            if plain_eager([mask]) and check.looks_at_values(mask) and ((mask != 0) & (mask != 1)).any():
                wrong = mask[(mask != 0) & (mask != 1)][0].item()
                raise ValueError(f"mask: expected 0 and 1, got {wrong}; of several sequences in a row make cu_seqlens")
            mask = mask != 0
        return mask

    def _check_state(self, state: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
        """Return the state if it has exactly this model's names, else raise ValueError, or TypeError for anything but
        tensors. Shapes are checked where each tensor is read."""
        if state is None:
            return None
        if not isinstance(state, Mapping):
            raise TypeError(f"initial_state: expected a dictionary of tensors, got {type(state).__name__}")
        names = [
            f"blocks.{n}.{part}.{name}"
            for n, block in enumerate(self.blocks)
            for part, names in (("time", block.time.STATE), ("channels", block.channels.STATE))
            for name in names
        ]
        for name in names:
            if name not in state:
                raise ValueError(f"initial_state: expected {name!r}, got none of that name")
            if not isinstance(state[name], Tensor):
                raise TypeError(f"initial_state[{name!r}]: expected a tensor, got {type(state[name]).__name__}")
            check.check_device(f"initial_state[{name!r}]", state[name], self.embedding.weight.device, "the model")
        unknown = [name for name in state if name not in names]
        if unknown:
            raise ValueError(f"initial_state: expected the names that this model leaves, got {unknown[0]!r} too")
        return state


IGNORED = -100
"""The target value of a position that the loss skips."""


def loss(logits: Tensor, targets: Tensor, group: "torch.distributed.ProcessGroup | None" = None) -> Tensor:
    """Return the mean cross entropy over the targets [B, T] that are not `IGNORED`, in nats, computed in float32.

    logits: [B, T, vocab]. An untrained model's loss is about ln(vocab). group: a process group whose ranks hold slices
    of T: the mean is over all ranks' targets and the same everywhere; each rank's gradient is that of its own share."""
    logits, targets = logits.flatten(0, 1).float(), targets.flatten()
    if group is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORED)
    own = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    totals = torch.stack((own.detach().double(), (targets != IGNORED).sum().double()))
    dist.all_reduce(totals, group=group)
    own = own / totals[1].to(own.dtype)
    return own + ((totals[0] / totals[1]).to(own.dtype) - own.detach())
