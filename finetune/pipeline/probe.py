"""Three steps of a recipe's own training on this machine, timed: from them follows how long all of it takes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.doctor.trials import for_trial
from finetune.errors import UserError
from finetune.pipeline.inputs import gather_inputs
from finetune.pipeline.material import example_lengths, gather_material
from finetune.pipeline.methods import train_by_method
from finetune.pipeline.trainable import load_to_train
from finetune.plan.time import TrainingTime, probe_rate, training_time
from finetune.recipe.schema import Recipe
from finetune.telemetry.events import read_events
from finetune.telemetry.memory import memory_basis, peak_memory_bytes, reset_peak_memory
from finetune.telemetry.progress import Progress

FEWEST_STEPS = 2  # the first one warms up


@dataclass(frozen=True, slots=True)
class Probe:
    """What a few steps told. `train_tokens` and `n_examples` (packs counted as one) are those of one pass over the rows;
    `total_steps` is what the trainer would do in all; `step_tokens` and `step_seconds` are of the steps that were run,
    the first of which warms up. `peak_bytes` is what they used, counted as `basis` says ('rss' or 'cuda')."""

    train_tokens: int
    n_rows: int
    n_examples: int
    total_steps: int
    step_tokens: tuple[int, ...]
    step_seconds: tuple[float, ...]
    peak_bytes: int
    basis: str

    @property
    def tokens_per_second(self) -> float:
        return probe_rate(self.step_tokens, self.step_seconds)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}

    def time(self, recipe: Recipe, *, n_devices: int = 1) -> TrainingTime:
        """The whole training: on one device with the trainer's own number of steps, on several by division."""
        time = training_time(
            recipe,
            self.train_tokens,
            self.tokens_per_second,
            n_rows=self.n_rows,
            n_examples=self.n_examples,
            n_devices=n_devices,
            basis=f"probe of {len(self.step_tokens)} steps",
        )
        return replace(time, steps=self.total_steps) if n_devices == 1 else time


def probe_training(
    recipe: str, overrides: Sequence[str] = (), *, n_steps: int = 3, say: Callable[[str], None]
) -> Probe:
    """Train `n_steps` steps of the recipe's own model on its own rows and throw the result away.

    Reads or builds the data as a run does. Raises UserError for a faulty recipe, fewer than two steps, a training that is
    shorter than the probe, and for distillation, whose teacher takes time too.
    """
    if n_steps < FEWEST_STEPS:
        raise UserError(
            f"{n_steps} steps tell no rate",
            where="--probe-steps",
            why="the first step warms up, and its time is left out",
            fix=f"take {FEWEST_STEPS} or more",
        )
    inputs = gather_inputs(recipe, overrides, say=say)
    if inputs.recipe.train.method == "distil":
        raise UserError(
            "a probe does not know what the teacher of a distillation takes",
            where="--probe",
            fix="give --train-tokens, and --tokens-per-second from events.jsonl of a run that was begun",
        )
    material = gather_material(inputs, say)
    say(f"probe: {n_steps} steps of {inputs.recipe.name}")
    reset_peak_memory()
    model = load_to_train(inputs, new_tokens=material.new, rows=material.split.rows)
    split: Any = material.split
    nothing = replace(split, rows=[])
    with TemporaryDirectory() as name, Progress("probe", n_steps, "steps") as progress:
        # The trainer's own line tells the time of a training that will not take place.
        with contextlib.redirect_stderr(io.StringIO()):
            train_by_method(
                _quiet(inputs.recipe),
                model,
                material.tokenizer,
                split,
                nothing,
                run_folder=Path(name),
                owner="probe",
                say=lambda line: None,
                source=inputs.source,
                callbacks=[_StopAfter(n_steps, progress)],
            )
        events = read_events(Path(name) / "events.jsonl")
    return _told(events, example_lengths(inputs.recipe, material.split))


def _quiet(recipe: Recipe) -> Recipe:
    """The recipe as it trains, without looking at validation rows or keeping checkpoints on the way."""
    train = recipe.train
    return for_trial(
        recipe,
        epochs=train.epochs,
        max_steps=train.max_steps,
        batch_ramp=train.batch_ramp,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        checkpoint_every_steps=2**31 - 1,
    )


def _told(events: Sequence[dict[str, Any]], lengths: Sequence[int]) -> Probe:
    """From the events of the few steps. `lengths` are the tokens of every row."""
    start = next(event for event in events if event["event"] == "start")
    steps = [event for event in events if event["event"] == "step"]
    if len(steps) < FEWEST_STEPS:
        raise UserError(
            f"the training has {len(steps)} steps, too few to tell a rate",
            where="--probe",
            fix="run it: it takes less time than a probe",
        )
    tokens = tuple(later - earlier for earlier, later in pairwise([0, *(step["tokens"] for step in steps)]))
    return Probe(
        train_tokens=sum(lengths),
        n_rows=len(lengths),
        n_examples=start["examples"],
        total_steps=start["total_steps"],
        step_tokens=tokens,
        step_seconds=tuple(
            count / step["tokens_per_second"] for count, step in zip(tokens, steps, strict=True)
        ),
        peak_bytes=peak_memory_bytes(),
        basis=memory_basis(),
    )


class _StopAfter(TrainerCallback):
    """Ends a training after so many steps, and tells of each."""

    def __init__(self, n_steps: int, progress: Progress) -> None:
        self._n_steps, self._progress = n_steps, progress

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._progress.advance()
        if state.global_step >= self._n_steps:
            control.should_training_stop = True
