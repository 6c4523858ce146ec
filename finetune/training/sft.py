"""Supervised fine-tuning, from top to bottom: rows in, adapter out. Trainer and loop are TRL's and transformers'."""

from __future__ import annotations

import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Value
from datasets import Sequence as Column
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig

from finetune.data.packing import pack
from finetune.data.tokenise import TokenisedRow
from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.model.adapter_files import save_adapter
from finetune.model.adapters import trainables_to_fp32
from finetune.model.fast_lora import speed_up_lora
from finetune.model.source import ModelSource
from finetune.paths import disk_faults
from finetune.recipe.schema import Recipe, TrainSection
from finetune.telemetry.callback import StepTally, TelemetryCallback
from finetune.telemetry.events import EventLog, read_events
from finetune.telemetry.flops import measure_peak_flops, step_work
from finetune.telemetry.progress import Progress
from finetune.training.checkpoints import (
    checkpoint_step,
    damage,
    newest_usable,
    publish_folder,
)
from finetune.training.sft_trainer import ExactSftTrainer, OnEvent, StopWhenAsked
from finetune.units import format_bytes

_SCHEDULERS = {"cosine": "cosine_with_min_lr", "linear": "linear", "constant": "constant_with_warmup"}
_IDS = Column(Value("int32"))


@dataclass(frozen=True)
class TrainResult:
    """What training did. Losses in nats per target token; `adapter_sha256` is of the trained weights file."""

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def train_sft(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_rows: Sequence[TokenisedRow],
    validation_rows: Sequence[TokenisedRow],
    *,
    run_folder: Path,
    owner: str,
    say: Callable[[str], None],
    source: ModelSource | None = None,
) -> TrainResult:
    """Tune `model` (adapter attached, or whole) on tokenised rows and write `adapter/` or `model/` into the run folder.

    `source` is the base on disk; its digest is noted beside the adapter, so that another base is refused later.
    Continues from the newest undamaged checkpoint of the same recipe (`owner`: its digest). Raises UserError for a
    non-finite loss or gradient, a disk that is full, a checkpoint of another recipe; KeyboardInterrupt after Ctrl-C,
    once the current step is saved.
    """
    settings = recipe.train
    train_set = training_dataset(train_rows, settings)
    total_steps = count_steps(len(train_set), settings)
    checkpoint_root = run_folder / "checkpoints"
    log, tally, stop = EventLog(run_folder / "events.jsonl"), StepTally(), StopWhenAsked()
    trainer = ExactSftTrainer(
        checkpoint_root=checkpoint_root,
        owner=owner,
        keep_checkpoints=settings.keep_checkpoints,
        tally=tally,
        model=model,
        args=trainer_arguments(recipe, total_steps, checkpoint_root),
        train_dataset=train_set,
        eval_dataset=training_dataset(validation_rows, settings) if validation_rows else None,
        processing_class=tokenizer,
    )
    trainables_to_fp32(model)  # TRL casts the adapters of a quantized model to bf16
    speed_up_lora(model)
    compute = torch.bfloat16 if recipe.model.dtype == "bf16" else torch.float32
    telemetry = TelemetryCallback(
        log,
        tally,
        step_work(model),
        measure_peak_flops(compute, trainer.args.device) * trainer.args.world_size,
        Progress("train", total_steps, "steps"),
    )

    def saved(step: int) -> None:
        log.write("checkpoint", step=step, path=f"checkpoints/step-{step}")
        telemetry.restart_clock()

    def validated(step: int, metrics: dict[str, float]) -> None:
        log.write(
            "validation",
            step=step,
            loss=metrics["eval_loss"],
            target_tokens=int(metrics["eval_target_tokens"]),
        )
        telemetry.restart_clock()

    trainer.remove_callback(PrinterCallback)  # it prints to standard output, which belongs to answers
    for callback in (telemetry, stop, OnEvent(saved, validated)):
        trainer.add_callback(callback)

    _trial_save(trainer, checkpoint_root)
    checkpoint = newest_usable(checkpoint_root, owner=owner, say=say)
    if checkpoint is not None:
        step = checkpoint_step(checkpoint)
        say(f"continuing from checkpoint {checkpoint.name} of {total_steps} steps")
        log.write("resume", step=step)
        _continue_totals(telemetry, run_folder / "events.jsonl")
    elif read_events(run_folder / "events.jsonl"):
        log.write("resume", step=0)  # killed before the first checkpoint: what it did is lost

    started = time.monotonic()
    with _finish_step_on_signal(stop):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if stop.asked and trainer.state.global_step < total_steps:
        raise KeyboardInterrupt
    seconds = time.monotonic() - started

    validation = trainer.evaluate() if validation_rows else None
    output = _save_result(trainer, recipe, run_folder, source)
    return _summarise(recipe, trainer, run_folder, output, validation, seconds)


