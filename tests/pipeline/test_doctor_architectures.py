"""The doctor on models that are no Llama: what cannot be packed is told, and what can be trained goes through every trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from finetune.doctor import trials
from finetune.doctor.finding import Finding
from finetune.errors import UserError
from finetune.pipeline.doctor import examine_recipe
from finetune.pipeline.inputs import gather_inputs
from finetune.pipeline.preflight import preflight

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def mamba() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    size = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
    return MambaForCausalLM(MambaConfig(vocab_size=259, **size, **IDS))


def gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 64}
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=259, **size, **heads, **IDS))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=2, n_positions=512, **IDS))


def place(project: Any, make: Callable[[], Any]) -> None:
    """The model in place of the project's Llama, with the same tokenizer."""
    torch.manual_seed(0)
    folder = project.folder / "tiny-model"
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    make().save_pretrained(folder)


def examine(project: Any, *overrides: str) -> dict[str, Finding]:
    found = examine_recipe(str(project.recipe), overrides, say=lambda line: None)
    return {one.check: one for one in found.findings}


def faults(found: dict[str, Finding]) -> list[str]:
    """A random model has nothing that a few steps could teach it by heart."""
    return [str(one) for one in found.values() if one.status == "fault" and "by heart" not in one.check]


def test_a_mamba_is_told_what_a_run_says_of_packing(project: Any) -> None:
    place(project, mamba)
    found = examine(project)
    (told,) = [one for one in found.values() if one.status == "fault"]
    assert told.where == "train.packing" and "packing: false" in told.remedy
    inputs = gather_inputs(str(project.recipe))
    with pytest.raises(UserError) as caught:
        preflight(inputs.recipe, inputs.source)
    assert told.detail.startswith(caught.value.faults[0].what)
    assert found["memory forecast"].status == "warning" and "mamba" in found["memory forecast"].detail


@pytest.mark.parametrize(
    ("make", "packing"), [(mamba, "false"), (gemma2, "true"), (gpt2, "true")], ids=["mamba", "gemma2", "gpt2"]
)
def test_every_trial_is_made(
    project: Any, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], packing: str
) -> None:
    monkeypatch.setattr(trials, "OVERFIT_STEPS", 2)
    place(project, make)
    found = examine(project, f"train.packing={packing}", "train.learning_rate=1e-3")
    assert faults(found) == []
    made = ("gradients", "longest batch", "resume", "save and reload", "accumulation")
    assert {found[name].status for name in made} <= {"ok", "warning"}
    assert found["packing"].status == ("ok" if packing == "true" else "skipped")


@pytest.mark.parametrize("target", ["out_proj", "dt_proj"])
def test_parts_of_a_mamba_that_no_adapter_reaches_are_told(project: Any, target: str) -> None:
    place(project, mamba)
    found = examine(project, "train.packing=false", f"adapter.target_modules=[in_proj, {target}]")
    (told,) = [one for one in found.values() if one.status == "fault"]
    assert told.where == "adapter.target_modules" and target in told.detail
    assert "in_proj" in told.remedy and "past an adapter" in told.detail


def test_adam_mini_knows_of_models_without_heads() -> None:
    from finetune.recipe.train_section import TrainSection
    from finetune.training.optimizers import build_optimizer

    model = mamba()
    optimizer = build_optimizer(model, TrainSection(optimizer="adam_mini", learning_rate=1e-3))
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
