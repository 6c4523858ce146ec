"""Divergence: stop, or go back to the last good checkpoint and go on with half the rate or without the rows of that step.

What was done lies in `rewinds.json` of the run folder and as `rewind` events. A run is a function of its recipe and of these
acts: each of them holds from its step on, so that a resumed run, or one that is given the acts beforehand, takes the
same steps to the same bytes.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.errors import UserError
from finetune.paths import read_json, write_json
from finetune.recipe.train_section import TrainSection
from finetune.telemetry.divergence import LONG_STEPS, DivergenceRule
from finetune.telemetry.events import read_events
from finetune.training.checkpoints import (
    UnusableCheckpointError,
    checkpoint_step,
    damage,
    list_checkpoints,
    newest_usable,
    set_aside,
)
from finetune.training.exact_trainer import DivergenceError, NotFiniteError
from finetune.training.processes import n_processes

FILE_NAME = "rewinds.json"
HALF = 0.5


@dataclass(frozen=True, slots=True)
class Act:
    """One rewind: from the step that proved the divergence back to `to_step`. It holds for every step after `to_step`.

    `onset` is the first bad step, `reason` 'diverged' or 'not_finite', `rate_factor` multiplies the learning rate,
    `rows` are ids that carry no loss.
    """

    from_step: int
    onset: int
    to_step: int
    reason: str
    remedy: str
    rate_factor: float
    rows: tuple[str, ...]

    @classmethod
    def read(cls, content: dict[str, Any]) -> Act:
        return cls(**{**content, "rows": tuple(content["rows"])})


def read_acts(run_folder: Path) -> list[Act]:
    """The acts of a run, in their order; none where it never rewound. Raises UserError where they cannot be read."""
    return _read(run_folder)[0]


def write_acts(run_folder: Path, acts: Sequence[Act], *, is_done: bool = True) -> None:
    """Atomically. Not `is_done`: the last act is decided, but what came after its step is not cleared away yet."""
    content = {"format": 1, "acts": [asdict(act) for act in acts]}
    write_json(run_folder / FILE_NAME, content | ({} if is_done else {"is_done": False}))


def _read(run_folder: Path) -> tuple[list[Act], bool]:
    """The acts, and whether the last one is done."""
    path = run_folder / FILE_NAME
    if not path.is_file():
        return [], True
    content = read_json(path)
    try:
        return [Act.read(one) for one in content["acts"]], bool(content.get("is_done", True))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} does not hold the rewinds of a run",
            why="what was done about a divergence decides the rates and rows of all later steps",
            fix="bring the file back, or train anew in another folder (--run-dir)",
        ) from error


def rate_factor(acts: Sequence[Act], step: int) -> float:
    """What the schedule's rate is multiplied with in the step after `step` steps are done."""
    return math.prod(act.rate_factor for act in acts if act.to_step <= step)


def left_out(acts: Sequence[Act], step: int) -> frozenset[str]:
    """Rows that carry no loss in the step after `step` steps are done."""
    return frozenset(row for act in acts if act.to_step <= step for row in act.rows)


@dataclass(frozen=True, slots=True)
class Trouble:
    """A divergence: first bad step, the step that proved it, why, and the rows around its beginning."""

    onset: int
    step: int
    reason: str
    rows: tuple[str, ...]


