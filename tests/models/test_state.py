"""A model's state, masks and packed sequences: the same logits, state and gradients as of each sequence alone."""

import time

import pytest
import torch

import flakit
from flakit.models import MIXERS, LanguageModel, WatchWarning, generate, generation, pad
from flakit.models.generation import draw
from flakit.ops.rwkv7 import fused_recurrent_rwkv7
from tests.models.awake import awake

VOCAB = 11
LINEAR = [name for name in MIXERS if name != "attention"]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-4}
"""Of a sum of gradients over some forty tokens and two layers, in another order; relative to the largest element."""
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(params=MIXERS)
def mixer(request):
    return request.param


def small(mixer, dtype=torch.float64, **options):
    """A model in which no layer is silent; three layers and a bias of decays that forget within some tokens."""
    options = {"layers": 3} | ({"slots": 5} if mixer == "gsa" else {}) | options
    model = LanguageModel(VOCAB, dim=24, mixer=mixer, head_size=12, **options).to(dtype)
    return awake(model, 0.2, dtype=torch.float64)


def tokens(B=3, T=37, seed=0):
    return torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(seed))


def same(found, expected, dtype, name=""):
    assert found.shape == expected.shape and found.dtype == expected.dtype and found.isfinite().all(), name
    if not found.is_floating_point():  # which positions of attention's keys are tokens
        assert torch.equal(found, expected), name
        return
    worst = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert worst < TOLERANCE[dtype], (name, worst.item())


