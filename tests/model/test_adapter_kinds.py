"""Every kind of adapter: how it starts, that all of it trains, and that base plus file equals what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from finetune.errors import UserError
from finetune.model.adapter_files import load_adapter, save_adapter
from finetune.model.adapters import (
    adapted_modules,
    attach_adapter,
    base_only,
    check_gradients_arrive,
    count_trainable,
    trainable_parameters,
)
from finetune.model.load import load_model
from finetune.model.source import resolve_model
from finetune.plan.architecture import read_architecture
from finetune.plan.trained import trained_elements
from finetune.recipe.adapter_section import AdapterInit, AdapterKind, AdapterSection

IDS = torch.arange(5, 29)[None]
SECTIONS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"kind": "dora"},
    "rslora": {"rslora": True},
    "gaussian": {"init": "gaussian"},
    "orthogonal": {"init": "orthogonal"},
    "pissa": {"init": "pissa"},
    "olora": {"init": "olora"},
    "pissa-rslora": {"init": "pissa", "rslora": True},
    "pissa-dora": {"init": "pissa", "kind": "dora"},
    "eva": {"init": "eva"},
    "patterns": {"rank_pattern": {"down_proj": 8}, "alpha_pattern": {"q_proj": 2.0}},
    "pissa-patterns": {"init": "pissa", "rank_pattern": {"down_proj": 8}, "alpha_pattern": {"q_proj": 2.0}},
    "layers": {"layers": [-1]},
    "saved": {"modules_to_save": ["lm_head"]},
    "vera": {"kind": "vera", "rank": 16},
    "ia3": {"kind": "ia3", "target_modules": ["k_proj", "v_proj", "down_proj"]},
    "prompt": {"kind": "prompt", "virtual_tokens": 3},
    "prefix": {"kind": "prefix", "virtual_tokens": 3},
    "bitfit": {"kind": "bitfit"},
}
# Kinds whose step 0 is not the base: something stands in front of the row.
IN_FRONT = ("prompt", "prefix")


def test_every_kind_and_start_of_a_recipe_is_saved_here() -> None:
    """`none` has no adapter; loftq, which needs codes, has a test of its own."""
    kinds = {options.get("kind", "lora") for options in SECTIONS.values()} | {"none"}
    starts = {options.get("init", "default") for options in SECTIONS.values()} | {"loftq"}
    assert (kinds, starts) == (set(get_args(AdapterKind)), set(get_args(AdapterInit)))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(make_tiny_model: Any, make_tiny_tokenizer: Any, tmp_path: Path) -> Path:
    """An untied tiny model whose attention has biases, so that every kind has something to train."""
    model = make_tiny_model(tie=False)
    config = model.config
    config.attention_bias = True
    torch.manual_seed(1)
    model = type(model)(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_(0.0, 0.1)
    model.save_pretrained(tmp_path / "base")
    make_tiny_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _section(name: str) -> AdapterSection:
    return AdapterSection(**({"rank": 4, "alpha": 8.0} | SECTIONS[name]))


def _base(folder: Path, dtype: str = "fp32", **options: Any) -> Any:
    return load_model(resolve_model(str(folder)), dtype=dtype, **options)


def _batches() -> list[dict[str, torch.Tensor]]:
    ids = torch.arange(3, 259).view(4, 64)
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]


def _attached(folder: Path, name: str, dtype: str = "fp32") -> Any:
    return attach_adapter(
        _base(folder, dtype),
        _section(name),
        seed=7,
        source=resolve_model(str(folder)),
        batches=_batches(),
    )


def _train(model: Any, steps: int = 3, lr: float = 0.05) -> None:
    """A few AdamW steps with decay, held halves kept as the trainer keeps them."""
    optimizer = torch.optim.AdamW(trainable_parameters(model).values(), lr=lr, weight_decay=0.1)
    held = getattr(model, "held_halves", None)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        check_gradients_arrive(model)
        if held is not None:
            held.before_step()
        optimizer.step()
        if held is not None:
            held.after_step()
    model.eval()


def _logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in IN_FRONT])
def test_step_zero_computes_the_base(folder: Path, name: str) -> None:
    before = _logits(_base(folder))
    change = (_logits(_attached(folder, name)) - before).abs().max()
    assert change <= (
        5e-6 if name in ("orthogonal", "pissa-dora", "dora") or "issa" in name or "olora" in name else 0
    )


@pytest.mark.parametrize("name", SECTIONS)
def test_base_and_saved_adapter_equal_what_was_trained_here_and_in_plain_peft(
    folder: Path, tmp_path: Path, name: str
) -> None:
    from peft import PeftModel

    model = _attached(folder, name)
    before = _logits(_base(folder))
    _train(model)
    expected = _logits(model)
    assert (expected - before).abs().max() > 1e-3
    save_adapter(model, tmp_path / "adapter", source=resolve_model(str(folder)))
    ours = load_adapter(_base(folder), tmp_path / "adapter", source=resolve_model(str(folder)))
    assert torch.equal(_logits(ours), expected)
    assert trainable_parameters(ours) == {}
    plain = _logits(PeftModel.from_pretrained(_base(folder), str(tmp_path / "adapter")))
    if name == "prompt":
        plain = plain[:, 3:]  # PEFT returns the logits of the virtual tokens too
    assert torch.equal(plain, expected)
    with base_only(ours):
        assert torch.equal(_logits(ours), before)
    assert torch.equal(_logits(ours), expected)


@pytest.mark.parametrize("name", ["pissa", "olora", "pissa-rslora", "pissa-dora"])
def test_a_doubled_start_holds_its_first_matrices_bit_by_bit(folder: Path, name: str) -> None:
    model = _attached(folder, name)
    base = {key: p.clone() for key, p in model.named_parameters() if not p.requires_grad}
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.shape[0] == 8
    assert torch.equal(a[:4], a[4:]) and torch.equal(b[:, :4], -b[:, 4:])
    held_a, held_b = a[4:].clone(), b[:, 4:].clone()
    _train(model)
    assert torch.equal(a[4:], held_a) and torch.equal(b[:, 4:], held_b)
    assert not torch.equal(a[:4], held_a) and not torch.equal(b[:, :4], -held_b)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[key], value) for key, value in base.items())


def test_pissa_starts_from_the_principal_components_of_the_weight(folder: Path) -> None:
    layer = _attached(folder, "pissa").base_model.model.model.layers[0].mlp.up_proj
    product = (
        layer.scaling["default"] * layer.lora_B["default"].weight[:, :4] @ layer.lora_A["default"].weight[:4]
    )
    u, values, vh = torch.linalg.svd(layer.base_layer.weight)
    expected = u[:, :4] @ torch.diag(values[:4]) @ vh[:4]
    assert torch.allclose(product, expected, atol=1e-5)


def test_a_doubled_start_has_the_gradients_of_the_method(folder: Path) -> None:
    """Against PEFT's own PiSSA, which changes the base: the same function, so the same loss and gradient of A and B."""
    from peft import LoraConfig, get_peft_model

    ours = _attached(folder, "pissa")
    config = LoraConfig(
        r=4, lora_alpha=8, init_lora_weights="pissa", target_modules="all-linear", task_type="CAUSAL_LM"
    )
    theirs = get_peft_model(_base(folder), config)
    losses = []
    for model in (ours, theirs):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)
    for name, parameter in trainable_parameters(theirs).items():
        other = trainable_parameters(ours)[name].grad
        assert other is not None and parameter.grad is not None
        half = other[:4] if "lora_A" in name else other[:, :4]
        assert torch.allclose(half, parameter.grad, atol=1e-5)


