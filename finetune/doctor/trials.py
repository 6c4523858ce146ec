"""Short trainings through the very code of a run: one step on the longest batch, a resume, eight examples by heart, a save.

The model is used up by them. Each is in a folder of its own, which is gone afterwards.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.data.pair_tokens import AnsweredPrompt
from finetune.data.tokenise import TokenisedRow
from finetune.doctor.finding import Finding, fault, ok, skipped, warning
from finetune.doctor.memory import Room, check_probe, longest_batch, out_of_memory
from finetune.doctor.rates import usual_rate
from finetune.doctor.trained import gradients_cut
from finetune.model.adapters import CutGraphError, trainable_parameters
from finetune.recipe.schema import Recipe
from finetune.telemetry.events import read_events
from finetune.telemetry.memory import peak_memory_bytes, reset_peak_memory
from finetune.training.arguments import count_steps
from finetune.training.branches import row_tokens

ExampleRow = TokenisedRow | AnsweredPrompt
TrainRows = Callable[..., Any]

RESUME_STEPS, RESUME_ROWS = 3, 3
OVERFIT_ROWS, OVERFIT_STEPS = 8, 40
LEARNT_NATS = 0.1  # a target: the model gives the right token more than nine times in ten
_OVERFIT_SECONDS = 40.0
_FEW_STEPS = 10  # too few to tell that nothing is learnt
_FALLS = 0.5  # what a working training reaches at least: half of the first loss
# On a GPU sums are added up in another order every time; on the CPU nothing of a resume may differ.
_GPU_RESUME_LIMIT = 1e-2
_MOST_ELEMENTS = 500_000_000  # 2 GB of copies
_NO_GRADIENT = "does not require grad"  # what torch says of a loss that nothing trained stands behind
# Kinds with too few parameters to learn a row by heart in a few steps.
_LOW_CAPACITY = ("vera", "ia3", "prompt", "prefix", "bitfit")


@dataclass
class Trials:
    """The trials of one model. `train(recipe, model, rows, folder, callbacks)` is the recipe's method."""

    recipe: Recipe
    model: Any
    rows: Sequence[ExampleRow]
    train: TrainRows
    n_parameters: int
    kept: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)

    def close(self) -> None:
        """Remove what was written."""
        self.kept.cleanup()

    def probe(self, forecast_bytes: int | None, room: Room) -> Iterator[Finding]:
        """One whole optimizer step on the longest batch of the rows: whether it fits, and where its gradients arrive."""
        train = self.recipe.train
        places = longest_batch(
            [self._tokens_of(row) for row in self.rows],
            micro_batch=train.micro_batch_size,
            pack_tokens=train.pack_tokens if train.packing else None,
        )
        chosen = [self.rows[place] for place in places]
        settled = for_trial(self.recipe, max_steps=1)
        reset_peak_memory()
        started = time.monotonic()
        with _folder() as folder:
            try:
                self.train(settled, self.model, chosen, folder, ())
            except (RuntimeError, MemoryError) as error:
                if _is_memory(error):
                    yield out_of_memory(sum(self._tokens_of(row) for row in chosen), room)
                    return
                if not (isinstance(error, CutGraphError) or _NO_GRADIENT in str(error)):
                    raise
                yield gradients_cut(str(error))
                return
            (step,) = [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]
        n_trained = len(trainable_parameters(self.model))  # a training stops where one of them gets none
        yield ok("gradients", f"they arrive at all {n_trained} trained tensors")
        rate = step["tokens_per_second"]
        seconds = step["tokens"] / rate if rate else time.monotonic() - started
        n_steps = self._steps_of_the_run()
        yield check_probe(peak_memory_bytes(), forecast_bytes, room, step["tokens"], seconds, n_steps)

    def resume(self) -> Finding:
        """Three steps in one go against two, a checkpoint, and one more: the same weights, whatever was drawn at random."""
        name = "resume"
        rows = short_rows(self.rows, RESUME_ROWS)
        longest = max(self._tokens_of(row) for row in rows)
        settled = for_trial(
            self.recipe,
            max_steps=RESUME_STEPS,
            checkpoint_every_steps=RESUME_STEPS - 1,
            keep_checkpoints=RESUME_STEPS,
            micro_batch_size=1,
            pack_tokens=longest,
        )
        # What the reference of a pair is taken from.
        start = _copied(self.model) if self.recipe.learns_preferences else {}
        with _folder() as whole, _folder() as continued:
            self.train(settled, self.model, rows, whole, ())
            _restore(self.model, start)
            checkpoint = f"step-{RESUME_STEPS - 1}"
            shutil.copytree(whole / "checkpoints" / checkpoint, continued / "checkpoints" / checkpoint)
            self.train(settled, self.model, rows, continued, ())
            resumed = any(event["event"] == "resume" for event in read_events(continued / "events.jsonl"))
            apart = weights_apart(saved_weights(whole), saved_weights(continued))
        limit = _GPU_RESUME_LIMIT if torch.cuda.is_available() else 0.0
        if not resumed or not apart <= limit:
            return Finding(
                name,
                "fault",
                "a training that was interrupted and continued ends in other weights than one that was not",
                apart,
                limit,
                remedy="train without interruption, and report this with the recipe",
                where="train.checkpoint_every_steps",
            )
        return Finding(
            name,
            "ok",
            f"{RESUME_STEPS} steps, with and without an interruption after the second",
            apart,
            limit,
        )

    def overfit(self) -> Finding:
        """Eight short examples by heart: if that cannot be reached, something does not learn."""
        rows = short_rows(self.rows, OVERFIT_ROWS)
        usual = usual_rate(self.recipe.train.method, self.recipe.adapter.kind, self.n_parameters)
        settled = for_trial(
            plainly(self.recipe),
            max_steps=OVERFIT_STEPS,
            checkpoint_every_steps=10 * OVERFIT_STEPS,
            gradient_accumulation_steps=OVERFIT_ROWS,
            learning_rate=usual.high / 2,
            schedule="constant",
            warmup_share=0.0,
            optimizer="adamw",
            optimizer_options={},
            lora_plus_ratio=None,
            weight_decay=0.0,
        )
        folder = Path(self.kept.name)
        watch = _StopWhenLearnt(folder / "events.jsonl", pairs=self.recipe.learns_preferences)
        self.train(settled, self.model, rows, folder, (watch,))
        steps = [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]
        return judge_overfit(
            steps,
            len(rows),
            self.recipe.adapter.kind,
            pairs=self.recipe.learns_preferences,
            was_cut_short=watch.is_late,
        )

    def reload(self, load: Callable[[Path], Any]) -> Finding:
        """What `overfit` saved, loaded afresh: every trained tensor is the one that was trained, bit for bit.

        `load` reads the run folder it is given.
        """
        name = "save and reload"
        if not any((Path(self.kept.name) / kind).is_dir() for kind in ("adapter", "model")):
            return skipped(name, "the examples by heart came to no result that could be saved")
        trained = _some(trainable_parameters(self.model))
        self.model = None
        again = dict(load(Path(self.kept.name)).named_parameters())
        missing = [key for key in trained if key not in again]
        if missing:
            return fault(
                name,
                f"{len(missing)} trained tensors are not in what was saved, e.g. {missing[0]}",
                _REPORT,
                where="adapter",
            )
        changed = [key for key, value in trained.items() if not _same(value, again[key].detach().cpu())]
        if changed:
            return fault(
                name,
                f"{len(changed)} of {len(trained)} tensors come back changed, e.g. {changed[0]}",
                _REPORT,
                where="adapter",
            )
        return ok(name, f"{len(trained)} trained tensors come back as they were")

    def _tokens_of(self, row: ExampleRow) -> int:
        if isinstance(row, AnsweredPrompt):
            return row_tokens(row, share_prompts=False)
        return len(row.input_ids)

    def _steps_of_the_run(self) -> int:
        """About: packs are taken to be full."""
        train = self.recipe.train
        n_examples = len(self.rows)
        if train.packing:
            n_examples = math.ceil(sum(self._tokens_of(row) for row in self.rows) / train.pack_tokens)
        return count_steps(n_examples, train)


