"""The forms of answers, and the warning before two forms of them spoil a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.curate.answers import find_repeated, is_empty, is_refusal
from finetune.data.curate.consistency import Mix, measure_consistency
from finetune.data.curate.coverage import tag_coverage
from finetune.data.curate.formats import format_of, has_courtesy, length_class, opening_words
from finetune.data.curate.language import UNDETERMINED, language_of


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("", "empty"), (" \n", "empty"),
        ('{"a": 1}', "JSON"), ("[1, 2]", "JSON"), (' {"a": [1, {"b": null}]}\n', "JSON"),
        ('```json\n{"a": 1}\n```', "JSON in a fence"),
        ('Here it is:\n```json\n{"a": 1}\n```', "JSON with words"), ('Result: {"a": 1}', "JSON with words"),
        ('{"a": 1} is the answer', "JSON with words"),
        ('{"a": 1', "broken JSON"), ('{"a": 1,}', "broken JSON"), ("{'a': 1}", "broken JSON"), ('[{"a": 1}', "broken JSON"),
        ("<p>hello</p>", "markup"), ('<svg a="1">x</svg>', "markup"),
        ("| a | b |\n|---|---|\n| 1 | 2 |", "table"), ("a\tb\tc\nd\te\tf", "table"),
        ("- a\n- b", "list"), ("1. one\n2. two\nok", "list"), ("First:\n* a\n* b", "list"),
        ("def f(x):\n    return x\n", "code"), ("```python\nx = 1\n```", "code"), ("SELECT * FROM t;", "code"),
        ("import numpy as np\nprint(np.ones(3))", "code"),
        ("Use this:\n```python\nx = 1\n```\nand it works well.", "code with words"),
        ("42", "number"), ("-3.5 %", "number"), ("1,000", "number"),
        ("The answer is Paris.", "prose"), ("positive", "prose"), ("[citation needed]", "prose"), ("{note} this", "prose"),
        ("We import goods and return them.\nClass is over.", "prose"), ("- just one line", "prose"),
        ("今天天气很好。", "prose"), ("We are here;\nand you are not there;", "prose"),
    ],
)  # fmt: skip
def test_the_form_of_an_answer(answer: str, form: str) -> None:
    assert format_of(answer) == form


@given(st.text(max_size=60))
def test_every_answer_has_a_form_a_length_and_an_opening(answer: str) -> None:
    assert format_of(answer)
    assert "word" in length_class(answer)
    assert len(opening_words(answer)) <= 120
    assert isinstance(has_courtesy(answer), bool)


def test_lengths_and_openings() -> None:
    assert [length_class(" ".join(["w"] * n)) for n in (0, 1, 2, 10, 11, 200, 201, 2000)] == [
        "0 words", "1 word", "2–10 words", "2–10 words", "11–50 words", "51–200 words", "201–1,000 words",
        "over 1,000 words",
    ]  # fmt: skip
    assert length_class("今" * 80) == "11–50 words"
    assert opening_words("The  QUICK brown fox") == "the quick brown"
    assert opening_words('{ "intent": 1}') == '{"intent"'


@pytest.mark.parametrize(
    "answer", ["Sure! Here", "Certainly, this", "I’d be happy to help.", "Natürlich! Hier", "¡Claro! Aquí"]
)
def test_a_courtesy(answer: str) -> None:
    assert has_courtesy(answer)


@pytest.mark.parametrize("answer", ["Surely not", "The thing", "", "Claros are kites"])
def test_no_courtesy(answer: str) -> None:
    assert not has_courtesy(answer)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Turn on the light in the kitchen", "en"), ("Schalte das Licht in der Küche ein", "de"),
        ("Allume la lumière de la cuisine", "fr"), ("打开厨房的灯", "zh"), ("電気をつけてください", "ja"),
        ("불을 켜 주세요", "ko"), ("The capital of France is Paris.", "en"),
        ("yes", "und"), ("12345", "und"), ("def f(x): return x + 1", "und"), ('{"a": "b"}', "und"), ("", "und"),
        ("https://example.com/a/long/path/of/english/words", "und"),
    ],
)  # fmt: skip
def test_languages_and_what_is_too_short_to_tell(text: str, code: str) -> None:
    assert language_of(text) == code


@pytest.mark.parametrize(
    "answer",
    [
        "I'm sorry, but I can't help with that.", "I’m sorry, but I cannot assist with that request.",
        "As an AI language model, I cannot have opinions.", "Sorry, I am not able to do that",
        "Unfortunately, I do not have access to it.", "I cannot provide legal advice.", "I am unable to assist.",
        "Es tut mir leid, aber ich kann dabei nicht helfen.", "Je suis désolé, mais je ne peux pas.",
        "Lo siento, pero no puedo ayudarte", "抱歉，我无法回答这个问题",
    ],
)  # fmt: skip
def test_refusals(answer: str) -> None:
    assert is_refusal(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "I can't believe it's not butter", "Sorry to hear that! Try turning it off.", "I won't be there tomorrow.",
        "I'm sorry for your loss.", "Unfortunately the train is late.", "As an AI researcher she wrote papers.", "",
        "The model said: I'm sorry, but I can't help with that.",
    ],
)  # fmt: skip
def test_no_refusals(answer: str) -> None:
    assert not is_refusal(answer)


def test_empty_answers() -> None:
    assert [is_empty(text) for text in ("", " \n", "...", "—", "?!", "-")] == [True] * 6
    assert [is_empty(text) for text in ("ok", "0", "👍", "+", "今", "x = 1")] == [False] * 6


def test_boilerplate_is_counted_whole_or_by_its_sentences() -> None:
    answers = [f"Answer number {n} is this. I hope this helps you!" for n in range(30)]
    answers += ["Please ask a qualified professional about it."] * 12
    answers += ["positive"] * 50 + ['{"a": 1}'] * 50 + ["one two three four five"] * 9
    found = find_repeated(answers)
    assert [(one.kind, one.text, one.n_rows, one.rows) for one in found] == [
        ("last sentence", "i hope this helps you!", 30, (0, 1, 2)),
        ("answer", "please ask a qualified professional about it.", 12, (30, 31, 32)),
    ]
    assert find_repeated([]) == []


def _mix(answers: list[str], aspect: str, **options: object) -> Mix:
    return next(mix for mix in measure_consistency(answers, **options) if mix.aspect == aspect)  # type: ignore[arg-type]


@pytest.mark.parametrize(("n_prose", "warned"), [(0, False), (4, False), (5, True), (20, True)])
def test_a_minority_of_five_in_a_hundred_is_warned_of(n_prose: int, warned: bool) -> None:
    answers = ['{"intent": "on"}'] * (100 - n_prose) + ["I turned it on for you."] * n_prose
    mix = _mix(answers, "format")
    assert mix.warned is warned
    assert mix.minority_share == pytest.approx(n_prose / 100)
    assert {pile.value: pile.n for pile in mix.piles} == {"JSON": 100 - n_prose} | (
        {"prose": n_prose} if n_prose else {}
    )
    assert mix.piles[0].value == "JSON"
    for pile in mix.piles:
        assert len(pile.rows) == min(pile.n, 3)
        assert all(format_of(answers[row]) == pile.value for row in pile.rows)


def test_examples_are_drawn_from_all_over_and_the_same_each_time() -> None:
    answers = ["The same answer."] * 1000
    (pile,) = _mix(answers, "format").piles
    assert pile == _mix(answers, "format").piles[0]
    assert max(pile.rows) > 200


def test_within_a_tag_two_tasks_may_differ() -> None:
    answers = ['{"a": 1}'] * 10 + ["Some words here."] * 10
    tasks = ["extract"] * 10 + ["chat"] * 10
    assert _mix(answers, "format").warned
    mixes = measure_consistency(answers, within=tasks, aspects=["format"])
    assert [(mix.within, mix.warned, mix.n) for mix in mixes] == [("chat", False, 10), ("extract", False, 10)]


def test_a_record_has_no_language_but_the_sentences_in_it_have() -> None:
    records = [
        f'{{"intent":"HassTurnOn","name":"{name}","area":"salle de bain"}}'
        for name in ("lampe du plafond", "the lamp")
    ]
    assert {pile.value for pile in _mix(records, "language").piles} == {UNDETERMINED}
    assert _mix(["[" + "9," * (1 << 20)], "language").piles[0].value == UNDETERMINED
    said = ['{"steps":[{"reply":"Turn the lamp off before you leave the house"}]}'] * 9
    assert not _mix([*records * 20, *said], "language").warned
    german = '{"steps":[{"reply":"Schalte das Licht in der Küche aus, bevor du gehst"}]}'
    assert _mix([*said, german], "language").warned


def test_languages_that_cannot_be_told_are_no_minority() -> None:
    answers = ["Turn on the light in the kitchen"] * 10 + ["ok"] * 10
    mix = _mix(answers, "language")
    assert (mix.warned, mix.minority_share) == (False, 0.0)
    assert _mix([*answers, "Schalte das Licht in der Küche ein"], "language").warned
    assert measure_consistency([]) == []


def test_coverage_of_tags_by_side() -> None:
    rows = [("train", {"intent": "on", "id": str(n)}) for n in range(300)]
    rows += [("test", {"intent": "on"}), ("train", {"intent": "off"}), ("train", {})]
    ids, intents = tag_coverage(rows)
    assert (ids.tag, ids.n_values, ids.values, ids.missing) == ("id", 300, {}, 3)
    assert intents.values == {"on": {"train": 300, "test": 1}, "off": {"train": 1}}
    assert (intents.missing, intents.unmeasured) == (1, ("off",))
    assert tag_coverage([]) == []
