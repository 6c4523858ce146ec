"""What every method's assembly does around its trainer: telemetry, trial save, resume, Ctrl-C, the result on disk."""

from __future__ import annotations

import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers.trainer_callback import PrinterCallback, TrainerCallback

from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.model.adapter_files import save_adapter
from finetune.model.load import DTYPES
from finetune.model.memory import mapped_activations, release_memory
from finetune.model.source import ModelSource
from finetune.paths import disk_faults, write_json
from finetune.recipe.schema import Recipe
from finetune.telemetry.callback import TelemetryCallback
from finetune.telemetry.events import EventLog, read_events
from finetune.telemetry.flops import measure_peak_flops, step_work
from finetune.telemetry.progress import Progress
from finetune.telemetry.trackers import trackers_open
from finetune.telemetry.updates import count
from finetune.training.best_step import BestStep
from finetune.training.checkpoints import checkpoint_step, newest_usable, publish_folder
from finetune.training.exact_trainer import ExactTrainer, OnEvent, StopWhenAsked
from finetune.training.preflight import check_training
from finetune.training.processes import n_processes
from finetune.training.rewind import Rewinder
from finetune.training.samples import SampleWriter, sample_prompts
from finetune.training.validation import by_source
from finetune.units import format_bytes

VALIDATION_ROWS = (
    "validation_rows.json"  # of the run folder: summed loss and targets of every validation row, at the end
)
_SAME_SIGNAL_SECONDS = 5.0


