"""What a teacher's top k leaves out: the mass that it covers, and how far what is read back is from the full distribution.

Shapes: n target tokens · V vocabulary · k kept tokens · t temperatures.

Two numbers of reconstruction, both KL(teacher || what is read back) in nats a target on a sample of targets:
`rounding` over k + 1 outcomes, which the losses see, is what the type of the logits costs; `uniform_tail` over all V, with
the mass of the tail spread evenly, is what is no longer known of the tokens outside the top k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.distil.cache.coding import Coding, TopK
from finetune.distil.losses import bucket_log_probabilities, forward_kl
from finetune.distil.targets import TeacherTargets

LOW_COVERAGE = 0.9


def read_back(top: TopK, coding: Coding, temperature: float) -> TeacherTargets:
    """The targets of a loss at one of the coding's temperatures."""
    column = coding.temperatures.index(temperature)
    return TeacherTargets.top_k(top.ids, top.gaps, top.logsumexp[:, column])


def covered_mass(top: TopK, coding: Coding, temperature: float) -> Tensor:
    """The teacher's probability of its top k, [n] in fp64."""
    column = coding.temperatures.index(temperature)
    scaled = top.gaps.double() / temperature - top.logsumexp[:, column].double()[:, None]
    return scaled.exp().sum(dim=1).clamp(max=1.0)


def coverage_sums(top: TopK, coding: Coding) -> dict[str, Any]:
    """By temperature: the sum of covered mass, the least, and how many targets are below 0.9."""
    sums = {}
    for temperature in coding.temperatures:
        mass = covered_mass(top, coding, temperature)
        low = int((mass < LOW_COVERAGE).sum())
        sums[str(temperature)] = {"sum": float(mass.sum()), "least": float(mass.min()), "below_0.9": low}
    return sums


def reconstruction_sums(logits: Tensor, top: TopK, coding: Coding) -> dict[str, Any]:
    """By temperature, over these targets: n, and sum and largest of both divergences. logits [n, V] are the teacher's own."""
    logits = logits.double()
    sums = {}
    for temperature in coding.temperatures:
        kept = read_back(top, coding, temperature)
        log_kept, log_full_in_buckets = bucket_log_probabilities(logits, kept, temperature)
        rounding = forward_kl(log_full_in_buckets, log_kept)
        log_full = torch.log_softmax(logits / temperature, dim=1)
        spread = forward_kl(log_full, _spread_evenly(log_kept, kept, coding))
        sums[str(temperature)] = {
            "n": len(logits),
            "rounding": {"sum": float(rounding.sum()), "largest": float(rounding.max())},
            "uniform_tail": {"sum": float(spread.sum()), "largest": float(spread.max())},
        }
    return sums


def _spread_evenly(log_kept: Tensor, kept: TeacherTargets, coding: Coding) -> Tensor:
    """Log-probabilities [n, V] of what is kept, every token outside the top k having the same."""
    assert kept.ids is not None
    n_others = coding.vocabulary - coding.k
    if n_others == 0:
        return torch.zeros_like(log_kept).scatter(1, kept.ids, log_kept)
    tail = log_kept[:, -1:] - torch.log(torch.tensor(float(n_others)))
    return tail.expand(-1, coding.vocabulary).scatter(1, kept.ids, log_kept[:, :-1])


def merge_sums(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums of several sets of targets as those of all: `sum`, `n` and counts add up, extremes stay extremes."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict):
                merged[name] = merge_sums([merged.get(name, {}), value])
            elif name not in merged:
                merged[name] = value
            elif name == "least":
                merged[name] = min(merged[name], value)
            elif name == "largest":
                merged[name] = max(merged[name], value)
            else:
                merged[name] += value
    return merged


def summarise(sums: dict[str, Any], n_targets: int) -> dict[str, Any]:
    """`coverage` and `reconstruction` of a manifest from the merged sums of its shards."""
    coverage = {
        temperature: {
            "mean": one["sum"] / n_targets,
            "least": one["least"],
            "share_below_0.9": one["below_0.9"] / n_targets,
        }
        for temperature, one in sums.get("coverage", {}).items()
    }
    reconstruction = {
        temperature: {
            "sampled_targets": one["n"],
            **{
                f"{kind}_kl": {"mean": one[kind]["sum"] / one["n"], "largest": one[kind]["largest"]}
                for kind in ("rounding", "uniform_tail")
            },
        }
        for temperature, one in sums.get("reconstruction", {}).items()
    }
    return {"coverage": coverage} | ({"reconstruction": reconstruction} if reconstruction else {})
