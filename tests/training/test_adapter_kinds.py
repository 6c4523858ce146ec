"""Every kind of adapter and start through the whole of training: a few steps, a kill, and the same bytes at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from finetune.data.tokenise import TokenisedRow
from finetune.digest import digest_folder
from finetune.errors import UserError
from finetune.model.adapter_files import load_adapter
from finetune.model.adapter_starts import lora_layers
from finetune.recipe.adapter_section import AdapterInit, AdapterKind
from finetune.telemetry.events import read_events
from finetune.training.exact_trainer import StopWhenAsked
from finetune.training.trained_part import add_trained_part, start_batches

UNPACKED = {"train__packing": False, "train__micro_batch_size": 4}
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"adapter__kind": "dora"},
    "rslora": {"adapter__rslora": True},
    "pissa": {"adapter__init": "pissa", "train__weight_decay": 0.1},
    "olora": {"adapter__init": "olora"},
    "gaussian": {"adapter__init": "gaussian"},
    "eva": {"adapter__init": "eva"},
    "orthogonal": {"adapter__init": "orthogonal"},
    "lora plus": {"train__lora_plus_ratio": 4.0},
    "patterns": {"adapter__rank_pattern": {"down_proj": 16}, "adapter__layers": [-1]},
    "head": {"adapter__modules_to_save": ["lm_head"]},
    "vera": {"adapter__kind": "vera", "train__learning_rate": 0.1},
    "ia3": {"adapter__kind": "ia3", "train__learning_rate": 0.1},
    "prompt": {
        "adapter__kind": "prompt",
        "adapter__virtual_tokens": 4,
        "train__learning_rate": 0.3,
        **UNPACKED,
    },
    "prefix": {
        "adapter__kind": "prefix",
        "adapter__virtual_tokens": 4,
        "train__learning_rate": 0.1,
        **UNPACKED,
    },
    "last layer": {"adapter__kind": "none", "adapter__layers": [-1], "adapter__freeze": ["embed_tokens"]},
}


def test_every_kind_and_start_of_a_recipe_is_trained_here() -> None:
    """Plain LoRA, bitfit and loftq in the tests below: they need a base of another kind."""
    kinds = {changes.get("adapter__kind", "lora") for changes in KINDS.values()} | {"bitfit"}
    starts = {changes.get("adapter__init", "default") for changes in KINDS.values()} | {"loftq"}
    assert (kinds, starts) == (set(get_args(AdapterKind)), set(get_args(AdapterInit)))


def losses_of(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def killed_after(step: int) -> Any:
    def kill(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            raise SystemExit  # nothing is saved on the way out, as after kill -9

    return kill


@pytest.mark.parametrize("name", KINDS)
def test_it_learns_and_a_killed_run_ends_with_the_same_bytes(
    name: str, make_recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(**({"train__epochs": 3, "train__pack_tokens": 192} | KINDS[name]))
    result, folder, _ = train(recipe, name="whole")
    losses = losses_of(folder)
    assert len(losses) >= 5
    assert losses[-1] < losses[0] - 0.02
    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", killed_after(5))
        with pytest.raises(SystemExit):
            train(recipe, name="killed")
    said: list[str] = []
    again, killed, _ = train(recipe, name="killed", said=said)
    assert "step-4" in said[0]
    assert again.adapter_sha256 == result.adapter_sha256
    assert digest_folder(killed / result.output) == digest_folder(folder / result.output)
    assert losses_of(killed) == losses
    assert not [path for path in folder.rglob("*") if path.suffix in (".pt", ".pth", ".bin", ".pkl")]


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].get("adapter__kind") != "none"])
def test_the_saved_adapter_on_a_fresh_base_is_the_trained_model(
    name: str, make_recipe: Any, make_rows: Any, train: Any, make_tiny_model: Any
) -> None:
    recipe = make_recipe(**({"train__epochs": 1, "train__pack_tokens": 256} | KINDS[name]))
    _, folder, model = train(recipe)
    base = make_tiny_model()
    base.get_input_embeddings().weight.data *= 3
    base.set_attn_implementation("sdpa")
    loaded = load_adapter(base, folder / "adapter")
    model.get_base_model().set_attn_implementation("sdpa")
    ids = torch.tensor([make_rows(1)[0].input_ids])
    with torch.no_grad():
        trained, fresh = model.eval()(input_ids=ids).logits, loaded(input_ids=ids).logits
    assert torch.allclose(trained, fresh, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("quantize", ["nf4", "fp4", "int8"])
def test_quantized_bases_train_and_resume(
    kind: str,
    quantize: str,
    make_recipe: Any,
    train: Any,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from finetune.model.adapters import attach_adapter
    from finetune.model.load import load_model
    from finetune.model.source import resolve_model

    recipe = make_recipe(
        adapter__kind=kind,
        model__quantize=quantize,
        model__id=str(tiny_model_folder),
        train__epochs=2,
        train__pack_tokens=192,
    )

    def base(_: Any) -> Any:
        model = load_model(
            resolve_model(str(tiny_model_folder)), dtype="fp32", quantize=quantize, attention="document"
        )
        return attach_adapter(model, recipe.adapter, seed=0)

    result, folder, model = train(recipe, name="whole", model=base)
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    losses = losses_of(folder)
    assert losses[-1] < losses[0]
    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", killed_after(3))
        with pytest.raises(SystemExit):
            train(recipe, name="killed", model=base)
    again, _, _ = train(recipe, name="killed", model=base)
    assert again.adapter_sha256 == result.adapter_sha256


@pytest.mark.parametrize("name", ["bitfit", "loftq"])
def test_biases_and_starts_against_codes_train_and_resume(
    name: str,
    make_recipe: Any,
    train: Any,
    make_tiny_model: Any,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from finetune.model.adapters import attach_adapter
    from finetune.model.load import load_model
    from finetune.model.source import resolve_model

    source = resolve_model(str(tiny_model_folder))
    changes: dict[str, Any] = {"adapter__kind": "bitfit", "train__learning_rate": 0.05}
    if name == "loftq":
        changes = {"adapter__init": "loftq", "model__quantize": "nf4", "model__id": str(tiny_model_folder)}
    recipe = make_recipe(train__epochs=2, train__pack_tokens=192, **changes)

    def base(_: Any) -> Any:
        if name == "loftq":
            model = load_model(source, dtype="fp32", quantize="nf4", attention="document")
            return attach_adapter(model, recipe.adapter, seed=0, source=source)
        plain = make_tiny_model()
        plain.config.attention_bias = True
        torch.manual_seed(0)
        biased = type(plain)(plain.config).eval()
        biased.set_attn_implementation("document")
        return attach_adapter(biased, recipe.adapter, seed=0)

    result, folder, model = train(recipe, name="whole", model=base)
    losses = losses_of(folder)
    assert losses[-1] < losses[0]
    if name == "bitfit":
        moved = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
        assert moved and all(key.endswith(".bias") for key in moved)
    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", killed_after(3))
        with pytest.raises(SystemExit):
            train(recipe, name="killed", model=base)
    again, killed, _ = train(recipe, name="killed", model=base)
    assert again.adapter_sha256 == result.adapter_sha256
    assert losses_of(killed) == losses


def test_frozen_layers_and_modules_stay_as_they_were(
    make_recipe: Any, train: Any, make_tiny_model: Any
) -> None:
    recipe = make_recipe(**({"train__epochs": 1} | KINDS["last layer"]))
    _, _, model = train(recipe)
    base = make_tiny_model()
    base.get_input_embeddings().weight.data *= 3
    before = dict(base.named_parameters())
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "layers.1." in name or name == "model.norm.weight"}


def test_freezing_everything_is_refused(make_recipe: Any, adapted_model: Any) -> None:
    recipe = make_recipe(adapter__kind="none", adapter__freeze=["model", "lm_head"])
    with pytest.raises(UserError, match="nothing is left to train"):
        adapted_model(recipe)
    with pytest.raises(UserError, match="did you mean 'embed_tokens'"):
        adapted_model(make_recipe(adapter__kind="none", adapter__freeze=["embed_token"]))


def short_rows(n: int) -> list[TokenisedRow]:
    """Rows of five different tokens each."""
    starts = range(5, 5 + 5 * n, 5)
    return [
        TokenisedRow(f"row-{first}", ids, ids, 5) for first in starts if (ids := [*range(first, first + 5)])
    ]


def test_eva_puts_as_many_short_rows_into_a_batch_as_its_ranks_need(
    make_tiny_model: Any, make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT passes over batches with fewer tokens than directions, and asks for the next one without end."""
    recipe = make_recipe(adapter__init="eva")
    model = add_trained_part(make_tiny_model(), recipe, rows=short_rows(20))
    ranks = [len(layer.lora_A["default"].weight) for layer in lora_layers(model).values()]
    assert 0 < sum(ranks) <= 8 * 14
    batches = start_batches(short_rows(20), model, at_least=32)
    assert [int(batch["attention_mask"].sum()) for batch in batches] == [35, 65]
    with pytest.raises(UserError, match="needs 32 tokens of train rows at these ranks, and there are 30"):
        add_trained_part(make_tiny_model(), recipe, rows=short_rows(6))
    highest = make_recipe(adapter__init="eva", adapter__rank=32)
    monkeypatch.setattr("finetune.model.adapter_starts._EVA_PASSES", 5)
    with pytest.raises(UserError, match="did not settle in 5 passes"):
        add_trained_part(make_tiny_model(), highest, rows=short_rows(40))
    with pytest.raises(UserError, match="finds 32 components"):
        add_trained_part(make_tiny_model(), make_recipe(adapter__init="eva", adapter__rank=33), rows=())
