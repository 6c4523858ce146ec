"""The update ratio is that of the definition, and never costs a second copy of a whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from finetune.telemetry.updates import UpdateWatch, global_norm


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def stepped(watch: UpdateWatch, net: nn.Module) -> tuple[float, float]:
    watch.start(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.01)
    return watch.finish(net)


def test_ratio_and_norm_are_those_of_the_definition() -> None:
    net = model()
    net[0].requires_grad_(False)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    weight_norm, ratio = stepped(UpdateWatch(), net)
    assert ratio == pytest.approx(0.01, rel=1e-3)
    flat = torch.cat([parameter.detach().flatten() for parameter in trained])
    assert weight_norm == pytest.approx(float(flat.norm()), rel=1e-5)


def test_watching_leaves_the_weights_alone() -> None:
    net = model()
    watch = UpdateWatch()
    watch.start(net)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    watch.finish(net)
    assert all(torch.equal(new, old) for new, old in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("limit", [10, 80, 200, 10_000])
def test_no_more_than_the_limit_is_copied(limit: int) -> None:
    net = model()
    watch = UpdateWatch(max_elements=limit)
    watch.start(net)
    n_copied = sum(tensor.numel() for tensor in watch._before)
    assert 0 < n_copied <= limit
    watch.finish(net)
    assert watch._before == []
    assert stepped(watch, net)[1] == pytest.approx(0.01, rel=1e-3)


def test_a_model_with_nothing_to_train_has_no_ratio() -> None:
    net = model().requires_grad_(False)
    assert stepped(UpdateWatch(), net) == (0.0, 0.0)
    assert global_norm([]) == 0.0