_REPORT = "keep the base and the versions as they are, and report this with the recipe"


class _StopWhenLearnt(TrainerCallback):
    """Ends the training of the few examples as soon as they are known, or when their time is over."""

    def __init__(self, events: Path, *, pairs: bool) -> None:
        self._events, self._pairs = events, pairs
        self._started = time.monotonic()
        self.is_late = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        last = [event for event in read_events(self._events) if event["event"] == "step"][-1]
        if is_learnt(last, pairs=self._pairs):
            control.should_training_stop = True
        elif time.monotonic() - self._started > _OVERFIT_SECONDS and state.global_step < state.max_steps:
            self.is_late = True
            control.should_training_stop = True


def is_learnt(step: dict[str, Any], *, pairs: bool) -> bool:
    """Answers: the loss is near zero. Pairs: after a step, every chosen answer is ahead; of answers that are judged one by
    one, and where margins are not told, the chosen ones are on average."""
    if not pairs:
        return isinstance(step["loss"], float) and step["loss"] <= LEARNT_NATS
    if "reward_accuracy" in step:
        return bool(
            step["reward_accuracy"] == 1.0 and step.get("reward_margin", 0.0) > 0.0 and step["step"] > 1
        )
    return step["step"] > 1 and bool(step.get("reward_chosen", 0.0) > step.get("reward_rejected", 0.0))


