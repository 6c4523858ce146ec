"""Several sampled answers to each question: how much of the noise comes from the questions and how much from sampling."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.stats.clusters import robust_mean, unit_totals
from finetune.stats.validate import checked_clusters


@dataclass(frozen=True, slots=True)
class VarianceParts:
    """Variance of one score split in two (Miller 2024, arXiv 2411.00640, section 3).

    question: variance over questions of the expected score; more questions are its only cure.
    sampling: mean variance of the score when one question is answered again; more samples per question divide it.
    standard_error: of the mean over all questions, √((question + sampling/K) / n) for K samples each.
    sampling_share: sampling's part of the variance of a question's averaged score, 0 to 1.
    """

    mean: float
    question: float
    sampling: float
    standard_error: float
    sampling_share: float
    n: int
    samples: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def variance_parts(samples: Sequence[Sequence[float]]) -> VarianceParts:
    """Split the variance of `samples`: one sequence of scores per question, of any lengths, at least two questions.

    Questions with a single sample say nothing about sampling noise; if all have one, sampling is 0 and everything counts as
    question noise. The question part is never negative: sampling noise alone explains what it would take away.
    """
    groups = [np.asarray(group, dtype=np.float64) for group in samples]
    if len(groups) < 2 or any(group.size == 0 for group in groups):
        raise UserError("at least two questions with a score each are needed to split the variance")
    if not all(np.all(np.isfinite(group)) for group in groups):
        raise UserError("a sampled score is not a finite number", fix="score these answers again")
    means = np.array([group.mean() for group in groups])
    repeated = [group for group in groups if group.size > 1]
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in repeated)
    freedom = sum(group.size - 1 for group in repeated)
    sampling = within / freedom if freedom else 0.0
    # the variance of the observed means holds sampling/K of each question beside the question part
    inverse = float(np.mean([1.0 / group.size for group in groups]))
    observed = float(means.var(ddof=1))
    return VarianceParts(
        mean=float(means.mean()),
        question=max(observed - sampling * inverse, 0.0),
        sampling=sampling,
        standard_error=float(np.sqrt(observed / len(groups))),
        sampling_share=min(1.0, sampling * inverse / observed) if observed > 0.0 else 0.0,
        n=len(groups),
        samples=1.0 / inverse,
    )


@dataclass(frozen=True, slots=True)
class DifferenceNoise:
    """Where the noise of a paired difference over repeated answers comes from, and what more repeats could do about it.

    question, sampling: the variance parts of a question's difference (see `VarianceParts`).
    sampling_share: sampling's part of the squared standard error, 0 to 1. standard_error: of the mean difference, robust
    to clusters. standard_error_floor: what endless repeats would leave of it. narrower_at_most: the share by which the
    interval would shrink then.
    """

    repeats: float
    question: float
    sampling: float
    sampling_share: float
    standard_error: float
    standard_error_floor: float
    narrower_at_most: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def difference_noise(
    differences: Sequence[Sequence[float]], clusters: Sequence[Hashable] | None = None
) -> DifferenceNoise | None:
    """Split the noise of a paired difference: one sequence a question, arm B minus arm A for each repeat.

    Repeat k of both arms may share its random numbers: the pair's difference is what is taken apart. Sampling is
    independent from question to question, also within a cluster, so it adds sampling/K/n to the squared standard error,
    and the rest is there to stay. None when no question was answered twice, or when there are fewer than two clusters.
    """
    if not any(len(group) > 1 for group in differences):
        return None
    labels = checked_clusters(clusters, len(differences))
    if len(differences) < 2 or (labels is not None and len(set(labels)) < 2):
        return None
    parts = variance_parts(differences)
    means = np.array([float(np.mean(group)) for group in differences])
    squared = float(robust_mean(unit_totals(means, labels)).standard_error) ** 2
    share = min(1.0, parts.sampling / parts.samples / parts.n / squared) if squared > 0.0 else 0.0
    floor = float(np.sqrt(squared * (1.0 - share)))
    return DifferenceNoise(
        repeats=parts.samples,
        question=parts.question,
        sampling=parts.sampling,
        sampling_share=share,
        standard_error=float(np.sqrt(squared)),
        standard_error_floor=floor,
        narrower_at_most=1.0 - float(np.sqrt(1.0 - share)),
    )
