"""The form of an answer: JSON, list, table, code or prose; how long; how it opens. Forms, not contents.

These are rules of thumb, stated here so that a reader can judge them; each looks at one answer alone.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from finetune.data.fold import fold_text

_FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_LIST_LINE = re.compile(r"^\s*(?:[-*+•‣–]|\(?\d{1,3}[.)]|\(?[a-zA-Z][.)])\s+\S")
_TABLE_RULE = re.compile(r"^\s*\|?\s*:?-{3,}:?\s*(?:\|\s*:?-{3,}:?\s*)*\|?\s*$")
_TAG = re.compile(r"^<([A-Za-z][\w:.-]*)(?:\s[^<>]*)?>.*</\1>$", re.DOTALL)
_NUMBER = re.compile(r"^[+-]?[\d.,]*\d\s?%?$")
_CODE_LINE = re.compile(
    r"^\s*(?:(?:def|class|async def|fn|func|function|public|private|static|import|from|#include|using|package|const|let"
    r"|var|return|SELECT|INSERT|UPDATE|CREATE|WITH)\b.*|[\w.\[\]]+\s*(?:=|\+=|:=)\s*\S.*|[\w.]+\(.*\):?"
    r"|.*[;{}]|\}.*|//.*|#!.*)$"
)
_LIKE_JSON = re.compile(r"""\{\s*(?:["'][^"'\n]*["']\s*:|\w+\s*:\s*["'{\[\d])|\[\s*[{"'\d]""")
_MOST_CHARACTERS_PARSED = 1 << 20
_COURTESIES = (
    "sure", "certainly", "of course", "absolutely", "great question", "good question", "happy to help", "i'd be happy to",
    "i would be happy to", "no problem", "here is", "here's", "here are", "as an ai", "thank you for", "thanks for",
    "natürlich", "gerne", "selbstverständlich", "hier ist", "bien sûr", "certainement", "avec plaisir", "voici",
    "claro", "por supuesto", "con gusto", "aquí tienes", "certo", "certamente", "ecco", "com certeza", "aqui está",
)  # fmt: skip
_LENGTHS = ((0, "0 words"), (1, "1 word"), (10, "2–10 words"), (50, "11–50 words"), (200, "51–200 words"),
            (1000, "201–1,000 words"))  # fmt: skip


def format_of(answer: str) -> str:
    """The form of an answer, one of:

    empty · JSON · JSON in a fence · JSON with words · broken JSON · markup · table · code · code with words · list ·
    number · prose. JSON is an object or an array; a bare number or word is none.
    """
    text = answer.strip()
    if not text:
        return "empty"
    if text[0] in "{[" and (form := _bracketed_form(text)):
        return form
    fenced = _fenced_form(text)
    if fenced:
        return fenced
    if _NUMBER.match(text):
        return "number"
    if _TAG.match(text):
        return "markup"
    if _holds_json(text):
        return "JSON with words"
    lines = [line for line in text.splitlines() if line.strip()]
    if any(_TABLE_RULE.match(line) and "|" in line for line in lines[1:3]) or _is_grid(lines):
        return "table"
    if sum(bool(_LIST_LINE.match(line)) for line in lines) * 2 > len(lines) > 1:
        return "list"
    if sum(bool(_CODE_LINE.match(line)) for line in lines) * 2 > len(lines) and not _reads_as_prose(text):
        return "code"
    return "prose"


def length_class(answer: str) -> str:
    """The class of an answer's length in words, or in characters ÷ 2 in a script without spaces."""
    n_words = len(answer.split())
    if n_words and len(answer) > 25 * n_words:
        n_words = len(answer) // 2
    return next((name for most, name in _LENGTHS if n_words <= most), "over 1,000 words")


def opening_words(answer: str, n: int = 3) -> str:
    """The first `n` words, folded; of JSON, the first key."""
    text = answer.lstrip()
    if text[:1] == "{":
        key = re.match(r'\{\s*("[^"\n]{0,60}")', text)
        return f"{{{key.group(1)}" if key else "{"
    return " ".join(fold_text(text[: 40 * n]).split()[:n])


def has_courtesy(answer: str) -> bool:
    """Whether an answer opens with a courtesy ("Sure! Here is …") before it comes to the point. Seven languages."""
    opening = fold_text(answer[:60]).lstrip("¡!*_ ").replace("’", "'")
    return any(
        opening.startswith(phrase) and not opening[len(phrase) : len(phrase) + 1].isalnum()
        for phrase in _COURTESIES
    )


def _is_json(text: str) -> bool:
    try:
        parsed: Any = orjson.loads(text)
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        return False
    return isinstance(parsed, dict | list)


def _bracketed_form(text: str) -> str | None:
    """The form of text that opens with a bracket, when it is JSON or was meant to be."""
    if len(text) > _MOST_CHARACTERS_PARSED or _is_json(text):
        return "JSON"
    if text[-1] not in "}]" and _holds_json(text):
        return "JSON with words"
    return "broken JSON" if _LIKE_JSON.match(text) else None


def _fenced_form(text: str) -> str | None:
    fence = _FENCE.search(text)
    if fence is None:
        return None
    inside = sum(len(one.group(0)) for one in _FENCE.finditer(text))
    is_whole = inside >= 0.9 * len(text)
    content = fence.group(2).strip()
    if content[:1] in ("{", "[") and _is_json(content):
        return "JSON in a fence" if is_whole else "JSON with words"
    return "code" if is_whole else "code with words"


def _is_grid(lines: list[str]) -> bool:
    """Lines that all have the same number, two or more, of bars or tabs."""
    return len(lines) > 1 and any(
        len(counts := {line.count(mark) for line in lines}) == 1 and counts.pop() >= 2 for mark in "|\t"
    )


def _reads_as_prose(text: str) -> bool:
    words = text.split()
    plain = sum(word.strip(".,;:!?\"'()").isalpha() for word in words)
    return plain > 0.85 * len(words) and len(words) > 5


def _holds_json(text: str) -> bool:
    """Whether a JSON object stands at the end or the beginning of the text, with words around it."""
    start, stop = text.find("{"), text.rfind("}")
    return 0 <= start < stop and (start == 0 or stop == len(text) - 1) and _is_json(text[start : stop + 1])
