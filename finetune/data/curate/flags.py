"""Why a row deserves a look, for each row of a data set: one list of short names a row."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.data.curate.answers import is_empty, is_refusal
from finetune.data.curate.consistency import ASPECTS, measure_consistency
from finetune.data.curate.contradictions import find_contradictions
from finetune.data.curate.exact import groups_of_equal, text_digests
from finetune.data.curate.near import find_near_duplicates
from finetune.data.curate.personal import find_in_row
from finetune.data.fold import fold_text, fold_turns
from finetune.data.rows import Row
from finetune.data.texts import calls_of, whole_text

_FORMS = ("format", "language", "courtesy")


def flag_rows(rows: Sequence[Row]) -> list[list[str]]:
    """The flags of each row, in the order of their names:

    contradiction, empty, near duplicate, personal data, refusal, repeated answer, and other format, other language or
    other courtesy for rows of a minority that is warned of. All rows are compared with all, so the whole data set is to
    be given, also where only some of its rows are shown.
    """
    flags: list[set[str]] = [set() for _ in rows]
    answered = [index for index, row in enumerate(rows) if row.kind not in ("text", "tokens")]
    calls = {index: calls_of(rows[index]) for index in answered}
    answers = [rows[index].answer + calls[index] for index in answered]
    for index, answer in zip(answered, answers, strict=True):
        if is_refusal(answer):
            flags[index].add("refusal")
        if is_empty(answer):  # a call of tools is not
            flags[index].add("empty")
    for group in find_contradictions([fold_turns(rows[index].prompt) for index in answered], answers):
        for place in group.rows:
            flags[answered[place]].add("contradiction")
    _flag_repeated(answers, answered, flags)
    in_words = [index for index in answered if not calls[index]]
    _flag_minorities([rows[index].answer for index in in_words], in_words, flags)
    for one, other, _ in find_near_duplicates([whole_text(row) for row in rows]):
        flags[one].add("near duplicate")
        flags[other].add("near duplicate")
    for index, row in enumerate(rows):
        if find_in_row(row):
            flags[index].add("personal data")
    return [sorted(found) for found in flags]


def _flag_repeated(answers: Sequence[str], answered: Sequence[int], flags: list[set[str]]) -> None:
    """Answers of four words or more that ten rows or more have."""
    folded = [fold_text(answer) for answer in answers]
    for group in groups_of_equal(text_digests(folded), at_least=10):
        text = folded[int(group[0])]
        if len(text.split()) >= 4 and text[:1] not in ("{", "["):
            for place in group.tolist():
                flags[answered[place]].add("repeated answer")


def _flag_minorities(answers: Sequence[str], answered: Sequence[int], flags: list[set[str]]) -> None:
    for mix in measure_consistency(answers, aspects=_FORMS):
        if mix.warned:
            majority = mix.piles[0].value
            for index, answer in zip(answered, answers, strict=True):
                if ASPECTS[mix.aspect](answer) != majority:
                    flags[index].add(f"other {mix.aspect}")
