"""The fused LoRA pass against PEFT's own: outputs, gradients, and when it must stay out of the way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from finetune.model.fast_lora import speed_up_lora


def lora_model(tiny_model: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=8, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    model = get_peft_model(tiny_model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def loss_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.arange(3, 63).view(2, 30)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_loss_and_every_gradient_equal_pefts(tiny_model: Any) -> None:
    model = lora_model(tiny_model.double())
    loss, gradients = loss_and_gradients(model)
    assert speed_up_lora(model) == 14
    fast_loss, fast_gradients = loss_and_gradients(model)
    torch.testing.assert_close(fast_loss, loss, atol=1e-12, rtol=1e-12)
    assert fast_gradients.keys() == gradients.keys() and len(gradients) == 28
    for name, gradient in gradients.items():
        torch.testing.assert_close(fast_gradients[name], gradient, atol=1e-12, rtol=1e-9)


def test_bf16_weights_with_fp32_adapters_stay_within_bf16_rounding(tiny_model: Any) -> None:
    exact = lora_model(copy.deepcopy(tiny_model).double())
    _, expected = loss_and_gradients(exact)
    model = lora_model(tiny_model.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        _, plain = loss_and_gradients(model)
        speed_up_lora(model)
        _, fast = loss_and_gradients(model)
    assert all(gradient.dtype == torch.float32 for gradient in fast.values())

    def error(found: dict[str, torch.Tensor]) -> float:
        distances = [(found[name].double() - expected[name]).norm() for name in expected]
        return float(
            torch.stack(distances).norm() / torch.stack([g.norm() for g in expected.values()]).norm()
        )

    assert error(fast) < 1.2 * error(plain)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_other_layers_keep_pefts_forward(tiny_model: Any, options: dict[str, Any]) -> None:
    if "lora_bias" in options:
        for module in list(tiny_model.modules()):
            if isinstance(module, torch.nn.Linear):
                module.bias = torch.nn.Parameter(torch.zeros(module.out_features))
    assert speed_up_lora(lora_model(tiny_model, **options)) == 0


def test_disabled_and_merged_adapters_fall_back(tiny_model: Any) -> None:
    ids = torch.arange(3, 33).view(1, 30)
    with torch.no_grad():
        base = copy.deepcopy(tiny_model)(ids).logits
        model = lora_model(tiny_model)
        tuned = model(ids).logits
        speed_up_lora(model)
        with model.disable_adapter():
            torch.testing.assert_close(model(ids).logits, base)
        torch.testing.assert_close(model(ids).logits, tuned, atol=1e-5, rtol=1e-4)
        model.merge_adapter()
        torch.testing.assert_close(model(ids).logits, tuned, atol=1e-5, rtol=1e-4)
