"""Whole preference runs: resumed, flagged, with a reference that is computed once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.digest import digest_folder
from finetune.errors import UserError
from finetune.telemetry.events import read_events


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == name]


@pytest.mark.parametrize("dies_at_step", [1, 2, 3])
def test_a_killed_run_ends_in_the_same_bytes(
    dpo_recipe: Any, train_pairs: Any, dies_at: Any, dies_at_step: int
) -> None:

    recipe = dpo_recipe(train__epochs=2, train__pack_tokens=200)
    _, whole, _ = train_pairs(recipe, name="whole")
    dies_at(dies_at_step, lambda: train_pairs(recipe, name="killed"))
    said: list[str] = []
    _, killed, _ = train_pairs(recipe, name="killed", said=said)
    assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")
    assert [e["loss"] for e in events_of(killed, "step")] == [e["loss"] for e in events_of(whole, "step")]
    assert any("continuing" in line for line in said) == (dies_at_step > 2)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_batch_that_grows_takes_every_example_once_and_resumes(
    method: str, dpo_recipe: Any, train_pairs: Any, make_pairs: Any, dies_at: Any
) -> None:
    recipe = dpo_recipe(
        method,
        losses=["kto"] if method == "kto" else ["sigmoid"],
        train__packing=False,
        train__gradient_accumulation_steps=3,
        train__batch_ramp={"start_accumulation": 1, "steps": 4},
        train__epochs=1,
    )
    rows = make_pairs(7, unit="judged" if method == "kto" else "pair")
    _, whole, _ = train_pairs(recipe, name="whole", rows=rows)
    sizes = [1, 1, 2, 2, *[3] * 9]
    counts = [round(event["epoch"] * len(rows)) for event in events_of(whole, "step")]
    assert counts == [min(sum(sizes[: n + 1]), len(rows)) for n in range(len(counts))]
    assert counts[-1] == len(rows) and counts[-2] < len(rows)
    dies_at(3, lambda: train_pairs(recipe, name="killed", rows=rows))
    _, killed, _ = train_pairs(recipe, name="killed", rows=rows)
    assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")


def test_the_reference_is_computed_once_and_read_by_every_run_from_the_same_start(
    dpo_recipe: Any, train_pairs: Any, make_pairs: Any, tmp_path: Path
) -> None:
    first: list[str] = []
    train_pairs(dpo_recipe(), name="a", said=first, validation=make_pairs(3))
    assert sum("reference" in line for line in first) == 2  # train and validation
    kept = {path.name: path.read_bytes() for path in (tmp_path / "references").iterdir()}
    again: list[str] = []
    train_pairs(dpo_recipe(beta=0.5), name="b", said=again, validation=make_pairs(3))
    assert not any("reference" in line for line in again)
    shutil.rmtree(tmp_path / "references")
    train_pairs(dpo_recipe(), name="c", validation=make_pairs(3))
    assert {path.name: path.read_bytes() for path in (tmp_path / "references").iterdir()} == kept
    other: list[str] = []
    train_pairs(dpo_recipe(), name="d", said=other, rows=make_pairs(5), validation=make_pairs(3))
    assert sum("reference" in line for line in other) == 1  # other train rows, the same validation rows


def test_another_start_has_another_reference(
    dpo_recipe: Any, train_pairs: Any, moved_model: Any, tmp_path: Path
) -> None:
    recipe = dpo_recipe()
    for number, scale in enumerate((0.1, 0.2)):
        train_pairs(recipe, name=f"r{number}", model=moved_model(recipe, scale))
    assert len(list((tmp_path / "references").iterdir())) == 2


def test_a_damaged_reference_is_refused(dpo_recipe: Any, train_pairs: Any, tmp_path: Path) -> None:
    train_pairs(dpo_recipe(), name="a")
    (kept,) = (tmp_path / "references").iterdir()
    kept.write_bytes(kept.read_bytes()[:-8])
    with pytest.raises(UserError, match="cannot be read"):
        train_pairs(dpo_recipe(), name="b")


def test_a_run_without_a_margin_is_flagged(dpo_recipe: Any, train_pairs: Any) -> None:
    said: list[str] = []
    recipe = dpo_recipe(train__learning_rate=1e-12, train__epochs=6)
    result, folder, _ = train_pairs(recipe, said=said)
    (flag,) = events_of(folder, "flag")
    assert flag["name"] == "no_margin"
    assert flag["step"] == 10
    assert result.flags == [flag["message"]]
    assert any(flag["message"] in line for line in said)


def test_chosen_answers_that_become_unlikely_are_flagged(dpo_recipe: Any, train_pairs: Any) -> None:
    """apo_down pushes the chosen answers down too."""
    recipe = dpo_recipe(losses=["apo_down"], beta=0.5, train__epochs=12)
    result, folder, _ = train_pairs(recipe)
    assert [flag["name"] for flag in events_of(folder, "flag")] == ["chosen_falls"]
    assert "less likely than under the reference" in result.flags[0]


def test_a_run_that_learns_is_not_flagged_and_gets_its_validation_pairs_right(
    dpo_recipe: Any, train_pairs: Any, make_pairs: Any
) -> None:
    recipe = dpo_recipe(train__epochs=15)
    result, folder, _ = train_pairs(recipe, validation=make_pairs(6))
    assert result.flags == []
    assert result.validation["reward_accuracy"] == 1.0
    assert result.validation["reward_margin"] > 0.5
    assert result.validation_loss is not None
    assert result.validation_loss < events_of(folder, "step")[0]["loss"]


def test_the_adapter_loads_in_plain_peft(
    dpo_recipe: Any, train_pairs: Any, adapted_model: Any, make_pairs: Any, answer_logps: Any
) -> None:
    from peft import PeftModel

    recipe = dpo_recipe()
    _, folder, trained = train_pairs(recipe)
    base = adapted_model(recipe).unload()
    loaded = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    rows = make_pairs(3)
    assert torch.allclose(answer_logps(loaded, rows), answer_logps(trained.eval(), rows), atol=1e-4)


@pytest.fixture
def windowed_model() -> Callable[[], Any]:
    """A tiny model whose layers see the last 8 tokens only."""

    def make() -> Any:
        from transformers import MistralConfig, MistralForCausalLM

        torch.manual_seed(0)
        config = MistralConfig(
            vocab_size=259,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=8,
            max_position_embeddings=512,
        )
        return MistralForCausalLM(config).eval()

    return make


def test_a_model_with_a_window_gets_a_copy_of_the_prompt_for_each_answer(
    dpo_recipe: Any, first_step: Any, make_pairs: Any, answer_logps: Any, windowed_model: Any
) -> None:
    from finetune.model.adapters import attach_adapter
    from finetune.model.attention import register_document_attention

    recipe, said, rows = dpo_recipe(train__pack_tokens=4096), [], make_pairs(4)
    model = windowed_model()
    model.set_attn_implementation(register_document_attention())
    tuned = attach_adapter(model, recipe.adapter, seed=1)
    alone = answer_logps(tuned, rows)
    loss, _, means = first_step(recipe, model=tuned, rows=rows, said=said)
    assert any("cannot share a prompt" in line for line in said)
    assert means["logp_chosen"] == pytest.approx(float(alone[:, 0].mean()), abs=1e-3)
    assert loss == pytest.approx(0.693147, abs=1e-6)


def test_a_pair_that_does_not_fit_a_pack_is_named(dpo_recipe: Any, train_pairs: Any) -> None:
    answer = Answer([5] * 100, [5] * 100)
    with pytest.raises(UserError, match=r"a row of 250 tokens does not fit"):
        rows = [AnsweredPrompt("long", [4] * 50, (answer, Answer([6] * 100, [6] * 100)))]
        train_pairs(dpo_recipe(train__pack_tokens=200), rows=rows)


def test_ctrl_c_saves_the_step_and_the_run_continues(
    dpo_recipe: Any, train_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.training.exact_trainer import StopWhenAsked

    recipe = dpo_recipe(train__checkpoint_every_steps=100)
    _, whole, _ = train_pairs(recipe, name="whole")
    original = StopWhenAsked.on_step_end

    def asked(self: StopWhenAsked, *args: Any, **kwargs: Any) -> None:
        self.asked = True
        original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", asked)
        with pytest.raises(KeyboardInterrupt):
            train_pairs(recipe, name="stopped")
    _, stopped, _ = train_pairs(recipe, name="stopped")
    assert digest_folder(stopped / "adapter") == digest_folder(whole / "adapter")


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo"])
def test_the_best_step_is_chosen_by_the_losses_of_single_examples(
    dpo_recipe: Any, train_pairs: Any, make_pairs: Any, method: str
) -> None:
    unit = "judged" if method == "kto" else "pair"
    recipe = dpo_recipe(
        method, train__result="best", train__validate_every_steps=1, train__epochs=2, train__pack_tokens=200
    )
    rows = make_pairs(6, unit=unit)
    result, folder, _ = train_pairs(recipe, rows=rows, validation=rows)
    validations = {event["step"]: event["loss"] for event in events_of(folder, "validation")}
    assert validations[result.result_step] == pytest.approx(result.validation_loss, abs=1e-6)
    assert result.result_step <= min(validations, key=lambda step: validations[step])