class DivergenceWatch(TrainerCallback):
    """Judges the loss of every step, before telemetry empties the tally, and stops training when it has diverged.

    With `rewinds` the first step has a checkpoint before it, and the rates are those of the acts.
    """

    def __init__(self, trainer: Any, *, rewinds: bool) -> None:
        self._trainer, self._rewinds = trainer, rewinds
        self._rule = DivergenceRule()
        self._rows: dict[int, tuple[str, ...]] = {}
        self.trouble: Trouble | None = None

    def continue_from(self, events: Sequence[dict[str, Any]]) -> None:
        """Start anew from the steps that are told already; they may have diverged before their process was killed."""
        self._rule, self._rows, self.trouble = DivergenceRule(), {}, None
        for event in events:
            if event["event"] != "step" or not isinstance(step := event.get("step"), int):
                continue
            self._rows[step] = tuple(event.get("rows", ()))
            if (loss := event.get("loss")) is not None and self._rule.add(float(loss)):
                self._diverged_at(step)

    def rows_before(self, step: int) -> tuple[str, ...]:
        """Rows of a step and of the one before it, each once."""
        return tuple(dict.fromkeys(row for one in (step - 1, step) for row in self._rows.get(one, ())))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._rewinds:
            return
        # Not again after a rewind to it: random numbers have been drawn, and its own state is loaded only later.
        if state.global_step == 0 and not (self._trainer.checkpoint_root / "step-0").is_dir():
            self._trainer._save_checkpoint(kwargs["model"], None)
        _set_rates(self._trainer.lr_scheduler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step, tally = state.global_step, self._trainer.tally
        self._rows[step] = tuple(tally.rows)
        self._rows.pop(step - 2 * LONG_STEPS, None)
        if (tally.n_targets or tally.n_examples) and self._rule.add(tally.loss):
            self._diverged_at(step)
            control.should_training_stop = True

    def _diverged_at(self, step: int) -> None:
        """Note that this step proves it; of a replay the first one counts."""
        if self.trouble is None:
            onset = step - self._rule.n_steps + 1
            self.trouble = Trouble(onset, step, "diverged", self.rows_before(onset))


def _set_rates(scheduler: Any) -> None:
    """The rates of the next step as the schedule has them now; a checkpoint holds those from before an act."""
    rates = [
        base * share(scheduler.last_epoch)
        for base, share in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler._last_lr = rates


class Rewinder:
    """Trains to the end, whatever it takes within the recipe's limit.

    `restart(step)` is told after a rewind: what the session keeps of later steps must go. Acts of an earlier process are
    read from the run folder when this is made; call `finish_act` before a checkpoint is chosen.
    """

    def __init__(
        self,
        trainer: Any,
        run_folder: Path,
        log: Any,
        say: Callable[[str], None],
        restart: Callable[[int], None],
    ) -> None:
        self._trainer, self._folder, self._log, self._say, self._restart = (
            trainer,
            run_folder,
            log,
            say,
            restart,
        )
        self._settings: TrainSection = trainer.settings
        self.acts, self._is_done = _read(run_folder)
        self.watch = DivergenceWatch(trainer, rewinds=self._settings.on_divergence == "rewind")
        trainer.rate_factor = lambda step: rate_factor(self.acts, step)
        trainer.left_out = lambda step: left_out(self.acts, step)
        if self._settings.on_divergence == "rewind":
            trainer.recent_steps_kept = LONG_STEPS

    def train(self, checkpoint: Path | None) -> None:
        """Raises UserError for a divergence that the recipe does not let it mend."""
        trainer = self._trainer
        while True:
            self.watch.continue_from(read_events(self._folder / "events.jsonl"))
            not_finite = None
            try:
                if self.watch.trouble is None:
                    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
                trouble = self.watch.trouble
            except NotFiniteError as error:
                step, not_finite = error.step, error
                rows = dict.fromkeys([*self.watch.rows_before(step), *trainer.tally.rows])
                trouble = Trouble(step, step, "not_finite", tuple(rows))
            except UnusableCheckpointError as error:
                checkpoint = self._earlier(error)
                continue
            if trouble is None:
                return
            try:
                checkpoint = self._rewind(trouble, not_finite)
            except UserError:
                told = {"reason": trouble.reason, "onset": trouble.onset, "rows": list(trouble.rows)}
                self._log.write("stop", step=trouble.step, **told)
                raise

    def finish_act(self) -> None:
        """Clear away what the last act leaves behind, where its process was killed in the middle of that."""
        if not self._is_done:
            self._carry_out()

    def _earlier(self, error: UnusableCheckpointError) -> Path:
        """The checkpoint before one that is refused, which is set aside. Raises `error` again among several processes, some
        of which may be training already."""
        trainer = self._trainer
        if n_processes() > 1:
            raise error
        place = set_aside(error.checkpoint)
        said = f"checkpoint {error.checkpoint.name} cannot be continued from ({error.reason}); it is kept as {place}"
        before = newest_usable(trainer.checkpoint_root, owner=trainer.owner, say=self._say)
        if before is None:
            raise UserError(
                said,
                why="no checkpoint comes before it, and the model holds what was read of this one",
                fix="the same command now starts the training anew",
            ) from error
        self._say(f"{said}; training continues from {before.name}")
        self._begin_anew(checkpoint_step(before))
        return before

    def _begin_anew(self, step: int) -> None:
        """Forget what is later than `step`; optimizer and schedule are made anew, then filled from its checkpoint."""
        self._log.write("resume", step=step)
        self._trainer.tally.__init__()
        self._trainer.optimizer = self._trainer.lr_scheduler = None
        self._restart(step)

    def _rewind(self, trouble: Trouble, not_finite: NotFiniteError | None) -> Path:
        """Decide on an act and carry it out; returns the checkpoint to go on from. Raises UserError where the recipe allows none
        or none can help."""
        settings = self._settings
        if settings.on_divergence != "rewind" or len(self.acts) >= settings.rewind.at_most:
            raise not_finite if not_finite is not None else self._diverged(trouble)
        remedy = settings.rewind.remedy
        checkpoint = self._last_good(trouble.onset)
        if remedy == "skip_rows" and left_out(self.acts, checkpoint_step(checkpoint)).issuperset(
            trouble.rows
        ):
            raise self._no_rows_left(trouble)
        act = Act(
            from_step=trouble.step,
            onset=trouble.onset,
            to_step=checkpoint_step(checkpoint),
            reason=trouble.reason,
            remedy=remedy,
            rate_factor=HALF if remedy == "halve_rate" else 1.0,
            rows=trouble.rows if remedy == "skip_rows" else (),
        )
        self.acts.append(act)
        write_acts(self._folder, self.acts, is_done=False)  # first: a process killed here goes on as decided
        self._carry_out()
        self._begin_anew(act.to_step)
        return checkpoint

    def _carry_out(self) -> None:
        """Remove later checkpoints and tell the last act; what of that was done before is not done again."""
        act, attempt = self.acts[-1], len(self.acts)
        for later in list_checkpoints(self._trainer.checkpoint_root):
            if checkpoint_step(later) > act.to_step:
                doomed = later.with_name(f".{later.name}.removed")
                later.rename(doomed)
                shutil.rmtree(doomed)
        told = [event for event in read_events(self._folder / "events.jsonl") if event["event"] == "rewind"]
        factor = rate_factor(self.acts, act.to_step)
        if all(event.get("attempt") != attempt for event in told):
            what = {**asdict(act), "rows": list(act.rows), "rate_share": factor}
            self._log.write("rewind", step=act.to_step, attempt=attempt, **what)
        done = (
            f"without {len(act.rows)} rows" if act.remedy == "skip_rows" else f"with {factor:g} of the rate"
        )
        self._say(
            f"{_told(act)}; back to step {act.to_step}, on {done} "
            f"(rewind {attempt} of at most {self._settings.rewind.at_most})"
        )
        write_acts(self._folder, self.acts)
        self._is_done = True

    def _last_good(self, onset: int) -> Path:
        """The newest undamaged checkpoint of a step before the first bad one."""
        for checkpoint in reversed(list_checkpoints(self._trainer.checkpoint_root)):
            if checkpoint_step(checkpoint) < onset and damage(checkpoint) is None:
                return checkpoint
        raise UserError(
            f"there is no undamaged checkpoint from before step {onset} to go back to",
            where="train.on_divergence",
            fix="start the run anew with a lower train.learning_rate",
        )

    def _no_rows_left(self, trouble: Trouble) -> DivergenceError:
        return DivergenceError(
            f"{_told(trouble)} again, without the rows of its beginning",
            why="the same steps without the same rows come to the same end: these rows are not the cause",
            fix="set train.rewind.remedy: halve_rate, or lower train.learning_rate",
        )

    def _diverged(self, trouble: Trouble) -> DivergenceError:
        good = [
            step
            for path in list_checkpoints(self._trainer.checkpoint_root)
            if (step := checkpoint_step(path)) < trouble.onset
        ]
        kept = f"; the last checkpoint before it is step {good[-1]}" if good else ""
        often = f", after {len(self.acts)} rewind{'s' * (len(self.acts) > 1)}" if self.acts else ""
        remedy = "raise train.rewind.at_most" if self.acts else "set train.on_divergence: rewind"
        return DivergenceError(
            f"{_told(trouble)}{often}{kept}",
            why=f"for {trouble.step - trouble.onset + 1} steps the loss was above where it began: the model is worse than before training",
            fix=f"lower train.learning_rate (by 2 to 10 times), lengthen train.warmup_share, or {remedy}",
        )


def _told(trouble: Trouble | Act) -> str:
    if trouble.reason == "not_finite":
        return f"loss or gradient of step {trouble.onset} is not finite"
    return f"the loss diverged at step {trouble.onset}"
