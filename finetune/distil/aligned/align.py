"""Two tokenisations of the same answers, cut where both have a boundary between tokens.

A *group* is a stretch of an answer between two neighbouring boundaries that teacher and student share: one token each
where they agree, several on one side or on both where they do not. Boundaries are compared in bytes, so a character that one
tokenizer keeps whole and the other splits is aligned at its end, and two that split it alike are aligned inside it. Where
an answer begins, and where it ends with the token that ends a turn, are boundaries of both whatever is written there.

    student   |I|'m| 2|0|°|C|<|im_end|>        teacher   |I'm| |20|°C|</s>
    groups    [I,'m | I'm]  [ 2,0 |  ,20]  [°,C | °C]  [<|im_end|> | </s>]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from finetune.data.tokenise import TokenisedRow
from finetune.distil.aligned.token_bytes import TokenBytes
from finetune.errors import UserError

_START, _END = -1, 1 << 60  # of an answer, before and behind every byte of it
_SHOWN_BYTES = 60


class Group(NamedTuple):
    """Targets student_first..student_last (exclusive) of a row's student, and those of its teacher, over the same text.

    Counted over the targets of the row, not over its tokens.
    """

    student_first: int
    student_last: int
    teacher_first: int
    teacher_last: int

    @property
    def is_one_to_one(self) -> bool:
        return self.student_last - self.student_first == 1 == self.teacher_last - self.teacher_first


@dataclass(frozen=True, slots=True)
class AlignedRow:
    """A row's groups in order, the tokens of its targets on both sides, and the pairs of tokens that ended its answers."""

    groups: tuple[Group, ...]
    student_ids: tuple[int, ...]
    teacher_ids: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """The targets of one answer: their tokens, the byte at which the first begins and each ends (from the first that is no
    white space), the text, and the token that ends the turn, if one does."""

    ids: list[int]
    start: int
    ends: list[int]
    text: bytes
    end_token: int | None

    @property
    def boundaries(self) -> dict[int, int]:
        """Byte -> number of tokens before it, at every place between tokens that has a byte of the text before it."""
        inside = {end: number for number, end in enumerate(self.ends, start=1) if 0 < end <= len(self.text)}
        inside[self.start] = 0
        if self.end_token is not None:
            inside[_END] = len(self.ids)
        return inside


def align_row(
    student: TokenisedRow, teacher: TokenisedRow, student_bytes: TokenBytes, teacher_bytes: TokenBytes
) -> AlignedRow:
    """The groups of one row, tokenised by both sides, each through its own chat template.

    Raises UserError, naming the row, when the two do not have the same answers: white space around an answer may differ.
    """
    own, other = student.spans(), teacher.spans()
    if len(own) != len(other):
        raise _unlike(student, f"{len(own)} answers for the student and {len(other)} for the teacher")
    groups: list[Group] = []
    ends: list[tuple[int, int]] = []
    student_ids: list[int] = []
    teacher_ids: list[int] = []
    for (first, last), (other_first, other_last) in zip(own, other, strict=True):
        ours = _read(student.input_ids, first, last, student_bytes)
        theirs = _read(teacher.input_ids, other_first, other_last, teacher_bytes)
        if ours.text != theirs.text:
            raise _unlike(
                student, f"{_told(ours.text)} for the student and {_told(theirs.text)} for the teacher"
            )
        groups += _groups(ours, theirs, len(student_ids), len(teacher_ids))
        if ours.end_token is not None and theirs.end_token is not None:
            ends.append((ours.end_token, theirs.end_token))
        student_ids += ours.ids
        teacher_ids += theirs.ids
    return AlignedRow(tuple(groups), tuple(student_ids), tuple(teacher_ids), tuple(ends))


def _groups(ours: _Answer, theirs: _Answer, student_base: int, teacher_base: int) -> list[Group]:
    own, other = ours.boundaries, theirs.boundaries
    shared = sorted(own.keys() & other.keys())
    return [
        Group(student_base + own[a], student_base + own[b], teacher_base + other[a], teacher_base + other[b])
        for a, b in pairwise(shared)
    ]


def _read(row_ids: Sequence[int], first: int, last: int, of_token: TokenBytes) -> _Answer:
    """The targets first..last of a row as bytes; white space around an answer is of the template, and not of its text.

    Of running text the first token is predicted by none: it is no target, but its bytes are of the text.
    """
    ids = list(row_ids[first:last])
    end_token = ids[-1] if ids[-1] in of_token.special else None
    pieces = of_token.pieces(ids[:-1] if end_token is not None else ids)
    before = b"" if first != 1 or row_ids[0] in of_token.special else of_token.pieces(row_ids[:1])[0]
    whole = before + b"".join(pieces)
    lead = len(whole) - len(whole.lstrip())
    start = len(before) - lead if before else _START
    ends = [end + len(before) - lead for end in accumulate(len(piece) for piece in pieces)]
    return _Answer(ids, start, ends, whole.strip(), end_token)


def _unlike(row: TokenisedRow, why: str) -> UserError:
    return UserError(
        "the chat templates of teacher and student do not write the same answer",
        where=f"row {row.row_id} ({row.source})",
        why=f"it is {why}",
        fix="leave this row out, mend the template that changes answers, or set distil.way: answers",
    )


def _told(text: bytes) -> str:
    shown = text[:_SHOWN_BYTES].decode(errors="replace")
    return f"'{shown}{'…' if len(text) > _SHOWN_BYTES else ''}'"


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """Tokens that both tokenizers have, by the bytes they stand for: `student_ids` and `teacher_ids` in the same order.

    n_student, n_teacher: ids that each tokenizer has, counted from 0.
    """

    student_ids: tuple[int, ...]
    teacher_ids: tuple[int, ...]
    n_student: int
    n_teacher: int

    @staticmethod
    def of(student: TokenBytes, teacher: TokenBytes, ends: Sequence[tuple[int, int]] = ()) -> SharedTokens:
        """Ordinary tokens with the same bytes, special ones with the same name, and the tokens that end a turn on both sides
        (`ends`), whatever their names. Of several tokens with the same bytes the first counts."""
        own, other = _by_content(student), _by_content(teacher)
        pairs = [(own[key], other[key]) for key in own.keys() & other.keys()]
        of_ends = sorted(set(ends))
        taken = ({a for a, _ in of_ends}, {b for _, b in of_ends})
        kept = [(a, b) for a, b in pairs if a not in taken[0] and b not in taken[1]]
        if (
            len(taken[0]) == len(of_ends) == len(taken[1])
        ):  # one to one, or they cannot be told from each other
            kept += of_ends
        kept.sort()
        sizes = [max(one.tokenizer.get_vocab().values()) + 1 for one in (student, teacher)]
        return SharedTokens(tuple(a for a, _ in kept), tuple(b for _, b in kept), *sizes)


def _by_content(side: TokenBytes) -> dict[bytes | str, int]:
    """Id by bytes of ordinary tokens and by name of special ones; a piece comes before a byte that could spell it."""
    found: dict[bytes | str, int] = {}
    for id, content in sorted(side.by_id.items(), key=lambda one: (one[0] in side.spelling, one[0])):
        if content:
            found.setdefault(content, id)
    return found | {name: id for id, name in side.special.items()}
