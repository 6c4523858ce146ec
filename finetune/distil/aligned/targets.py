"""What a teacher with another tokenizer says of a student's targets, and how far the student is from it.

At every boundary between tokens that both tokenisations share (align.py) the two are compared over outcomes that both can
name (outcomes.py). Each side is a distribution over them, so every divergence of losses.py is defined and never negative, and
where the tokenizers are the same it is the plain one. `uld` takes no notice of which token is which: Σ |p₍ᵢ₎ - q₍ᵢ₎| over
the probabilities of each side in descending order (Boizard et al. 2024, Universal Logit Distillation, arXiv:2402.12030).

GOLD of TRL aligns by text in the same way. It scales whole distributions by the probabilities of further tokens, after which
they no longer sum to 1, and takes differences of shared and of sorted other tokens from those.

Shapes: n student targets, c of a chunk · m teacher targets · g groups · V, U vocabularies of student and teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from finetune.distil.aligned.align import AlignedRow
from finetune.distil.aligned.outcomes import common_outcomes, sorted_distance, what_comes_next
from finetune.distil.losses import KINDS, ULD, check_loss
from finetune.distil.outcomes import wide
from finetune.distil.targets import TeacherTargets


@dataclass(frozen=True, slots=True)
class AlignedTargets:
    """The teacher's distributions at m targets of its own, and which of them belong to which of n student targets.

    groups [g, 4] as `Group`, counted over all targets here; student_ids [n] and teacher_ids [m] are the targets' own tokens;
    to_student [U] the student's id of a teacher's token, -1 where it has none. Chunks never part a group.
    """

    teacher: TeacherTargets
    groups: Tensor
    student_ids: Tensor
    teacher_ids: Tensor
    to_student: Tensor

    @staticmethod
    def of(teacher: TeacherTargets, rows: Sequence[AlignedRow], to_student: Tensor) -> AlignedTargets:
        """Of rows in turn, `teacher` holding their teacher's targets in the same order; on its device."""
        groups: list[list[int]] = []
        student_ids: list[int] = []
        teacher_ids: list[int] = []
        for row in rows:
            base = (len(student_ids), len(student_ids), len(teacher_ids), len(teacher_ids))
            groups += [
                [edge + start for edge, start in zip(group, base, strict=True)] for group in row.groups
            ]
            student_ids += row.student_ids
            teacher_ids += row.teacher_ids
        if len(teacher) != len(teacher_ids):
            raise ValueError(f"{len(teacher)} teacher targets, {len(teacher_ids)} in the rows")
        return AlignedTargets(
            teacher,
            torch.tensor(groups, dtype=torch.long).view(-1, 4),
            torch.tensor(student_ids, dtype=torch.long),
            torch.tensor(teacher_ids, dtype=torch.long),
            to_student,
        )

    def __len__(self) -> int:
        return len(self.student_ids)

    def is_finite(self) -> bool:
        """Whether the teacher has a distribution at every one of its targets."""
        return self.teacher.is_finite()

    def to(self, device: torch.device | str) -> AlignedTargets:
        """The same on another device."""
        return AlignedTargets(
            self.teacher.to(device),
            self.groups.to(device),
            self.student_ids.to(device),
            self.teacher_ids.to(device),
            self.to_student.to(device),
        )

    def cuts(self, chunk_tokens: int) -> list[int]:
        """Where chunks of at most `chunk_tokens` student targets begin, and the end; longer where a group is."""
        edges = sorted({0, len(self), *self.groups[:, 0].tolist(), *self.groups[:, 1].tolist()})
        found = [0]
        for edge, following in zip(edges, [*edges[1:], edges[-1] + chunk_tokens + 1], strict=True):
            if edge > found[-1] and following - found[-1] > chunk_tokens:
                found.append(edge)
        return found

    def part(self, start: int, stop: int) -> AlignedTargets:
        """The groups within student targets start..stop, with the teacher's logits there made."""
        groups = self.groups[(self.groups[:, 0] >= start) & (self.groups[:, 1] <= stop)]
        first, last = (int(groups[0, 2]), int(groups[-1, 3])) if len(groups) else (0, 0)
        return replace(
            self,
            teacher=self.teacher.part(first, last),
            groups=groups - groups.new_tensor([start, start, first, first]),
            student_ids=self.student_ids[start:stop],
            teacher_ids=self.teacher_ids[first:last],
        )

    def divergence(
        self, kind: str, student_logits: Tensor, *, temperature: float = 1.0, beta: float | None = None
    ) -> Tensor:
        """T² times the divergence at every boundary, [c]: a group's at its first student target, 0 at its others.

        student_logits [c, V] at the targets of what `part` returned. Raises ValueError as `check_loss` does.
        """
        check_loss(kind, temperature, beta, aligned=True)
        student = torch.log_softmax(wide(student_logits) / temperature, dim=1)
        ours, theirs = self.groups[:, :2], self.groups[:, 2:]
        said = what_comes_next(
            self.teacher, self.teacher_ids, theirs, temperature, len(self.to_student), student.dtype
        )
        if kind == ULD:
            found = sorted_distance(student, ours, said)
        else:
            function, default = KINDS[kind]
            weight = default if beta is None else beta
            log_p, log_q = common_outcomes(
                student, self.student_ids, ours, said, self.teacher_ids[theirs[:, 0]], self.to_student
            )
            found = function(log_p, log_q) if weight is None else function(log_p, log_q, weight)
        return torch.zeros_like(student[:, 0]).index_put((ours[:, 0],), found * temperature**2)
