"""The tasks and the corpus: answers checked by doing what the task says, one sequence after another."""

from itertools import permutations

import pytest
import torch

from flakit.models import IGNORED, Copying, Corpus, Delay, Permutations, Recall, standard_library


def batch(task, size=7, T=20, seed=0):
    return task.batch(size, T, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("moves", ["swaps", "all"])
@pytest.mark.parametrize("items", [2, 3, 5])
def test_permutations_say_where_things_lie(items, moves):
    task = Permutations(items, moves)
    tokens, targets = batch(task)
    orders = {0: list(range(items))}
    for sequence, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert (sequence[0], answers[0]) == (0, 0)
        order = list(range(items))
        for move, answer in zip(sequence[1:], answers[1:], strict=True):
            order = [order[at] for at in _places(items, moves)[move - 1]]
            assert orders.setdefault(answer, order) == order
    assert len({tuple(order) for order in orders.values()}) == len(orders) <= task.classes


def _places(items, moves):
    """What each move does, in the order of the tokens: permutations in lexicographic order."""
    every = permutations(range(items))
    return [order for order in every if moves == "all" or sum(a != b for a, b in enumerate(order)) == 2]


@pytest.mark.parametrize(
    ("items", "moves", "classes", "vocab"), [(3, "swaps", 6, 6), (3, "all", 6, 7), (5, "swaps", 120, 120)]
)
def test_permutations_count_their_group(items, moves, classes, vocab):
    task = Permutations(items, moves)
    assert (task.classes, task.vocab) == (classes, vocab)
    assert all(len(set(column.tolist())) == classes for column in task.after.T)  # a move can be undone


def test_moves_do_not_commute():
    after = Permutations(3).after
    assert after[after[0, 0], 1] != after[after[0, 1], 0]


def test_recall_asks_for_what_was_said():
    tokens, targets = batch(Recall(keys=4, values=9))
    asked = 0
    for sequence, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        said = {}
        for at in range(0, 20, 2):
            assert answers[at] == said.get(sequence[at], IGNORED)
            assert answers[at + 1] == IGNORED
            said[sequence[at]] = sequence[at + 1]
            asked += answers[at] != IGNORED
    assert asked > 20


@pytest.mark.parametrize("T", [20, 21])
def test_copying_asks_for_the_first_half(T):
    tokens, targets = batch(Copying(symbols=5), T=T)
    half = (T + 1) // 2
    assert (tokens[:, half] == 5).all()
    assert (targets[:, :half] == IGNORED).all()
    assert torch.equal(targets[:, half:], tokens[:, : T - half])
    assert torch.equal(tokens[:, half + 1 :], targets[:, half : T - 1])


@pytest.mark.parametrize("by", [1, 3])
def test_delay_asks_for_an_earlier_token(by):
    tokens, targets = batch(Delay(symbols=5, by=by))
    assert (targets[:, :by] == IGNORED).all()
    assert torch.equal(targets[:, by:], tokens[:, :-by])


@pytest.mark.parametrize(
    "task", [Permutations(3), Recall(), Copying(), Delay(), Corpus(torch.arange(200).byte())], ids=repr
)
def test_batches_are_made_from_their_generator_alone(task):
    (tokens, targets), (same, _), (other, _) = (batch(task, seed=seed) for seed in (0, 0, 1))
    assert tokens.shape == targets.shape == (7, 20)
    assert tokens.dtype == targets.dtype == torch.long
    assert 0 <= tokens.min() and tokens.max() < task.vocab
    assert torch.equal(tokens, same) and not torch.equal(tokens, other)
    assert batch(task, T=1)[0].shape == (7, 1)


def test_the_corpus_is_the_standard_library():
    corpus = standard_library(modules=20)
    assert b"def " in bytes(corpus.text.tolist())
    tokens, targets = batch(corpus, T=50)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    train, held_out = corpus.split(0.25)
    assert len(held_out.text) == pytest.approx(len(corpus.text) / 4, abs=1)
    assert torch.equal(torch.cat((train.text, held_out.text)), corpus.text)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Permutations(6), "items: expected 2, 3, 4 or 5, got 6"),
        (lambda: Permutations(moves="some"), "moves: expected 'swaps' or 'all', got 'some'"),
        (lambda: batch(Corpus(torch.zeros(10)), T=10), "T: expected 1 to 9, the bytes of the corpus less one, got 10"),
        (lambda: Delay(4, 0), "by: expected a whole number of at least 1, got 0"),
        (lambda: Delay(0), "symbols: expected a whole number of at least 1, got 0"),
        (lambda: Copying(0), "symbols: expected a whole number of at least 1, got 0"),
        (lambda: batch(Copying(3), T=0), "T: expected a whole number of at least 1, got 0"),
        (lambda: Recall(0, 2), "keys: expected a whole number of at least 1, got 0"),
        (lambda: Recall(2, 2.0), "values: expected a whole number of at least 1, got 2.0"),
        (lambda: batch(Permutations(3), T=0), "T: expected a whole number of at least 1, got 0"),
        (lambda: batch(Permutations(3), size=0), "size: expected a whole number of at least 1, got 0"),
        (lambda: Corpus(torch.zeros(9)).split(1.5), "share: expected a number above 0 and below 1, got 1.5"),
        (lambda: standard_library(0), "modules: expected a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_made_is_named(make, says):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == says
