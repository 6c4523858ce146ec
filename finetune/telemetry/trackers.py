"""Trackers that events go to besides events.jsonl: whether they are installed, and what they are told of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

PACKAGES = ("trackio", "wandb", "tensorboard", "mlflow")
_NOT_TRACKED = ("step", "epoch", "rows")  # trackers count steps themselves, and hold numbers only


def missing_trackers(names: Sequence[str]) -> list[str]:
    """Those of `names` (trackio, wandb, tensorboard, mlflow) whose package is not installed here."""
    from transformers import integrations

    return [name for name in names if not getattr(integrations, f"is_{name}_available")()]


def tracked(fields: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event, nested ones under 'outer/inner'; what is not finite is left out."""
    found: dict[str, float] = {}
    for name, value in fields.items():
        if name in _NOT_TRACKED:
            continue
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in tracked(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[name] = value
    return found
