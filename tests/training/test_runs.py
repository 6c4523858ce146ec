"""Optimizers, schedules, losses, memory savings and the batch ramp through whole trainings: exact, resumable, stopped in time."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.digest import digest_folder
from finetune.errors import UserError
from finetune.recipe.train_section import SCHEDULE_FREE, TrainSection
from finetune.telemetry.events import read_events
from finetune.training.batch_ramp import plan_windows
from finetune.training.exact_trainer import StopWhenAsked
from finetune.training.memory_saving import set_model_dropout
from finetune.training.optimizers import OPTIMIZERS
from finetune.training.preflight import check_training
from finetune.training.schedules import rate_share
from finetune.training.sft_trainer import ExactSftTrainer

ON_CPU = [name for name, entry in OPTIMIZERS.items() if not entry.needs_cuda]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def killed_after(step: int) -> Any:
    def kill(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            raise SystemExit

    return kill


def whole_and_killed(
    recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch, at: int, **options: Any
) -> tuple[Path, Path]:
    """Folders of an undisturbed run and of one that was killed after step `at` and started again."""
    _, whole, _ = train(recipe, name="whole", **options)
    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", killed_after(at))
        with pytest.raises(SystemExit):
            train(recipe, name="killed", **options)
    _, killed, _ = train(recipe, name="killed", **options)
    return whole, killed


@pytest.mark.parametrize("name", ON_CPU)
def test_every_optimizer_resumes_to_the_same_bytes(
    name: str, make_recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(
        train__optimizer=name,
        train__schedule="constant" if name in SCHEDULE_FREE else "cosine",
        train__learning_rate=0.3 if "sgd" in name else 5e-3,
        train__weight_decay=0.01,
        train__epochs=3,
        train__pack_tokens=192,
    )
    whole, killed = whole_and_killed(recipe, train, monkeypatch, at=5)
    losses = [event["loss"] for event in steps_of(whole)]
    assert losses[-1] < losses[0]
    assert [event["loss"] for event in steps_of(killed)] == losses
    assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")


@pytest.mark.parametrize("name", ON_CPU)
def test_a_non_finite_gradient_stops_every_optimizer_before_its_step(
    name: str, make_recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = make_recipe(
        train__optimizer=name,
        train__schedule="constant" if name in SCHEDULE_FREE else "cosine",
        train__checkpoint_every_steps=1,
        train__epochs=3,
    )
    original = ExactSftTrainer.training_step

    def poisoned(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, model, *args, **kwargs)
        if self.state.global_step == 1:
            next(p for p in model.parameters() if p.grad is not None).grad[0] = math.nan
        return loss

    monkeypatch.setattr(ExactSftTrainer, "training_step", poisoned)
    with pytest.raises(UserError, match="gradient of step 2 is not finite"):
        train(recipe)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-1"]


@pytest.mark.parametrize("schedule", ["linear", "wsd", "inverse_sqrt", "constant"])
def test_the_rates_of_a_run_are_those_of_its_schedule(schedule: str, make_recipe: Any, train: Any) -> None:
    recipe = make_recipe(
        train__schedule=schedule, train__warmup_share=0.3, train__epochs=3, train__pack_tokens=192
    )
    _, folder, _ = train(recipe)
    rates = [event["learning_rate"] for event in steps_of(folder)]
    expected = [1e-2 * rate_share(recipe.train, step, len(rates)) for step in range(len(rates))]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__gradient_checkpointing": True},
        {"train__gradient_checkpointing": "selective"},
        {"train__gradient_checkpointing": "selective", "adapter__kind": "none"},
        {"train__gradient_checkpointing": "selective", "train__packing": False, "train__micro_batch_size": 2},
    ],
    ids=["full", "selective", "selective full tuning", "selective unpacked"],
)
def test_saving_memory_changes_no_loss(changes: dict[str, Any], make_recipe: Any, train: Any) -> None:
    plain = {name: value for name, value in changes.items() if name != "train__gradient_checkpointing"}
    losses = []
    for number, options in enumerate((plain, changes)):
        _, folder, _ = train(make_recipe(**options, train__epochs=2), name=f"run-{number}")
        losses.append([event["loss"] for event in steps_of(folder)])
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["all kept", "recomputed"])
def test_activations_that_wait_elsewhere_change_no_loss(
    checkpointing: bool, make_recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's offloading needs a GPU; a copy stands in for its way to the host and back, at the same hooks of autograd."""
    copied: list[int] = []

    def copies(model: Any, warn_if_no_head: bool) -> Any:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            copied.append(tensor.numel())
            return tensor.detach().clone()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    monkeypatch.setattr("trl.models.get_act_offloading_ctx_manager", copies)
    monkeypatch.setattr("finetune.training.session.check_training", lambda recipe: None)
    options = {"train__gradient_checkpointing": checkpointing, "train__epochs": 2}
    _, plain, _ = train(make_recipe(**options), name="plain")
    assert not copied
    _, moved, _ = train(make_recipe(**options, train__activation_offload=True), name="moved")
    assert copied
    assert [e["loss"] for e in steps_of(moved)] == [e["loss"] for e in steps_of(plain)]
    assert digest_folder(moved / "adapter") == digest_folder(plain / "adapter")


