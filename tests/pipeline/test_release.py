"""Training starts with the memory of the evaluation given back: no model of an earlier stage is still alive."""

from __future__ import annotations

import weakref
from typing import Any

import pytest


def test_no_evaluated_model_is_alive_when_training_loads_its_own(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.pipeline import before, stages, trainable

    loaded: list[weakref.ref[Any]] = []
    alive_at_load: list[int] = []
    original = stages.load_model

    def watched(*arguments: Any, **options: Any) -> Any:
        alive_at_load.append(sum(reference() is not None for reference in loaded))
        model = original(*arguments, **options)
        loaded.append(weakref.ref(model))
        return model

    for module in (before, stages, trainable):
        monkeypatch.setattr(module, "load_model", watched)
    project.run()
    assert len(loaded) == 3  # baseline, training, tuned
    assert alive_at_load[1] == 0