def test_eva_shares_out_the_ranks_and_keeps_their_sum(folder: Path) -> None:
    model = _attached(folder, "eva")
    ranks = [
        module.lora_A["default"].weight.shape[0] for module in model.modules() if hasattr(module, "lora_A")
    ]
    assert sum(ranks) <= 14 * 4
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
    a = layer.lora_A["default"].weight
    assert torch.allclose(a @ a.T, torch.eye(len(a)) * float((a @ a.T)[0, 0]), atol=1e-4)


def test_starts_do_not_touch_the_global_generator_and_repeat(folder: Path) -> None:
    for name in ("pissa", "orthogonal", "eva", "prompt", "prefix", "gaussian"):
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        first = _attached(folder, name)
        assert torch.equal(torch.rand(2), expected), name
        second = trainable_parameters(_attached(folder, name))
        for key, parameter in trainable_parameters(first).items():
            assert torch.equal(parameter, second[key]), (name, key)


@pytest.mark.parametrize("quantize", ["nf4", "fp4"])
def test_loftq_halves_the_error_of_four_bits_and_belongs_to_its_codes(
    folder: Path, tmp_path: Path, quantize: str
) -> None:
    source = resolve_model(str(folder))
    section = AdapterSection(rank=32, alpha=64, init="loftq")
    exact = _logits(_base(folder))
    coded = _logits(_base(folder, quantize=quantize))
    model = attach_adapter(_base(folder, quantize=quantize), section, seed=0, source=source)
    started = _logits(model)
    assert (started - exact).norm() < 0.7 * (coded - exact).norm()
    save_adapter(model, tmp_path / "adapter", source=source)
    loaded = load_adapter(_base(folder, quantize=quantize), tmp_path / "adapter", source=source)
    assert torch.equal(_logits(loaded), started)
    with pytest.raises(UserError, match="belongs to weights in"):
        load_adapter(_base(folder), tmp_path / "adapter", source=source)
    with pytest.raises(UserError, match="without double quantization"):
        load_adapter(
            _base(folder, quantize=quantize, double_quantization=False), tmp_path / "adapter", source=source
        )


