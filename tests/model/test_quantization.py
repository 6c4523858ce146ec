"""Quantized bases: exact values, gradients after an evaluation, merging after an evaluation, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from finetune.errors import UserError
from finetune.model import quantization
from finetune.model.adapters import (
    adapter_effect,
    attach_adapter,
    check_gradients_arrive,
    prepare_for_training,
    trainable_parameters,
)
from finetune.model.load import load_model
from finetune.model.quantization import (
    check_row_lengths,
    dequantise_4bit,
    dequantised_state,
    dequantised_weight,
    disable_cpu_repacking,
    linear_4bit_modules,
    row_length_is_exact,
)
from finetune.model.source import resolve_model
from finetune.recipe.schema import AdapterSection

IDS = torch.arange(5, 37)[None]
FOUR_BIT = ["nf4", "fp4"]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def _load(folder: Path, quantize: str, dtype: str = "fp32", **options: Any) -> Any:
    return load_model(resolve_model(str(folder)), quantize=quantize, dtype=dtype, **options)


def _adapted(base: Any, kind: str = "lora", noise: float = 0.1) -> Any:
    model = attach_adapter(base, AdapterSection(kind=kind, rank=4, alpha=8.0), seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(trainable_parameters(model).items()):
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return model


def _plain_twin(tiny_model: Any, quantized: Any) -> Any:
    """An unquantized model that holds the dequantised weights."""
    twin = copy.deepcopy(tiny_model)
    missing, unexpected = twin.load_state_dict(dequantised_state(quantized, torch.float32), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []) or (missing, unexpected) == ([], [])
    return twin


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in trainable_parameters(model).items()}


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("quantize", FOUR_BIT)
@pytest.mark.parametrize("n_columns", [32, 48, 96, 192, 100, 99, 64, 576])
def test_every_row_length_is_decoded_to_its_values(quantize: str, n_columns: int) -> None:
    import bitsandbytes.functional as bnb

    weights = torch.randn(64, n_columns, generator=torch.Generator().manual_seed(0))
    for compress in (False, True):
        packed, state = bnb.quantize_4bit(
            weights, blocksize=64, quant_type=quantize, compress_statistics=compress
        )
        flat, flat_state = bnb.quantize_4bit(
            weights.flatten(), blocksize=64, quant_type=quantize, compress_statistics=compress
        )
        decoded = dequantise_4bit(packed, state)
        assert decoded.shape == weights.shape
        assert torch.equal(decoded.flatten(), bnb.dequantize_4bit(flat, flat_state).flatten())
        assert _relative(decoded, weights) == pytest.approx(0.092 if quantize == "nf4" else 0.122, abs=0.006)
        assert tuple(state.shape) == (64, n_columns)  # the state handed in is not changed


@pytest.mark.parametrize("quantize", FOUR_BIT)
def test_rows_that_the_library_decodes_wrongly_are_refused_before_loading(
    tiny_model: Any, tiny_model_folder: Path, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert row_length_is_exact(64, quantize)
    assert row_length_is_exact(576, quantize)
    assert row_length_is_exact(99, quantize)
    wrong = [length for length in (32, 96) if not row_length_is_exact(length, quantize)]
    layers = nn.ModuleDict({"good": nn.Linear(64, 8), "bad": nn.Linear(96, 8)})
    if wrong:  # a repaired library decodes them rightly, and then nothing is refused
        with pytest.raises(UserError, match=r"rows of 96 weights wrongly .* e\.g\. bad"):
            check_row_lengths(layers, quantize)
    check_row_lengths(layers, "int8")
    check_row_lengths(layers, "none")
    check_row_lengths(layers, quantize, device="cuda:0")
    # load_model asks before it reads any weight.
    monkeypatch.setattr(quantization, "row_length_is_exact", lambda length, _: length != 128)
    (tiny_model_folder / "model.safetensors").write_bytes(b"never read")
    from finetune.model.source import ModelSource

    source = ModelSource("x", str(tiny_model_folder), None, "0")
    with pytest.raises(UserError, match=r"rows of 128 weights wrongly .*down_proj"):
        load_model(source, quantize=quantize)


def test_a_decoder_that_mixes_up_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional as bnb

    right = bnb.dequantize_4bit

    def wrong(packed: torch.Tensor, state: Any) -> torch.Tensor:
        decoded: torch.Tensor = right(packed, state)
        return decoded.roll(1) if len(state.shape) == 2 else decoded

    monkeypatch.setattr(bnb, "dequantize_4bit", wrong)
    assert not row_length_is_exact.__wrapped__(64, "nf4")


@pytest.mark.parametrize("quantize", FOUR_BIT)
@pytest.mark.parametrize("double", [True, False])
def test_which_layers_are_quantized(tiny_model_folder: Path, quantize: str, double: bool) -> None:
    model = _load(tiny_model_folder, quantize, double_quantization=double)
    layers = linear_4bit_modules(model)
    assert len(layers) == 14
    assert not any("lm_head" in name for name in layers)
    assert {module.weight.quant_state.quant_type for module in layers.values()} == {quantize}
    assert {module.weight.quant_state.nested for module in layers.values()} == {double}
    assert not any(module.support_avx512bf16_for_cpu for module in layers.values())


def test_int8_layers(tiny_model_folder: Path) -> None:
    model = _load(tiny_model_folder, "int8")
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("Linear8bitLt") == 14


def test_the_adapted_layer_equals_dequantised_plus_update(tiny_model_folder: Path) -> None:
    """64 x 64 NF4: adapter output against (a) dequantised + update, (b) requantised, (c) original + update."""
    import bitsandbytes.functional as bnb

    original = _load(tiny_model_folder, "none").model.layers[0].self_attn.q_proj.weight.detach()
    model = _adapted(_load(tiny_model_folder, "nf4"))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    update = layer.get_delta_weight("default").detach()
    base = dequantised_weight(layer.get_base_layer())
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    for training in (True, False):
        layer.train(training)
        with torch.no_grad():
            found = layer(x)
        assert _relative(found, x @ (base + update).T) < 1e-5
    packed, state = bnb.quantize_4bit(base + update, blocksize=64, quant_type="nf4")
    requantised = x @ dequantise_4bit(packed, state).T
    assert _relative(requantised, found) > 0.02
    assert _relative(x @ (original + update).T, found) > 0.005


@pytest.mark.parametrize("quantize", [*FOUR_BIT, "int8"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_gradients_equal_those_of_the_dequantised_model(
    tiny_model: Any, tiny_model_folder: Path, quantize: str, kind: str
) -> None:
    quantized = _load(tiny_model_folder, quantize)
    twin = _adapted(_plain_twin(tiny_model, quantized), kind)
    model = _adapted(quantized, kind)
    for each in (model, twin):
        prepare_for_training(each)
    for _ in range(2):  # DoRA used to lose the scales of int8 layers between the first forward and the second
        expected, found = _gradients(twin), _gradients(model)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert _relative(found[name], gradient) < 1e-4, name


@pytest.mark.parametrize("quantize", [*FOUR_BIT, "int8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_evaluating_first_does_not_change_the_training(
    tiny_model_folder: Path, quantize: str, dtype: str
) -> None:
    fresh = _adapted(_load(tiny_model_folder, quantize, dtype))
    evaluated = _adapted(_load(tiny_model_folder, quantize, dtype))
    evaluated.eval()
    with torch.no_grad():
        first = evaluated(IDS).logits
        assert torch.equal(evaluated(IDS).logits, first)
    for model in (fresh, evaluated):
        prepare_for_training(model)
    expected, found = _gradients(fresh), _gradients(evaluated)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(bool(gradient.any()) for gradient in found.values())


@pytest.mark.parametrize("quantize", [*FOUR_BIT, "int8"])
def test_evaluating_first_does_not_change_what_is_merged(tiny_model_folder: Path, quantize: str) -> None:
    fresh = dequantised_state(_load(tiny_model_folder, quantize), torch.float32)
    model = _adapted(_load(tiny_model_folder, quantize))
    model.eval()
    with torch.no_grad():
        model(IDS)
    assert adapter_effect(model, {"input_ids": IDS}) > 0
    found = dequantised_state(model, torch.float32)
    assert found.keys() == fresh.keys()
    assert all(torch.equal(found[name], fresh[name]) for name in fresh)


def test_the_dequantised_state_has_the_names_and_dtypes_of_the_base(
    tiny_model: Any, tiny_model_folder: Path
) -> None:
    expected = {name for name, _ in tiny_model.named_parameters()}
    for quantize in ("none", "nf4", "int8"):
        state = dequantised_state(_adapted(_load(tiny_model_folder, quantize)), torch.bfloat16)
        assert set(state) == expected
        assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    plain = dequantised_state(_adapted(_load(tiny_model_folder, "none")))
    for name, parameter in tiny_model.named_parameters():
        assert torch.equal(plain[name], parameter)


def test_the_trap_is_real_and_noticed(tiny_model_folder: Path) -> None:
    """Where the CPU repacks, an unguarded forward is refused afterwards instead of decoding to garbage."""
    from bitsandbytes.functional import has_avx512bf16

    if not has_avx512bf16():
        pytest.skip("this CPU does not repack 4-bit weights")
    model = _load(tiny_model_folder, "nf4")
    for module in linear_4bit_modules(model).values():
        module.support_avx512bf16_for_cpu = True  # as bitsandbytes sets it
    with torch.no_grad():
        model(IDS)
    with pytest.raises(RuntimeError, match="was repacked"):
        disable_cpu_repacking(model)
    with pytest.raises(RuntimeError, match="was repacked"):
        dequantised_state(model)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_gradients_arrive_through_a_quantized_base(
    tiny_model_folder: Path, quantize: str, use_reentrant: bool | None
) -> None:
    base = _load(tiny_model_folder, quantize, "bf16", attention="document")
    model = attach_adapter(base, AdapterSection(rank=4), seed=0)
    prepare_for_training(
        model, gradient_checkpointing=use_reentrant is not None, use_reentrant=bool(use_reentrant)
    )
    model(IDS, labels=IDS).loss.backward()
    check_gradients_arrive(model)
    assert {parameter.grad.dtype for parameter in trainable_parameters(model).values()} == {torch.float32}


def test_an_unknown_quantization() -> None:
    with pytest.raises(UserError, match="unknown quantization 'int3'"):
        quantization.quantization_config("int3", dtype=torch.float32)
