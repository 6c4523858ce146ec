"""Validation against training: overfitting."""

from __future__ import annotations

import numpy as np

from finetune.doctor.diagnosis.curve import Curve, noise_of
from finetune.doctor.diagnosis.finding import Diagnosis

_RISE_SHARE = 0.05
_LEAST_RISE = 0.01  # nats
_TRAIN_FALL_SHARE = 0.1
_LEAST_VALIDATIONS = 4


def find_overfitting(curve: Curve) -> Diagnosis | None:
    """The validation loss rises from its lowest point while the training loss goes on falling."""
    known = np.isfinite(curve.validation_loss)
    losses, steps = curve.validation_loss[known], curve.validation_step[known]
    if len(losses) < _LEAST_VALIDATIONS or curve.n < 10:
        return None
    lowest = int(np.argmin(losses))
    after = losses[lowest + 1 :]
    if len(after) < 2:
        return None
    level, last = float(losses[lowest]), float(np.mean(after[-2:]))
    rise = last - level
    if rise < max(_RISE_SHARE * level, _LEAST_RISE, 3.0 * noise_of(losses)):
        return None
    loss, width = curve.clean, curve.spans(0.08, 5)
    there = int(np.searchsorted(curve.step, steps[lowest]))
    start = max(there - width // 2, 0)
    then, now = float(np.mean(loss[start : start + width])), float(np.mean(loss[-width:]))
    if now > then - _TRAIN_FALL_SHARE * then:
        return None
    never = lowest == 0
    return Diagnosis(
        "overfitting",
        "warning",
        (
            "the validation loss never fell"
            if never
            else f"the validation loss was lowest ({level:.3g}) at step {steps[lowest]}"
        )
        + f" and is {last:.3g} now, while the training loss fell from {then:.3g} to {now:.3g}: rows are learned by heart",
        "train.result: best takes the best step, train.early_stopping stops there; fewer epochs, a lower adapter rank, dropout, and "
        "above all more rows help"
        + (
            ". As nothing carried over from the start, check first that answers belong to their prompts"
            if never
            else ""
        ),
        {
            "lowest_validation_loss": round(level, 4),
            "lowest_at_step": int(steps[lowest]),
            "last_validation_loss": round(last, 4),
            "train_loss_then": round(then, 4),
            "train_loss_now": round(now, 4),
        },
        (int(steps[lowest]),),
    )
