"""What is written about a training while it runs, and that writing it changes no byte of the weights."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from finetune.errors import UserError
from finetune.telemetry.callback import TelemetryCallback
from finetune.telemetry.events import read_events
from finetune.training import samples as samples_module
from finetune.training import session
from finetune.training.preflight import check_training
from finetune.training.samples import kl_to_base, sample_prompts
from finetune.training.validation import by_source

SAMPLES = {"every_steps": 2, "prompts": 2, "max_new_tokens": 6}


def weights_of(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == kind]


class Gradients(TrainerCallback):
    """The norm of the gradient that the optimizer is given."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gradients = [p.grad.flatten() for p in kwargs["model"].parameters() if p.grad is not None]
        self.norms.append(float(torch.cat(gradients).norm()))


@pytest.fixture
def recipe(make_recipe: Any) -> Any:
    """Dropout, so that every draw of a random number shows in the weights; clipped from the first step on."""
    return make_recipe(
        adapter={"rank": 8, "alpha": 16, "dropout": 0.1},
        train__epochs=2,
        train__pack_tokens=128,
        train__max_grad_norm=0.05,
        train__validate_every_steps=3,
        train__samples=SAMPLES,
    )


def without_samples(recipe: Any) -> Any:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"samples": None})})


def test_the_weights_are_the_same_bytes_with_and_without_being_watched(
    recipe: Any, train: Any, make_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(3)
    _, watched, _ = train(recipe, name="watched", validation=rows)
    _, plain, _ = train(without_samples(recipe), name="plain", validation=rows)

    class Blind(TelemetryCallback):
        """Keeps only what the result is made of."""

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            pass

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            pass

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.log.write(
                "step",
                step=state.global_step,
                tokens=0,
                target_tokens=0,
                loss=0.0,
                tokens_per_second=1.0,
                mfu=0.0,
            )
            self.tally.__init__()

    monkeypatch.setattr(session, "TelemetryCallback", Blind)
    _, blind, _ = train(without_samples(recipe), name="blind", validation=rows)
    assert weights_of(watched) == weights_of(plain) == weights_of(blind)
    assert events_of(watched, "sample") and not events_of(plain, "sample")
    assert "grad_norm" not in events_of(blind, "step")[0]


def test_every_step_tells_how_the_weights_moved_and_on_what(recipe: Any, train: Any, make_rows: Any) -> None:
    seen = Gradients()
    _, folder, _ = train(without_samples(recipe), callbacks=[seen])
    steps = events_of(folder, "step")
    assert [step["grad_norm_clipped"] for step in steps] == pytest.approx(seen.norms, rel=1e-4)
    assert all(step["grad_norm"] > step["grad_norm_clipped"] for step in steps)
    (start,) = events_of(folder, "start")
    (end,) = events_of(folder, "end")
    assert start["setting"]["method"] == "sft" and start["setting"]["adapter"] == recipe.adapter.kind
    assert start["setting"]["optimizer"] == recipe.train.optimizer and "parameters" in start["setting"]
    assert start["total_steps"] == len(steps) == end["step"] == end["total_steps"]
    per_pass = start["examples"]
    assert [step["data_position"] for step in steps] == [*range(1, per_pass + 1)] * 2
    for step in steps:
        assert set(step["update_ratio_blocks"]) == {"0", "1"}
        assert step["peak_memory_bytes"] > 0
    # In the first step only B moves, which was zero and has no ratio; A is told from B and has no gradient yet.
    assert steps[0]["update_ratio_median"] == 0.0
    assert all(0 < step["update_ratio_median"] < 1 for step in steps[1:])
    low, high = sorted(steps[-1]["update_ratio_blocks"].values())
    assert low <= steps[-1]["update_ratio"] <= high


def test_validation_is_told_by_source_and_the_sources_add_up(recipe: Any, train: Any, make_rows: Any) -> None:
    rows = [replace(row, source=f"file-{index % 2}:{index}") for index, row in enumerate(make_rows(5))]
    _, folder, _ = train(without_samples(recipe), validation=rows)
    for event in events_of(folder, "validation"):
        parts = event["sources"]
        assert set(parts) == {"file-0", "file-1"}
        assert sum(part["target_tokens"] for part in parts.values()) == event["target_tokens"]
        total = sum(part["loss"] * part["target_tokens"] for part in parts.values())
        assert total / event["target_tokens"] == pytest.approx(event["loss"], rel=1e-9)
    assert by_source(None, ["one", "one"]) == {}  # type: ignore[arg-type]
    assert by_source(None, ["rows.jsonl:1", "rows.jsonl:27"]) == {}  # type: ignore[arg-type]


def test_samples_answer_the_same_prompts_along_the_way(
    recipe: Any, train: Any, make_rows: Any, tiny_tokenizer: Any
) -> None:
    validation = make_rows(3)
    _, folder, model = train(recipe, validation=validation)
    found = events_of(folder, "sample")
    n_steps = events_of(folder, "end")[0]["step"]
    steps = sorted({0, *range(2, n_steps + 1, 2), n_steps})
    assert [event["step"] for event in found] == [step for step in steps for _ in range(2)]
    first = found[0]
    assert first["prompt"].endswith("<|im_start|>assistant\n")
    assert first["name"] == "row-0" and first["reference"] == "zero"
    assert first["kl_to_base"] == 0.0  # a fresh adapter is the base
    assert found[-1]["kl_to_base"] > 1e-4
    # The last answers are those of the trained model, by a plain greedy decoder.
    ids = torch.tensor([sample_prompts(recipe.train.samples, validation, tiny_tokenizer)[0].ids])
    n_prompt = ids.shape[1]
    with torch.no_grad():
        for _ in range(6):
            following = model(input_ids=ids).logits[0, -1].argmax().view(1, 1)
            ids = torch.cat([ids, following], dim=1)
            if int(following) == tiny_tokenizer.eos_token_id:
                break
    assert found[-2]["output"] == tiny_tokenizer.decode(ids[0, n_prompt:], skip_special_tokens=True)


def test_the_kl_is_that_of_the_definition_and_leaves_the_model_as_it_was(
    adapted_model: Any, make_recipe: Any
) -> None:
    from finetune.doctor.invariants import disturb

    model = adapted_model(make_recipe(train__packing=False))
    disturb(model)
    model.eval()
    needed = [parameter.requires_grad for parameter in model.parameters()]
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        found = kl_to_base(model, ids, 4)
        own = model(input_ids=ids).logits[0, 3:-1].double().softmax(-1)
        with model.disable_adapter():
            base = model(input_ids=ids).logits[0, 3:-1].double().softmax(-1)
    expected = (own * (own / base).log()).sum(-1).mean()
    assert found == pytest.approx(float(expected), rel=1e-4)
    assert [parameter.requires_grad for parameter in model.parameters()] == needed


def test_prompts_can_be_ones_own(make_recipe: Any, tiny_tokenizer: Any) -> None:
    section = make_recipe(train__samples={"every_steps": 5, "prompts": ["Who?", "What?"]}).train.samples
    prompts = sample_prompts(section, [], tiny_tokenizer)
    assert [prompt.name for prompt in prompts] == ["prompt 1", "prompt 2"]
    assert "Who?<|im_end|>\n<|im_start|>assistant\n" in tiny_tokenizer.decode(prompts[0].ids)


def test_weights_that_are_spread_over_processes_write_no_samples(make_recipe: Any) -> None:
    trainer = types.SimpleNamespace(is_fsdp_enabled=True, is_deepspeed_enabled=False)
    with pytest.raises(UserError, match="no process holds the whole model"):
        samples_module.SampleWriter(trainer, make_recipe().train.samples, [], None, lambda: None)  # type: ignore[arg-type]


def test_a_tracker_that_is_not_installed_is_refused_with_the_remedy(
    make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.is_wandb_available", lambda: False)
    with pytest.raises(UserError) as caught:
        check_training(make_recipe(train__report_to=["wandb"]))
    (fault,) = caught.value.faults
    assert fault.where == "train.report_to" and "pip install 'finetune-pipeline[wandb]'" in fault.fix


def test_a_tracker_gets_every_number_of_a_step_and_of_a_validation(
    recipe: Any, train: Any, make_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, Any, Any]] = []

    class Writer:
        def __init__(self, log_dir: str) -> None:
            self.log_dir = log_dir

        def add_scalar(self, name: str, value: Any, step: Any) -> None:
            told.append((name, value, step))

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    fake = types.ModuleType("tensorboardX")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    for place in ("transformers.integrations", "transformers.integrations.integration_utils"):
        monkeypatch.setattr(f"{place}.is_tensorboard_available", lambda: True)
    changed = without_samples(recipe)
    tracked = changed.model_copy(
        update={"train": changed.train.model_copy(update={"report_to": ["tensorboard"]})}
    )
    _, folder, _ = train(tracked, name="tracked", validation=make_rows(3))
    _, plain, _ = train(changed, name="plain", validation=make_rows(3))
    assert weights_of(folder) == weights_of(plain)
    steps = {step["step"]: step for step in events_of(folder, "step")}
    for name, field in (
        ("train/loss", "loss"),
        ("train/update_ratio", "update_ratio"),
        ("train/grad_norm_clipped", "grad_norm_clipped"),
    ):
        values = {step: value for told_name, value, step in told if told_name == name}
        assert {step: steps[step][field] for step in steps} == pytest.approx(values)
    losses = [value for name, value, _ in told if name == "eval/loss"]
    assert losses == pytest.approx([event["loss"] for event in events_of(folder, "validation")])
    assert all(math.isfinite(value) for _, value, _ in told)


@pytest.mark.parametrize("packing", [True, False])
def test_every_step_names_the_row_with_the_highest_loss(
    packing: bool, make_recipe: Any, make_rows: Any, train: Any
) -> None:
    """Of all micro-batches of the step, by the mean loss over the row's own targets, however short it is."""
    recipe = make_recipe(
        train__packing=packing,
        train__pack_tokens=96,
        train__micro_batch_size=2,
        train__gradient_accumulation_steps=2,
        train__learning_rate=1e-12,  # the model stays what it was, so that it can be asked afterwards
        train__epochs=2,
    )
    rows = make_rows(20)
    _, folder, model = train(recipe, rows=rows)
    model.eval()
    means = {}
    with torch.no_grad():
        for row in rows:
            ids, labels = torch.tensor([row.input_ids]), torch.tensor([row.labels])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1]
            means[row.row_id] = float(torch.nn.functional.cross_entropy(logits, labels[0, 1:]))
    steps = events_of(folder, "step")
    assert len({step["worst_row"] for step in steps}) > 1
    for step in steps:
        worst = max(step["rows"], key=means.__getitem__)
        assert len(step["rows"]) > 1
        assert (step["worst_row"], step["worst_row_loss"]) == (worst, pytest.approx(means[worst], abs=1e-4))
