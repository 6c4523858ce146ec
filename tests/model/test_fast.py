"""Norms and gated MLPs that keep less: the model's own results to the last bit, gradients no worse, and when they stay out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.model.fast import restore, speed_up
from finetune.model.fast_mlp import slim_gates
from finetune.model.fast_norm import slim_norms

FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
]


def built(model_type: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=131,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.train()


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    tuned = get_peft_model(
        model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    )
    for name, parameter in tuned.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return tuned


def logits_and_gradients(model: Any, dtype: torch.dtype | None = None) -> tuple[Any, dict[str, Any]]:
    ids = torch.arange(3, 63).view(2, 30)
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output.logits.detach(), {
        name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None
    }


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    off = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return (off / sum(float(one.square().sum()) for one in expected.values())) ** 0.5


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_gives_its_own_results_to_the_last_bit(model_type: str) -> None:
    model = built(model_type).to(torch.bfloat16).requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)  # so that everything has a gradient
    logits, gradients = logits_and_gradients(model)
    n_norms = sum("norm" in name for name, _ in model.named_parameters())
    assert slim_norms(model) == n_norms
    assert slim_gates(model) == (0 if model_type == "phi3" else 2)
    slim_logits, slim_gradients = logits_and_gradients(model)
    assert torch.equal(slim_logits, logits)
    exact = model.double()
    restore(exact)
    _, expected = logits_and_gradients(exact)
    assert distance(slim_gradients, expected) <= 1.02 * distance(gradients, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_alone_is_bit_equal_and_its_gradient_nearer_to_the_exact_one(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(1)
    for kind in (LlamaRMSNorm, GemmaRMSNorm):
        norm = kind(96).to(dtype).requires_grad_(False)
        norm.weight.uniform_(0.3, 2.0)
        x, upstream = torch.randn(50, 96).to(dtype), torch.randn(50, 96).to(dtype)

        def gradient(norm: Any = norm, x: torch.Tensor = x, upstream: torch.Tensor = upstream) -> Any:
            given = x.clone().requires_grad_()
            result = norm(given)
            return result.detach(), torch.autograd.grad(result, given, upstream)[0].double()

        own, own_gradient = gradient()
        assert slim_norms(norm) == 1
        slim, slim_gradient = gradient()
        assert torch.equal(slim, own)
        wide = x.double().requires_grad_()
        factor = norm.weight.double() + (1.0 if kind is GemmaRMSNorm else 0.0)
        exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * factor
        expected = torch.autograd.grad(exact, wide, upstream.double())[0]
        off, own_off = (float((one - expected).norm()) for one in (slim_gradient, own_gradient))
        assert off <= 1.01 * own_off


@pytest.mark.parametrize("checkpointing", [False, {"use_reentrant": False}, {"use_reentrant": True}])
def test_adapted_model_in_fp32_has_the_gradients_of_pefts_own_passes(
    tiny_model: Any, checkpointing: Any
) -> None:
    model = adapted(tiny_model)
    _, gradients = logits_and_gradients(model)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(checkpointing)
        model.train()
    speed_up(model)
    _, fast = logits_and_gradients(model)
    assert fast.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(fast[name], gradient, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_fp32_adapters_is_no_farther_from_fp64(
    tiny_model: Any, dtype: torch.dtype
) -> None:
    expected = logits_and_gradients(adapted(copy.deepcopy(tiny_model)).double())[1]
    model = adapted(tiny_model.to(dtype))
    plain = logits_and_gradients(model, dtype)[1]
    speed_up(model)
    fast = logits_and_gradients(model, dtype)[1]
    assert distance(fast, expected) <= 1.1 * distance(plain, expected)


def kept_bytes(model: Any) -> int:
    """Bytes of distinct storages, parameters left out, that the graph of one forward pass holds."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.randn(1, 40, 64, dtype=torch.bfloat16, requires_grad=True))
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def test_a_norm_keeps_its_input_and_an_mlp_its_two_branches() -> None:
    model = built("llama").to(torch.bfloat16).requires_grad_(False)
    layer = model.model.layers[0]
    slim_norms(model)
    assert kept_bytes(layer.input_layernorm) == 40 * 64 * 2 + 40 * 4
    slim_gates(model)
    assert kept_bytes(layer.mlp) == 2 * 40 * 96 * 2
    tuned = adapted(model)
    speed_up(tuned)
    input_and_middles = 40 * 64 * 2 + 3 * 40 * 8 * 2
    assert kept_bytes(tuned.get_base_model().model.layers[0].mlp) == 2 * 40 * 96 * 2 + input_and_middles


