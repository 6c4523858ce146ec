"""The target loss against its definition: full logits and cross-entropy in fp64."""

from __future__ import annotations

import pytest
import torch

from finetune.training import losses


def reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")


@pytest.mark.parametrize("head_is_trainable", [False, True])
@pytest.mark.parametrize("n_targets", [1, 7, 40])
def test_values_and_gradients_equal_the_definition(
    head_is_trainable: bool, n_targets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_CHUNK_TARGETS", 16)  # several chunks, the last one short
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(n_targets, 8, generator=generator, requires_grad=True)
    weight = torch.randn(50, 8, generator=generator, requires_grad=head_is_trainable)
    targets = torch.randint(50, (n_targets,), generator=generator)
    upstream = torch.rand(n_targets, generator=generator)

    nll = losses.target_nll(hidden, weight, None, targets)
    (nll * upstream).sum().backward()

    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    expected = reference(exact_hidden, exact_weight, targets)
    (expected * upstream).sum().backward()
    torch.testing.assert_close(nll.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, atol=1e-6, rtol=1e-5)
    if head_is_trainable:
        torch.testing.assert_close(weight.grad.double(), exact_weight.grad, atol=1e-6, rtol=1e-5)


def test_no_target_gives_an_empty_loss_that_can_be_differentiated() -> None:
    hidden = torch.randn(0, 8, requires_grad=True)
    for trainable in (False, True):
        weight = torch.randn(50, 8, requires_grad=trainable)
        nll = losses.target_nll(hidden, weight, None, torch.empty(0, dtype=torch.long))
        assert nll.shape == (0,)
        nll.sum().backward()


def test_bf16_gradient_is_within_bf16_rounding_of_the_exact_one() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(32, 64, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(300, 64, generator=generator) / 8).bfloat16()
    targets = torch.randint(300, (32,), generator=generator)
    losses.target_nll(hidden, weight, None, targets).sum().backward()
    exact = hidden.detach().double().requires_grad_()
    reference(exact, weight.double(), targets).sum().backward()
    error = (hidden.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 0.01
