"""Search over a recipe: many short trainings, few long ones, winners compared row by row on validation, never on test.

Successive halving (Jamieson & Talwalkar 2016, arXiv 1502.07943) on a budget of training rows: every candidate learns from a
share of the rows with its whole schedule, the best third goes on to three times as many, until the last few have all of
them. Optuna draws the candidates. A trial is a folder of its own by digest, so a sweep that was killed goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.build import build_dataset, default_builds_root
from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.evaluation.suite_data import load_suite_data
from finetune.paths import read_json, runs_root, write_atomic, write_json
from finetune.pipeline.generate import ensure_generated
from finetune.pipeline.inputs import RunInputs, gather_inputs
from finetune.pipeline.manifest import RESOLVED, RunManifest, only_process
from finetune.pipeline.preflight import preflight
from finetune.pipeline.stages import (
    RunContext,
    build_stage,
    check_stage,
    data_stage,
    train_depends_on,
    train_model,
)
from finetune.recipe.resolve import resolved_yaml
from finetune.recipe.search_space import Axis
from finetune.stats.learning_curve import LearningCurve, fit_learning_curve
from finetune.stats.paired import paired_t
from finetune.training.session import VALIDATION_ROWS

Say = Callable[[str], None]
REDUCTION = 3  # of the candidates from rung to rung, and of the rows the other way
CURVE_SHARES = (0.12, 0.25, 0.5, 1.0)
_FEWEST_ROWS = 8


@dataclass(frozen=True, slots=True)
class Trial:
    """One training: what it overrode, how many rows it was given, and its validation loss [nats a target]."""

    overrides: tuple[str, ...]
    rows: int
    loss: float
    folder: str
    sums: tuple[float, ...]
    targets: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in ("sums", "targets")}


@dataclass(frozen=True, slots=True)
class Finalist:
    """A trial with all rows beside the best one: loss minus the best's, paired over validation rows, 95 %."""

    trial: Trial
    difference: float
    low: float
    high: float

    @property
    def is_worse(self) -> bool:
        return self.low > 0.0


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Every trial, the finalists (the best first), the learning curve if asked for, and where it is written."""

    folder: Path
    trials: tuple[Trial, ...]
    finalists: tuple[Finalist, ...]
    curve: LearningCurve | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "trials": [trial.to_dict() for trial in self.trials],
            "finalists": [
                {**one.trial.to_dict(), "difference": one.difference, "low": one.low, "high": one.high}
                for one in self.finalists
            ],
            "curve": self.curve.to_dict() if self.curve is not None else None,
        }

    def lines(self) -> list[str]:
        """For the screen: finalists with the interval of their distance to the best, then what to run."""
        found = [
            f"{len(self.trials)} trainings; finalists on all {self.finalists[0].trial.rows} rows, by validation loss:"
        ]
        for one in self.finalists:
            told = f"  {one.trial.loss:.4f}  {' '.join(one.trial.overrides) or 'the recipe as it is'}"
            if one is not self.finalists[0]:
                told += f"  {one.difference:+.4f} [{one.low:+.4f}, {one.high:+.4f}]"
                told += " worse" if one.is_worse else " not told apart from the best"
            found.append(told)
        if self.curve is not None:
            found += [
                f"  {size:>8,} rows  {loss:.4f}"
                for size, loss in zip(self.curve.sizes, self.curve.losses, strict=True)
            ]
            found.append(self.curve.line())
        best = self.finalists[0].trial
        found.append(
            f'then: make finetune SET="{" ".join(best.overrides)}"   # judged on test once, by the run'
        )
        return found


def sweep(
    path: str,
    axes: Sequence[Axis],
    *,
    overrides: Sequence[str] = (),
    within: str | None = None,
    max_trials: int | None = None,
    curve: bool = False,
    say: Say,
) -> SweepResult:
    """Try the values of `axes` on a recipe. within: a key of `axes` each of whose values keeps candidates of its own to the
    end, such as `adapter.kind` to compare LoRA with full tuning, each at its best rate. max_trials: drawn by Optuna's TPE
    where the grid has more. curve: also train the winner on 12, 25 and 50 % of the rows.

    Raises UserError for a recipe, a key or a value that is wrong before anything is trained.
    """
    if within is not None and within not in {axis.key for axis in axes}:
        raise UserError(f"--within {within} is no key of the sweep", fix="name a key that an --over gives")
    base = gather_inputs(path, overrides, say=say)
    for axis in axes:  # every value by itself, so that a fault shows now and not after hours
        for value in axis.values:
            gather_inputs(path, [*overrides, f"{axis.key}={value}"])
    content = {"recipe": base.digest, "axes": [asdict(axis) for axis in axes], "max_trials": max_trials}
    folder = runs_root() / "sweeps" / f"{base.recipe.name}-{digest_json(content)[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    with only_process(folder):
        searching = _Search(path, tuple(overrides), folder, base, say)
        groups = [None] if within is None else [f"{within}={value}" for value in _axis(axes, within).values]
        final: list[Trial] = []
        for group in groups:
            free = [axis for axis in axes if axis.key != within]
            final += searching.halve(free, max_trials, fixed=(group,) if group is not None else ())
        finalists = _finalists(final)
        fitted = searching.curve(finalists[0].trial) if curve else None
        result = SweepResult(folder, tuple(searching.trials), finalists, fitted)
        write_json(folder / "sweep.json", result.to_dict())
    return result


def _axis(axes: Sequence[Axis], key: str) -> Axis:
    return next(axis for axis in axes if axis.key == key)


class _Search:
    """Trains trials of one recipe; every one that is there already is read."""

    def __init__(
        self, path: str, overrides: tuple[str, ...], folder: Path, base: RunInputs, say: Say
    ) -> None:
        self.path, self.overrides, self.folder, self.base, self.say = path, overrides, folder, base, say
        self.trials: list[Trial] = []
        ensure_generated(base.spec_path, say=say)
        build = build_dataset(base.spec_path, default_builds_root())
        rows = build.manifest["splits"]["train"]["rows"]
        self.n_rows = min(rows, base.recipe.data.max_train_rows or rows)

    def halve(self, axes: Sequence[Axis], max_trials: int | None, *, fixed: tuple[str, ...]) -> list[Trial]:
        """The trials of the last rung, which learnt from all rows."""
        candidates = math.prod(len(axis.values) for axis in axes)
        n_trials = min(candidates, max_trials or candidates)
        n_rungs = 1 + (int(math.log(n_trials, REDUCTION) + 1e-9) if n_trials > 1 else 0)
        rung_rows = [max(_FEWEST_ROWS, self.n_rows // REDUCTION**rung) for rung in reversed(range(n_rungs))]
        alive = self._first_rung(axes, n_trials, candidates, fixed, rung_rows[0])
        for rows in rung_rows[1:]:
            best = sorted(alive, key=lambda trial: trial.loss)[: max(1, len(alive) // REDUCTION)]
            self.say(f"sweep: the best {len(best)} of {len(alive)} go on to {rows} rows")
            alive = [self.train(trial.overrides, rows) for trial in best]
        return alive

    def _first_rung(
        self, axes: Sequence[Axis], n_trials: int, candidates: int, fixed: tuple[str, ...], rows: int
    ) -> list[Trial]:
        """All candidates in turn, or those that Optuna's TPE draws where there are more than may be tried."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        space = {axis.key: list(axis.values) for axis in axes}
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.base.recipe.seed))
        if n_trials == candidates:
            for values in product(*space.values()):
                study.enqueue_trial(dict(zip(space, values, strict=True)))
        found: dict[tuple[str, ...], Trial] = {}
        asked = 0
        while len(found) < n_trials and asked < 10 * n_trials:  # TPE may draw one again
            asked += 1
            trial = study.ask()
            chosen = tuple(f"{key}={trial.suggest_categorical(key, values)}" for key, values in space.items())
            overrides = fixed + chosen
            if overrides not in found:
                found[overrides] = self.train(overrides, rows)
            study.tell(trial, found[overrides].loss)
        return list(found.values())

    def train(self, overrides: tuple[str, ...], rows: int) -> Trial:
        """One training on the first `rows` training rows, in a folder by its digest; read where it is complete."""
        own = [*overrides, *([f"data.max_train_rows={rows}"] if rows < self.n_rows else [])]
        inputs = gather_inputs(self.path, [*self.overrides, *own])
        target = self.folder / inputs.digest[:12]
        manifest = RunManifest.open(target, recipe_digest=inputs.digest, recipe_name=inputs.recipe.name)
        if not manifest.stages.get("train", {}).get("completed"):
            self.say(f"sweep: {' '.join(overrides) or 'the recipe as it is'}, {rows} rows")
            _train(inputs, manifest)
        losses = read_json(target / VALIDATION_ROWS)
        sums, targets = tuple(losses["sums"]), tuple(losses["targets"])
        trial = Trial(overrides, rows, float(np.sum(sums) / np.sum(targets)), str(target), sums, targets)
        if not math.isfinite(trial.loss):
            raise UserError(
                f"the validation loss of {' '.join(overrides)} is not finite", fix="leave that value out"
            )
        self.trials.append(trial)
        self.say(f"sweep: validation loss {trial.loss:.4f}")
        return trial

    def curve(self, best: Trial) -> LearningCurve:
        """The winner's loss over growing data."""
        points = [
            best
            if share == 1.0
            else self.train(best.overrides, max(_FEWEST_ROWS, round(share * self.n_rows)))
            for share in CURVE_SHARES
        ]
        return fit_learning_curve(
            [trial.rows for trial in points],
            [trial.sums for trial in points],
            best.targets,
            seed=self.base.recipe.seed,
        )