def test_selective_checkpointing_multiplies_hardly_a_matrix_twice(
    make_recipe: Any, adapted_model: Any, make_rows: Any
) -> None:
    """Counts products of one forward and backward: recomputing all needs more, recomputing what is cheap does not."""
    from torch.utils.flop_counter import FlopCounterMode

    from finetune.training.memory_saving import checkpointing_arguments

    counts = []
    for setting in (False, True, "selective"):
        recipe = make_recipe(train__gradient_checkpointing=setting, train__packing=False)
        model = adapted_model(recipe).train()
        arguments = checkpointing_arguments(recipe.train)
        if arguments["gradient_checkpointing"]:
            model.get_base_model().gradient_checkpointing_enable(arguments["gradient_checkpointing_kwargs"])
        ids = torch.tensor([make_rows(1)[0].input_ids])
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        counts.append(counter.get_total_flops())
    plain, full, selective = counts
    assert plain <= selective < plain + 0.2 * (full - plain)


def test_model_dropout_reaches_the_model_and_resumes(
    make_recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(
        train__model_dropout=0.2, adapter__dropout=0.1, train__epochs=3, train__pack_tokens=192
    )
    whole, killed = whole_and_killed(recipe, train, monkeypatch, at=5)
    assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")
    _, plain, model = train(make_recipe(train__epochs=3, train__pack_tokens=192), name="plain")
    assert [e["loss"] for e in steps_of(plain)] != [e["loss"] for e in steps_of(whole)]
    assert model.config.attention_dropout == 0.0


@pytest.mark.parametrize("ramp", [None, {"steps": 3}], ids=["whole batches", "batch ramp"])
def test_killed_between_the_last_step_and_the_result_it_takes_no_further_step(
    ramp: Any, make_recipe: Any, train: Any
) -> None:
    """The last step is in the middle of an epoch, as with `max_steps` and broken numbers of epochs."""
    recipe = make_recipe(
        train__max_steps=2,
        train__pack_tokens=96,
        train__gradient_accumulation_steps=2,
        train__batch_ramp=ramp,
    )
    _, folder, _ = train(recipe)
    whole = digest_folder(folder / "adapter")
    shutil.rmtree(folder / "adapter")
    said: list[str] = []
    result, _, _ = train(recipe, said=said)
    assert any("continuing from checkpoint step-2 of 2 steps" in line for line in said)
    assert digest_folder(folder / "adapter") == whole
    assert result.steps == len(steps_of(folder)) == 2


@pytest.mark.parametrize("kind", ["OPT", "GPTNeo", "GPT2", "Falcon"])
def test_every_place_of_dropout_is_reached(kind: str) -> None:
    """Modules, attributes of modules, and what is read from the configuration: without it, training mode computes as
    evaluation does, and with it anything else."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2}
    own = {
        "OPT": {"ffn_dim": 64, "num_hidden_layers": 1, "word_embed_proj_dim": 32},
        "GPTNeo": {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]},
        "GPT2": {"n_layer": 1},
        "Falcon": {"num_hidden_layers": 1},
    }[kind]
    config = getattr(transformers, f"{kind}Config")(**sizes, **own)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        plain = model.eval()(ids).logits
        set_model_dropout(model, 0.5)
        assert not torch.equal(model.train()(ids).logits, plain)
        set_model_dropout(model, 0.0)
        torch.testing.assert_close(model.train()(ids).logits, plain)


class TestBatchRamp:
    def settings(self, **ramp: Any) -> TrainSection:
        return TrainSection(
            epochs=2.0, gradient_accumulation_steps=4, batch_ramp={"start_accumulation": 1, **ramp}
        )

    def test_by_steps_the_batch_grows_evenly_and_every_example_comes_once_an_epoch(self) -> None:
        windows = plan_windows([10] * 13, self.settings(steps=6), seed=1)
        sizes = [len(window) for window in windows]
        assert sizes == [1, 1, 2, 2, 3, 3, 1, 4, 4, 4, 1]  # the first epoch ends in a short window
        first = [index for window in windows.examples[:7] for index in window]
        second = [index for window in windows.examples[7:] for index in window]
        assert sorted(first) == sorted(second) == list(range(13))
        assert first != second
        assert windows.epochs[6] == 1.0 and windows.epochs[-1] == 2.0

    def test_by_tokens(self) -> None:
        windows = plan_windows([10] * 13, self.settings(tokens=60), seed=1)
        assert [len(window) for window in windows][:5] == [1, 1, 2, 3, 4]

    def test_half_an_epoch_and_a_limit_of_steps(self) -> None:
        section = self.settings(steps=6).model_copy(update={"epochs": 1.5})
        assert sum(map(len, plan_windows([10] * 12, section, seed=1))) == 18
        assert len(plan_windows([10] * 12, section.model_copy(update={"max_steps": 4}), seed=1)) == 4

    def test_a_run_follows_its_windows_counts_its_epochs_and_resumes(
        self, make_recipe: Any, make_rows: Any, train: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recipe = make_recipe(
            train__packing=False,
            train__gradient_accumulation_steps=4,
            train__batch_ramp={"start_accumulation": 1, "steps": 4},
            train__epochs=2,
        )
        rows = make_rows(11)
        whole, killed = whole_and_killed(recipe, train, monkeypatch, at=5, rows=rows)
        windows = plan_windows([len(row.input_ids) for row in rows], recipe.train, recipe.seed)
        tokens = [sum(len(rows[index].input_ids) for index in window) for window in windows]
        steps = steps_of(whole)
        assert [step["tokens"] for step in steps] == [sum(tokens[: n + 1]) for n in range(len(tokens))]
        assert [step["epoch"] for step in steps] == pytest.approx(windows.epochs, abs=1e-5)
        assert [step["loss"] for step in steps_of(killed)] == [step["loss"] for step in steps]
        assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")

    def test_a_step_of_three_micro_batches_has_the_gradient_of_one_batch(
        self, make_recipe: Any, make_rows: Any, train: Any
    ) -> None:
        """The first steps of a ramp from 3 to 4 against plain accumulation over the same rows."""
        rows = [make_rows(3)[0]] * 3 + [make_rows(3)[1]] * 3
        common = {
            "train__packing": False,
            "train__learning_rate": 1e-12,
            "train__schedule": "constant",
            "train__epochs": 1,
        }
        ramp = make_recipe(
            **common,
            train__gradient_accumulation_steps=4,
            train__batch_ramp={"start_accumulation": 3, "steps": 100},
        )
        _, folder, _ = train(ramp, rows=rows, name="ramp")
        order = plan_windows([len(row.input_ids) for row in rows], ramp.train, ramp.seed).examples
        for step, window in zip(steps_of(folder), order, strict=True):
            one = make_recipe(**common, train__micro_batch_size=len(window))
            _, alone, _ = train(one, rows=[rows[index] for index in window], name=f"step-{step['step']}")
            (single,) = steps_of(alone)
            assert step["loss"] == pytest.approx(single["loss"], abs=1e-5)
            assert step["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"model__dtype": "fp16"}, "model.dtype"),
        ({"train__activation_offload": True}, "train.activation_offload"),
        ({"train__fp8": True}, "train.fp8"),
        ({"train__optimizer": "adamw_paged_8bit"}, "train.optimizer"),
    ],
)
def test_what_needs_a_gpu_is_refused_by_name_without_one(
    changes: dict[str, Any], where: str, make_recipe: Any
) -> None:
    with pytest.raises(UserError) as caught:
        check_training(make_recipe(**changes), on_cuda=False)
    (fault,) = caught.value.faults
    assert fault.where == where
    assert fault.fix


def test_all_that_a_machine_lacks_is_told_at_once(make_recipe: Any) -> None:
    recipe = make_recipe(model__dtype="fp16", train__fp8=True, train__optimizer="lion_paged")
    with pytest.raises(UserError) as caught:
        check_training(recipe, on_cuda=False)
    assert len(caught.value.faults) == 3


def test_a_batch_ramp_goes_with_several_processes_but_not_with_spread_weights(
    make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(train__gradient_accumulation_steps=4, train__batch_ramp={"steps": 2})
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_training(recipe, on_cuda=False)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError) as caught:
        check_training(recipe, on_cuda=False)
    assert [fault.where for fault in caught.value.faults] == ["train.batch_ramp"]


def test_a_plain_recipe_passes_the_preflight(make_recipe: Any) -> None:
    check_training(make_recipe(), on_cuda=False)