def test_everything_is_undone(tiny_model: Any) -> None:
    model = adapted(tiny_model)
    names = list(model.state_dict())
    speed_up(model)
    assert list(model.state_dict()) == names
    assert any("forward" in module.__dict__ for module in model.modules())
    speed_up(model)  # a second time changes nothing
    restore(model)
    assert not any({"forward", "slim"} & set(module.__dict__) for module in model.modules())


def test_without_gradients_the_models_own_passes_run(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.model import fast_mlp, fast_norm

    model = adapted(tiny_model)
    ids = torch.arange(3, 33).view(1, 30)
    with torch.no_grad():
        before = model(ids).logits
    speed_up(model)
    for module, name in ((fast_norm, "_RmsNorm"), (fast_mlp, "_Gated"), (fast_mlp, "_GatedLoraProduct")):
        monkeypatch.delattr(module, name)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before, atol=1e-6, rtol=1e-5)


def test_a_copy_of_the_model_runs_its_own_modules(tiny_model: Any) -> None:
    model = adapted(tiny_model)
    speed_up(model)
    twin = copy.deepcopy(model)
    norm = twin.get_base_model().model.layers[0].post_attention_layernorm
    assert norm.forward.__self__ is norm
    logits_and_gradients(twin)
    assert all(parameter.grad is None for parameter in model.parameters())


class _Centred(torch.nn.Module):
    """Not an RMSNorm, though it looks like one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64), requires_grad=False)
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() - x.float().mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def test_what_is_not_recognised_or_trained_is_left_alone(tiny_model: Any) -> None:
    assert slim_norms(_Centred()) == 0
    assert slim_norms(torch.nn.LayerNorm(64, bias=False).requires_grad_(False)) == 0
    assert slim_norms(built("llama")) == 0  # its norms are trained
    layer = tiny_model.model.layers[0]
    own = type(layer.mlp).forward
    layer.mlp.__class__ = type("Scaled", (type(layer.mlp),), {"forward": lambda self, x: own(self, x) * 2.0})
    assert slim_gates(tiny_model) == 1  # that of the other layer


@pytest.mark.parametrize("options", [{"lora_dropout": 0.5}, {"use_dora": True}])
def test_adapters_that_keep_pefts_pass_get_the_product_itself(
    tiny_model: Any, options: dict[str, Any]
) -> None:
    model = adapted(tiny_model, **options)
    torch.manual_seed(5)
    logits, gradients = logits_and_gradients(model)
    speed_up(model)
    torch.manual_seed(5)
    fast_logits, fast = logits_and_gradients(model)
    assert torch.equal(fast_logits, logits)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fast[name], gradient, atol=1e-7, rtol=1e-4)


def test_a_hook_on_the_down_projection_is_called_with_what_it_multiplies(tiny_model: Any) -> None:
    model = adapted(tiny_model)
    speed_up(model)
    seen: list[torch.Size] = []
    layer = model.get_base_model().model.layers[0]
    layer.mlp.down_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape))
    logits_and_gradients(model)
    assert seen == [torch.Size([2, 30, 128])]


def test_disabled_adapters_fall_back_to_the_base(tiny_model: Any) -> None:
    model = adapted(tiny_model)
    with model.disable_adapter():
        base = model(torch.arange(3, 33).view(1, 30)).logits
    speed_up(model)
    with model.disable_adapter():
        torch.testing.assert_close(model(torch.arange(3, 33).view(1, 30)).logits, base)
