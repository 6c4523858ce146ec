"""The fused LoRA layer is PEFT's layer: same outputs and gradients, and PEFT's own road wherever more is asked."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from finetune.model.adapter_files import save_adapter
from finetune.model.adapters import attach_adapter, base_only, prepare_for_training, trainable_parameters
from finetune.model.fused_lora import FusedLoraLinear, fuse_lora
from finetune.recipe.schema import AdapterSection

IDS = torch.arange(5, 37)[None]


def _pair(base: Any, **keys: Any) -> tuple[Any, Any]:
    """The same adapted model twice: as PEFT made it, and fused."""
    section = AdapterSection(**({"rank": 4, "alpha": 8.0} | keys))
    plain = attach_adapter(base, section, seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(trainable_parameters(plain).items()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    fused = copy.deepcopy(plain)
    fuse_lora(fused)
    return plain, fused


def _step(model: Any, autocast: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(IDS, labels=IDS)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad for name, p in trainable_parameters(model).items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_outputs_and_gradients_equal_those_of_peft(tiny_model: Any, bias: bool, checkpointing: bool) -> None:
    if bias:
        tiny_model.config.attention_bias = tiny_model.config.mlp_bias = True
        tiny_model = type(tiny_model)(tiny_model.config)
        for name, parameter in tiny_model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.02)
    plain, fused = _pair(tiny_model)
    assert fuse_lora(fused) == 0  # once is enough
    assert sum(isinstance(module, FusedLoraLinear) for module in fused.modules()) == 14
    for model in (plain, fused):
        prepare_for_training(model, gradient_checkpointing=checkpointing)
    (logits, expected), (found_logits, found) = _step(plain), _step(fused)
    assert torch.allclose(found_logits, logits, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    plain.eval(), fused.eval()
    with torch.no_grad():
        assert torch.allclose(fused(IDS).logits, plain(IDS).logits, atol=1e-5)


def test_gradients_of_the_formula() -> None:
    from finetune.model.fused_lora import _FusedLora

    generator = torch.Generator().manual_seed(0)
    x, down, up = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((2, 3, 6), (2, 6), (5, 2))
    )
    weight, bias = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((5, 6), (5,)))

    def fused(*inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _FusedLora.apply(inputs[0], weight, bias, inputs[1], inputs[2], 1.5)
        return result

    assert torch.autograd.gradcheck(fused, (x, down, up))
    assert torch.allclose(fused(x, down, up), x @ (weight + 1.5 * up @ down).T + bias)


def test_autocast_computes_in_bf16_with_fp32_gradients(tiny_model: Any) -> None:
    reference, _ = _pair(copy.deepcopy(tiny_model))
    plain, fused = _pair(tiny_model.bfloat16())
    for model in (reference, plain, fused):
        model.train()
    _, exact = _step(reference)
    (_, peft), (_, found) = _step(plain, autocast=True), _step(fused, autocast=True)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}

    def error(gradients: dict[str, torch.Tensor]) -> float:
        difference = sum(float((gradients[name] - exact[name]).norm() ** 2) for name in exact)
        return (difference / sum(float(exact[name].norm() ** 2) for name in exact)) ** 0.5

    assert error(found) <= 1.2 * error(peft) < 0.2


@pytest.mark.parametrize("keys", [{"kind": "dora"}, {"dropout": 0.5}])
def test_other_variants_run_as_peft_wrote_them(tiny_model: Any, keys: dict[str, Any]) -> None:
    plain, fused = _pair(tiny_model, **keys)
    results = []
    for model in (plain, fused):
        model.train()
        torch.manual_seed(1)
        results.append(_step(model))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_disabling_merging_saving_and_unloading_still_work(tiny_model: Any, tmp_path: Path) -> None:
    before = tiny_model(IDS).logits
    plain, fused = _pair(tiny_model)
    tuned = plain(IDS).logits
    with base_only(fused):
        assert torch.equal(fused(IDS).logits, before)
    save_adapter(plain, tmp_path / "plain")
    save_adapter(fused, tmp_path / "fused")
    name = "adapter_model.safetensors"
    assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "fused" / name).read_bytes()
    fused.merge_adapter()
    assert torch.allclose(fused(IDS).logits, tuned, atol=1e-5)
    fused.unmerge_adapter()
    merged = fused.merge_and_unload()
    assert torch.allclose(merged(IDS).logits, tuned, atol=1e-5)
    assert not any(isinstance(module, FusedLoraLinear) for module in merged.modules())


def test_a_base_that_is_trained_too_gets_its_gradient(tiny_model: Any) -> None:
    _, fused = _pair(tiny_model)
    layer = fused.base_model.model.model.layers[0].self_attn.q_proj
    layer.base_layer.weight.requires_grad_(True)
    _step(fused)
    assert layer.base_layer.weight.grad.any()


def test_quantized_layers_are_left_to_peft() -> None:
    class Linear4bit(nn.Linear):
        pass

    from peft import LoraConfig, get_peft_model

    model = get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), LoraConfig(r=2, target_modules=["0"]))
    model.base_model.model[0].base_layer.__class__ = Linear4bit
    assert fuse_lora(model) == 0
