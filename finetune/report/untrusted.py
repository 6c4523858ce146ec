"""Text that a model, a data set or a file name brought along: escaped, with nothing invisible left in it.

A character that shows nothing, or that reorders its neighbours, lets a page claim what a file does not say. Every
such character is replaced by a mark that names it, before escaping.
"""

from __future__ import annotations

import difflib
import re

from markupsafe import Markup, escape

CLIP_CHARACTERS = 1200
_DIFF_CHARACTERS = 800
_LEAST_MATCH_FOR_MARKS = 0.3

# C0 without tab and newline, DEL and C1, soft hyphen and fillers, zero-width and bidi controls, line separators,
# interlinear marks, tag and variation characters that smuggle text, and surrogates that no encoding holds.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff\ud800-\udfff]"
)
_TOKENS = re.compile(r"\w+|\s+|[^\w\s]")


def _name_of(match: re.Match[str]) -> str:
    return f"\u27e8U+{ord(match[0]):04X}\u27e9"  # a code point: fonts that lack control pictures are common


def visible(text: str) -> str:
    """`text` with every control, bidi, zero-width and unpaired-surrogate character spelled out."""
    return _HIDDEN.sub(_name_of, text)


def _marked(text: str) -> Markup:
    """Escaped text in which the spelled-out characters are set apart from ordinary ones."""
    pieces: list[Markup] = []
    position = 0
    for match in _HIDDEN.finditer(text):
        pieces.append(escape(text[position : match.start()]))
        pieces.append(Markup('<span class="control">{}</span>').format(_name_of(match)))
        position = match.end()
    pieces.append(escape(text[position:]))
    return Markup("").join(pieces)


def clipped(text: str, limit: int = CLIP_CHARACTERS) -> tuple[str, int]:
    """The first `limit` characters and how many were left out."""
    return text[:limit], max(0, len(text) - limit)


def _clip_note(n_left_out: int) -> Markup:
    if not n_left_out:
        return Markup("")
    return Markup(' <span class="clip">… {} more characters</span>').format(f"{n_left_out:,}")


def untrusted(text: str, limit: int = CLIP_CHARACTERS) -> Markup:
    """Safe markup of `text`: escaped, hidden characters spelled out, clipped with a count of what was left out."""
    shown, left_out = clipped(text, limit)
    return _marked(shown) + _clip_note(left_out)


def against_reference(output: str, reference: str, limit: int = CLIP_CHARACTERS) -> Markup:
    """`output` as `untrusted` gives it, with the words that differ from `reference` marked.

    A gap mark stands where words of the reference are missing. Long texts and texts that share little with the
    reference are left unmarked: there the marks would be noise.
    """
    if output == reference or max(len(output), len(reference)) > _DIFF_CHARACTERS:
        return untrusted(output, limit)
    theirs, ours = _TOKENS.findall(reference), _TOKENS.findall(output)
    matcher = difflib.SequenceMatcher(None, theirs, ours, autojunk=False)
    if matcher.ratio() < _LEAST_MATCH_FOR_MARKS:
        return untrusted(output, limit)
    pieces: list[Markup] = []
    for kind, _, _, start, end in matcher.get_opcodes():
        text = _marked("".join(ours[start:end]))
        if kind == "equal":
            pieces.append(text)
        elif kind == "delete":
            pieces.append(Markup('<span class="gap" role="img" aria-label="words missing here"></span>'))
        else:
            pieces.append(Markup("<mark>{}</mark>").format(text))
    return Markup("").join(pieces)
