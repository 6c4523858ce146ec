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


SHAPES = {
    "dft": losses.LossShape(dft=True),
    "smoothing": losses.LossShape(label_smoothing=0.1),
    "z": losses.LossShape(z_loss=0.01),
    "smoothing and z": losses.LossShape(label_smoothing=0.2, z_loss=0.05),
    "dft and z": losses.LossShape(dft=True, z_loss=0.05),
}


def by_hand(logits: torch.Tensor, targets: torch.Tensor, shape: losses.LossShape) -> torch.Tensor:
    """The formulas at the head of losses.py, from probabilities."""
    logs = logits.log_softmax(dim=1)
    own = logs.gather(1, targets[:, None]).squeeze(1)
    value = -own
    if shape.dft:
        value = own.exp().detach() * value
    value = (1 - shape.label_smoothing) * value - shape.label_smoothing * logs.mean(dim=1)
    return value + shape.z_loss * logits.exp().sum(dim=1).log() ** 2


@pytest.mark.parametrize("head_is_trainable", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_other_shapes_equal_their_formulas_in_value_and_gradient(
    shape: losses.LossShape, head_is_trainable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_CHUNK_TARGETS", 16)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(40, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 8, generator=generator, dtype=torch.float64, requires_grad=head_is_trainable)
    bias = torch.randn(50, generator=generator, dtype=torch.float64)
    targets = torch.randint(50, (40,), generator=generator)
    upstream = torch.rand(40, generator=generator, dtype=torch.float64)
    objective, nll = losses.target_losses(hidden, weight, bias, targets, shape)
    (objective * upstream).sum().backward()
    exact_hidden, exact_weight = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    logits = exact_hidden @ exact_weight.T + bias
    expected = by_hand(logits, targets, shape)
    (expected * upstream).sum().backward()
    torch.testing.assert_close(objective, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(nll, torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    assert not nll.requires_grad
    torch.testing.assert_close(hidden.grad, exact_hidden.grad, atol=1e-12, rtol=1e-10)
    if head_is_trainable:
        torch.testing.assert_close(weight.grad, exact_weight.grad, atol=1e-12, rtol=1e-10)


def test_the_planning_figures() -> None:
    """Probabilities .9, .5 and .05 of the right token: losses, their mean, and that of a guess among 100,000."""
    nll = losses.logit_losses(
        torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.05, 0.95]]).log(), torch.zeros(3, dtype=torch.long)
    )[0]
    torch.testing.assert_close(nll, torch.tensor([0.105361, 0.693147, 2.995732]), atol=1e-6, rtol=0)
    assert float(nll.mean()) == pytest.approx(1.264747, abs=1e-6)
    guess = losses.logit_losses(torch.zeros(1, 100_000), torch.zeros(1, dtype=torch.long))[0]
    assert float(guess) == pytest.approx(11.512925, abs=1e-6)
    # dft of the same tokens: each loss times its probability
    dft = losses.logit_losses(
        torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.05, 0.95]]).log(),
        torch.zeros(3, dtype=torch.long),
        losses.LossShape(dft=True),
    )[0]
    torch.testing.assert_close(dft, torch.tensor([0.0948249, 0.3465736, 0.1497866]), atol=1e-6, rtol=0)
