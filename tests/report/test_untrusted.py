"""Model text on a page: nothing runs, nothing hides, nothing is reordered, nothing floods."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from finetune.report.untrusted import against_reference, untrusted, visible


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</pre></style>",
        "&lt;b&gt;",
        "{{ 7 * 7 }}",
        "'",
    ],
)
def test_markup_becomes_text(text: str) -> None:
    shown = str(untrusted(text))
    assert "<" not in shown and '"' not in shown and "'" not in shown
    assert "&lt;b&gt;" not in text or "&amp;lt;b&amp;gt;" in shown


def test_every_control_and_format_character_is_spelled_out() -> None:
    """All of Unicode: what has no glyph or moves its neighbours must not reach the page as itself."""
    hidden = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(chr(code))
        in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI", "BN")
    ]
    let_through = {"\t", "\n"}
    for character in hidden:
        if unicodedata.category(character) == "Cf" and 0x1BCA0 <= ord(character) <= 0x1D17A:
            continue  # format signs of shorthand and of music, visible in their scripts
        assert (character in visible(f"a{character}b")) == (character in let_through), hex(ord(character))


def test_ordinary_text_of_any_script_stays_as_it_is() -> None:
    text = "Grüße, مرحبا שלום 你好 😀\n\tindented"
    assert visible(text) == text


def test_hidden_characters_are_marked_and_their_neighbours_are_still_escaped() -> None:
    assert str(untrusted("a\u202e<b>")) == 'a<span class="control">\u27e8U+202E\u27e9</span>&lt;b&gt;'


def test_a_lone_surrogate_can_be_encoded() -> None:
    assert "\u27e8U+D800\u27e9" in str(untrusted("x\ud800y"))
    str(untrusted("x\ud800y")).encode()


def test_long_text_is_clipped_with_a_count() -> None:
    shown = str(untrusted("x" * 5000, limit=1200))
    assert shown.count("x") == 1200
    assert "3,800 more characters" in shown
    assert "more characters" not in str(untrusted("x" * 1200, limit=1200))


def test_words_that_differ_from_the_reference_are_marked() -> None:
    shown = str(against_reference('{"area": "attic"}', '{"area": "office"}'))
    assert "<mark>attic</mark>" in shown
    assert shown.count("<mark>") == 1


def test_missing_words_leave_a_gap_mark() -> None:
    shown = str(against_reference('{"area": "office"}', '{"area": "office", "item": "milk"}'))
    assert 'class="gap"' in shown
    assert "<mark>" not in shown


def test_marks_keep_hostile_text_escaped() -> None:
    shown = str(against_reference("turn <b>on</b> the lights", "turn on the lights"))
    assert "<b>" not in shown and "&lt;" in shown


def test_equal_and_unrelated_texts_have_no_marks() -> None:
    assert "<mark>" not in str(against_reference("same", "same"))
    assert "<mark>" not in str(against_reference("Sure! Let me help.", '{"intent": "HassTurnOn"}'))
