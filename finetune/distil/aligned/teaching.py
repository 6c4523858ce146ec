"""A teacher with another tokenizer: the rows in its own tokens and words, aligned with the student's, and what it says of them.

The teacher reads every row through its own chat template, as it was trained to; only the answers have to be the same text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow, TrainOn, tokenise_rows
from finetune.distil.aligned.align import AlignedRow, SharedTokens, align_row
from finetune.distil.aligned.targets import AlignedTargets
from finetune.distil.aligned.token_bytes import TokenBytes
from finetune.distil.cache.read import TeacherCache
from finetune.distil.cache.write import padded
from finetune.distil.head import live_targets
from finetune.distil.targets import TeacherTargets
from finetune.errors import UserError


@dataclass(frozen=True, slots=True)
class AlignedRows:
    """Train rows of a student in its teacher's tokens, `teacher_rows`, in the same order, and where both meet."""

    teacher_rows: list[TokenisedRow]
    aligned: list[AlignedRow]
    shared: SharedTokens

    @property
    def longest_tokens(self) -> int:
        """Tokens of the row that is longest for the teacher."""
        return max(len(row.input_ids) for row in self.teacher_rows)

    def to_student(self) -> Tensor:
        """The student's id of every token of the teacher [U], -1 where it has none."""
        found = torch.full((self.shared.n_teacher,), -1, dtype=torch.long)
        found[torch.tensor(self.shared.teacher_ids, dtype=torch.long)] = torch.tensor(
            self.shared.student_ids, dtype=torch.long
        )
        return found

    def facts(self) -> dict[str, Any]:
        """How much of the student's tokens and targets the teacher's line up with."""
        groups = [group for row in self.aligned for group in row.groups]
        alone = sum(group.is_one_to_one for group in groups)
        covered = sum(group.student_last - group.student_first for group in groups)
        return {
            "student_tokens": self.shared.n_student,
            "teacher_tokens": self.shared.n_teacher,
            "shared_tokens": len(self.shared.student_ids),
            "targets": sum(len(row.student_ids) for row in self.aligned),
            "boundaries": len(groups),
            "targets_one_to_one": alone,
            "targets_in_groups": covered - alone,
        }


def align_rows(
    student_rows: Sequence[TokenisedRow],
    source_rows: Sequence[Row],
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    *,
    train_on: TrainOn | Literal["each"] = "all",
) -> AlignedRows:
    """Tokenise `source_rows`, from which `student_rows` were made, as the teacher reads them, and align the answers.

    Raises UserError for rows of tokens, which have no text, and as `align_row` and `TokenBytes` do.
    """
    student_bytes, teacher_bytes = TokenBytes(student_tokenizer), TokenBytes(teacher_tokenizer)
    of_tokens = next((row for row in source_rows if row.kind == "tokens"), None)
    if of_tokens is not None:
        raise UserError(
            "rows of tokens have no text that another tokenizer could read",
            where=f"row {of_tokens.id} ({of_tokens.source})",
            fix="give the rows as text, or take a teacher with the student's tokenizer",
        )
    taught = tokenise_rows(source_rows, teacher_tokenizer, max_tokens=sys.maxsize, train_on=train_on).rows
    by_id = {row.row_id: row for row in taught}
    teacher_rows = [by_id[row.row_id] for row in student_rows]
    aligned = [
        align_row(row, theirs, student_bytes, teacher_bytes)
        for row, theirs in zip(student_rows, teacher_rows, strict=True)
    ]
    ends = sorted({end for row in aligned for end in row.ends})
    return AlignedRows(teacher_rows, aligned, SharedTokens.of(student_bytes, teacher_bytes, ends))


class AlignedTeaching:
    """The teacher of a trainer (`finetune.distil.trainer.Teaching`) whose tokenizer is another one.

    said: what it says of the targets of its rows at some places, in order; one of `live` and `cached` gives it.
    """

    def __init__(
        self, rows: AlignedRows, said: Callable[[Sequence[int], torch.device], TeacherTargets]
    ) -> None:
        self.rows, self._said = rows, said
        self._to_student = rows.to_student()

    @classmethod
    def live(cls, rows: AlignedRows, teacher: Any) -> AlignedTeaching:
        """The teacher itself, run on its own tokens of the student's batch."""

        def said(places: Sequence[int], device: torch.device) -> TeacherTargets:
            n_teacher = rows.shared.n_teacher
            if not places:
                return TeacherTargets.full(torch.zeros(0, n_teacher, device=device))
            if next(teacher.parameters()).device != device:
                teacher.to(device)
            batch = padded([rows.teacher_rows[place] for place in places])
            return live_targets(teacher, {name: value.to(device) for name, value in batch.items()}, n_teacher)

        return cls(rows, said)

    @classmethod
    def cached(cls, rows: AlignedRows, cache: TeacherCache, temperature: float) -> AlignedTeaching:
        """What a cache of `rows.teacher_rows` holds."""
        return cls(rows, lambda places, device: cache.targets(places, temperature).to(device))

    def targets(self, inputs: dict[str, Any]) -> AlignedTargets:
        """What the teacher says of the rows of a batch, on its device."""
        places, device = inputs["rows"], inputs["labels"].device
        self._to_student = self._to_student.to(device)
        aligned = [self.rows.aligned[place] for place in places]
        return AlignedTargets.of(self._said(places, device), aligned, self._to_student).to(device)
