"""Scorers for written answers: matches, patterns, numbers, checks, languages; and the registry that makes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.errors import UserError
from finetune.evaluation.scorers.checks import REQUIREMENTS, meets, sentences_in, words_in
from finetune.evaluation.scorers.language import guess_language
from finetune.evaluation.scorers.registry import SCORERS, find_scorer, make_format, make_scorer, scorer_names
from finetune.evaluation.scorers.text import normalised_match, numbers_in, text_match


def _score(name: str, output: str, reference: str = "", **parameters: Any) -> float:
    return make_scorer(name, parameters)(output, reference, None)


def test_text_match_is_exact_but_for_outer_space() -> None:
    assert text_match(" Paris\n", "Paris") == 1.0
    assert text_match("paris", "Paris") == 0.0
    assert text_match("Paris.", "Paris") == 0.0


@pytest.mark.parametrize("output", ["paris", "The Paris!", "  “PARIS”. ", "Ｐａｒｉｓ"])
def test_normalised_match_forgives_spelling(output: str) -> None:
    assert normalised_match(output, "Paris") == 1.0


@pytest.mark.parametrize("output", ["Paris, France", "Pari s", "", "Parıs"])
def test_normalised_match_forgives_no_words(output: str) -> None:
    assert normalised_match(output, "Paris") == 0.0


def test_contains_asks_for_whole_words() -> None:
    assert _score("contains", "It is Paris, of course.", "paris") == 1.0
    assert _score("contains", "Comparison", "paris") == 0.0
    assert _score("contains", "Comparison", "paris", whole_words=False) == 1.0
    assert _score("contains", "anything", "the") == 0.0  # nothing is left of it after normalising


def test_regex_searches_or_covers_the_whole_answer() -> None:
    assert _score("regex", "answer: B.", pattern=r"\b[A-D]\b") == 1.0
    assert _score("regex", "answer: B.", pattern=r"[A-D]", full=True) == 0.0
    assert _score("regex", " b ", pattern=r"[A-D]", full=True, ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("output", "reference", "parameters", "expected"),
    [
        ("The answer is 42.", "42", {}, 1.0),
        ("6 times 7 is 42", "42", {}, 1.0),
        ("42 is 6 times 7", "42", {}, 0.0),
        ("42 is 6 times 7", "42", {"which": "first"}, 1.0),
        ("42 is 6 times 7", "42", {"which": "only"}, 0.0),
        ("42, yes 42", "42", {"which": "only"}, 1.0),
        ("1,234.50 dollars", "1234.5", {}, 1.0),
        ("0.3", "0.30", {}, 1.0),
        ("3.1", "3.14", {"tolerance": 0.05}, 1.0),
        ("3.0", "3.14", {"tolerance": 0.05}, 0.0),
        ("98", "100", {"relative": 0.02}, 1.0),
        ("97", "100", {"relative": 0.02}, 0.0),
        ("−5", "-5", {}, 1.0),
        ("5", "-5", {}, 0.0),
        ("1e3", "1000", {}, 1.0),
        ("none", "5", {}, 0.0),
        ("v42b", "42", {}, 0.0),
    ],
)
def test_numeric_by_hand(output: str, reference: str, parameters: dict[str, Any], expected: float) -> None:
    assert _score("numeric", output, reference, **parameters) == expected


def test_numeric_refuses_a_reference_without_one_number() -> None:
    with pytest.raises(ValueError, match="exactly one number"):
        _score("numeric", "5", "five")


def test_numbers_in_keeps_order_and_sign() -> None:
    assert [str(number) for number in numbers_in("a -1.5, then 2,000 and 7.")] == ["-1.5", "2000", "7"]


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        ({"contains_any": ["Paris", "Lutetia"]}, "Paris it is", "London"),
        ({"contains_all": ["red", "blue"]}, "Blue and red", "only red"),
        ({"excludes": ["sorry"]}, "Yes.", "Sorry, no."),
        ({"number": 42}, "It is 42", "It is 41"),
        ({"number": {"value": 3.14, "tolerance": 0.01}}, "about 3.14", "about 3.2"),
        ({"regex": r"^\d+$"}, "123", "a123"),
        ({"full_regex": r"[A-D]"}, " B ", "B."),
        ({"words": 3}, "one two three", "one two"),
        ({"words": [2, 3]}, "it's well-made", "one two three four"),
        ({"sentences": 2}, "One. Two!", "One."),
        ({"lines": 3}, "a\nb\n\nc", "a\nb"),
        ({"paragraphs": 2}, "a\nb\n\nc", "a\n\nb\n \nc"),
        ({"bullets": [2, 3]}, "List:\n- a\n* b\n 3) c", "- a\n-b\nc - d"),
        ({"characters": [0, 5]}, "short", "longer"),
        ({"starts_with": "Dear"}, " Dear you", "My dear"),
        ({"ends_with": "."}, "Done. ", "Done"),
        ({"upper_case": True}, "YES 1!", "Yes"),
        ({"lower_case": True}, "yes", "123"),
        ({"json": True}, '{"a":1}', "[1]"),
        ({"json_keys": ["a", "b"]}, '{"b":1,"a":2}', '{"a":1}'),
        ({"language": "fr"}, "Le chat est dans la maison.", "The cat is in the house."),
        ({"refuses": True}, "I’m sorry, but I can’t do that.", "Sure, here is how."),
        ({"refuses": False}, "Here is the answer.", "I cannot help."),
        ({"contains_any": ["yes"], "words": [1, 2]}, "yes", "yes it is so"),
    ],
)
def test_every_requirement_tells_right_from_wrong(check: dict[str, Any], right: str, wrong: str) -> None:
    assert meets(right, check) == 1.0
    assert meets(wrong, check) == 0.0


def test_no_requirement_is_untested_and_unknown_ones_are_named() -> None:
    tested = {
        "contains_any", "contains_all", "excludes", "number", "regex", "full_regex", "words", "sentences", "lines", "paragraphs", "bullets",
        "characters", "starts_with", "ends_with", "upper_case", "lower_case", "json", "json_keys", "language", "refuses",
    }  # fmt: skip
    assert set(REQUIREMENTS) == tested
    with pytest.raises(ValueError, match="did you mean 'words'"):
        meets("a", {"word": 1})
    with pytest.raises(ValueError, match="no check"):
        meets("a", {})


@given(st.text(max_size=60))
def test_no_text_breaks_a_requirement(output: str) -> None:
    for name, wanted in {
        "contains_any": ["cat"],
        "number": 1,
        "words": 1,
        "language": "en",
        "refuses": True,
    }.items():
        assert meets(output, {name: wanted}) in (0.0, 1.0)


def test_requirements_of_every_item_are_added_to_its_own() -> None:
    score = make_scorer("check", {"every": {"words": [1, 3]}})
    assert score("Paris it is", "", {"contains_any": ["Paris"]}) == 1.0
    assert score("It is Paris, of course", "", {"contains_any": ["Paris"]}) == 0.0
    assert score("any two", "", None) == 1.0
    with pytest.raises(UserError, match="did you mean 'words'"):
        make_scorer("check", {"every": {"word": 3}})


@pytest.mark.parametrize(
    "check",
    [
        {"regex": "("},
        {"regex": 3},
        {"words": "three"},
        {"words": [5, 1]},
        {"words": [1, 2, 3]},
        {"words": -1},
        {"characters": 2.5},
        {"lines": True},
        {"number": {"tolerance": 1}},
        {"number": None},
        {"starts_with": 3},
        {"starts_with": ""},
        {"contains_any": "Paris"},
        {"contains_any": ["A"]},  # an article, which no normalised answer holds
        {"contains_all": []},
        {"excludes": ["!"]},
        {"upper_case": "yes"},
        {"json_keys": "ab"},
        {"language": "english"},
    ],
)
def test_a_requirement_that_cannot_be_checked_is_named(check: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"'{next(iter(check))}: "):
        meets("text", check)


def test_words_and_sentences_are_counted_as_people_count_them() -> None:
    assert words_in("It's a well-made, 2nd try — isn’t it?") == [
        "It's",
        "a",
        "well-made",
        "2nd",
        "try",
        "isn’t",
        "it",
    ]
    assert len(sentences_in("Is it? Yes! It is… So. And no end")) == 5
    assert sentences_in(" ... ") == []


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The weather is nice and we are going to the park.", "en"),
        ("Das Wetter ist schön und wir gehen nicht in die Stadt.", "de"),
        ("Il fait beau et nous allons au parc avec les enfants.", "fr"),
        ("El tiempo es bueno y vamos a la playa con los niños.", "es"),
        ("Il tempo è bello e non siamo nella casa di Maria.", "it"),
        ("O tempo está bom e não vamos para a praia com as crianças.", "pt"),
        ("Het weer is mooi en wij gaan niet naar de stad.", "nl"),
        ("Погода хорошая", "ru"),
        ("今日は天気がいい", "ja"),
        ("今天天气很好", "zh"),
        ("오늘 날씨가 좋다", "ko"),
        ("12345 !!", None),
        ("", None),
    ],
)
def test_languages_are_told_by_script_and_small_words(text: str, language: str | None) -> None:
    assert guess_language(text) == language


def test_every_scorer_says_what_it_does_in_one_sentence() -> None:
    assert scorer_names()[: len(SCORERS)] == list(SCORERS)
    for kind in SCORERS.values():
        assert 10 < len(kind.summary) < 160, kind.name
        assert len(kind.code_digest) >= 16


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("numerc", {}, "did you mean 'numeric'"),
        ("numeric", {"tolerence": 1}, "did you mean 'tolerance'"),
        ("numeric", {"which": "middle"}, "is not last, first or only"),
        ("numeric", {"tolerance": -1}, "must not be negative"),
        ("regex", {}, "cannot be made"),
        ("regex", {"pattern": 3}, "parameter 'pattern' should be a valid string, not 3"),
        ("regex", {"pattern": "x", "full": "false"}, "'full' should be a valid boolean, not 'false'"),
        ("choice_letter", {"letters": ["A", "B"]}, "'letters' should be a valid string"),
        ("python", {"function": 3}, "'function' should be a valid string"),
        ("numeric", {"tolerance": "0.1"}, "'tolerance' should be a valid number"),
        ("exact_match", {"x": 1}, "takes no parameters"),
    ],
)
def test_scorers_that_cannot_be_made_are_user_errors(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_scorer(name, parameters, where="suite.yaml: scorers")


def test_a_scorer_takes_the_modules_it_uses_into_its_digest() -> None:
    assert find_scorer("check").code_digest.count("-") == 3  # checks, json_object, language, text
    assert find_scorer("exact_match").code_digest.count("-") == 0


@pytest.mark.parametrize(
    ("output", "reference", "parameters", "expected"),
    [
        ("1 + 1\n#### 2", "2", {}, 1.0),
        ("#### 3 no, #### 2", "2", {}, 1.0),
        ("#### 3 no, #### 2", "2", {"which": "first"}, 0.0),
        ("#### Paris.", "paris", {}, 1.0),
        ("#### Paris.", "paris", {"normalised": False}, 0.0),
        ("2", "2", {}, 0.0),
        ("####", "", {}, 0.0),
    ],
)
def test_a_captured_answer_is_compared(
    output: str, reference: str, parameters: dict[str, Any], expected: float
) -> None:
    assert _score("regex_match", output, reference, pattern=r"#### (\S+)", **parameters) == expected


def test_without_a_group_the_whole_match_is_compared() -> None:
    assert _score("regex_match", "on 2024-01-05.", "2024-01-05", pattern=r"\d{4}-\d\d-\d\d") == 1.0
    with pytest.raises(UserError, match="is not last or first"):
        make_scorer("regex_match", {"pattern": "a", "which": "any"})


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("B", "B"),
        (" b. ", "B"),
        ("(B)", "B"),
        ("**B**", "B"),
        ("B) Paris", "B"),
        ("B: because A is wrong", "B"),
        ("The answer is B.", "B"),
        ("Answer: (C)", "C"),
        ("Option A looks right, but the answer is D", "D"),
        ("It must be (C).", "C"),
        ("(A) or (C)?", None),
        ("The answer is A or B.", None),
        ("(B) because (A) is wrong", "B"),
        ("A cat sat on the mat", None),
        ("Both B and C", None),
        ("The answer is Berlin", None),
        ("E", None),
        ("", None),
    ],
)
def test_the_letter_of_an_answer(output: str, letter: str | None) -> None:
    assert make_format("choice_letter", {})(output) is (letter is not None)  # type: ignore[misc]
    for reference in "ABCD":
        assert _score("choice_letter", output, reference) == float(reference == letter)


def test_choice_letters_have_their_alphabet() -> None:
    assert _score("choice_letter", "2", "(2)", letters="123") == 1.0
    with pytest.raises(ValueError, match="names none of ABCD"):
        _score("choice_letter", "A", "Paris")
    with pytest.raises(UserError, match="two or more different"):
        make_scorer("choice_letter", {"letters": "AA"})


@pytest.mark.parametrize(
    ("name", "parameters", "good", "off"),
    [
        ("exact_match", {}, '{"a": 1}', "[1]"),
        ("slot_f1", {}, "{}", "none"),
        ("field_f1", {}, "{}", "{} {}"),
        ("json_schema", {"schema": {"type": "object"}}, "[1]", "[1"),
        ("numeric", {}, "1 or 2", "two"),
        ("numeric", {"which": "only"}, "2, that is 2", "1 or 2"),
        ("regex_match", {"pattern": "#(.)"}, "#b", "b"),
        ("choice_letter", {}, "B", "all of them"),
    ],
)
def test_off_format_is_told_from_wrong(name: str, parameters: dict[str, Any], good: str, off: str) -> None:
    well_formed = make_format(name, parameters)
    assert well_formed is not None
    assert (well_formed(good), well_formed(off)) == (True, False)


def test_scorers_of_any_text_have_no_format() -> None:
    assert all(make_format(name, {}) is None for name in ("text_match", "chrf", "check", "valid_json"))


def test_chrf_by_hand() -> None:
    # Character 1- to 6-grams of "abcd" and "abce": precision = recall = 3/4, 2/3, 1/2 and 0 for n = 1 to 4; longer ones
    # exist on neither side. chrF takes the means, 23/48, first, and their F2 is the same.
    assert _score("chrf", "abcd", "abce") == pytest.approx((3 / 4 + 2 / 3 + 1 / 2) / 4)
    assert _score("chrf", "the cat", "the cat") == 1.0
    assert _score("chrf", "", "abc") == _score("chrf", "xyz", "abc") == 0.0


def test_bleu_by_hand() -> None:
    # 1- to 4-grams right: 5 of 6, 3 of 5, 1 of 4, and 0 of 3, which exponential smoothing counts as a half.
    expected = (5 / 6 * 3 / 5 * 1 / 4 * 0.5 / 3) ** 0.25
    assert _score("bleu", "the cat sat on the mat", "the cat is on the mat") == pytest.approx(expected)
    assert _score("bleu", "the cat", "the cat") == 1.0  # effective order: no 3-grams to miss
    assert _score("bleu", "", "the cat") == 0.0
    with pytest.raises(UserError, match="tokenize: 'none such'"):
        make_scorer("bleu", {"tokenize": "none such"})


def test_rouge_by_hand() -> None:
    assert _score("rouge", "the cat", "the cat sat", kind="rouge1") == pytest.approx(0.8)  # P 1, R 2/3
    assert _score("rouge", "the cat", "the cat sat", kind="rouge2") == pytest.approx(2 / 3)  # P 1, R 1/2
    assert _score("rouge", "cat the", "the cat sat") == pytest.approx(
        0.4
    )  # longest common run 1: P 1/2, R 1/3
    assert _score("rouge", "cats", "cat", stemmer=True) == pytest.approx(1.0)
    assert _score("rouge", "", "the cat") == _score("rouge", "кот", "кот") == 0.0
    with pytest.raises(UserError, match="kind: 'rouge9'"):
        make_scorer("rouge", {"kind": "rouge9"})


def test_json_schema_accepts_and_refuses() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert _score("json_schema", '{"a": 1}', schema=schema) == 1.0
    assert _score("json_schema", '{"a": "1"}', schema=schema) == 0.0
    assert _score("json_schema", "no json", schema=schema) == 0.0
    assert _score("json_schema", "NaN", schema={"type": "number"}) == 0.0
    assert _score("json_schema", "[" * 100_000, schema=schema) == 0.0
    assert _score("json_schema", "3", '{"type":"integer"}') == 1.0


def test_a_schema_that_is_none_is_refused_and_nothing_is_fetched() -> None:
    with pytest.raises(UserError, match="is no JSON Schema"):
        make_scorer("json_schema", {"schema": {"type": "intger"}})
    with pytest.raises(ValueError, match="is no JSON Schema: 5"):
        _score("json_schema", "5", "5")
    with pytest.raises(ValueError, match="outside itself"):
        _score("json_schema", "3", schema={"$ref": "http://127.0.0.1:9/schema.json"})


MEASURED = (
    '{"choices": ["Paris", "New York City", "Rome"], "log_likelihoods": [-6.0, -7.0, -5.0], '
    '"tokens": [2, 4, 1], "bytes": [5, 13, 4]}'
)


@pytest.mark.parametrize(
    ("scorer", "winner"),
    [
        ("choice_accuracy", "Rome"),  # -6, -7, -5
        ("choice_accuracy_per_token", "New York City"),  # -3, -1.75, -5
        ("choice_accuracy_per_byte", "New York City"),  # -1.2, -0.54, -1.25
    ],
)
def test_the_likeliest_choice_by_hand(scorer: str, winner: str) -> None:
    for choice in ("Paris", "New York City", "Rome"):
        assert _score(scorer, MEASURED, choice) == float(choice == winner)


def test_of_equal_choices_the_first_counts() -> None:
    measured = '{"choices": ["a", "b"], "log_likelihoods": [-1.0, -1.0], "tokens": [1, 1], "bytes": [1, 1]}'
    assert (_score("choice_accuracy", measured, "a"), _score("choice_accuracy", measured, "b")) == (1.0, 0.0)


def test_likelihoods_of_texts_by_hand() -> None:
    # Two texts of 2 and 6 tokens, 4 and 12 bytes: means 4 and 8. Nats -3 and -9: 12 / 8 a token, 12 / ln 2 / 16 a byte.
    texts = [
        f'{{"log_likelihood": {nats}, "tokens": {tokens}, "bytes": {size}, "mean_tokens": 4, "mean_bytes": 8, "kl": {kl}}}'
        for nats, tokens, size, kl in ((-3.0, 2, 4, 0.5), (-9.0, 6, 12, 1.5))
    ]

    def mean(scorer: str) -> float:
        return sum(_score(scorer, text) for text in texts) / len(texts)

    assert mean("nll_per_token") == pytest.approx(12 / 8)
    assert mean("bits_per_byte") == pytest.approx(12 / math.log(2) / 16)
    assert mean("kl_per_token") == pytest.approx(2.0 / 8)
    assert not any(
        find_scorer(name).higher_is_better for name in ("nll_per_token", "bits_per_byte", "kl_per_token")
    )
