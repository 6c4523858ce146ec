"""Divergences and their chunked sum; what the conformance checks measure is run by test_conformance.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.distil.losses import (
    KINDS,
    TeacherTargets,
    chunked_distillation_loss,
    divergence,
    target_places,
)

N, D, V, K = 24, 8, 400, 6


def logits(n: int, v: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return 2.0 * torch.randn(n, v, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def top_k(values: torch.Tensor, k: int, temperature: float = 1.0) -> TeacherTargets:
    kept, ids = values.topk(k, dim=1)
    return TeacherTargets.top_k(ids, kept, torch.logsumexp(values / temperature, dim=1))


@pytest.fixture
def student() -> dict[str, torch.Tensor]:
    return {"hidden": logits(N, D, 0), "head_weight": logits(V, D, 1), "answer_ids": torch.arange(N) * 7 % V}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gradients_are_those_of_the_whole_logits(
    kind: str, temperature: float, student: dict[str, torch.Tensor]
) -> None:
    teacher = top_k(logits(N, V, 2), K, temperature)
    found, wanted = [], []
    for results in (found, wanted):
        hidden, head = (student[name].clone().requires_grad_() for name in ("hidden", "head_weight"))
        bias = logits(1, V, 3)[0].requires_grad_()
        if results is found:
            loss = chunked_distillation_loss(
                hidden, head, teacher, student["answer_ids"], kind=kind, temperature=temperature, answer_weight=0.25,
                n_items=50, chunk_tokens=7, head_bias=bias,
            ).loss  # fmt: skip
        else:
            whole = torch.nn.functional.linear(hidden, head, bias)
            nll = torch.nn.functional.cross_entropy(whole, student["answer_ids"], reduction="none")
            loss = (0.75 * divergence(kind, whole, teacher, temperature=temperature) + 0.25 * nll).sum() / 50
        (3.0 * loss).backward()
        results += [loss.detach(), hidden.grad, head.grad, bias.grad]
    for ours, plain in zip(found, wanted, strict=True):
        assert torch.allclose(ours, plain, atol=1e-11, rtol=0)


def test_gradcheck_of_every_kind() -> None:
    hidden, head = logits(3, 2, 4).requires_grad_(), logits(5, 2, 5).requires_grad_()
    for kind in KINDS:
        for teacher in (TeacherTargets.full(logits(3, 5, 6)), top_k(logits(3, 5, 6), 2, 2.0)):
            assert torch.autograd.gradcheck(
                lambda h, w, kind=kind, teacher=teacher: (
                    chunked_distillation_loss(
                        h,
                        w,
                        teacher,
                        torch.tensor([0, 4, 2]),
                        kind=kind,
                        temperature=2.0,
                        answer_weight=0.5,
                        chunk_tokens=2,
                    ).loss
                ),
                (hidden, head),
            )


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return result


@pytest.mark.parametrize("form", ["top_k", "live"])
def test_no_tensor_holds_the_logits_of_all_targets(form: str, student: dict[str, torch.Tensor]) -> None:
    hidden = student["hidden"].requires_grad_()
    if form == "live":
        teacher = TeacherTargets.live(logits(N, 3, 7), logits(V, 3, 8))
    else:
        teacher = top_k(logits(N, V, 2), K)
    with LargestTensor() as seen:
        loss = chunked_distillation_loss(
            hidden,
            student["head_weight"],
            teacher,
            student["answer_ids"],
            kind="jsd",
            answer_weight=0.5,
            chunk_tokens=2,
        ).loss
        loss.backward()
    assert seen.elements <= max(V * D, 2 * V) < N * V


def test_a_live_teacher_is_its_full_logits(student: dict[str, torch.Tensor]) -> None:
    states, head, bias = logits(N, 3, 7), logits(V, 3, 8), logits(1, V, 9)[0]
    live = TeacherTargets.live(states, head, bias)
    full = TeacherTargets.full(torch.nn.functional.linear(states, head, bias))
    losses = [
        float(chunked_distillation_loss(**student, targets=teacher, kind="reverse_kl", chunk_tokens=5).loss)
        for teacher in (live, full)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_weights_count_targets_by_their_weight(student: dict[str, torch.Tensor]) -> None:
    teacher = top_k(logits(N, V, 2), K)
    weights = torch.zeros(N, dtype=torch.float64)
    weights[3], weights[5] = 2.0, 0.5
    found = chunked_distillation_loss(
        **student, targets=teacher, kind="forward_kl", n_items=1.0, weights=weights, chunk_tokens=4
    ).loss
    whole = torch.nn.functional.linear(student["hidden"], student["head_weight"])
    values = divergence("forward_kl", whole, teacher)
    assert float(found) == pytest.approx(float(2.0 * values[3] + 0.5 * values[5]), abs=1e-10)


def test_parts_are_told_and_what_has_no_weight_is_not_computed(student: dict[str, torch.Tensor]) -> None:
    teacher = top_k(logits(N, V, 2), K, 2.0)
    parts = {
        share: chunked_distillation_loss(
            **student, targets=teacher, kind="forward_kl", temperature=2.0, answer_weight=share
        )
        for share in (0.0, 0.5, 1.0)
    }
    assert float(parts[0.5].loss) == pytest.approx(float(parts[0.0].loss + parts[1.0].loss) / 2)
    assert float(parts[0.0].divergence_sum) == pytest.approx(float(parts[0.0].loss) * N)
    assert float(parts[1.0].nll_sum) == pytest.approx(float(parts[1.0].loss) * N)
    assert math.isnan(parts[0.0].nll_sum) and math.isnan(parts[1.0].divergence_sum)
    student["hidden"].requires_grad_()
    learnt = chunked_distillation_loss(
        **student, targets=teacher, kind="forward_kl", temperature=2.0, answer_weight=0.5
    )
    assert learnt.loss.requires_grad
    assert not learnt.divergence_sum.requires_grad and not learnt.nll_sum.requires_grad
    assert not learnt.by_target.requires_grad


def test_every_targets_own_loss_is_told_before_its_weight(student: dict[str, torch.Tensor]) -> None:
    teacher = top_k(logits(N, V, 2), K)
    weights = torch.linspace(0.0, 2.0, N, dtype=torch.float64)
    found = chunked_distillation_loss(
        **student,
        targets=teacher,
        kind="jsd",
        answer_weight=0.25,
        n_items=1.0,
        weights=weights,
        chunk_tokens=4,
    )
    whole = torch.nn.functional.linear(student["hidden"], student["head_weight"])
    nll = torch.nn.functional.cross_entropy(whole, student["answer_ids"], reduction="none")
    expected = 0.75 * divergence("jsd", whole, teacher) + 0.25 * nll
    assert found.by_target.tolist() == pytest.approx(expected.tolist(), abs=1e-10)
    assert float(found.loss) == pytest.approx(float((expected * weights).sum()), abs=1e-9)


def test_a_batch_without_targets_has_loss_and_gradient_zero(student: dict[str, torch.Tensor]) -> None:
    hidden, head = student["hidden"][:0].requires_grad_(), student["head_weight"].requires_grad_()
    loss = chunked_distillation_loss(
        hidden, head, TeacherTargets.full(logits(0, V, 2)), torch.zeros(0, dtype=torch.long), kind="jsd"
    ).loss
    loss.backward()
    assert float(loss.detach()) == 0.0 and head.grad is not None and not head.grad.any()


def test_bf16_weights_and_autocast_keep_their_types() -> None:
    teacher = top_k(logits(N, V, 2).float(), K)
    hidden = logits(N, D, 0).bfloat16().requires_grad_()
    head = logits(V, D, 1).bfloat16()
    loss = chunked_distillation_loss(hidden, head, teacher, torch.arange(N), kind="forward_kl").loss
    loss.backward()
    assert loss.dtype == torch.float32 and hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    wide = head.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same = chunked_distillation_loss(hidden, wide, teacher, torch.arange(N), kind="forward_kl").loss
    same.backward()
    assert float(same.detach()) == pytest.approx(float(loss.detach()))
    assert wide.grad is not None and wide.grad.dtype == torch.float32 and bool(wide.grad.any())


def test_a_token_that_only_the_teacher_has_makes_the_forward_kl_infinite() -> None:
    student = torch.tensor([[1.0, -math.inf, 0.0]], dtype=torch.float64)
    teacher = TeacherTargets.full(torch.zeros(1, 3, dtype=torch.float64))
    assert float(divergence("forward_kl", student, teacher)) == math.inf
    assert float(divergence("total_variation", student, teacher)) == pytest.approx(0.3977, abs=1e-4)
    assert math.isfinite(float(divergence("jsd", student, teacher)))


def test_distant_models_stay_finite_in_fp32() -> None:
    p, q = torch.full((2, 5), -300.0), torch.full((2, 5), -300.0)
    p[:, 0], q[:, 1] = 300.0, 300.0
    for kind in KINDS:
        student = q.clone().requires_grad_()
        value = divergence(kind, student, TeacherTargets.full(p))
        value.sum().backward()
        assert bool(torch.isfinite(value).all()) and bool(torch.isfinite(student.grad).all()), kind


def test_targets_are_predicted_by_the_position_before_them() -> None:
    labels = torch.tensor([[5, -100, 7, 8], [-100, -100, -100, 6]])
    places, answers = target_places(labels)
    assert places.tolist() == [[False, True, True, False], [False, False, True, False]]
    assert answers.tolist() == [7, 8, 6]  # nothing predicts the first token of a row


@pytest.mark.parametrize(
    ("kind", "temperature", "beta", "said"),
    [
        ("kl", 1.0, None, "no divergence named kl"),
        ("forward_kl", 0.0, None, "temperature 0.0"),
        ("forward_kl", math.nan, None, "temperature nan"),
        ("forward_kl", 1.0, 0.5, "takes no weight"),
        ("jsd", 1.0, 0.0, "it is 0 for any two models"),
        ("jsd", 1.0, 1.0, "it is 0 for any two models"),
        ("skew_forward_kl", 1.0, 1.0, "skew_forward_kl with a weight of 1.0"),
    ],
)
def test_what_is_not_defined_is_refused(kind: str, temperature: float, beta: float | None, said: str) -> None:
    teacher = TeacherTargets.full(logits(1, 4, 0))
    with pytest.raises(ValueError, match=said):
        divergence(kind, logits(1, 4, 1), teacher, temperature=temperature, beta=beta)


def test_skew_of_weight_0_is_the_plain_divergence() -> None:
    student, teacher = logits(4, 9, 1), TeacherTargets.full(logits(4, 9, 2))
    for skew, plain in (("skew_forward_kl", "forward_kl"), ("skew_reverse_kl", "reverse_kl")):
        assert torch.equal(divergence(skew, student, teacher, beta=0.0), divergence(plain, student, teacher))


def test_sizes_that_do_not_go_together_are_refused(student: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="teacher logits"):
        divergence("jsd", logits(2, 4, 0), TeacherTargets.full(logits(2, 5, 0)))
    with pytest.raises(ValueError, match="24 hidden states, 3 teacher targets"):
        chunked_distillation_loss(**student, targets=TeacherTargets.full(logits(3, V, 0)), kind="jsd")
    with pytest.raises(ValueError, match="logsumexp"):
        TeacherTargets.top_k(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3))
