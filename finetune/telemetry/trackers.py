"""Trackers that events go to besides events.jsonl: whether they are installed, and what they are told of a step."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any

PACKAGES = ("trackio", "wandb", "tensorboard", "mlflow")
_NOT_TRACKED = ("step", "epoch", "rows")  # trackers count steps themselves, and hold numbers only


def missing_trackers(names: Sequence[str]) -> list[str]:
    """Those of `names` (trackio, wandb, tensorboard, mlflow) whose package is not installed here."""
    from transformers import integrations

    return [name for name in names if not getattr(integrations, f"is_{name}_available")()]


@contextmanager
def trackers_open(callbacks: Sequence[Any], names: Sequence[str]) -> Iterator[None]:
    """Around a training and what is measured after it: the trackers of `names` end when the block does, once.

    What they print goes to standard error. By themselves they end with the training, so that the last validation, and every training after a rewind, would open
    a run of its own in MLflow and Trackio. `callbacks` are those of the trainer.
    """
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    kinds = tuple(INTEGRATION_TO_CALLBACK[name] for name in names)
    ends: dict[int, Callable[[], None]] = {}

    def later(number: int, end: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        ends[number] = partial(end, *args, **kwargs)

    held = [callback for callback in callbacks if isinstance(callback, kinds)]
    for number, callback in enumerate(held):
        callback.on_train_end = partial(later, number, callback.on_train_end)
    with redirect_stdout(sys.stderr) if held else nullcontext():
        try:
            yield
        finally:
            for callback in held:
                del callback.on_train_end  # the class's own is found again
            for end in ends.values():
                end()
            if held and "wandb" in names:
                _finish_wandb()


def _finish_wandb() -> None:
    """Its callback leaves the run open until the process ends: the next training, as in a sweep, would go into it."""
    wandb: Any = importlib.import_module("wandb")
    if wandb.run is not None:
        wandb.finish()


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
