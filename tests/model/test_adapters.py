"""Adapters: what they select, how they start, that gradients arrive, and that the base stays the base."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from finetune.errors import UserError
from finetune.model.adapters import (
    adapted_modules,
    adapter_active,
    adapter_effect,
    attach_adapter,
    base_only,
    check_gradients_arrive,
    count_trainable,
    prepare_for_training,
    target_module_names,
    trainable_parameters,
    trainables_to_fp32,
)
from finetune.model.load import model_skeleton
from finetune.model.source import resolve_model
from finetune.recipe.schema import AdapterSection

IDS = torch.arange(5, 25)[None]
KINDS = ["lora", "dora"]


def _section(**keys: Any) -> AdapterSection:
    return AdapterSection(**({"rank": 4, "alpha": 8.0} | keys))


def _disturb(model: nn.Module, seed: int = 3) -> None:
    """Give every trainable parameter some noise, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(trainable_parameters(model).items()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_one_misspelt_target_among_good_ones(tiny_model: Any) -> None:
    with pytest.raises(UserError) as error:
        attach_adapter(tiny_model, _section(target_modules=["q_proj", "k_prj"]), seed=0)
    text = str(error.value)
    assert "'k_prj' matches no module" in text
    assert "did you mean 'k_proj'" in text
    assert "q_proj" not in text.replace("k_proj", "")
    assert not hasattr(tiny_model, "peft_config")


def test_all_wrong_targets_are_reported_together(tiny_model: Any) -> None:
    with pytest.raises(UserError) as error:
        target_module_names(tiny_model, ["nonsense", "lm_head", "embed_tokens", "input_layernorm", "q_proj"])
    assert len(error.value.faults) == 4
    assert "the output head" in str(error.value)
    assert "not a linear layer" in str(error.value)


def test_targets_are_checked_before_weights_are_loaded(tiny_model_folder: Path) -> None:
    skeleton = model_skeleton(resolve_model(str(tiny_model_folder)))
    assert len(target_module_names(skeleton, ["q_proj"])["q_proj"]) == 2
    with pytest.raises(UserError, match="'qproj' matches no module"):
        target_module_names(skeleton, ["qproj"])


def test_no_targets_at_all(tiny_model: Any) -> None:
    with pytest.raises(UserError, match="no target modules are named"):
        target_module_names(tiny_model, [])
    with pytest.raises(UserError, match="no linear layer"):
        target_module_names(nn.Sequential(nn.ReLU()), "all-linear")


@pytest.mark.parametrize("tie", [True, False])
def test_all_linear_is_every_linear_layer_but_the_head(tiny_model: Any, tie: bool) -> None:
    tiny_model.config.tie_word_embeddings = tie
    model = attach_adapter(type(tiny_model)(tiny_model.config), _section(), seed=0)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert adapted_modules(model) == dict.fromkeys(names, 2)
    assert all("lora_" in name for name in trainable_parameters(model))


def test_the_report_of_a_small_adapter(tiny_model: Any) -> None:
    model = attach_adapter(tiny_model, _section(target_modules=["q_proj"]), seed=0)
    assert adapted_modules(model) == {"q_proj": 2}
    assert count_trainable(model) == 2 * (4 * 64 + 64 * 4)


def test_one_layer_by_its_full_name(tiny_model: Any) -> None:
    model = attach_adapter(tiny_model, _section(target_modules=["layers.1.self_attn.q_proj"]), seed=0)
    assert adapted_modules(model) == {"q_proj": 1}


def test_a_name_that_the_head_shares_is_not_reached() -> None:
    """A head whose suffix equals a layer's: 'all-linear' must still leave it out."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.ModuleDict({"proj": nn.Linear(8, 8)})
            self.head = nn.ModuleDict({"proj": nn.Linear(8, 8)})

        def get_output_embeddings(self) -> nn.Module:
            return self.head["proj"]

    assert target_module_names(Odd(), "all-linear") == {"proj": ["block.proj"]}
    from finetune.model.adapter_targets import suffixes_that_select

    assert suffixes_that_select(Odd(), ["block.proj"], ["proj"]) == ["block.proj"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_adapter_changes_nothing_and_is_fp32(tiny_model: Any, kind: str, dtype: torch.dtype) -> None:
    base = tiny_model.to(dtype)
    before = base(IDS).logits.float()
    model = attach_adapter(base, _section(kind=kind), seed=0)
    assert {parameter.dtype for parameter in trainable_parameters(model).values()} == {torch.float32}
    change = (model(IDS).logits.float() - before).abs().max()
    # DoRA divides two norms that are equal up to rounding.
    assert change <= (0.0 if kind == "lora" else 2e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_depends_on_the_seed_and_on_nothing_else(tiny_model: Any, kind: str) -> None:
    def start(seed: int, noise: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(noise)
        model = attach_adapter(copy.deepcopy(tiny_model), _section(kind=kind), seed=seed)
        return {name: parameter.detach() for name, parameter in trainable_parameters(model).items()}

    first, again, other = start(1, 11), start(1, 22), start(2, 11)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if "lora_A" in name)
    bound = max(float(first[name].abs().max()) for name in first if "q_proj.lora_A" in name)
    assert 0.1 < bound <= 1 / 64**0.5


def test_the_global_generator_is_left_alone(tiny_model: Any) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    attach_adapter(tiny_model, _section(), seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_the_update_is_alpha_over_r_times_b_a(tiny_model: Any) -> None:
    model = attach_adapter(tiny_model, _section(rank=4, alpha=6.0, target_modules=["q_proj"]), seed=0)
    _disturb(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = x @ (layer.base_layer.weight + 6.0 / 4 * up @ down).T
    assert torch.allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_still_there_bit_by_bit(tiny_model: Any, kind: str) -> None:
    before = tiny_model(IDS).logits
    model = attach_adapter(tiny_model, _section(kind=kind), seed=0)
    _disturb(model)
    tuned = model(IDS).logits
    assert not torch.equal(tuned, before)
    with base_only(model):
        assert torch.equal(model(IDS).logits, before)
    assert torch.equal(model(IDS).logits, tuned)
    # The object that was wrapped carries the adapter too: it is no stand-in for the base.
    assert torch.equal(tiny_model(IDS).logits, tuned)


def test_base_only_of_a_model_without_adapter(tiny_model: Any) -> None:
    with base_only(tiny_model) as model:
        assert model is tiny_model


def test_whether_an_adapter_does_anything(tiny_model: Any) -> None:
    model = attach_adapter(tiny_model, _section(), seed=0)
    inputs = {"input_ids": IDS}
    assert adapter_effect(model, inputs) == 0.0
    assert not adapter_active(model, inputs)
    _disturb(model)
    model.train()
    assert adapter_active(model, inputs)
    assert model.training


def test_a_second_adapter_on_the_same_base_is_refused(tiny_model: Any) -> None:
    attach_adapter(tiny_model, _section(), seed=0)
    with pytest.raises(RuntimeError, match="carries an adapter already"):
        attach_adapter(tiny_model, _section(), seed=0)


def test_kind_none_has_no_adapter(tiny_model: Any) -> None:
    with pytest.raises(UserError, match="no adapter to attach"):
        attach_adapter(tiny_model, _section(kind="none"), seed=0)


def test_half_precision_trainables_become_fp32_in_place(tiny_model: Any) -> None:
    model = attach_adapter(tiny_model, _section(), seed=0)
    parameters = list(trainable_parameters(model).values())
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()  # what TRL does to the adapters of a quantized model
    assert trainables_to_fp32(model) == len(parameters)
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    assert trainables_to_fp32(model) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_gradients_reach_every_adapter(tiny_model: Any, kind: str, use_reentrant: bool | None) -> None:
    model = attach_adapter(tiny_model, _section(kind=kind), seed=0)
    prepare_for_training(
        model, gradient_checkpointing=use_reentrant is not None, use_reentrant=bool(use_reentrant)
    )
    assert model.training
    assert model.config.use_cache is False
    optimizer = torch.optim.SGD(trainable_parameters(model).values(), lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    check_gradients_arrive(model)
    optimizer.step()
    ups = {name: parameter for name, parameter in trainable_parameters(model).items() if "lora_B" in name}
    assert len(ups) == 14
    assert all(parameter.norm() > 0 for parameter in ups.values())


def test_a_graph_that_is_cut_is_noticed(tiny_model: Any) -> None:
    model = attach_adapter(tiny_model, _section(), seed=0)
    model.train()
    # Reentrant checkpointing over a frozen embedding, without the remedy.
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": True})
    handle = getattr(model.get_base_model(), "_require_grads_hook", None)
    if handle is not None:
        handle.remove()
    loss = model(IDS, labels=IDS).loss
    if loss.requires_grad:
        loss.backward()
    with pytest.raises(RuntimeError, match=r"(14|28) of 28"):
        check_gradients_arrive(model)


def test_checkpointing_gives_the_same_gradients(tiny_model: Any) -> None:
    model = attach_adapter(tiny_model, _section(), seed=0)
    _disturb(model)
    gradients = []
    for use_reentrant in (None, True, False):
        prepare_for_training(
            model, gradient_checkpointing=use_reentrant is not None, use_reentrant=bool(use_reentrant)
        )
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trainable_parameters(model).values()]))
    assert torch.allclose(gradients[0], gradients[1], atol=1e-7)
    assert torch.allclose(gradients[0], gradients[2], atol=1e-7)
