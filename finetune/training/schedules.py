"""Learning-rate schedules by the names a recipe uses: pure functions of the step, from 0 to 1 of the peak.

transformers' own are not used because its warm-up-stable-decay warms up from the floor instead of from 0, and its inverse
square root falls by the scale of 10,000 steps when there is no warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from finetune.recipe.train_section import Schedule, TrainSection


def build_schedule(
    optimizer: torch.optim.Optimizer,
    settings: TrainSection,
    total_steps: int,
    factor: Callable[[int], float] = lambda step: 1.0,
) -> LambdaLR:
    """The recipe's schedule over every parameter group, each keeping its own multiple of the rate; `factor` of the step is
    what a rewind makes of it."""
    return LambdaLR(optimizer, lambda step: rate_share(settings, step, total_steps) * factor(step))


def rate_share(settings: TrainSection, step: int, total_steps: int) -> float:
    """Share of the peak rate that step `step` (from 0) of `total_steps` uses.

    A linear warm-up from 0 over `warmup_share` of the steps, rounded up, then the schedule; the decaying ones are at
    `floor_share` at `total_steps`.
    """
    warmup = warmup_steps(settings, total_steps)
    if step < warmup:
        return step / warmup
    return _AFTER_WARMUP[settings.schedule](settings, step, warmup, total_steps)


def warmup_steps(settings: TrainSection, total_steps: int) -> int:
    """Steps of the warm-up. A single step has none: its rate would be 0, and the run would learn nothing."""
    return math.ceil(settings.warmup_share * total_steps) if total_steps > 1 else 0


def _constant(settings: TrainSection, step: int, warmup: int, total: int) -> float:
    return 1.0


def _cosine(settings: TrainSection, step: int, warmup: int, total: int) -> float:
    """Half a cosine from the peak to the floor (Loshchilov and Hutter 2017, arXiv:1608.03983)."""
    falling = 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup, total)))
    return settings.floor_share + (1.0 - settings.floor_share) * falling


def _linear(settings: TrainSection, step: int, warmup: int, total: int) -> float:
    return 1.0 - (1.0 - settings.floor_share) * _progress(step, warmup, total)


def _wsd(settings: TrainSection, step: int, warmup: int, total: int) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395), with a linear decay."""
    decay = round(settings.decay_share * total)
    return _linear(settings, step, max(total - decay, warmup), total)


def _inverse_sqrt(settings: TrainSection, step: int, warmup: int, total: int) -> float:
    """√(warm-up / step): the peak at the end of the warm-up (Vaswani et al. 2017, arXiv:1706.03762)."""
    scale = max(warmup, 1)
    return math.sqrt(scale / max(step, scale))


def _progress(step: int, start: int, end: int) -> float:
    """0 up to `start`, 1 from `end` on, linear in between."""
    return min(max((step - start) / max(end - start, 1), 0.0), 1.0)


_AFTER_WARMUP: dict[Schedule, Callable[[TrainSection, int, int, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "constant": _constant,
}