def gradients(model, made):
    """Of a loss of all these logits [N, VOCAB], each row with a weight of its own."""
    model.zero_grad()
    weights = torch.sin(torch.arange(made.numel(), dtype=made.dtype)).view(made.shape)
    (made.log_softmax(-1) * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert all(x.any() for x in found.values())
    return found


def alone(model, rows, **how):
    """Each sequence by itself: logits one after another, and states."""
    made = [model(row[None], output_final_state=True, **how) for row in rows]
    return torch.cat([x[0] for x, _ in made]), [state for _, state in made]


def compare(model, found, expected, dtype):
    same(found, expected, dtype, "logits")
    wanted = gradients(model, expected)
    for name, x in gradients(model, found).items():
        same(x, wanted[name], dtype, name)


MASKS = {
    "left": lambda T: torch.arange(T) >= torch.tensor([3, 0, T - 1])[:, None],
    "right": lambda T: torch.arange(T) < torch.tensor([T - 3, T, 1])[:, None],
    "anywhere": lambda T: torch.rand(3, T, generator=torch.Generator().manual_seed(2)) < 0.6,
}


@DTYPES
@pytest.mark.parametrize("kind", MASKS)
def test_a_masked_row_is_its_tokens_alone(mixer, kind, dtype):
    model, seen = small(mixer, dtype), tokens()
    mask = MASKS[kind](seen.shape[1])
    padded = seen.masked_fill(~mask, -100)  # what stands in padding is not read
    compare(
        model, model(padded, mask=mask)[mask], alone(model, [s[m] for s, m in zip(seen, mask, strict=True)])[0], dtype
    )


def test_padding_moved_logits_before_there_was_a_mask(mixer):
    model, seen = small(mixer), tokens()
    padded = torch.cat((seen.new_zeros(3, 3), seen), 1)
    assert (model(padded)[:, 3:] - model(seen)).abs().max() > 0.1
    mask = torch.cat((torch.zeros(3, 3, dtype=torch.int64), torch.ones_like(seen)), 1)
    same(model(padded, mask=mask)[:, 3:], model(seen), torch.float64)


@DTYPES
def test_packed_sequences_are_each_alone(mixer, dtype):
    model, (seen,) = small(mixer, dtype), tokens(B=1)
    offsets = [0, 1, 1, 14, 33]  # of one token, of none, and rows behind the last
    found = model(seen[None], cu_seqlens=torch.tensor(offsets))[0, : offsets[-1]]
    rows = [seen[i:j] for i, j in zip(offsets, offsets[1:], strict=False) if j > i]
    compare(model, found, alone(model, rows)[0], dtype)


@DTYPES
def test_a_call_goes_on_where_another_stopped(mixer, dtype):
    """In parts of 16, 1, 19 and 1 tokens, with the gradient through all of them."""
    model, seen = small(mixer, dtype), tokens()
    parts, state = [], None
    for part in seen.split([16, 1, 19, 1], 1):
        made, state = model(part, initial_state=state, output_final_state=True)
        parts.append(made)
    whole, expected = model(seen, output_final_state=True)
    compare(model, torch.cat(parts, 1).flatten(0, 1), whole.flatten(0, 1), dtype)
    assert list(state) == list(expected)
    for name, x in state.items():
        same(x.to(dtype), expected[name].to(dtype), dtype, name)


@pytest.mark.parametrize("mixer", LINEAR)
def test_masked_and_packed_calls_leave_and_take_states(mixer):
    model, seen = small(mixer), tokens()
    mask = MASKS["left"](37)
    mask[1] = False  # nothing new: its state goes through
    _, before = model(tokens(seed=3), output_final_state=True)
    rows = [s[m] for s, m in zip(seen, mask, strict=True)]
    made, states = [], []
    for n, row in enumerate(rows):
        came = {name: x[n : n + 1] for name, x in before.items()}
        logits, state = model(row[None], initial_state=came, output_final_state=True) if len(row) else (None, came)
        made += [logits[0]] if len(row) else []
        states.append(state)
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    how = {"initial_state": before, "output_final_state": True}
    masked, left = model(seen, mask=mask, **how)
    packed, packed_left = model(torch.cat(rows)[None], cu_seqlens=offsets, **how)
    same(masked[mask], torch.cat(made), torch.float64)
    same(packed[0], torch.cat(made), torch.float64)
    for name in left:
        expected = torch.cat([state[name] for state in states])
        same(left[name], expected, torch.float64, name)
        same(packed_left[name], expected, torch.float64, name)


def test_attention_leaves_a_state_after_padding_too():
    model, seen, mask = small("attention"), tokens(), MASKS["anywhere"](37)
    later = tokens(T=5, seed=4)
    _, state = model(seen, mask=mask, output_final_state=True)
    rows = [torch.cat((s[m], x)) for s, m, x in zip(seen, mask, later, strict=True)]
    expected = torch.stack([model(row[None])[0, -5:] for row in rows])
    same(model(later, initial_state=state), expected, torch.float64)


def test_everything_that_a_later_token_sees_is_in_the_state(mixer):
    """Each piece of it, changed, changes the next logits."""
    model, seen = small(mixer), tokens()
    _, state = model(seen[:, :-1], output_final_state=True)
    expected = model(seen[:, -1:], initial_state=state)
    for name, x in state.items():
        changed = ~x if x.dtype == torch.bool else x + torch.arange(x.numel()).sin().view(x.shape)
        assert (model(seen[:, -1:], initial_state=state | {name: changed}) - expected).abs().max() > 1e-6, name


@pytest.mark.parametrize("mixer", LINEAR)
def test_the_state_does_not_grow(mixer):
    model = small(mixer)
    (_, short), (_, long) = (model(tokens(T=T), output_final_state=True) for T in (1, 37))
    assert {name: x.shape for name, x in short.items()} == {name: x.shape for name, x in long.items()}


def test_bfloat16_and_autocast_go_on_too(mixer):
    model, seen = small(mixer, torch.bfloat16), tokens()
    _, state = model(seen[:, :20], output_final_state=True)
    assert (model(seen[:, 20:], initial_state=state) - model(seen)[:, 20:]).abs().max() < 0.2
    model = small(mixer, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = model(seen[:, :20], output_final_state=True)
        found = model(seen[:, 20:], initial_state=state, mask=torch.ones_like(seen[:, 20:]))
        assert (found - model(seen)[:, 20:]).abs().max() < 0.2


def test_one_token_goes_through_the_recurrent_form(mixer):
    if mixer == "attention":
        pytest.skip("has no operator")
    from flakit.models import stream

    model, called = small(mixer), []
    chunk = model.blocks[0].time.operator
    recurrent = stream.RECURRENT[chunk]
    stream.RECURRENT[chunk] = lambda *x, **how: called.append(x[0].shape[1]) or recurrent(*x, **how)
    try:
        generate(model, tokens(), 4, temperature=0)
    finally:
        stream.RECURRENT[chunk] = recurrent
    assert called == [1] * 3 * 3  # three tokens after the first, in three layers


@pytest.mark.full
def test_a_masked_model_compiles_whole():
    model, seen, mask = small("rwkv7", torch.float32, layers=2), tokens(), MASKS["left"](37)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found, state = compiled(seen, mask=mask, output_final_state=True)
    expected, _ = model(seen, mask=mask, output_final_state=True)
    same(found, expected, torch.float32)
    same(compiled(seen[:, :1], initial_state=state), model(seen[:, :1], initial_state=state), torch.float32)


# --- generate ---------------------------------------------------------------------------------------------------------


def naive(model, row, steps):
    """The likeliest token each time, with the whole row computed again."""
    for _ in range(steps):
        row = torch.cat((row, model(row[None])[0, -1].argmax()[None]))
    return row[-steps:]


def test_a_padded_batch_says_what_each_row_says_alone(mixer):
    model = small(mixer)
    rows = [row[:n] for row, n in zip(tokens(), (1, 20, 37), strict=True)]
    seen, mask = pad(rows)
    assert seen.shape == mask.shape == (3, 37) and mask.sum(1).tolist() == [1, 20, 37]
    found = generate(model, seen, 6, mask=mask, temperature=0)
    assert found.tolist() == [naive(model, row, 6).tolist() for row in rows]
    assert len(set(found.flatten().tolist())) > 3  # it says something
    right = torch.stack([torch.cat((row, row.new_zeros(37 - len(row)))) for row in rows])
    assert torch.equal(generate(model, right, 6, mask=mask.flip(1), temperature=0), found)


def shares(logits, temperature=1.0, top_k=None, top_p=None, draws=4000):
    """How often each token is drawn of one row of logits."""
    generator = torch.Generator().manual_seed(1)
    found = draw(logits.expand(draws, -1), temperature, top_k, top_p, generator)
    return torch.bincount(found, minlength=VOCAB).double() / draws


def test_tokens_are_drawn_as_often_as_their_probability_says():
    logits = small("rwkv6")(tokens(B=1, T=5))[0, -1].detach()
    p = (logits / 0.7).softmax(-1)
    error = 4 * (0.25 / 4000) ** 0.5  # four standard deviations, at most
    assert (shares(logits, 0.7) - p).abs().max() < error
    few = torch.where(p >= p.topk(3).values[-1], p, 0)
    assert (shares(logits, 0.7, top_k=3) - few / few.sum()).abs().max() < error
    order = p.argsort(descending=True)
    for top_p in (0.5, 0.9):
        n = int((p[order].cumsum(0) < top_p).sum()) + 1
        few = torch.zeros_like(p).scatter(0, order[:n], p[order[:n]])
        found = shares(logits, 0.7, top_p=top_p)
        assert (found - few / few.sum()).abs().max() < error and (found > 0).sum() == n
    likeliest = torch.eye(VOCAB, dtype=torch.float64)[logits.argmax()]
    for how in ({"top_p": 1e-9}, {"temperature": 1e-300}, {"temperature": 0}, {"top_k": 1}):
        assert torch.equal(shares(logits, **how), likeliest), how
    assert (shares(torch.full((VOCAB,), -torch.inf).index_fill(0, torch.tensor([2, 3]), 0.0)) > 0).sum() == 2


def test_a_seed_decides_and_leaves_the_global_random_state():
    model, seen = small("rwkv7"), tokens(T=5)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    one, same_seed, other = (generate(model, seen, 20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(one, same_seed) and not torch.equal(one, other)
    assert torch.equal(one, generate(model, seen, 20, generator=torch.Generator().manual_seed(1)))


def test_a_row_ends_at_eos():
    model, seen = small("gsa"), tokens()
    free = generate(model, seen, 30, seed=0)
    eos = free[0, 4].item()
    found = generate(model, seen, 30, seed=0, eos=eos)
    for row, was in zip(found, free, strict=True):
        n = was.tolist().index(eos) + 1 if eos in was else 30
        assert row.tolist()[:n] == was.tolist()[:n] and (row[n:] == eos).all()
    first = generate(model, seen[:1], 30, temperature=0)
    stop = first[0, 0].item()
    assert generate(model, seen[:1], 30, temperature=0, eos=stop).tolist() == [[stop]]


def test_generate_leaves_the_model_as_it_was():
    model = small("rwkv7").train()
    found = generate(model, tokens(), 3)
    assert model.training and not found.requires_grad and found.dtype == torch.int64
    assert generate(model, tokens(), 0).shape == (3, 0)


def test_generate_goes_on_from_a_state():
    model, seen = small("rwkv6"), tokens()
    _, state = model(seen[:, :30], output_final_state=True)
    found = generate(model, seen[:, 30:], 8, temperature=0, initial_state=state)
    assert torch.equal(found, generate(model, seen, 8, temperature=0))


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_gpu_says_what_a_cpu_says(mixer):
    model = small(mixer, torch.float32)
    seen, mask = pad([row[:n] for row, n in zip(tokens(), (1, 20, 37), strict=True)])
    expected, state = model(seen, mask=mask, output_final_state=True)
    found, left = model.cuda()(seen.cuda(), mask=mask.cuda(), output_final_state=True)
    same(found.cpu()[mask], expected[mask], torch.float32)
    for name in state:
        same(left[name].cpu(), state[name], torch.float32, name)
    said = generate(model, seen.cuda(), 6, mask=mask.cuda(), temperature=0)
    assert torch.equal(said.cpu(), generate(model.cpu(), seen, 6, mask=mask, temperature=0))


def test_a_step_that_somebody_follows_is_no_graph():
    """On a GPU a graph would be replayed past them."""
    model, repeats = small("rwkv6"), generation._is_repeatable
    assert repeats(model)
    assert not repeats(small("attention"))
    with flakit.trace():
        assert not repeats(model)
    with pytest.warns(WatchWarning, match="nothing was measured"), flakit.watch(model):
        assert not repeats(model)
    with model.blocks[1].channels.register_forward_hook(lambda *_: None):
        assert not repeats(model)
    model.blocks[2].time.operator = lambda *given, **named: flakit.chunk_rwkv6(*given, **named)
    assert not repeats(model)
    model = small("gsa")
    assert repeats(model)
    model.blocks[0].compile(backend="eager")
    assert not repeats(model)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixer", ["rwkv6", "rwkv7", "gsa"])
def test_a_graph_says_what_kernels_launched_one_by_one_say(mixer, dtype, monkeypatch, record_property):
    model, seen = small(mixer, dtype).cuda(), tokens().cuda()
    captured, said, seconds = [], {}, {}
    graph = generation._Captured
    monkeypatch.setattr(generation, "_Captured", lambda *given: captured.append(given) or graph(*given))
    for worth in (8, 1000, 8, 1000):  # twice: kernels are compiled in the first
        monkeypatch.setattr(generation, "WORTH_A_GRAPH", worth)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        said[worth] = generate(model, seen, 200, seed=1)
        torch.cuda.synchronize()
        seconds[worth] = time.perf_counter() - begun
    record_property("ms a token", {n: round(5 * each, 3) for n, each in seconds.items()})
    assert len(captured) == 2 and torch.equal(said[8], said[1000])
    assert len(set(said[8].flatten().tolist())) > 3
    monkeypatch.setattr(generation, "WORTH_A_GRAPH", 8)
    seen_by_hook = []
    with model.blocks[0].register_forward_hook(lambda *_: seen_by_hook.append(1)):
        assert torch.equal(generate(model, seen, 200, seed=1), said[8]) and len(seen_by_hook) == 200
    with flakit.checked():
        assert torch.equal(generate(model, seen, 200, seed=1), said[8])
    assert len(captured) == 2


# --- errors -----------------------------------------------------------------------------------------------------------

STATE = "blocks.0.time.state"


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"mask": [[1]]}, TypeError, "mask: expected a tensor [B, T], got list"),
        (
            {"mask": torch.ones(3, 37)},
            TypeError,
            "mask: expected bool, or whole numbers 0 and 1, got float32; a mask that is added to scores is another "
            "thing",
        ),
        ({"mask": torch.ones(3, 1, 37, dtype=bool)}, ValueError, "mask: expected [3, 37] like tokens, got [3, 1, 37]"),
        (
            {"mask": torch.full((3, 37), 2)},
            ValueError,
            "mask: expected 0 and 1, got 2; of several sequences in a row make cu_seqlens",
        ),
        (
            {"mask": torch.ones(3, 37, dtype=bool), "cu_seqlens": torch.tensor([0, 37])},
            ValueError,
            "mask: expected None with cu_seqlens, whose rows behind the last offset are padding",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 37])},
            ValueError,
            "cu_seqlens: expected a batch of 1 with packed sequences, got B = 3",
        ),
        ({"initial_state": 1}, TypeError, "initial_state: expected a dictionary of tensors, got int"),
        ({"initial_state": {}}, ValueError, "initial_state: expected 'blocks.0.time.shift', got none of that name"),
        (
            {"initial_state": {STATE: torch.zeros(2, 2, 12, 12)}},
            ValueError,
            f"initial_state[{STATE!r}]: expected [3, 2, 12, 12], got [2, 2, 12, 12]",
        ),
        ({"initial_state": {STATE: None}}, TypeError, f"initial_state[{STATE!r}]: expected a tensor, got NoneType"),
        (
            {"initial_state": {"more": torch.zeros(1)}},
            ValueError,
            "initial_state: expected the names that this model leaves, got 'more' too",
        ),
    ],
)
def test_wrong_arguments_are_named(how, error, says):
    model = small("rwkv7")
    if how.get("initial_state") not in (None, {}, 1):
        how = {"initial_state": model(tokens(), output_final_state=True)[1] | how["initial_state"]}
    with pytest.raises(error) as raised:
        model(tokens(), **how)
    assert str(raised.value) == says


