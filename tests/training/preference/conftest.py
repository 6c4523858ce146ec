"""Pairs over the tiny model, and trainers that are asked for their first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.pair_tokens import AnsweredPrompt, tokenise_preferences
from finetune.data.rows import Row
from finetune.recipe.schema import Recipe
from finetune.training.preference import train_preference

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def _row(index: int) -> Row:
    """'n?' is better answered by the number in words than by the one after it; lengths differ from row to row."""
    good, bad = " ".join([WORDS[index % 10]] * (1 + index % 3)), WORDS[(index + 1) % 10] * (1 + index % 2)
    return Row(
        f"row-{index}",
        ({"role": "system", "content": "s"}, {"role": "user", "content": f"{'so ' * (index % 4)}{index}?"}),
        str(index),
        "test",
        kind="preference",
        chosen=({"role": "assistant", "content": good},),
        rejected=({"role": "assistant", "content": bad},),
    )


@pytest.fixture
def make_pairs(tiny_tokenizer: Any) -> Callable[..., list[AnsweredPrompt]]:
    """make_pairs(n, unit=…): tokenised pairs, or judged answers, of uneven length."""

    def make(n: int = 6, unit: Any = "pair") -> list[AnsweredPrompt]:
        rows = [_row(index) for index in range(n)]
        return tokenise_preferences(rows, tiny_tokenizer, unit=unit, max_tokens=256).rows

    return make


@pytest.fixture
def dpo_recipe(make_recipe: Any) -> Callable[..., Recipe]:
    """dpo_recipe(method=…, losses=…, train__…=…): a preference recipe; other keywords go to train.preference."""

    def make(method: str = "dpo", **changes: Any) -> Recipe:
        own = {key: value for key, value in changes.items() if "__" not in key}
        rest = {key: value for key, value in changes.items() if "__" in key}
        return make_recipe(train__method=method, train__preference=own, **rest)  # type: ignore[no-any-return]

    return make


@pytest.fixture
def train_pairs(
    tmp_path: Path,
    tiny_tokenizer: Any,
    make_pairs: Any,
    adapted_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """train_pairs(recipe, name=…, rows=…, validation=…, model=…); returns (result, run folder, model)."""
    monkeypatch.setattr("finetune.training.session.measure_peak_flops", lambda dtype, device: 1e12)

    def run(
        recipe: Recipe,
        *,
        name: str = "run",
        rows: Sequence[AnsweredPrompt] | None = None,
        validation: Sequence[AnsweredPrompt] = (),
        model: Any = None,
        said: list[str] | None = None,
    ) -> Any:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        unit = "judged" if recipe.train.method == "kto" else "pair"
        model = adapted_model(recipe) if model is None else model
        result = train_preference(
            recipe,
            model,
            tiny_tokenizer,
            rows or make_pairs(unit=unit),
            validation,
            run_folder=folder,
            owner="o" * 64,
            references=tmp_path / "references",
            say=(said if said is not None else []).append,
        )
        return result, folder, model

    return run


@pytest.fixture
def dies_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """dies_at(step, run): call `run`, whose process "is killed" after that optimizer step."""
    from finetune.training.exact_trainer import StopWhenAsked

    def kill(step: int, run: Callable[[], Any]) -> None:
        calls, original = {"n": 0}, StopWhenAsked.on_step_end

        def dies(*args: Any, **kwargs: Any) -> None:
            calls["n"] += 1
            if calls["n"] == step:
                raise SystemExit
            original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(StopWhenAsked, "on_step_end", dies)
            with pytest.raises(SystemExit):
                run()

    return kill


class _FirstStepError(Exception):
    """Ends training once the first gradient is there."""


@pytest.fixture
def first_step(train_pairs: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """first_step(recipe, …): (loss, flattened gradient, means) of the first optimizer step, before clipping."""
    from finetune.training.exact_trainer import ExactTrainer

    def run(recipe: Recipe, **options: Any) -> Any:
        found: dict[str, Any] = {}

        def capture(self: Any, model: Any) -> float:
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            found["gradient"] = torch.cat(gradients).clone()
            found["loss"], found["means"] = self.tally.loss, self.tally.example_means()
            raise _FirstStepError

        with monkeypatch.context() as patch:
            patch.setattr(ExactTrainer, "_clip_grad_norm", capture)
            with pytest.raises(_FirstStepError):
                train_pairs(recipe, **options)
        return found["loss"], found["gradient"], found["means"]

    return run


@pytest.fixture
def moved_model(adapted_model: Any) -> Callable[..., Any]:
    """moved_model(recipe): the tiny model whose adapter already does something: an adapter that SFT has left."""

    def make(recipe: Recipe, scale: float = 0.3) -> Any:
        model = adapted_model(recipe)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        return model

    return make


@pytest.fixture
def answer_logps() -> Callable[..., Any]:
    """answer_logps(model, rows): [rows, answers] log-probabilities, each answer alone behind its own prompt."""

    @torch.no_grad()
    def score(model: Any, rows: Sequence[AnsweredPrompt]) -> torch.Tensor:
        values = []
        for row in rows:
            for answer in row.answers:
                ids = torch.tensor([row.prompt + answer.ids])
                logits = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt) - 1 : -1].float()
                chosen = torch.tensor(answer.ids)
                values.append(-torch.nn.functional.cross_entropy(logits, chosen, reduction="sum"))
        return torch.stack(values).view(len(rows), -1)

    return score
