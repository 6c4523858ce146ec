"""The update ratio is that of the definition, and never costs a second copy of a whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from finetune.telemetry.updates import Movement, UpdateWatch, block_of, global_norm


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def stepped(watch: UpdateWatch, net: nn.Module) -> Movement:
    watch.start(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.01)
    return watch.finish(net)


def test_ratio_and_norm_are_those_of_the_definition() -> None:
    net = model()
    net[0].requires_grad_(False)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    moved = stepped(UpdateWatch(), net)
    assert moved.ratio == pytest.approx(0.01, rel=1e-3)
    flat = torch.cat([parameter.detach().flatten() for parameter in trained])
    assert moved.weight_norm == pytest.approx(float(flat.norm()), rel=1e-5)


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
    assert stepped(watch, net).ratio == pytest.approx(0.01, rel=1e-3)


def test_a_model_with_nothing_to_train_has_no_ratio() -> None:
    net = model().requires_grad_(False)
    assert stepped(UpdateWatch(), net) == Movement(0.0, 0.0, None, {})
    assert global_norm([]) == 0.0


def test_median_and_blocks_tell_where_the_weights_move() -> None:
    net = nn.ModuleDict({"embed": nn.Linear(8, 8, bias=False), "layers": model()})
    watch = UpdateWatch()
    with torch.no_grad():
        net["layers"][2].weight.zero_()  # like LoRA's B before its first step: it has no ratio of its own
        watch.start(net)
        net["layers"][0].weight.mul_(1.04)
        net["layers"][1].bias.mul_(1.5)
        net["layers"][2].weight.fill_(0.5)
        net["embed"].weight.mul_(1.02)
    moved = watch.finish(net)
    weight, bias = net["layers"][1].weight, net["layers"][1].bias.detach() / 1.5
    whole = float(torch.cat([weight.detach().flatten(), bias]).norm())
    assert list(moved.blocks) == ["0", "1", "2", "3", "4", "5", "outside"]
    assert moved.blocks["outside"] == pytest.approx(0.02, rel=1e-3)
    assert moved.blocks["1"] == pytest.approx(0.5 * float(bias.norm()) / whole, rel=1e-3)
    assert moved.blocks["3"] == 0.0
    assert moved.median == 0.0  # most tensors stood still
    assert moved.ratio > 0.0


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("base_model.model.model.layers.11.self_attn.q_proj.lora_A.default.weight", "11"),
        ("transformer.h.3.attn.c_attn.weight", "3"),
        ("gpt_neox.layers.0.mlp.dense.weight", "0"),
        ("model.embed_tokens.weight", "outside"),
        ("lm_head.weight", "outside"),
    ],
)
def test_a_parameter_belongs_to_its_layer(name: str, block: str) -> None:
    assert block_of(name) == block
