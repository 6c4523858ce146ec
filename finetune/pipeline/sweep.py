"""Search over a recipe: many short trainings, few long ones, winners compared row by row on validation, never on test.

Successive halving (Jamieson & Talwalkar 2016, arXiv 1502.07943) on a budget of training rows, or of optimizer steps: every
candidate learns from a share of it with its whole schedule, the best third goes on to three times as much, until the last
few have all of it. Optuna draws the candidates. A trial is a folder of its own by digest, so a sweep that was killed goes on.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from finetune.data.build import build_dataset, default_builds_root
from finetune.digest import digest_json
from finetune.errors import ExitCode, UserError
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
from finetune.pipeline.sweep_result import SweepResult, Trial, finalists_of
from finetune.recipe.preference_section import PREFERENCE_METHODS
from finetune.recipe.resolve import resolved_yaml
from finetune.recipe.schema import Recipe
from finetune.recipe.search_space import Axis
from finetune.stats.learning_curve import LearningCurve, fit_learning_curve
from finetune.telemetry.events import read_events
from finetune.training.arguments import count_steps
from finetune.training.exact_trainer import DivergenceError
from finetune.training.session import VALIDATION_ROWS
from finetune.units import format_duration

Say = Callable[[str], None]
REDUCTION = 3  # of the candidates from rung to rung, and of the budget the other way
FINALISTS = 2  # at the least: one alone is compared with nothing
CURVE_SHARES = (0.12, 0.25, 0.5, 1.0)
CURVE_REPEATS = 2  # trainings on the least data with other seeds: how far losses differ by chance
LOST = "lost.json"  # of a trial's folder: why its training did not come to its end
_FEWEST_ROWS = 8
_MOST_COMBINATIONS_READ = 200
# Keys (with all below them) that change what the validation loss is a loss of, or nothing that is trained.
_NOT_COMPARABLE = (
    "name",
    "description",
    "recipe",
    "profile",
    "profiles",
    "extends",
    "eval",
    "data.spec",
    "data.train_on",
    "data.max_validation_rows",
    "train.method",
    "train.preference",
)


def sweep(
    path: str,
    axes: Sequence[Axis],
    *,
    overrides: Sequence[str] = (),
    within: str | None = None,
    max_trials: int | None = None,
    steps: int | None = None,
    curve: bool = False,
    say: Say,
) -> SweepResult:
    """Try the values of `axes` on a recipe. within: a key of `axes` each of whose values keeps candidates of its own to the
    end, such as `adapter.kind` to compare LoRA with full tuning, each at its best rate. max_trials: drawn by Optuna's TPE
    where the grid has more. steps: the budget is optimizer steps, so many for the finalists, instead of rows. curve: also
    train the winner on 12, 25 and 50 % of the rows.

    Raises UserError for a recipe, a key or a value that is wrong before anything is trained, and when every training is lost.
    """
    if within is not None and within not in {axis.key for axis in axes}:
        raise UserError(f"--within {within} is no key of the sweep", fix="name a key that an --over gives")
    base = gather_inputs(path, overrides, say=say)
    _refuse_other_measures(axes, base.recipe.train.method, steps)
    for axis in axes:  # every value by itself, so that a fault shows now and not after hours
        for value in axis.values:
            gather_inputs(path, [*overrides, f"{axis.key}={value}"])
    content = {
        "recipe": base.digest,
        "axes": [asdict(axis) for axis in axes],
        "max_trials": max_trials,
        "within": within,
        "steps": steps,
    }
    folder = runs_root() / "sweeps" / f"{base.recipe.name}-{digest_json(content)[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    with only_process(folder):
        searching = _Search(path, tuple(overrides), folder, base, steps, say)
        groups = [()] if within is None else [(f"{within}={value}",) for value in _axis(axes, within).values]
        free = [axis for axis in axes if axis.key != within]
        grids = {group: searching.combinations(free, group) for group in groups}
        n_candidates = [min(len(grid), max_trials or len(grid)) for grid in grids.values()]
        keep = FINALISTS if within is None else 1
        of_curve = len(CURVE_SHARES) - 1 + CURVE_REPEATS if curve else 0
        searching.expect(sum(map(sum, (rung_sizes(n, keep) for n in n_candidates))) + of_curve)
        final = [
            trial
            for group, grid in grids.items()
            for trial in searching.halve(free, grid, max_trials, fixed=group, keep=keep)
        ]
        if not final:
            raise UserError(
                f"every training was lost: {searching.trials[0].why}",
                where=str(folder),
                fix="search lower learning rates, or look at the data with `finetune doctor`",
            )
        finalists = finalists_of(final)
        fitted = searching.curve(finalists[0].trial) if curve else None
        result = SweepResult(folder, path, tuple(searching.trials), finalists, fitted)
        write_json(folder / "sweep.json", result.to_dict())
    return result


def rung_sizes(n_candidates: int, keep: int) -> list[int]:
    """Trainings of each rung: all candidates, then the best third, and so on; the last rung has at least `keep` of them.

    Three candidates of which two are kept would cost as much as three whole trainings, so they get those.
    """
    if keep > 1 and n_candidates <= REDUCTION:
        return [n_candidates]
    sizes = [n_candidates]
    while sizes[-1] >= REDUCTION:
        sizes.append(max(sizes[-1] // REDUCTION, keep))
    return sizes


def _refuse_other_measures(axes: Sequence[Axis], method: str, steps: int | None) -> None:
    """Trials are ranked by validation loss, which has to be the same loss of the same rows for all of them."""
    budget = ("data.max_train_rows",) if steps is None else ("data.max_train_rows", "train.max_steps")
    order = ("train.pack_tokens",) if method in PREFERENCE_METHODS else ()
    for axis in axes:
        if axis.key in budget:
            raise UserError(
                f"{axis.key} is what the sweep itself gives its trials",
                where="--over",
                fix="leave it out; --curve tells what more rows bring",
            )
        if any(axis.key == key or axis.key.startswith(f"{key}.") for key in (*_NOT_COMPARABLE, *order)):
            raise UserError(
                f"{axis.key} cannot be searched by validation loss",
                where="--over",
                why="its values change what that loss is measured on, or nothing that is trained",
                fix="run each value as a recipe of its own, and compare them on the suite",
            )


def _axis(axes: Sequence[Axis], key: str) -> Axis:
    return next(axis for axis in axes if axis.key == key)


@dataclass
class _Search:
    """Trains trials of one recipe; every one that is there already is read."""

    path: str
    overrides: tuple[str, ...]
    folder: Path
    base: RunInputs
    steps: int | None
    say: Say

    def __post_init__(self) -> None:
        self.trials: list[Trial] = []
        self._expected, self._seconds = 0, 0.0
        ensure_generated(self.base.spec_path, say=self.say)
        build = build_dataset(self.base.spec_path, default_builds_root())
        rows = build.manifest["splits"]["train"]["rows"]
        self.n_rows = min(rows, self.base.recipe.data.max_train_rows or rows)

    def expect(self, n_trainings: int) -> None:
        """How many trainings there will be at the most, for the time that is left."""
        self._expected = n_trainings
        self.say(f"sweep: at most {n_trainings} trainings")

    def combinations(self, axes: Sequence[Axis], fixed: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The grid, without what the recipe refuses in combination; of a very large one all of it, unread.

        Raises UserError when nothing of it is left.
        """
        grid = [
            fixed + tuple(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True))
            for values in product(*(axis.values for axis in axes))
        ]
        if len(grid) > _MOST_COMBINATIONS_READ:
            return grid
        kept, last = [], None
        for one in grid:
            try:
                gather_inputs(self.path, [*self.overrides, *one])
                kept.append(one)
            except UserError as error:
                last = error
                self.say(f"sweep: left out: {' '.join(one)}: {error.faults[0].what}")
        if last is not None and not kept:
            raise last
        return kept

    def halve(
        self,
        axes: Sequence[Axis],
        grid: Sequence[tuple[str, ...]],
        max_trials: int | None,
        *,
        fixed: tuple[str, ...],
        keep: int,
    ) -> list[Trial]:
        """The trials of the last rung, which had the whole budget; lost ones are not among them."""
        sizes = rung_sizes(min(len(grid), max_trials or len(grid)), keep)
        budgets = [self._share(1.0 / REDUCTION ** (len(sizes) - 1 - place)) for place in range(len(sizes))]
        alive = self._first_rung(axes, grid, sizes[0], fixed, budgets[0])
        for size, (rows, steps) in zip(sizes[1:], budgets[1:], strict=True):
            best = sorted(_found(alive), key=lambda trial: trial.known_loss)[:size]
            what = f"{rows} rows" if steps is None else f"{steps} steps"
            self.say(f"sweep: the best {len(best)} of {len(alive)} go on to {what}")
            alive = [self.train(trial.overrides, rows, steps) for trial in best]
        return _found(alive)

    def _share(self, share: float) -> tuple[int, int | None]:
        """(rows, steps) of a share of the budget."""
        if self.steps is not None:
            return self.n_rows, max(1, round(share * self.steps))
        return min(self.n_rows, max(_FEWEST_ROWS, round(share * self.n_rows))), None

    def _first_rung(
        self,
        axes: Sequence[Axis],
        grid: Sequence[tuple[str, ...]],
        n_trials: int,
        fixed: tuple[str, ...],
        budget: tuple[int, int | None],
    ) -> list[Trial]:
        """All candidates in turn, or those that Optuna's TPE draws where there are more than may be tried."""
        import optuna

        if n_trials == len(grid):
            return [self.train(overrides, *budget) for overrides in grid]
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.base.recipe.seed))
        found: dict[tuple[str, ...], Trial] = {}
        allowed, asked = set(grid), 0
        while len(found) < n_trials and asked < 10 * n_trials:  # TPE may draw one again
            asked += 1
            trial = study.ask()
            overrides = fixed + tuple(
                f"{axis.key}={trial.suggest_categorical(axis.key, list(axis.values))}" for axis in axes
            )
            if overrides in allowed and overrides not in found:
                found[overrides] = self.train(overrides, *budget)
            loss = found[overrides].loss if overrides in found else None
            if loss is None:  # refused or lost
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, loss)
        return list(found.values())

    def train(self, overrides: tuple[str, ...], rows: int, steps: int | None = None) -> Trial:
        """One training on the first `rows` training rows, or for `steps` steps, in a folder by its digest; read where it is
        complete."""
        own = [*overrides, *([f"data.max_train_rows={rows}"] if rows < self.n_rows else [])]
        if steps is not None:
            own.append(f"train.max_steps={steps}")
        inputs = gather_inputs(self.path, [*self.overrides, *own])
        target = self.folder / inputs.digest[:12]
        manifest = RunManifest.open(target, recipe_digest=inputs.digest, recipe_name=inputs.recipe.name)
        started, named = time.monotonic(), " ".join(overrides) or "the recipe as it is"
        is_new = not (manifest.stages.get("train", {}).get("completed") or (target / LOST).exists())
        if is_new:
            self.say(f"sweep: {named}, {rows} rows" + (f", {steps} steps" if steps is not None else ""))
            _train(inputs, manifest)
        shutil.rmtree(target / "checkpoints", ignore_errors=True)  # of no use to a trial that is over
        if self.steps is not None:
            _require_steps(target, inputs.recipe, self.steps, named)
        trial = self._read(target, overrides, rows, steps)
        self.trials.append(trial)
        self._seconds += time.monotonic() - started
        told = f"lost: {trial.why}" if trial.loss is None else f"validation loss {trial.loss:.4f}"
        self.say(f"sweep: {named}: {told}{self._time_left() if is_new else ''}")
        return trial

    def _time_left(self) -> str:
        """By the mean time of the trainings so far; later rungs are longer, which the share of rows makes up for."""
        left = self._expected - len(self.trials)
        if left <= 0:
            return ""
        work = sum(trial.rows if trial.steps is None else trial.steps for trial in self.trials)
        full = self.n_rows if self.steps is None else self.steps
        seconds = self._seconds / work * left * full
        return f" ({len(self.trials)} of at most {self._expected} trainings, at most {format_duration(seconds)} left)"

    def _read(self, target: Path, overrides: tuple[str, ...], rows: int, steps: int | None) -> Trial:
        if (target / LOST).exists():
            why = str(read_json(target / LOST)["why"])
            return Trial(overrides, rows, None, str(target), steps=steps, why=why)
        losses = read_json(target / VALIDATION_ROWS)
        sums, targets = tuple(losses["sums"]), tuple(losses["targets"])
        first = next((trial for trial in self.trials if trial.targets), None)
        if first is not None and first.targets != targets:
            raise UserError(
                f"{' '.join(overrides)} has other validation targets than {first.name}, so their losses cannot be compared",
                why="the tokenizer, the template or the length limit cuts the same rows into other tokens",
                fix="leave that value out, and compare it on the suite as a recipe of its own",
            )
        loss = float(np.sum(sums) / np.sum(targets))
        if not math.isfinite(loss):
            return Trial(
                overrides, rows, None, str(target), steps=steps, why="the validation loss is not finite"
            )
        return Trial(overrides, rows, loss, str(target), sums, targets, steps)

    def curve(self, best: Trial) -> LearningCurve:
        """The winner's loss over growing data, and with other seeds on the least of it."""
        points = [
            best
            if share == 1.0 and best.steps is None
            else self.train(best.overrides, max(_FEWEST_ROWS, round(share * self.n_rows)))
            for share in CURVE_SHARES
        ]
        known = _found(points)
        least = min((trial.rows for trial in known), default=0)
        plain = tuple(one for one in best.overrides if not one.startswith("seed="))
        own = gather_inputs(self.path, [*self.overrides, *best.overrides]).recipe.seed
        others = [own + place for place in range(1, CURVE_REPEATS + 1)] if known else []
        repeats = [self.train((*plain, f"seed={seed}"), least) for seed in others]
        return fit_learning_curve(
            [trial.rows for trial in known],
            [trial.sums for trial in known],
            known[-1].targets if known else (),
            repeats=[trial.sums for trial in _found(repeats)],
            seed=self.base.recipe.seed,
        )


