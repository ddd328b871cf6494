"""Record data/h200_fla_models.json: flash-linear-attention's language models, with its own operators and with flakit's.

python data/record_fla_models.py [rwkv7 rwkv6 gsa] [--out FILE] [--tune SECONDS] [--quick]

Needs a GPU and flash-linear-attention with transformers (pip install --editable '.[fla]'). Its kernels tune themselves
at first use, for minutes: that comes first, in processes that compile all at once and take turns on the GPU for each
measurement. Then each model is timed alone. The file is written again after each model, so that an interrupted run
leaves the finished ones; models that are not named keep their rows in it.
"""

import argparse
import contextlib
import fcntl
import functools
import itertools
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import flakit
from flakit.numerics import recorded
from flakit.numerics.errors import relative_l2

MODELS = ("rwkv7", "rwkv6", "gsa")
NOISE = 0.02
"""The standard deviation of noise added to every parameter: RWKV7 begins with output projections of zero, so that a
fresh model's loss does not depend on its layers."""
PARTS = ("training", "generation")
WHO = ("fla", "flakit")
BEGAN = time.monotonic()
REP = 10
"""The milliseconds for which each candidate of the autotuning is measured, instead of Triton's 100."""


@dataclass(frozen=True)
class Size:
    hidden: int = 1024
    layers: int = 4
    vocabulary: int = 4096
    B: int = 4
    T: int = 2048
    prompt: int = 128
    new: int = 32
    rounds: int = 2
    steps: int = 20


QUICK = Size(hidden=256, layers=2, vocabulary=512, B=2, T=128, prompt=80, new=4, steps=3)


def main() -> None:
    parser = recorded.script(__doc__, "h200_fla_models", quick="tiny models")
    parser.add_argument("models", nargs="*", default=MODELS, help=", ".join(MODELS))
    parser.add_argument("--tune", type=float, default=330, help="seconds at most that it may tune itself beforehand")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # a tuning process: what of whom
    options = parser.parse_args()
    if not set(options.models) <= set(MODELS):
        parser.error(f"models: expected some of {', '.join(MODELS)}, got {' '.join(options.models)}")
    if not torch.cuda.is_available():
        parser.error("needs a GPU, for flash-linear-attention's kernels")
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["TRITON_CACHE_AUTOTUNING"] = "1"  # read when a kernel is defined: before fla is imported
    folder = tempfile.TemporaryDirectory()
    take_turns(os.environ.setdefault("FLAKIT_TUNING_LOCK", str(Path(folder.name) / "lock")))
    size = QUICK if options.quick else Size()
    if options.part:
        tune(options.models[0], *options.part, size)
        return

    import fla

    say(f"flash-linear-attention {fla.__version__} tunes itself, {options.tune:.0f} s at most")
    tuned = tune_all(options.models, options.tune, options.quick)
    rows = []
    if options.out.exists():
        old = recorded.read(options.out)
        rows = [row for row in old.rows if row["op"] not in options.models]
        tuned += f"; {', '.join(dict.fromkeys(row['op'] for row in rows))} before: {old.meta['tuned']}" * bool(rows)
    meta = recorded.provenance(
        "python data/record_fla_models.py",
        fla=fla.__version__,
        transformers=__import__("transformers").__version__,
        python=platform.python_version(),
        size=str(size),
        experiment=f"forward, loss and backward in bfloat16; random tokens and weights, the same for both: its own "
        f"initialisation (fresh), for the rest with normal noise of {NOISE} on every parameter",
        tuned=tuned,
    )
    for name in options.models:
        rows += compare(name, size, "cuda")
        recorded.write(options.out, meta, rows)
        for row in rows[-2:]:
            say("  ".join(f"{key} {x:.6g}" if isinstance(x, float) else str(x) for key, x in row.items()))
    say(f"wrote {options.out}")


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:4.0f} s  {text}", flush=True)


# --- tuning beforehand ----------------------------------------------------------------------------------------------


def tune_all(models: list[str], limit: float, quick: bool) -> str:
    """Run once everything that will be timed, in parallel processes; return for the record which of them ended in
    time."""
    start, env = time.monotonic(), {"OMP_NUM_THREADS": "1", **os.environ}

    def outcome(part: str, name: str, who: str) -> str:
        command = [sys.executable, __file__, name, "--part", part, who, *["--quick"] * quick]
        try:
            code = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return "not in time"
        return f"failed with {code}" if code else "ready"

    parts, cut = list(itertools.product(PARTS, models, WHO)), []
    with ThreadPoolExecutor(len(parts)) as pool:
        running = {pool.submit(outcome, *each): each for each in parts}
        for done in as_completed(running):
            part, name, who = running[done]
            say(f"  {name} {part} {who}: {done.result()}")
            cut += [f"{name} {part} {who}"] * (done.result() != "ready")
    took = time.monotonic() - start
    return f"{took:.0f} s in {len(parts)} processes, {REP} ms a choice; not done: {', '.join(cut) or 'none'}"


def tune(name: str, part: str, who: str, size: Size) -> None:
    """Run once one part of what will be timed, so that its kernels tune themselves; flakit's operators only compile."""
    net, tokens = new_model(name, size, "cuda")
    with operators_of(who):
        train_step(net, tokens) if part == "training" else generate(net, tokens, size)
    torch.cuda.synchronize()


