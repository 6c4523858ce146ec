"""Curves with a known shape: events as training writes them, from plain functions of the step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def make_events() -> Callable[..., list[dict[str, Any]]]:
    """make_events(loss=lambda step: …, n=120, …): every field may be a function of the step (from 1) or a value."""

    def make(
        loss: Callable[[int], float],
        n: int = 120,
        *,
        noise: float = 0.02,
        validation: Callable[[int], float] | None = None,
        per_epoch: int = 1000,
        seed: int = 3,
        **fields: Any,
    ) -> list[dict[str, Any]]:
        chance = random.Random(seed)
        defaults: dict[str, Any] = {
            "grad_norm": lambda step: 1.0 + 0.2 * chance.random(),
            "update_ratio": 2e-3,
            "learning_rate": lambda step: min(step / 5, 1.0) * 1e-3,
            "tokens_per_second": lambda step: 1000.0 + 30.0 * chance.gauss(0, 1),
        }
        events: list[dict[str, Any]] = [{"event": "start", "step": 0, "total_steps": n}]
        for step in range(1, n + 1):
            values = {
                name: value(step) if callable(value) else value for name, value in (defaults | fields).items()
            }
            events.append(
                {
                    "event": "step",
                    "step": step,
                    "epoch": step / per_epoch,
                    "loss": loss(step) + noise * chance.gauss(0, 1),
                    **values,
                }
            )
            if validation is not None and step % 10 == 0:
                events.append({"event": "validation", "step": step, "loss": validation(step)})
        return events

    return make