@dataclass(frozen=True)
class TrainResult:
    """What training did. Losses in nats per target token, or a pair for preference methods.

    `result_step` is the step whose weights were saved, `adapter_sha256` that of their file. `validation` holds what else
    was measured on the validation rows, `flags` what a reader should look at before the verdict, in sentences.
    """

    output: str
    steps: int
    tokens: int
    target_tokens: int
    train_loss: float
    validation_loss: float | None
    seconds: float
    tokens_per_second: float
    mfu: float
    trainable_parameters: int
    adapter_sha256: str
    validation: dict[str, float] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    result_step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Session:
    """One training of one trainer in one run folder. `say` tells the user; `source` is the base on disk, if any.

    `validation_sources`: where each validation row came from, in the order of the trainer's `row_losses`. `sample_rows`:
    rows whose prompts are answered along the way, if the recipe asks for that. `callbacks` see every step last.
    """

    trainer: Any  # an ExactTrainer
    recipe: Recipe
    run_folder: Path
    say: Callable[[str], None]
    source: ModelSource | None = None
    validation_sources: Sequence[str] = ()
    sample_rows: Sequence[Any] = ()
    callbacks: Sequence[TrainerCallback] = ()

    def run(self) -> TrainResult:
        """Train from the newest undamaged checkpoint to the end, validate, and write the result.

        Raises UserError for a non-finite loss or gradient, a full disk, a checkpoint of another recipe;
        KeyboardInterrupt after Ctrl-C, once the current step is saved.
        """
        check_training(self.recipe)
        with trackers_open(self.trainer.callback_handler.callbacks, self.recipe.train.report_to):
            return self._run()

    def _run(self) -> TrainResult:
        trainer, root = self.trainer, self.trainer.checkpoint_root
        stop, best = trainer.stop, self._best_step()
        telemetry = self._watch(stop, best)

        def go_back(step: int) -> None:
            telemetry.total_tokens = telemetry.total_targets = 0
            _continue_totals(telemetry, self.events_path)
            if best is not None:
                best.validations.clear()
                best.continue_from(step)

        rewinder = Rewinder(trainer, self.run_folder, telemetry.log, self.say, go_back)
        trainer.callback_handler.callbacks.insert(0, rewinder.watch)  # before telemetry empties the tally
        with self._one_process_writes() as writes:
            if writes:
                trial_save(trainer, root)
        rewinder.finish_act()
        checkpoint = self._resume(telemetry)
        if best is not None:
            best.continue_from(checkpoint_step(checkpoint) if checkpoint else 0)
        release_memory()  # what loading, adapters and the trial save have freed
        started = time.monotonic()
        if best is not None and best.exhausted and checkpoint is not None:
            self.say(
                f"training had stopped early at step {checkpoint_step(checkpoint)}; there is nothing left to train"
            )
            trainer.load_step(checkpoint)
        else:
            with finish_step_on_signal(stop):
                rewinder.train(checkpoint)
        if stop.agreed and trainer.state.global_step < trainer.args.max_steps:
            raise KeyboardInterrupt
        seconds = time.monotonic() - started
        steps = trainer.state.global_step
        step = self._take(best, telemetry) if best is not None else steps
        with trainer.averaged_weights(), mapped_activations(trainer.args.device.type):
            validation = trainer.evaluate() if trainer.eval_dataset is not None else None
            weights = trainer.whole_weights()
            with self._one_process_writes() as writes:
                output = self.run_folder / ("adapter" if self.recipe.adapter.kind != "none" else "model")
                if writes:
                    save_result(trainer, self.recipe, output, self.source, weights)
                    if validation is not None:
                        losses = {
                            "sums": list(trainer.row_losses.sums),
                            "targets": list(trainer.row_losses.targets),
                        }
                        write_json(self.run_folder / VALIDATION_ROWS, losses)
        result = summarise(trainer, self.run_folder, output, validation, seconds)
        return replace(result, steps=steps, result_step=step)

    def _best_step(self) -> BestStep | None:
        settings = self.recipe.train
        if settings.result != "best" and settings.early_stopping is None:
            return None
        if self.trainer.eval_dataset is None:
            raise UserError(
                "there are no validation rows to choose the best step by",
                where="train.early_stopping" if settings.early_stopping is not None else "train.result",
                fix="give the dataset a validation split, or set train.result: last",
            )
        return BestStep(
            self.run_folder / "validation",
            losses=lambda: self.trainer.row_losses,
            kept=self.trainer.keep_also,
            patience=settings.early_stopping,
            say=self.say,
        )

    def _take(self, best: BestStep, telemetry: TelemetryCallback) -> int:
        """Bring back the chosen step's weights; returns the step."""
        choice = best.choice
        assert choice is not None
        if (chosen := best.checkpoint(self.trainer.checkpoint_root)) is not None:
            self.trainer.load_step(chosen)
        telemetry.log.write(
            "result", step=choice.step, lowest_step=choice.lowest, loss=best.validations[choice.step].mean
        )
        self.say(
            f"the result is step {choice.step}"
            + (
                ""
                if choice.step == choice.lowest
                else f", no worse than step {choice.lowest} with the lowest loss"
            )
        )
        return choice.step

    @contextmanager
    def _one_process_writes(self) -> Iterator[bool]:
        """Whether this process writes; the others wait until it has."""
        accelerator = self.trainer.accelerator
        yield accelerator.is_main_process
        accelerator.wait_for_everyone()

    @property
    def events_path(self) -> Path:
        return self.run_folder / "events.jsonl"

    def _watch(self, stop: StopWhenAsked, best: BestStep | None) -> TelemetryCallback:
        trainer = self.trainer
        log = EventLog(self.events_path if trainer.accelerator.is_main_process else None)
        compute = trainer.product_dtype = DTYPES[self.recipe.model.dtype]
        telemetry = TelemetryCallback(
            log,
            trainer.tally,
            step_work(trainer.model),
            measure_peak_flops(compute, trainer.args.device) * trainer.args.world_size,
            Progress("train", trainer.args.max_steps, "steps"),
            n_examples=len(trainer.train_dataset),
            setting={
                "method": self.recipe.train.method,
                "adapter": self.recipe.adapter.kind,
                "optimizer": self.recipe.train.optimizer,
                "parameters": None if self.source is None else self.source.n_parameters,
            },
            on_step=trainer.track,
        )

        def saved(step: int) -> None:
            log.write("checkpoint", step=step, path=f"checkpoints/step-{step}")
            telemetry.restart_clock()

        def validated(step: int, metrics: dict[str, float]) -> None:
            fields: dict[str, Any] = {name.removeprefix("eval_"): value for name, value in metrics.items()}
            if "target_tokens" in fields:
                fields["target_tokens"] = int(fields["target_tokens"])
            if sources := by_source(trainer.row_losses, self.validation_sources):
                fields["sources"] = sources
            log.write("validation", step=step, **fields)
            trainer.track_validation({"eval": fields})
            telemetry.restart_clock()

        trainer.remove_callback(PrinterCallback)  # it prints to standard output, which belongs to answers
        for callback in (telemetry, stop, OnEvent(saved, validated), *([best] if best else [])):
            trainer.add_callback(callback)
        samples = self.recipe.train.samples
        if samples is not None:
            prompts = sample_prompts(samples, self.sample_rows, trainer.processing_class)
            trainer.add_callback(SampleWriter(trainer, samples, prompts, log, telemetry.restart_clock))
        for callback in self.callbacks:
            trainer.add_callback(callback)
        return telemetry

    def _resume(self, telemetry: TelemetryCallback) -> Path | None:
        trainer = self.trainer
        checkpoint = newest_usable(trainer.checkpoint_root, owner=trainer.owner, say=self.say)
        if checkpoint is not None:
            step = checkpoint_step(checkpoint)
            self.say(f"continuing from checkpoint {checkpoint.name} of {trainer.args.max_steps} steps")
            telemetry.log.write("resume", step=step)
            _continue_totals(telemetry, self.events_path)
        elif any(event["event"] == "step" for event in read_events(self.events_path)):
            telemetry.log.write("resume", step=0)  # killed before the first checkpoint: what it did is lost
        return checkpoint


