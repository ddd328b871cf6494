"""Words in another language: one for every English one, with the same placeholders, and none that is left over."""

import json
import re
import threading

import numpy as np
import pytest
import torch

from flakit import language
from flakit.course import check, predict
from flakit.instruments.trace import trace
from flakit.language import LANGUAGES, Words, current, label, rephrase, say, speaking, table, use
from tests.language.words import PACKAGE, SOURCES, may_say, texts, translatable

FILES = sorted((PACKAGE / "language" / "zh").glob("*.json"))
SPEAKING = [name for name in SOURCES if not name.startswith("flakit/language") and may_say(name)]


def placeholders(text):
    return sorted(re.findall(r"\{[^}]*\}", text))


@pytest.mark.parametrize("name", SPEAKING)
def test_every_english_word_has_a_chinese_one(name):
    assert [text for text in translatable(name) if text not in table("zh")] == []


@pytest.mark.full
def test_no_translation_is_of_words_that_are_gone():
    there = {text for name in SOURCES for text in (*texts(name), *translatable(name))}
    assert [text for text in table("zh") if text not in there] == []


def test_translations_take_the_same_numbers():
    assert {text: chinese for text, chinese in table("zh").items() if placeholders(text) != placeholders(chinese)} == {}


def test_a_word_is_translated_once():
    pairs = [json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=list) for path in FILES]
    keys = [text for pair in pairs for text, _ in pair]
    assert len(keys) == len(set(keys)) == len(table("zh")) > 200


@pytest.fixture
def pirate(monkeypatch):
    """A language with three words."""
    words = {"hello": "ahoy", "{n} of {all}": "{n} o' {all}", "{what}: {n} tokens": "{what}: {n} doubloons"}
    monkeypatch.setattr(language, "LANGUAGES", (*LANGUAGES, "pirate"))
    monkeypatch.setattr(language, "table", {"pirate": words}.__getitem__)


def test_a_text_is_filled_in(pirate):
    words = Words() | {"pair": {"in": "{n} of {all}"}, "rows": {0: "none", 1: "one", 3: "{n}, {share:%}, {x:.2f}"}}
    assert words.say("pair", "in", n=torch.tensor(1 / 3), all=np.float32(1e-7)) == "0.3333 of 1e-07"
    assert words.say("pair", "in", n=float("-inf"), all=torch.float16) == "-inf of float16"
    assert [words.say("rows", n=n, share=0.999, x=1 / 3) for n in (0, 1, 2)] == ["none", "one", "one"]
    assert words.say("rows", n=torch.tensor(4), share=torch.tensor(0.004), x=float("nan")) == "4, <1%, NaN"
    with speaking("pirate"):
        assert words.say("pair", "in", n=1, all="2") == "1 o' 2"
    for path, values in (("pair",), {"n": 1}), (("rows",), {}):
        with pytest.raises(ValueError, match="expected the names of a text, got a table: (pair|rows)"):
            words.say(*path, **values)


def test_a_table_speaks_what_is_spoken(pirate):
    words = Words({"greet": "hello", "count": {1: "{n} of {all}", 2: ("hello", "{n}")}, "number": 3})
    assert words["greet"] == words.english["greet"] == "hello"
    with speaking("pirate"):
        assert words["greet"] == "ahoy"
        assert words["count"][1].format(n=1, all=2) == "1 o' 2"
        assert words["count"][2] == ("ahoy", "{n}")
        assert dict(words["count"])[2][0] == (words | {"more": 1})["greet"] == "ahoy"
        assert words["number"] == 3 and list(words) == ["greet", "count", "number"]
        assert rephrase("hello: 3 tokens") == "ahoy: 3 doubloons"
        assert (label("dtype"), rephrase("two words")) == ("dtype", "two words")
    assert words["greet"] == "hello"


def test_what_has_no_translation_is_an_error_and_a_formula_needs_none(pirate):
    with speaking("pirate"):
        assert say("e^{x} · $S_t$ = {y}") == "e^{x} · $S_t$ = {y}"
        with pytest.raises(ValueError, match="language: expected 'en' where 'goodbye' is said, got 'pirate'"):
            say("goodbye")


def test_an_unknown_language_is_named():
    for bad in ("fr", "", 3):
        for speak in (use, lambda language: speaking(language).__enter__()):
            with pytest.raises(ValueError, match=rf"language: expected one of en, zh, got {bad!r}"):
                speak(bad)


def test_threads_speak_each_their_own():
    heard = {}

    def talk(which, mine, others):
        with speaking(which):
            mine.set()
            others.wait(10)
            heard[which] = say("Right.")

    one, two = threading.Event(), threading.Event()
    threads = [threading.Thread(target=talk, args=each) for each in (("en", one, two), ("zh", two, one))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {"en": "Right.", "zh": "正确。"} and current() == "en"


def test_exercises_speak_it(capsys):
    use("zh")
    try:
        assert not check("半衰期", 3.0, 2.0)
        assert not check("状态", ..., [1.0])
        asked = predict("多少？", ["1", "2"], answer="2", why="因为。")
        page, answer = asked._repr_html_(), asked.choose("1")
    finally:
        use("en")
    out = capsys.readouterr().out
    assert "半衰期：还不对" in out and "3，偏大" in out and "还没有答案" in out
    assert "先猜一猜。" in page and "（你的选择）" in page and answer == "不对：2。 因为。"


def test_a_trace_is_drawn_in_what_is_spoken_and_printed_in_english():
    with trace() as found:
        torch.exp(torch.tensor([1.0, 100.0]))
    with speaking("zh"):
        assert found.drawn()["title"] == "第一个非有限的数据块：由有限的数算出的 inf"
        assert "First non-finite tile: inf born of finite numbers" in str(found)
    assert found.drawn()["title"] == "First non-finite tile: inf born of finite numbers"
