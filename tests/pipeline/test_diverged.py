"""A run that stops at a divergence leaves a report that says where and why, and comes to the same end again at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.telemetry.events import read_events
from finetune.training.exact_trainer import DivergenceError
from finetune.training.sft_trainer import ExactSftTrainer


def test_a_run_that_diverges_has_its_report(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ExactSftTrainer.training_step

    def explodes(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if (at := self.state.global_step) >= 16:
            draw = torch.Generator().manual_seed(at)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=draw))
        return original(self, model, *args, **kwargs)

    monkeypatch.setattr(ExactSftTrainer, "training_step", explodes)
    options = ("train.max_steps=40", "train.epochs=40", "adapter.kind=none", "train.checkpoint_every_steps=8")
    with pytest.raises(DivergenceError, match="the loss diverged at step 17"):
        project.run(*options)
    (folder,) = project.folder.glob("runs/recipe-*")
    page = (folder / "report.html").read_text()
    assert "Training stopped at step 26: from step 17 on the loss was above where it began" in page
    assert "Divergence</span>" in page and "<title>divergence</title>" in page
    n_steps = len([event for event in read_events(folder / "events.jsonl") if event["event"] == "step"])
    assert n_steps == 26
