"""A small language model: an embedding, layers of time mix and channel mix, a head.

    model = LanguageModel(vocab=256, dim=128, layers=4, mixer="rwkv7")
    logits = model(tokens)  # [B, T] -> [B, T, vocab]

The mixers differ and nothing else does, so that a comparison of two models compares their operators.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.common.registration import unseen
from ..ops.common.validation import looks_at_values
from .attention import Attention
from .gsa import GSA
from .layers import ChannelMix, whole
from .rwkv6 import RWKV6
from .rwkv7 import RWKV7

MIXERS: dict[str, Callable[..., nn.Module]] = {"rwkv7": RWKV7, "rwkv6": RWKV6, "gsa": GSA, "attention": Attention}
INITIALISATIONS = ("published", "normal")
SPREAD = 0.02
"""Standard deviation of the weights that "normal" draws."""


class Block(nn.Module):
    def __init__(self, dim: int, layer: int, layers: int, mixer: Callable[..., nn.Module], options: dict):
        super().__init__()
        self.norm_time, self.norm_channels = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.time = mixer(dim, layer, layers, **options)
        self.channels = ChannelMix(dim, layer, layers)

    def forward(self, x: Tensor, first_value: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y, first_value = self.time(self.norm_time(x), first_value)
        x = x + y
        return x + self.channels(self.norm_channels(x)), first_value


class LanguageModel(nn.Module):
    """Tokens [B, T], int64 or int32, to logits [B, T, vocab]; position t sees tokens 0 … t.

    vocab: number of different tokens. dim: width, a multiple of the mixers' head_size (32 unless given).
    mixer: one of `MIXERS`. options: keyword arguments of that mixer, such as head_size, operator or RWKV7's edit.
    initialisation: "published", as RWKV's authors start it (values by layer and channel, every layer silent at first),
        or "normal", as Transformers starts a model that says nothing: each matrix normal with `SPREAD`.
    seed: of the weights; PyTorch's own random state is left as it was.
    """

    def __init__(
        self,
        vocab: int,
        dim: int = 64,
        layers: int = 2,
        mixer: str = "rwkv7",
        *,
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
        head_size = whole("head_size", options.setdefault("head_size", min(32, dim)))
        if dim % head_size:
            raise ValueError(f"dim: expected a multiple of head_size = {head_size}, got {dim}")
        if mixer == "attention" and head_size % 2:
            raise ValueError(f"head_size: expected an even number, whose pairs of channels are turned, got {head_size}")
        self.vocab = vocab
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocab, dim)
            self.norm_in, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.blocks = nn.ModuleList(Block(dim, n, layers, MIXERS[mixer], options) for n in range(layers))
            self.head = nn.Linear(dim, vocab, bias=False)
            nn.init.uniform_(self.embedding.weight, -1e-4, 1e-4)
            nn.init.orthogonal_(self.head.weight, gain=0.5 * max(1.0, vocab / dim) ** 0.5)
            if initialisation == "normal":
                for module in self.modules():
                    if isinstance(module, (nn.Linear, nn.Embedding)):
                        nn.init.normal_(module.weight, std=SPREAD)

    def forward(self, tokens: Tensor) -> Tensor:
        self._check(tokens)
        x, first_value = self.norm_in(self.embedding(tokens)), None
        for block in self.blocks:
            x, first_value = block(x, first_value)
        return self.head(self.norm_out(x))

    def _check(self, tokens: Tensor) -> None:
        """Their values too where that waits for no GPU, or under `flakit.checked()`; not in what is compiled."""
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens: expected an integer tensor [B, T], got {type(tokens).__name__}")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"tokens: expected int64 or int32, got {str(tokens.dtype).removeprefix('torch.')}")
        if tokens.ndim != 2:
            cure = "; of one sequence make tokens[None]" if tokens.ndim == 1 else ""
            raise ValueError(f"tokens: expected [B, T], got {list(tokens.shape)}{cure}")
        if 0 in tokens.shape:
            raise ValueError(f"tokens: expected B and T of at least 1, got {list(tokens.shape)}")
        device = self.embedding.weight.device
        if tokens.device != device:
            raise ValueError(f"tokens: expected device {device} like the model, got {tokens.device}")
        if unseen([tokens]) and looks_at_values(tokens):
            wrong = (tokens < 0) | (tokens >= self.vocab)
            if wrong.any():
                b, t = wrong.nonzero()[0].tolist()
                raise ValueError(
                    f"tokens: expected 0 to {self.vocab - 1}, as vocab = {self.vocab}, got {tokens[b, t].item()} "
                    f"at [{b}, {t}]"
                )


IGNORED = -100
"""The target of a position that is not asked about."""


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over the targets [B, T] that are not `IGNORED`, in nats, computed in float32.

    An untrained model's is about ln(vocab): it knows nothing yet.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