def _require_steps(folder: Path, recipe: Recipe, budget: int, named: str) -> None:
    """Raise UserError where the recipe's passes over its rows end before the budget of the finalists: told by the first trial
    of a candidate, which is a short one. Batches that are chosen or grow while training are not known beforehand."""
    train = recipe.train
    if train.auto or train.batch_ramp is not None:
        return
    starts = [event for event in read_events(folder / "events.jsonl") if event["event"] == "start"]
    if not starts:  # lost before its first step
        return
    whole = count_steps(starts[-1]["examples"], train.model_copy(update={"max_steps": None}))
    if whole < budget:
        raise UserError(
            f"{named}: the recipe's whole training has {whole} steps, and the budget is {budget}",
            where="--steps",
            fix=f"lower --steps to {whole}, or set train.epochs to {math.ceil(budget / whole * train.epochs)}",
        )


def _found(trials: Sequence[Trial]) -> list[Trial]:
    """Those that were not lost."""
    return [trial for trial in trials if trial.loss is not None]


def _train(inputs: RunInputs, manifest: RunManifest) -> None:
    """Data, check and training of one trial; no suite is asked: the test side is for the run that follows.

    A training that diverges or does not fit is lost, and says so in its folder: that is an answer of the search and no fault.
    """
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
    depends_on = train_depends_on(context, rows)

    def work(outputs: list[Path]) -> None:
        train_model(context, rows, owner=digest_json(depends_on))
        outputs.append(folder / VALIDATION_ROWS)

    try:
        check_stage(context, rows)
        context.stage("train", depends_on, work, "train")
    except UserError as error:
        if not isinstance(error, DivergenceError) and error.exit_code != ExitCode.WILL_NOT_FIT:
            raise
        write_json(folder / LOST, {"format": 1, "why": error.faults[0].what})
