"""Divergences between models with different tokenizers: against sums in plain Python, finite differences, and the plain loss."""

from __future__ import annotations

import types

import pytest
import torch

from finetune.distil.aligned import outcomes
from finetune.distil.aligned.align import AlignedRow, Group
from finetune.distil.aligned.conformance import (
    ALL_KINDS,
    CHECKS,
    GROUPS,
    N_STUDENT,
    N_TEACHER,
    SHARED,
    STUDENT_IDS,
    TEACHER_IDS,
    example,
    logits_of,
    run_aligned_conformance,
)
from finetune.distil.aligned.targets import AlignedTargets
from finetune.distil.conformance import top_k_of
from finetune.distil.losses import ULD, chunked_distillation_loss, divergence
from finetune.distil.targets import TeacherTargets

V, U = N_STUDENT, N_TEACHER


def table(shared: dict[int, int], n_teacher: int) -> torch.Tensor:
    found = torch.full((n_teacher,), -1)
    for their, our in shared.items():
        found[their] = our
    return found


def test_a_student_that_says_what_its_teacher_says_has_no_loss_in_fp32() -> None:
    p = logits_of(5, V, 8).float()
    row = AlignedRow(tuple(Group(n, n + 1, n, n + 1) for n in range(5)), (3, 1, 4, 1, 5), (3, 1, 4, 1, 5), ())
    for kind in ALL_KINDS:
        for teacher in (TeacherTargets.full(p), top_k_of(p, 3, 1.0)):
            found = AlignedTargets.of(teacher, [row], torch.arange(V)).divergence(kind, p)
            assert float(found.abs().max()) <= 2e-6, kind


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_chunks_and_micro_batches_change_nothing(kind: str) -> None:
    p, hidden, head = logits_of(6, U, 9), logits_of(7, 4, 10), logits_of(V, 4, 11)
    aligned = example(TeacherTargets.full(p))
    answers = torch.tensor(STUDENT_IDS)
    losses = {}
    for chunk in (1, 2, 3, 100):
        assert aligned.cuts(chunk)[0] == 0 and aligned.cuts(chunk)[-1] == 7
        losses[chunk] = float(
            chunked_distillation_loss(hidden, head, aligned, answers, kind=kind, chunk_tokens=chunk).loss
        )
    whole = losses.pop(100)
    assert all(loss == pytest.approx(whole, abs=1e-12) for loss in losses.values())
    halves = [
        float(
            chunked_distillation_loss(
                hidden[a:b], head, aligned.part(a, b), answers[a:b], kind=kind, n_items=7
            ).loss
        )
        for a, b in ((0, 3), (3, 7))
    ]
    assert sum(halves) == pytest.approx(whole, abs=1e-12)


def test_a_chunk_never_parts_a_group() -> None:
    aligned = example(TeacherTargets.full(logits_of(6, U, 9)))
    for chunk in range(1, 9):
        cuts = aligned.cuts(chunk)
        assert not any(group.student_first < cut < group.student_last for cut in cuts for group in GROUPS)
        assert cuts == sorted(set(cuts))


def test_targets_without_any_group_have_loss_and_gradient_zero() -> None:
    row = AlignedRow((), (1, 2), (3,), ())
    aligned = AlignedTargets.of(TeacherTargets.full(logits_of(1, U, 0)), [row], table(SHARED, U))
    for kind in ALL_KINDS:
        hidden = logits_of(2, 4, 1).requires_grad_()
        loss = chunked_distillation_loss(
            hidden, logits_of(V, 4, 2), aligned, torch.tensor([1, 2]), kind=kind
        ).loss
        (slope,) = torch.autograd.grad(loss, hidden)
        assert float(loss.detach()) == 0.0 and not slope.any()


def test_a_text_all_but_certain_is_finite_in_fp32() -> None:
    p, q = logits_of(6, U, 1).float(), logits_of(7, V, 2).float()
    p[range(6), TEACHER_IDS] += 60.0
    q[range(7), STUDENT_IDS] += 60.0
    for kind in ALL_KINDS:
        for teacher in (TeacherTargets.full(p), top_k_of(p, 3, 1.0)):
            student = q.clone().requires_grad_()
            found = example(teacher).divergence(kind, student)
            (slope,) = torch.autograd.grad(found.sum(), student)
            assert bool(torch.isfinite(found).all()) and bool(torch.isfinite(slope).all())
            assert float(found.detach().abs().max()) < 1e-3


def test_what_cannot_be_is_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError, match="5 teacher targets, 6 in the rows"):
        example(TeacherTargets.full(logits_of(5, U, 0)))
    whole = TeacherTargets.full(logits_of(2, V, 0))
    with pytest.raises(ValueError, match="no divergence named uld"):
        divergence(ULD, logits_of(2, V, 1), whole)
    with pytest.raises(ValueError, match="uld takes no weight"):
        example(TeacherTargets.full(logits_of(6, U, 0))).divergence(ULD, logits_of(7, V, 1), beta=0.5)


@pytest.mark.parametrize(("strategy", "late"), [("bayesian", 0), ("observed", 1)])
def test_uld_is_that_of_trl_whose_default_takes_logits_one_place_late(strategy: str, late: int) -> None:
    """One answer whose tokens lie one to one: `observed`, TRL's default, reads the logits behind each token."""
    gold = pytest.importorskip("trl.experimental.gold.gold_trainer")
    config = types.SimpleNamespace(
        uld_crossentropy_weight=0.0,
        uld_distillation_weight=1.0,
        uld_student_temperature=1.0,
        uld_teacher_temperature=1.0,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        use_extended_uld=True,
        uld_token_merge_strategy=strategy,
    )
    p, q = logits_of(4, U, 12), logits_of(4, V, 13)
    labels, ids = torch.tensor([[-100, 1, 2, 3]]), torch.tensor([[0, 1, 2, 3]])
    offsets = torch.tensor([[[0, 0], [0, 1], [1, 2], [2, 3]]])
    theirs = gold.ULDLoss(config)(q[None], p[None], labels, labels, ids, ids, offsets, offsets)
    row = AlignedRow(tuple(Group(n, n + 1, n, n + 1) for n in range(3)), (1, 2, 3), (1, 2, 3), ())
    where = slice(late, 3 + late)  # position t is predicted by t - 1
    ours = AlignedTargets.of(TeacherTargets.full(p[where]), [row], table({}, U)).divergence(ULD, q[where])
    assert float(theirs) == pytest.approx(float(ours.mean()), abs=1e-10)


def test_the_doctor_measures_these_losses_too() -> None:
    found = list(run_aligned_conformance())
    assert [one.check for one in found] == list(CHECKS)
    assert all(one.value <= one.limit for one in found), found


def test_the_doctor_sees_a_text_whose_further_tokens_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = outcomes.of_text

    def first_token_only(chosen: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        text, further = honest(chosen, groups)
        return text - further, torch.zeros_like(further)

    monkeypatch.setattr(outcomes, "of_text", first_token_only)
    (reference,) = [one for one in run_aligned_conformance() if one.check == "other tokenizer"]
    assert reference.value > reference.limit