def test_wrong_offsets_are_named_even_where_no_operator_sees_them():
    for mixer in ("attention", "gsa"):
        with pytest.raises(ValueError, match="cu_seqlens: expected offsets up to T = 37 at most, got 38"):
            small(mixer)(tokens(B=1), cu_seqlens=torch.tensor([0, 38]))
    with pytest.raises(ValueError, match="cu_seqlens: expected None where a state comes in or goes out with mixer 'at"):
        small("attention")(tokens(B=1), cu_seqlens=torch.tensor([0, 37]), output_final_state=True)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"temperature": -1}, ValueError, "temperature: expected a number of at least 0, got -1.0"),
        ({"top_k": 0}, ValueError, "top_k: expected a whole number of at least 1, got 0"),
        ({"top_p": 0}, ValueError, "top_p: expected a number above 0, at most 1, got 0.0"),
        ({"eos": VOCAB}, ValueError, "eos: expected 0 to 10, as vocab = 11, got 11"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens: expected a whole number of at least 0, got -1"),
        ({"generator": 1}, TypeError, "generator: expected a torch.Generator or None, got int"),
        (
            {"seed": 1, "generator": torch.Generator()},
            ValueError,
            "seed: expected None beside a generator, which has its own",
        ),
        (
            {"mask": MASKS["left"](37) & torch.tensor([1, 0, 1])[:, None].bool()},
            ValueError,
            "mask: expected a token in every row, got none in row 1",
        ),
    ],
)
def test_generate_names_what_is_wrong(how, error, says):
    with pytest.raises(error) as raised:
        generate(small("rwkv7"), tokens(), **{"max_new_tokens": 1} | how)
    assert str(raised.value) == says


def test_lost_weights_are_no_text():
    model = small("gsa")
    model.head.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match="model: expected logits to draw from, got NaN in row 0"):
        generate(model, tokens(), 3)


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        ([], ValueError, "sequences: expected at least one, got none"),
        ([[1], []], ValueError, "sequences[1]: expected [T] with T of at least 1, got [0]"),
        ([[0.5]], TypeError, "sequences[0]: expected whole numbers, got float32"),
    ],
)
def test_pad_names_what_is_wrong(rows, error, says):
    with pytest.raises(error) as raised:
        pad(rows)
    assert str(raised.value) == says


def test_a_recurrent_operator_of_ones_own_takes_states_too():
    model = small("rwkv7", operator=fused_recurrent_rwkv7)
    _, state = model(tokens(), output_final_state=True)
    same(state[STATE], small("rwkv7")(tokens(), output_final_state=True)[1][STATE], torch.float64)