def take_turns(lock: str) -> None:
    """Let kernels compile in parallel, but one process at a time measure them, for a shorter time than usual. lock: a
    file."""
    import triton.testing

    alone = triton.testing.do_bench

    @functools.wraps(alone)
    def bench(call, *args, **named):
        call()  # compiles
        torch.cuda.synchronize()
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return alone(call, *args, **{**named, "warmup": 2, "rep": REP})

    triton.testing.do_bench = bench


# --- what is compared -----------------------------------------------------------------------------------------------


def operators_of(who: str) -> contextlib.AbstractContextManager:
    return flakit.in_place_of_fla() if who == "flakit" else contextlib.nullcontext()


def new_model(name: str, size: Size, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Tensor]:
    """Return one of flash-linear-attention's language models with random weights, and random tokens for it, [B, T]
    int64."""
    import fla.models as models

    prefix = name.upper()
    sizes = {"hidden_size": size.hidden, "num_hidden_layers": size.layers, "vocab_size": size.vocabulary}
    config = getattr(models, f"{prefix}Config")(**sizes, fuse_cross_entropy=device == "cuda")
    torch.manual_seed(0)
    net = getattr(models, f"{prefix}ForCausalLM")(config).to(device, dtype)
    tokens = torch.randint(size.vocabulary, (size.B, size.T), generator=torch.Generator().manual_seed(0))
    return net, tokens.to(device)


@torch.no_grad()
def move(net: nn.Module) -> None:
    """Add noise to all parameters, as a little training would change them, so that every part contributes."""
    torch.manual_seed(1)
    for parameter in net.parameters():
        parameter += NOISE * torch.randn(parameter.shape).to(parameter)


def train_step(net: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of one step, whose gradients replace earlier ones."""
    net.train()
    net.zero_grad(set_to_none=True)
    loss = net(tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def generate(net: nn.Module, tokens: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens after each prompt, [B, new], and their logits, [B, new, vocabulary]."""
    net.eval()
    prompt = tokens[:, : size.prompt]
    how = {"max_new_tokens": size.new, "min_new_tokens": size.new, "do_sample": False, "use_cache": True}
    how |= {"pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    answer = net.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
    return answer.sequences[:, size.prompt :], torch.stack(answer.logits, 1)


def compare(name: str, size: Size, device: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[dict]:
    """Yield a row for each of `WHO`: the same weights and tokens, once with its operators and once with ours."""
    net, tokens = new_model(name, size, device, dtype)
    fresh, results, times = {}, {}, {}
    for who in WHO:
        with operators_of(who):
            fresh[who] = outcome(net, tokens)
        say(f"  {name}: first step with {who}'s operators")
    move(net)
    for who in WHO:
        with operators_of(who):
            results[who] = outcome(net, tokens) | text(net, tokens, size)
        say(f"  {name}: first text with {who}'s operators")
    again = outcome(net, tokens) | text(net, tokens, size)
    for _ in range(size.rounds):  # A B A B: a clock that drifts drifts for both
        for who in WHO:
            with operators_of(who):
                for what, measured in timed(net, tokens, size).items():
                    times.setdefault((who, what), []).append(measured)
    for who in WHO:
        first = {f"fresh_{what}": fresh[who][what] for what in ("loss", "grad_norm")}
        row = {"op": name, "who": who} | first | {what: results[who][what] for what in ("loss", "grad_norm")}
        row |= alike(results[who], results["fla"] if who == "flakit" else again)
        yield row | {what: min(measured) for (whose, what), measured in times.items() if whose == who}


def outcome(net: nn.Module, tokens: Tensor) -> dict:
    loss = train_step(net, tokens).item()
    gradient = torch.cat([p.grad.float().flatten() for p in net.parameters() if p.grad is not None])
    return {"loss": loss, "grad_norm": gradient.norm().item(), "gradient": gradient}


def text(net: nn.Module, tokens: Tensor, size: Size) -> dict:
    tokens_after, logits = generate(net, tokens, size)
    return {"made": tokens_after, "logits": logits.float()}


def alike(got: dict, original: dict) -> dict:
    """Compare gradients, logits after equal tokens, and tokens: relative L2 differences and counts, by name."""
    same = got["made"] == original["made"]
    follow_same = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1).cumprod(1).bool()
    return {
        "gradient_difference": relative_l2(got["gradient"], original["gradient"]),
        "logit_difference": relative_l2(got["logits"][follow_same], original["logits"][follow_same]),
        "tokens": same.numel(),
        "same_tokens": int(same.sum()),
    }


def timed(net: nn.Module, tokens: Tensor, size: Size) -> dict[str, float]:
    """Return the milliseconds of a step among others, of issuing one to an idle GPU and of a generation; a step's peak
    in GiB."""
    wait = torch.cuda.synchronize if tokens.is_cuda else lambda: None

    def seconds(call: Callable, done: Callable = wait) -> float:
        wait()
        start = time.perf_counter()
        call()
        done()
        return time.perf_counter() - start

    def steps(count: int) -> None:
        for _ in range(count):
            train_step(net, tokens)

    steps(3)
    wait()
    if tokens.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    whole = seconds(lambda: steps(size.steps))
    peak = torch.cuda.max_memory_allocated() if tokens.is_cuda else 0
    issuing = [seconds(lambda: steps(1), done=lambda: None) for _ in range(size.steps)]
    generating = [seconds(lambda: generate(net, tokens, size)) for _ in range(3)]
    return {
        "step_ms": 1e3 * whole / size.steps,
        "host_ms": 1e3 * statistics.median(issuing),
        "peak_gib": peak / 2**30,
        "generate_ms": 1e3 * statistics.median(generating),
    }


if __name__ == "__main__":
    main()
