"""How short trainings are judged; that they run is tested on whole projects (tests/pipeline/test_doctor.py)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.data.tokenise import TokenisedRow
from finetune.doctor import trained
from finetune.doctor.trials import for_trial, is_learnt, judge_overfit, plainly, short_rows, weights_apart
from finetune.recipe.schema import Recipe


def losses(*values: Any) -> list[dict[str, Any]]:
    return [{"step": number, "loss": value} for number, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("values", "kind", "status"),
    [
        ((4.0, 1.0, 0.05), "lora", "ok"),
        ((4.0, 3.0, 1.0), "lora", "warning"),
        ((4.0, 3.9, 3.8), "lora", "fault"),
        ((4.0, 5.0, "nan"), "lora", "fault"),
        ((4.0, 3.9, 3.8), "prompt", "ok"),
        ((4.0, 4.1, 4.2), "prompt", "fault"),
    ],
)
def test_examples_by_heart_are_judged_by_their_loss(values: tuple[Any, ...], kind: str, status: str) -> None:
    assert judge_overfit(losses(*values), 8, kind, pairs=False).status == status


def test_a_slow_machine_is_no_fault() -> None:
    assert judge_overfit(losses(4.0, 3.8), 8, "lora", pairs=False, was_cut_short=True).status == "warning"
    assert judge_overfit(losses(4.0), 8, "lora", pairs=False, was_cut_short=True).status == "warning"
    flat = losses(*[4.0] * 12)
    assert judge_overfit(flat, 8, "lora", pairs=False, was_cut_short=True).status == "fault"


def test_pairs_are_learnt_when_every_chosen_answer_is_ahead() -> None:
    pair = {"step": 5, "loss": 0.4, "reward_accuracy": 1.0, "reward_margin": 0.8}
    assert is_learnt(pair, pairs=True)
    assert not is_learnt({**pair, "reward_accuracy": 0.5}, pairs=True)
    assert not is_learnt({**pair, "step": 1, "reward_margin": 0.0}, pairs=True)
    assert is_learnt({"step": 2, "loss": 0.4, "reward_chosen": 0.1, "reward_rejected": -0.1}, pairs=True)


def row(number: int, prompt: list[int], answer: list[int]) -> TokenisedRow:
    ids = [*prompt, *answer]
    return TokenisedRow(f"r{number}", ids, [-100] * len(prompt) + answer, len(answer))


def test_short_rows_have_different_prompts() -> None:
    rows = [row(0, [1, 2, 3, 4, 5], [9]), row(1, [1, 2], [7]), row(2, [1, 2], [8]), row(3, [1, 3], [8])]
    assert [one.row_id for one in short_rows(rows, 2)] == ["r1", "r3"]
    text = [TokenisedRow(f"t{n}", [1, n, 5], [-100, n, 5], 2) for n in (3, 4)]
    assert len(short_rows(text, 8)) == 2
    judged = [AnsweredPrompt(f"k{n}", [1, 2], (Answer([n], [n]),), wanted=n > 5) for n in (4, 5, 6)]
    assert [one.row_id for one in short_rows(judged, 8)] == ["k4", "k6"]


def test_a_trial_changes_nothing_but_what_looks_and_waits() -> None:
    recipe = Recipe.model_validate(
        {
            "name": "x",
            "model": {"id": "x"},
            "data": {"spec": "x"},
            "train": {
                "learning_rate": 3e-4,
                "auto": True,
                "validate_every_steps": 5,
                "early_stopping": 2,
                "samples": {"every_steps": 3},
                "loss": {"kind": "dft", "neftune_alpha": 5.0},
                "micro_batch_size": 2,
            },
            "eval": {"suites": ["x"]},
        }
    )
    settled = for_trial(plainly(recipe), max_steps=3).train
    assert (settled.auto, settled.validate_every_steps, settled.samples, settled.max_steps) == (
        False,
        None,
        None,
        3,
    )
    assert (settled.learning_rate, settled.micro_batch_size, settled.loss.kind) == (3e-4, 2, "nll")
    assert recipe.train.loss.kind == "dft"


def test_weights_apart() -> None:
    one = {"a": torch.tensor([1.0, -4.0])}
    assert weights_apart(one, {"a": one["a"].clone()}) == 0.0
    assert weights_apart(one, {"a": torch.tensor([1.0, -3.0])}) == pytest.approx(0.25)
    assert weights_apart(one, {"b": one["a"]}) == math.inf
    assert weights_apart({}, {}) == math.inf


def test_what_trains_is_what_the_recipe_names(tiny_model: Any) -> None:
    from finetune.model.adapters import attach_adapter, count_trainable

    recipe = Recipe.model_validate(
        {
            "name": "x",
            "model": {"id": "x"},
            "adapter": {"rank": 4, "target_modules": ["q_proj", "v_proj"]},
            "data": {"spec": "x"},
            "eval": {"suites": ["x"]},
        }
    )
    model = attach_adapter(tiny_model, recipe.adapter, seed=1)
    n_trained = count_trainable(model)
    found = trained.check_trained(recipe, model, n_trained)
    assert found.status == "ok" and "q_proj × 2, v_proj × 2" in found.detail
    assert trained.check_trained(recipe, model, 2 * n_trained).status == "fault"
    more = recipe.model_copy(
        update={"adapter": recipe.adapter.model_copy(update={"target_modules": ["q_proj", "k_proj"]})}
    )
    assert "no adapter sits on k_proj" in trained.check_trained(more, model, n_trained).detail
    base = next(p for name, p in model.named_parameters() if "norm" in name)
    base.requires_grad_(True)
    assert "adapter.kind lora does not name" in trained.check_trained(recipe, model, n_trained).detail
    model.requires_grad_(False)
    assert trained.check_trained(recipe, model, n_trained).detail == "nothing trains"
