"""Reward models: the loss by hand, one row for both answers, and scores that plain transformers reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from finetune.digest import digest_folder
from finetune.model.adapter_files import load_adapter
from finetune.model.adapters import attach_adapter
from finetune.model.load import load_model
from finetune.model.reward import scored_place
from finetune.model.source import resolve_model
from finetune.telemetry.events import read_events


@pytest.fixture
def reward_model(tiny_model_folder: Path) -> Callable[..., Any]:
    """reward_model(recipe): the tiny model with a score head and the recipe's adapter."""

    def make(recipe: Any, **options: Any) -> Any:
        given = {"dtype": "fp32", "attention": "document", "score_seed": 3} | options
        model = load_model(resolve_model(str(tiny_model_folder)), **given)
        return model if recipe.adapter.kind == "none" else attach_adapter(model, recipe.adapter, seed=1)

    return make


@torch.no_grad()
def scores(model: Any, rows: Any) -> torch.Tensor:
    """[rows, 2] scores as transformers gives them, each answer behind its own prompt."""
    model.eval()
    values = [
        model(input_ids=torch.tensor([row.prompt + a.ids])).logits[0, 0] for row in rows for a in row.answers
    ]
    return torch.stack(values).float().view(len(rows), 2)


@pytest.mark.parametrize("kind", ["lora", "dora", "vera", "ia3", "none"])
@pytest.mark.parametrize("center", [None, 0.1])
def test_the_first_loss_is_that_of_bradley_and_terry(
    dpo_recipe: Any, first_step: Any, make_pairs: Any, reward_model: Any, kind: str, center: float | None
) -> None:
    recipe = dpo_recipe("reward", center_rewards=center, adapter__kind=kind, train__pack_tokens=4096)
    rows, model = make_pairs(6), reward_model(recipe)
    found = scores(model, rows)
    expected = -logsigmoid(found[:, 0] - found[:, 1]).mean() + (center or 0) * (found.sum(dim=1) ** 2).mean()
    loss, gradient, means = first_step(recipe, rows=rows, model=model)
    assert loss == pytest.approx(float(expected), abs=1e-5)
    assert means["reward_margin"] == pytest.approx(float((found[:, 0] - found[:, 1]).mean()), abs=1e-5)
    assert float(gradient.norm()) > 0


def test_one_row_for_both_answers_gives_the_gradient_of_two(
    dpo_recipe: Any, first_step: Any, reward_model: Any
) -> None:
    gradients = []
    for share_prompts in (True, False):
        recipe = dpo_recipe("reward", share_prompts=share_prompts, train__pack_tokens=4096)
        gradients.append(first_step(recipe, model=reward_model(recipe))[1])
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 1e-5


@pytest.mark.parametrize(
    ("ids", "pad_id", "place"), [([5, 6, 2], 2, 1), ([5, 6, 2], None, 2), ([5, 6, 2], 9, 2), ([2, 2], 2, 1)]
)
def test_a_score_is_read_where_transformers_reads_it(ids: list[int], pad_id: int | None, place: int) -> None:
    assert scored_place(ids, pad_id) == place


def test_it_learns_resumes_to_the_same_bytes_and_loads_in_plain_transformers(
    dpo_recipe: Any,
    train_pairs: Any,
    make_pairs: Any,
    reward_model: Any,
    tiny_model_folder: Path,
    dies_at: Any,
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    recipe, rows = dpo_recipe("reward", train__epochs=8), make_pairs(6)
    result, whole, trained = train_pairs(recipe, name="whole", validation=rows, model=reward_model(recipe))
    first = next(event for event in read_events(whole / "events.jsonl") if event["event"] == "step")
    assert result.validation_loss < first["loss"]
    assert result.validation["reward_accuracy"] == 1.0
    dies_at(5, lambda: train_pairs(recipe, name="killed", validation=rows, model=reward_model(recipe)))
    _, killed, _ = train_pairs(recipe, name="killed", validation=rows, model=reward_model(recipe))
    assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")
    expected = scores(trained, rows)
    base = AutoModelForSequenceClassification.from_pretrained(
        tiny_model_folder, num_labels=1, dtype=torch.float32
    )
    assert torch.allclose(
        scores(PeftModel.from_pretrained(base, str(whole / "adapter")), rows), expected, atol=1e-4
    )
    ours = load_model(
        resolve_model(str(tiny_model_folder)), dtype="fp32", score_seed=77
    )  # the head is the saved one
    assert torch.allclose(scores(load_adapter(ours, whole / "adapter"), rows), expected, atol=1e-4)


def test_four_bit_weights_keep_their_head(dpo_recipe: Any, first_step: Any, reward_model: Any) -> None:
    recipe = dpo_recipe("reward", model__quantize="nf4", model__dtype="bf16")
    model = reward_model(recipe, dtype="bf16", quantize="nf4")
    assert type(model.get_base_model().score.original_module).__name__ == "Linear"
    loss, gradient, _ = first_step(recipe, model=model)
    assert loss == pytest.approx(0.69, abs=0.1)
    assert float(gradient.norm()) > 0


def test_the_same_seed_starts_the_same_head(dpo_recipe: Any, reward_model: Any) -> None:
    recipe = dpo_recipe("reward", adapter__kind="none")
    heads = [reward_model(recipe, score_seed=seed).score.weight for seed in (3, 3, 4)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
