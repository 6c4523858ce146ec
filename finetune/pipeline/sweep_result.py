"""What a sweep found: its trials, the finalists beside the best one row by row, and what to run next."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.stats.learning_curve import LearningCurve
from finetune.stats.paired import paired_t

_FEWEST_FOR_AN_EDGE = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """One training: what it overrode, its training rows and its limit of optimizer steps (None: the recipe's passes).

    `loss` is the validation loss [nats a target] from each row's sum and number of targets; None for a training that was lost,
    and then `why` says how.
    """

    overrides: tuple[str, ...]
    rows: int
    loss: float | None
    folder: str
    sums: tuple[float, ...] = ()
    targets: tuple[int, ...] = ()
    steps: int | None = None
    why: str = ""

    @property
    def known_loss(self) -> float:
        """The loss of a trial that was not lost."""
        assert self.loss is not None, "lost trials are not ranked"
        return self.loss

    @property
    def name(self) -> str:
        return " ".join(self.overrides) or "the recipe as it is"

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in ("sums", "targets")}


@dataclass(frozen=True, slots=True)
class Finalist:
    """A trial of the last rung beside the best one: loss minus the best's, paired over validation rows, 95 %."""

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
    recipe: str
    trials: tuple[Trial, ...]
    finalists: tuple[Finalist, ...]
    curve: LearningCurve | None = None

    @property
    def lost(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.loss is None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "trials": [trial.to_dict() for trial in self.trials],
            "finalists": [
                {**one.trial.to_dict(), "difference": one.difference, "low": one.low, "high": one.high}
                for one in self.finalists
            ],
            "lost": len(self.lost),
            "curve": self.curve.to_dict() if self.curve is not None else None,
        }

    def lines(self) -> list[str]:
        """For the screen: finalists with the interval of their distance to the best, then what to run."""
        best = self.finalists[0].trial
        given = f"all {best.rows} rows" if best.steps is None else f"{best.steps} steps"
        lost = f", {len(self.lost)} of them lost (too high a rate, as a rule)" if self.lost else ""
        found = [f"{len(self.trials)} trainings{lost}; finalists on {given}, by validation loss:"]
        for one in self.finalists:
            told = f"  {one.trial.known_loss:.4f}  {one.trial.name}"
            if one is not self.finalists[0]:
                told += f"  {one.difference:+.4f} [{one.low:+.4f}, {one.high:+.4f}]"
                told += " worse" if one.is_worse else " not told apart from the best"
            found.append(told)
        found += self._at_the_edge()
        if self.curve is not None:
            found += [
                f"  {size:>8,} rows  {loss:.4f}"
                for size, loss in zip(self.curve.sizes, self.curve.losses, strict=True)
            ]
            found.append(self.curve.line())
        settings = f' SET="{" ".join(best.overrides)}"' if best.overrides else ""
        found.append(
            f"then: make finetune RECIPE={self.recipe}{settings}   # judged on test once, by the run"
        )
        return found

    def _at_the_edge(self) -> list[str]:
        """Of the best trial of every choice that is no number, such as the kind of adapter: values that cannot be called the
        best yet, as they are the lowest or highest of three numbers or more that were tried."""
        best: dict[tuple[str, ...], Trial] = {}
        for one in self.finalists:
            numbers = _numbers(one.trial)
            choice = tuple(part for part in one.trial.overrides if part.partition("=")[0] not in numbers)
            best.setdefault(choice, one.trial)
        told = []
        for trial in best.values():
            for key, value in _numbers(trial).items():
                tried = {numbers[key] for other in self.trials if key in (numbers := _numbers(other))}
                if len(tried) >= _FEWEST_FOR_AN_EDGE and value in (min(tried), max(tried)):
                    end = "lowest" if value == min(tried) else "highest"
                    told.append(f"  {trial.name}: {key} is the {end} that was tried; the best may lie beyond")
        return told


def _numbers(trial: Trial) -> dict[str, float]:
    """The overrides of a trial that are numbers."""
    found = {}
    for override in trial.overrides:
        key, _, text = override.partition("=")
        with suppress(ValueError):
            found[key] = float(text)
    return found


def finalists_of(trials: Sequence[Trial]) -> tuple[Finalist, ...]:
    """The best first; each with the token-weighted difference to it, paired over the validation rows."""
    ranked = sorted(trials, key=lambda trial: trial.known_loss)
    best = ranked[0]
    scale = 1.0 / float(np.mean(best.targets))
    found = []
    for trial in ranked:
        difference = trial.known_loss - best.known_loss
        if len(trial.sums) < 2 or trial is best:  # one row has no noise to compare with
            found.append(Finalist(trial, difference, difference, difference))
            continue
        result = paired_t(np.asarray(best.sums) * scale, np.asarray(trial.sums) * scale)
        found.append(Finalist(trial, difference, result.low, result.high))
    return tuple(found)