@pytest.mark.parametrize("name", IN_FRONT)
def test_virtual_tokens_give_the_same_answer_with_a_cache_and_behind_padding(folder: Path, name: str) -> None:
    model = _attached(folder, name).eval()
    with torch.no_grad():
        model.prompt_encoder["default"].embedding.weight.mul_(5)
        whole = model(input_ids=IDS).logits
        first = model(input_ids=IDS[:, :10], use_cache=True, past_key_values=None)
        cache = first.past_key_values
        rest = model(input_ids=IDS[:, 10:], past_key_values=cache, use_cache=True).logits
        padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), IDS], dim=1)
        mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(IDS)], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        behind = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 5:]
    assert whole.shape[1] == IDS.shape[1]
    assert torch.allclose(first.logits, whole[:, :10], atol=1e-5)
    assert torch.allclose(rest, whole[:, 10:], atol=1e-5)
    assert torch.allclose(behind, whole, atol=1e-5)


def test_bitfit_trains_the_biases_and_nothing_else(folder: Path) -> None:
    model = _attached(folder, "bitfit")
    assert all(name.endswith(".bias") for name in trainable_parameters(model))
    assert len(trainable_parameters(model)) == 2 * 4


def test_a_model_without_biases_has_nothing_for_bitfit(tiny_model: Any) -> None:
    with pytest.raises(UserError, match="has no biases"):
        attach_adapter(tiny_model, AdapterSection(kind="bitfit"), seed=0)


@pytest.mark.parametrize(
    "name", ["lora", "dora", "rslora", "pissa", "patterns", "vera", "ia3", "prompt", "prefix", "bitfit"]
)
def test_the_forecast_counts_the_same_elements(folder: Path, name: str) -> None:
    import json

    architecture = read_architecture(json.loads((folder / "config.json").read_text()))
    assert trained_elements(_section(name), architecture).trained == count_trainable(_attached(folder, name))


def _faults(model: Any, **keys: Any) -> Sequence[Any]:
    with pytest.raises(UserError) as caught:
        attach_adapter(model, AdapterSection(**keys), seed=0)
    return caught.value.faults


def test_every_name_that_matches_nothing_is_told_at_once(tiny_model: Any) -> None:
    faults = _faults(
        tiny_model,
        target_modules=["q_proj", "k_prj"],
        modules_to_save=["lm_hed"],
        layers=[0, 5],
    )
    told = {fault.where: fault.fix for fault in faults}
    assert "k_proj" in told["adapter.target_modules"]
    assert "lm_head" in told["adapter.modules_to_save"]
    assert "0 to 1" in told["adapter.layers"]
    assert not getattr(tiny_model, "peft_config", None)


def test_patterns_must_hit_an_adapted_module(tiny_model: Any) -> None:
    faults = _faults(
        tiny_model, target_modules=["q_proj"], rank_pattern={"down_proj": 8}, alpha_pattern={"qproj": 1}
    )
    assert [fault.where for fault in faults] == ["adapter.rank_pattern", "adapter.alpha_pattern"]
    assert all("q_proj" in fault.fix for fault in faults)


def test_odd_ranks_and_ranks_above_a_matrix_are_refused(tiny_model: Any) -> None:
    assert "even" in _faults(tiny_model, init="orthogonal", rank=3)[0].what
    assert "components" in _faults(tiny_model, init="pissa", rank=65)[0].what


def test_what_is_trained_whole_carries_no_adapter_and_something_has_to(tiny_model: Any) -> None:
    faults = _faults(tiny_model, target_modules=["up_proj", "q_proj"], modules_to_save=["mlp"])
    assert [(fault.where, fault.what.partition(" ")[0]) for fault in faults] == [
        ("adapter.target_modules", "'up_proj'")
    ]
    assert "no adapter is left" in _faults(tiny_model, modules_to_save=["layers"])[0].what
    beside = attach_adapter(tiny_model, AdapterSection(modules_to_save=["mlp"]), seed=0)
    assert set(adapted_modules(beside)) == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_name_in_another_case_is_the_nearest(tiny_model: Any) -> None:
    assert "'q_proj'" in _faults(tiny_model, target_modules=["Q_PROJ"])[0].fix


def test_layers_are_counted_from_either_end(tiny_model: Any) -> None:
    model = attach_adapter(tiny_model, AdapterSection(layers=[-1], target_modules=["q_proj"]), seed=0)
    assert adapted_modules(model) == {"q_proj": 1}
    assert all("layers.1." in name for name in trainable_parameters(model))
