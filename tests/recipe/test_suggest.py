"""Suggestions for wrong keys, and the table of names that other tools use."""

from __future__ import annotations

import pytest

from finetune.recipe.renamed import RECIPE_NAMES_ELSEWHERE
from finetune.recipe.schema import RecipeFile
from finetune.recipe.suggest import dotted_keys, suggest

KNOWN = list(dotted_keys(RecipeFile))


def test_every_name_elsewhere_points_to_a_key_or_to_a_sentence() -> None:
    assert not {target for target in RECIPE_NAMES_ELSEWHERE.values() if " " not in target} - set(KNOWN)


def test_no_name_elsewhere_is_a_key_of_the_section_it_points_to() -> None:
    for name, target in RECIPE_NAMES_ELSEWHERE.items():
        section, dot, _ = target.rpartition(".")
        assert f"{section}{dot}{name}" not in KNOWN


@pytest.mark.parametrize(
    ("key", "target"),
    [
        ("max_seq_length", "data.max_tokens"),
        ("max_length", "data.max_tokens"),
        ("lora_r", "adapter.rank"),
        ("lora_alpha", "adapter.alpha"),
        ("lora_dropout", "adapter.dropout"),
        ("lr", "train.learning_rate"),
        ("num_train_epochs", "train.epochs"),
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("per_device_eval_batch_size", "eval.batch_size"),
        ("warmup_ratio", "train.warmup_share"),
        ("lr_scheduler_type", "train.schedule"),
        ("evaluation_strategy", "train.validate_every_steps"),
        ("save_steps", "train.checkpoint_every_steps"),
        ("load_in_4bit", "model.quantize"),
        ("model_name_or_path", "model.id"),
        ("dataset", "data.spec"),
        ("LoRA_R", "adapter.rank"),
        ("per-device-train-batch-size", "train.micro_batch_size"),
        ("num_train_epoch", "train.epochs"),
        ("gradient_checkpointing", "train.gradient_checkpointing"),
    ],
)
def test_names_of_other_tools(key: str, target: str) -> None:
    siblings = [name for name in KNOWN if "." not in name]
    assert suggest(key, "", siblings, KNOWN, RECIPE_NAMES_ELSEWHERE).startswith(f"did you mean '{target}'")


@pytest.mark.parametrize(
    ("key", "target"),
    [
        ("alpha", "beta"),
        ("lmbda", "distil.on_policy.share"),
        ("kd_temperature", "temperature"),
        ("divergence", "kind"),
    ],
)
def test_names_of_distillation_elsewhere(key: str, target: str) -> None:
    siblings = [name.removeprefix("distil.loss.") for name in KNOWN if name.startswith("distil.loss.")]
    assert suggest(key, "distil.loss", siblings, KNOWN, RECIPE_NAMES_ELSEWHERE).startswith(
        f"did you mean '{target}'"
    )
    assert suggest("alpha", "", [], KNOWN, RECIPE_NAMES_ELSEWHERE).startswith("did you mean 'adapter.alpha'")


def test_a_target_that_the_schema_lacks_is_not_suggested() -> None:
    assert suggest("alias", "", ["a", "b"], ["a", "b"], {"alias": "gone.key"}) == "keys known here: a, b"
