"""Every optimizer by name: it steps, decays only what may decay, and continues from disk bit by bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from finetune.errors import UserError
from finetune.model.adapters import attach_adapter
from finetune.plan.states import OPTIMIZERS as FORECAST_STATES
from finetune.recipe.adapter_section import AdapterSection
from finetune.recipe.train_section import SCHEDULE_FREE, OptimizerName, TrainSection
from finetune.training.optimizers import OPTIMIZERS, build_optimizer, check_optimizer, decays
from finetune.training.states import load_state, save_state

NAMES = get_args(OptimizerName)
ON_CPU = [name for name in NAMES if not OPTIMIZERS[name].needs_cuda]
IDS = torch.arange(5, 29)[None]


def settings(name: str, **keys: Any) -> TrainSection:
    schedule = "constant" if name in SCHEDULE_FREE else "cosine"
    rate = {"sgd": 0.5, "momentum": 0.1, "schedule_free_sgd": 0.9}.get(name, 3e-3)
    return TrainSection(**({"optimizer": name, "schedule": schedule, "learning_rate": rate} | keys))


def steps(model: Any, optimizer: torch.optim.Optimizer, n: int) -> list[float]:
    losses = []
    for _ in range(n):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def flat(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def test_every_name_has_an_entry_and_a_forecast() -> None:
    assert set(OPTIMIZERS) == set(NAMES) == set(FORECAST_STATES)


@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", ON_CPU)
def test_it_lowers_the_loss_and_continues_from_disk_bit_by_bit(
    name: str, adapter: bool, tiny_model: Any, tmp_path: Path
) -> None:
    model = attach_adapter(tiny_model, AdapterSection(rank=4), seed=0) if adapter else tiny_model.train()
    section = settings(name, weight_decay=0.01)
    optimizer = build_optimizer(model, section)
    losses = steps(model, optimizer, 6)
    assert losses[-1] < losses[0]
    save_state(tmp_path / "optimizer", optimizer.state_dict())
    twin = copy.deepcopy(model)
    again = build_optimizer(twin, section)
    again.load_state_dict(load_state(tmp_path / "optimizer"))
    assert steps(model, optimizer, 12) == steps(twin, again, 12)
    assert torch.equal(flat(model), flat(twin))


@pytest.mark.parametrize("name", ON_CPU)
def test_decay_never_acts_on_biases_norms_and_scales(name: str, make_tiny_model: Any) -> None:
    model = make_tiny_model(tie=False)
    model.config.attention_bias = True
    model = type(model)(model.config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = build_optimizer(model, settings(name, weight_decay=0.1, learning_rate=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):  # SOAP only looks at the first one
        optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not bool((parameter == 1.0).all())}
    spared = {name for name, parameter in model.named_parameters() if "norm" in name or name.endswith("bias")}
    assert len(spared) == 5 + 8
    assert not moved & spared
    # Schedule-free methods put the decay into the gradient, which Adam's denominator and averaging take up.
    assert moved >= {name for name, p in model.named_parameters() if name.endswith("proj.weight")}


def test_what_decays() -> None:
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert decays("layers.0.mlp.up_proj.lora_A.default.weight", matrix)
    assert not decays("layers.0.mlp.up_proj.lora_magnitude_vector.default.weight", vector)
    assert not decays("layers.0.mlp.down_proj.ia3_l.default", torch.zeros(1, 2))
    assert not decays("layers.0.input_layernorm.weight", vector)
    assert not decays("layers.0.self_attn.q_proj.bias", vector)


def test_one_step_is_that_of_the_library(tiny_model: Any) -> None:
    """Groups, rates and decay are all we add: against the class itself with everything in one group."""
    twin = copy.deepcopy(tiny_model)
    ours = build_optimizer(tiny_model, settings("lion", learning_rate=1e-3))
    from pytorch_optimizer import Lion

    theirs = Lion(twin.parameters(), lr=1e-3)
    assert steps(tiny_model, ours, 3) == steps(twin, theirs, 3)


def test_muon_takes_inner_matrices_and_adamw_the_rest(tiny_model: Any) -> None:
    optimizer: Any = build_optimizer(tiny_model, settings("muon"))
    kinds = [type(part).__name__ for part in optimizer.parts]
    assert kinds == ["Muon", "AdamW"]
    taken = {id(p) for group in optimizer.parts[0].param_groups for p in group["params"]}
    names = {name for name, parameter in tiny_model.named_parameters() if id(parameter) in taken}
    assert names == {name for name, p in tiny_model.named_parameters() if "_proj.weight" in name}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = flat(tiny_model)
    steps(tiny_model, optimizer, 1)
    assert torch.equal(flat(tiny_model), before)


@pytest.mark.parametrize("name", ["adamw_fused", "muon", "adam_mini", "lion"])
def test_lora_plus_gives_b_its_own_rate(name: str, tiny_model: Any) -> None:
    model = attach_adapter(tiny_model, AdapterSection(rank=4), seed=0)
    optimizer = build_optimizer(model, settings(name, lora_plus_ratio=16, learning_rate=1e-3))
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert rates[id(parameter)] == pytest.approx(1.6e-2 if ".lora_B." in key else 1e-3)


def test_lora_plus_is_the_step_of_peft(tiny_model: Any) -> None:
    from peft.optimizers import create_loraplus_optimizer

    model = attach_adapter(tiny_model, AdapterSection(rank=4), seed=0)
    twin = copy.deepcopy(model)
    ours = build_optimizer(model, settings("adamw", lora_plus_ratio=16, learning_rate=1e-3))
    theirs = create_loraplus_optimizer(twin, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    assert steps(model, ours, 3) == pytest.approx(steps(twin, theirs, 3), abs=1e-6)


def test_options_reach_the_class_and_unknown_ones_are_refused_with_the_nearest_name() -> None:
    section = settings("adamw", optimizer_options={"betas": [0.8, 0.9], "eps": 1e-6})
    check_optimizer(section)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), section)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    with pytest.raises(UserError, match="did you mean 'betas'"):
        check_optimizer(settings("adamw", optimizer_options={"beta": [0.8, 0.9]}))
    with pytest.raises(UserError, match="refuses its options"):
        check_optimizer(settings("adamw", optimizer_options={"betas": [0.8, 1.9]}))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"betas": [0.9]}),
        ("adamw", {"differentiable": True}),
        ("adamw_fused", {"eps": "tiny"}),
        ("soap", {"precondition_frequency": 0}),
    ],
)
def test_options_that_fail_only_in_a_step_are_refused_before_one(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"optimizer {name} refuses its options: ."):
        check_optimizer(settings(name, optimizer_options=options))


@pytest.mark.parametrize("name", [name for name in NAMES if OPTIMIZERS[name].needs_cuda])
def test_paged_optimizers_are_refused_without_a_gpu_and_name_another(name: str) -> None:
    with pytest.raises(UserError, match="needs CUDA") as caught:
        check_optimizer(settings(name), on_cuda=False)
    assert OPTIMIZERS[name].instead_on_cpu in caught.value.faults[0].fix


@pytest.mark.parametrize("name", ON_CPU)
def test_the_preflight_accepts_every_optimizer_as_it_is(name: str) -> None:
    check_optimizer(settings(name), on_cuda=False)