def training_dataset(rows: Sequence[TokenisedRow], settings: TrainSection) -> Dataset:
    """Packs (or rows, without packing) as the trainer reads them: input_ids, labels, seq_lengths, all int32.

    Rows of a pack lie one behind the other; `seq_lengths` says where each ends, so that none attends to another.
    """
    lengths = [len(row.input_ids) for row in rows]
    if settings.packing:
        longest = max(lengths, default=0)
        if longest > settings.pack_tokens:
            raise UserError(
                f"a row of {longest} tokens does not fit a pack of {settings.pack_tokens}",
                where="train.pack_tokens",
                fix=f"set train.pack_tokens to {longest} or more, or lower data.max_tokens",
            )
        packs = pack(lengths, settings.pack_tokens)
    else:
        packs = [[index] for index in range(len(rows))]
    columns: dict[str, list[list[int]]] = {
        "input_ids": [[token for index in members for token in rows[index].input_ids] for members in packs],
        "labels": [[label for index in members for label in rows[index].labels] for members in packs],
    }
    if settings.packing:
        columns["seq_lengths"] = [[lengths[index] for index in members] for members in packs]
    return Dataset.from_dict(columns, features=Features(dict.fromkeys(columns, _IDS)))


def count_steps(n_examples: int, settings: TrainSection, *, n_processes: int = 1) -> int:
    """Optimizer steps of the whole run, counted as transformers counts them (the last window may be short)."""
    batches = math.ceil(n_examples / (settings.micro_batch_size * n_processes))
    per_epoch = max(math.ceil(batches / settings.gradient_accumulation_steps), 1)
    steps = math.ceil(settings.epochs * per_epoch)
    return min(steps, settings.max_steps) if settings.max_steps else steps


def trainer_arguments(recipe: Recipe, total_steps: int, output: Path) -> SFTConfig:
    """The recipe in TRL's terms. Everything that TRL would do to rows is off: they come tokenised and packed."""
    settings = recipe.train
    scheduler = _SCHEDULERS[settings.schedule]
    return SFTConfig(
        output_dir=str(output),
        max_steps=total_steps,
        per_device_train_batch_size=settings.micro_batch_size,
        per_device_eval_batch_size=settings.micro_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=scheduler,
        lr_scheduler_kwargs={"min_lr_rate": settings.floor_share} if settings.schedule == "cosine" else {},
        warmup_steps=math.ceil(settings.warmup_share * total_steps),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        optim="adamw_torch_fused",
        bf16=recipe.model.dtype == "bf16",
        fp16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=settings.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if settings.gradient_checkpointing else None,
        packing=settings.packing,
        packing_strategy="bfd",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        seed=recipe.seed,
        data_seed=recipe.seed,
        save_strategy="steps",
        save_steps=settings.checkpoint_every_steps,
        eval_strategy="steps" if settings.validate_every_steps else "no",
        eval_steps=settings.validate_every_steps,
        logging_strategy="steps" if settings.report_to else "no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=list(settings.report_to) or "none",
        disable_tqdm=True,
    )


def _trial_save(trainer: ExactSftTrainer, root: Path) -> None:
    """Save once before the first step: a full disk or a bad folder must not surface after an hour."""
    trial = root / ".trial.partial"
    with disk_faults(root):
        try:
            trial.mkdir(parents=True, exist_ok=True)
            trainer.save_weights(trial)
            saved_bytes = sum(path.stat().st_size for path in trial.rglob("*") if path.is_file())
            # Adapter in fp32 plus two Adam moments, for every kept checkpoint and the one being written.
            needed = 3 * saved_bytes * (trainer.keep_checkpoints + 1)
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
def _finish_step_on_signal(stop: StopWhenAsked) -> Iterator[None]:
    """First SIGINT or SIGTERM: finish the step and save. A second one acts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: Any) -> None:
        stop.asked = True
        for known, handler in before.items():
            signal.signal(known, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _save_result(
    trainer: ExactSftTrainer, recipe: Recipe, run_folder: Path, source: ModelSource | None
) -> Path:
    """Write `adapter/` (or `model/` for full tuning) whole or not at all; it loads with plain PEFT / transformers."""
    if recipe.adapter.kind != "none":
        final = run_folder / "adapter"
        save_adapter(trainer.model, final, tokenizer=trainer.processing_class, source=source)
        return final
    final, aside = run_folder / "model", run_folder / ".model.partial"
    with disk_faults(final):
        shutil.rmtree(aside, ignore_errors=True)
        trainer.save_weights(aside)
        publish_folder(aside, final)
    return final


def _summarise(
    recipe: Recipe,
    trainer: ExactSftTrainer,
    run_folder: Path,
    output: Path,
    validation: dict[str, float] | None,
    seconds: float,
) -> TrainResult:
    steps = [event for event in read_events(run_folder / "events.jsonl") if event["event"] == "step"]
    weights = sorted(output.glob("*.safetensors"))[0]
    speeds = sorted(event["tokens_per_second"] for event in steps)
    shares = sorted(event["mfu"] for event in steps)
    return TrainResult(
        output=output.name,
        steps=trainer.state.global_step,
        tokens=steps[-1]["tokens"] if steps else 0,
        target_tokens=steps[-1]["target_tokens"] if steps else 0,
        train_loss=steps[-1]["loss"] if steps else math.nan,
        validation_loss=validation["eval_loss"] if validation else None,
        seconds=round(seconds, 2),
        tokens_per_second=speeds[len(speeds) // 2] if speeds else 0.0,
        mfu=shares[len(shares) // 2] if shares else 0.0,
        trainable_parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        adapter_sha256=digest_file(weights),
    )


__all__ = ["TrainResult", "count_steps", "damage", "train_sft", "trainer_arguments", "training_dataset"]
