"""What the losses between different tokenizers have to fulfil, measured like those of finetune/distil/conformance.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from finetune.distil.aligned.align import AlignedRow, Group
from finetune.distil.aligned.targets import AlignedTargets
from finetune.distil.conformance import Check, Measured, gradient_error, measured, top_k_of
from finetune.distil.losses import KINDS, ULD, chunked_distillation_loss, divergence
from finetune.distil.reference import reference_aligned
from finetune.distil.targets import TeacherTargets

_FP64 = 1e-10
N_STUDENT, N_TEACHER = 9, 11
# One to one, two to one, one to two, a stretch that the teacher has no counterpart for, two to two.
GROUPS = (Group(0, 1, 0, 1), Group(1, 3, 1, 2), Group(3, 4, 2, 4), Group(5, 7, 4, 6))
STUDENT_IDS, TEACHER_IDS = (0, 1, 2, 3, 4, 5, 6), (0, 10, 3, 9, 8, 1)
SHARED = {0: 0, 1: 1, 2: 2, 3: 8, 4: 7, 5: 6, 9: 3}  # teacher's id -> student's
_ALL = {token: token for token in range(N_STUDENT)}
ALL_KINDS = (*KINDS, ULD)


def logits_of(n: int, v: int, seed: int) -> Tensor:
    return 2.0 * torch.randn(n, v, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def example(teacher: TeacherTargets, shared: Mapping[int, int] = SHARED) -> AlignedTargets:
    to_student = torch.tensor([shared.get(token, -1) for token in range(N_TEACHER)])
    return AlignedTargets.of(teacher, [AlignedRow(GROUPS, STUDENT_IDS, TEACHER_IDS, ())], to_student)


def reference() -> tuple[float, float, str]:
    """fp64 sums in plain Python, for every kind, temperature and number of kept tokens, with many shared tokens and none."""
    p, q, errors = logits_of(6, N_TEACHER, 1), logits_of(7, N_STUDENT, 2), []
    for kind, temperature, k, shared in itertools.product(
        ALL_KINDS, (1.0, 2.5), (0, 1, 4, N_TEACHER), (SHARED, _ALL, {})
    ):
        teacher = top_k_of(p, k, temperature) if k else TeacherTargets.full(p)
        found = example(teacher, shared).divergence(kind, q, temperature=temperature)
        wanted = reference_aligned(
            kind, p.tolist(), q.tolist(), GROUPS, TEACHER_IDS, STUDENT_IDS, shared, temperature,
            None if teacher.ids is None else teacher.ids.tolist(),
        )  # fmt: skip
        at_boundaries = found[[group.student_first for group in GROUPS]]
        errors.append(float((at_boundaries - torch.tensor(wanted, dtype=torch.float64)).abs().max()))
        errors.append(float(found.sum() - at_boundaries.sum()))
    return max(errors), _FP64, f"{len(errors) // 2} sets of targets against sums in plain Python"


def finite_differences() -> tuple[float, float, str]:
    """Gradient of the chunked loss by states and head against central differences, groups of several tokens included."""
    worst, p, y = 0.0, logits_of(6, N_TEACHER, 3), torch.tensor(STUDENT_IDS)
    for kind, k in itertools.product(ALL_KINDS, (0, 3)):
        aligned = example(top_k_of(p, k, 2.0) if k else TeacherTargets.full(p))

        def loss(h: Tensor, w: Tensor, kind: str = kind, aligned: AlignedTargets = aligned) -> Tensor:
            return chunked_distillation_loss(
                h, w, aligned, y, kind=kind, temperature=2.0, answer_weight=0.3, chunk_tokens=3
            ).loss

        worst = max(worst, gradient_error(loss, (logits_of(7, 4, 4) / 2, logits_of(N_STUDENT, 4, 5) / 2)))
    return worst, 1e-7, "central differences along random directions, relative to the slope's size"


def other_ids() -> tuple[float, float, str]:
    """The same tokens under other ids give the plain loss, in value and gradient."""
    p, q, ids = logits_of(5, N_STUDENT, 6), logits_of(5, N_STUDENT, 7), (3, 1, 4, 1, 5)
    order = torch.randperm(
        N_STUDENT, generator=torch.Generator().manual_seed(0)
    )  # the teacher's id of a student's token
    theirs, to_student = torch.empty_like(p), torch.empty_like(order)
    theirs[:, order], to_student[order] = p, torch.arange(N_STUDENT)
    groups = tuple(Group(n, n + 1, n, n + 1) for n in range(5))
    row = AlignedRow(groups, ids, tuple(int(order[token]) for token in ids), ())
    worst = 0.0
    for kind, k in itertools.product(KINDS, (0, 4, N_STUDENT)):
        found = []
        for logits, is_other in ((p, False), (theirs, True)):
            teacher = top_k_of(logits, k, 2.0) if k else TeacherTargets.full(logits)
            student = q.clone().requires_grad_()
            value = (
                AlignedTargets.of(teacher, [row], to_student).divergence(kind, student, temperature=2.0)
                if is_other
                else divergence(kind, student, teacher, temperature=2.0)
            )
            found.append((value.detach(), torch.autograd.grad(value.sum(), student)[0]))
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(*found, strict=True)))
    return worst, _FP64, "aligned targets of one tokenizer against the plain loss, value and gradient"


CHECKS: dict[str, Check] = {
    "other tokenizer": reference,
    "other tokenizer, gradient": finite_differences,
    "other tokenizer, same tokens": other_ids,
}


def run_aligned_conformance() -> Iterator[Measured]:
    """Every check in turn."""
    yield from measured(CHECKS)