def _train(inputs: RunInputs, manifest: RunManifest) -> None:
    """Data, check and training of one trial; no suite is asked: the test side is for the run that follows."""
    folder = manifest.folder
    write_atomic(folder / RESOLVED, resolved_yaml(inputs.recipe))
    context = RunContext(inputs, manifest, lambda line: None)
    preflight(inputs.recipe, inputs.source, inputs.start)
    suites = [load_suite_data(suite, dataset_spec=inputs.spec_path) for suite in inputs.suites]
    rows = data_stage(context, build_stage(context), suites)
    if not rows.validation.rows:
        raise UserError(
            "there are no validation rows to compare trials on",
            where="data.spec",
            fix="give the dataset a validation split; test rows are not for choosing",
        )
    check_stage(context, rows)
    depends_on = train_depends_on(context, rows)

    def work(outputs: list[Path]) -> None:
        train_model(context, rows, owner=digest_json(depends_on))
        outputs.append(folder / VALIDATION_ROWS)

    context.stage("train", depends_on, work, "train")


def _finalists(trials: Sequence[Trial]) -> tuple[Finalist, ...]:
    """The best first; each with the token-weighted difference to it, paired over the validation rows."""
    ranked = sorted(trials, key=lambda trial: trial.loss)
    best = ranked[0]
    scale = 1.0 / float(np.mean(best.targets))
    found = []
    for trial in ranked:
        if len(trial.sums) < 2 or trial is best:
            difference = trial.loss - best.loss
            found.append(Finalist(trial, difference, difference, difference))
            continue
        result = paired_t(np.asarray(best.sums) * scale, np.asarray(trial.sums) * scale)
        found.append(Finalist(trial, trial.loss - best.loss, result.low, result.high))
    return tuple(found)