def trial_save(trainer: ExactTrainer, root: Path) -> None:
    """Save once before the first step: a full disk or a bad folder must not surface after an hour."""
    trial = root / ".trial.partial"
    with disk_faults(root):
        try:
            trial.mkdir(parents=True, exist_ok=True)
            trainer.save_weights(trial)
            saved_bytes = sum(path.stat().st_size for path in trial.rglob("*") if path.is_file())
            # Adapter in fp32 plus two Adam moments, for every kept checkpoint and the one being written.
            needed = 3 * saved_bytes * (trainer.settings.keep_checkpoints + 1)
            free = shutil.disk_usage(root).free
        finally:
            shutil.rmtree(trial, ignore_errors=True)
    if free < needed:
        raise UserError(
            f"{root} has {format_bytes(free)} free, the checkpoints need {format_bytes(needed)}",
            fix="free some space, lower train.keep_checkpoints, or set FINETUNE_RUNS to another disk",
        )


def _continue_totals(telemetry: TelemetryCallback, events: Path) -> None:
    steps = [event for event in read_events(events) if event["event"] == "step"]
    if steps:
        telemetry.total_tokens = steps[-1]["tokens"]
        telemetry.total_targets = steps[-1]["target_tokens"]


@contextmanager
def finish_step_on_signal(stop: StopWhenAsked) -> Iterator[None]:
    """First SIGINT or SIGTERM: finish the step and save. A second one acts at once.

    One Ctrl-C reaches each of several processes twice, from the terminal and from their launcher.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    asked_at = 0.0

    def ask(number: int, frame: Any) -> None:
        nonlocal asked_at
        again, now = stop.asked, time.monotonic()
        if again and now - asked_at < _SAME_SIGNAL_SECONDS:
            return
        if not again:
            stop.asked, asked_at = True, now
        if again or n_processes() == 1:
            for known, handler in before.items():
                signal.signal(known, handler)
        if again:
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def save_result(
    trainer: Any,
    recipe: Recipe,
    final: Path,
    source: ModelSource | None,
    weights: dict[str, Any] | None = None,
) -> None:
    """Write the adapter or the whole model into `final`, all of it or nothing; it loads with plain PEFT / transformers.

    `weights`: what is trained, where the model holds only a part of it (`CheckpointingTrainer.whole_weights`).
    """
    if recipe.adapter.kind != "none":
        save_adapter(trainer.model, final, tokenizer=trainer.processing_class, source=source, weights=weights)
        return
    aside = final.with_name(f".{final.name}.partial")
    with disk_faults(final):
        shutil.rmtree(aside, ignore_errors=True)
        trainer.save_weights(aside, weights)
        publish_folder(aside, final)


def summarise(
    trainer: Any, run_folder: Path, output: Path, validation: dict[str, float] | None, seconds: float
) -> TrainResult:
    """The result from the events of the whole training, earlier sessions included."""
    steps = [event for event in read_events(run_folder / "events.jsonl") if event["event"] == "step"]
    weights = sorted(output.glob("*.safetensors"))[0]
    speeds = sorted(event["tokens_per_second"] for event in steps)
    shares = sorted(event["mfu"] for event in steps)
    measured = {name.removeprefix("eval_"): value for name, value in (validation or {}).items()}
    return TrainResult(
        output=output.name,
        steps=trainer.state.global_step,
        tokens=steps[-1]["tokens"] if steps else 0,
        target_tokens=steps[-1]["target_tokens"] if steps else 0,
        train_loss=next((event["loss"] for event in reversed(steps) if event["loss"] is not None), math.nan),
        validation_loss=measured.pop("loss", None),
        seconds=round(seconds, 2),
        tokens_per_second=speeds[len(speeds) // 2] if speeds else 0.0,
        mfu=shares[len(shares) // 2] if shares else 0.0,
        trainable_parameters=sum(count(p) for p in trainer.model.parameters() if p.requires_grad),
        adapter_sha256=digest_file(weights),
        validation=measured,
    )