def judge_overfit(
    steps: Sequence[dict[str, Any]], n_rows: int, kind: str, *, pairs: bool, was_cut_short: bool = False
) -> Finding:
    """By the first and the last loss. `steps` are step events; `was_cut_short`: their time was over before their number."""
    name, first, last = f"{n_rows} examples by heart", steps[0], steps[-1]
    said = f"loss {_shown(first['loss'])} to {_shown(last['loss'])} in {len(steps)} steps"
    if is_learnt(last, pairs=pairs):
        return ok(name, said)
    if was_cut_short and (len(steps) < _FEW_STEPS or _number(last["loss"]) < _number(first["loss"])):
        return warning(
            name,
            f"{said}; their time of {_OVERFIT_SECONDS:.0f} s was over",
            "nothing has to be done if the other checks pass; on an idle machine the check comes to its end",
            where="train",
        )
    fell = _number(last["loss"]) <= _FALLS * _number(first["loss"])
    if kind in _LOW_CAPACITY and _number(last["loss"]) < _number(first["loss"]):
        return ok(name, f"{said}; {kind} has too few parameters for more")
    if fell or (pairs and _number(last["loss"]) < _number(first["loss"])):
        return warning(
            name,
            f"{said}: they are learnt, but not by heart",
            "look at those rows: answers that are not decided by their questions cannot be learnt; or the trained part is small",
            where="data.spec",
        )
    return fault(
        name,
        f"{said}: what cannot learn {n_rows} examples by heart will learn nothing",
        "look at the targets (`finetune data show`), at adapter.target_modules, and at the other findings here",
        where="adapter",
    )


def for_trial(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe for a few steps: batching, schedule and the rest as they are, but nothing that looks or waits."""
    quiet: dict[str, Any] = {
        "epochs": 1000.0,
        "auto": False,
        "batch_ramp": None,
        "gradient_accumulation_steps": 1,
        "validate_every_steps": None,
        "early_stopping": None,
        "result": "last",
        "report_to": [],
        "samples": None,
        "pin_checkpoints": [],
    }
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=quiet | changes)})


def plainly(recipe: Recipe) -> Recipe:
    """With the plain loss: without what keeps a model from learning by heart on purpose."""
    plain = {"kind": "nll", "label_smoothing": 0.0, "z_loss": 0.0, "turn_weights": [], "neftune_alpha": 0.0}
    loss = recipe.train.loss.model_copy(update=plain)
    changes = {"loss": loss, "model_dropout": None}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def short_rows(rows: Sequence[ExampleRow], count: int) -> list[ExampleRow]:
    """The shortest rows with different prompts: two answers to one prompt cannot both be learnt by heart."""
    chosen: dict[tuple[Any, ...], ExampleRow] = {}
    for row in sorted(rows, key=lambda one: (len(one.input_ids), one.row_id)):
        chosen.setdefault(_prompt_key(row), row)
        if len(chosen) == count:
            break
    return list(chosen.values())


def _prompt_key(row: ExampleRow) -> tuple[Any, ...]:
    if isinstance(row, AnsweredPrompt):
        return (*row.prompt, row.wanted)
    first = row.spans()[0][0]
    return tuple(row.input_ids[:first] if first > 1 else row.input_ids)


def saved_weights(run_folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the result in a run folder: of `adapter/`, or of `model/`."""
    found: dict[str, torch.Tensor] = {}
    for name in ("adapter", "model"):
        for path in sorted((run_folder / name).glob("*.safetensors")):
            found |= load_file(path)
    return found


def weights_apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of an element over the largest element; infinite when the tensors are not the same ones."""
    if one.keys() != other.keys() or not one:
        return math.inf
    scale = max(float(tensor.abs().max()) for tensor in one.values()) or 1.0
    return max(float((one[key].float() - other[key].float()).abs().max()) for key in one) / scale


def not_tried(names: Sequence[str], reason: str) -> Iterator[Finding]:
    """Trials that are left out, and why."""
    for name in names:
        yield skipped(name, reason)


@contextmanager
def _folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


def _is_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether it is the device or the machine that had no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in the type that was saved: a whole model is kept in its own type."""
    return torch.equal(one.to(other.dtype), other)


def _copied(model: Any) -> dict[str, torch.Tensor]:
    return {key: p.detach().cpu().clone() for key, p in trainable_parameters(model).items()}


@torch.no_grad()
def _restore(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    parameters = trainable_parameters(model)
    for key, value in weights.items():
        parameters[key].copy_(value)


def _some(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of all, or of evenly spaced ones where all would be too many."""
    n_elements = sum(parameter.numel() for parameter in parameters.values())
    stride = max(math.ceil(n_elements / _MOST_ELEMENTS), 1)
    return {key: p.detach().cpu().clone() for key, p in list(parameters.items())[::stride]}


def _number(loss: Any) -> float:
    return float(loss) if isinstance(loss, int | float) else math.inf


def _shown(loss: Any) -> str:
    return f"{loss:.3g}" if isinstance(loss, float) else str(loss)
