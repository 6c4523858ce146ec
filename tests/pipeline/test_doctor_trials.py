"""Faults that only a training shows, planted in a whole project: the trial that is there for each names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.doctor import trials
from finetune.doctor.finding import Finding
from finetune.model import attention
from finetune.pipeline import doctor_trials
from finetune.pipeline.doctor import examine_recipe
from finetune.training.sft_trainer import ExactSftTrainer


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "OVERFIT_STEPS", 2)


def examine(project: Any) -> dict[str, Finding]:
    found = examine_recipe(str(project.recipe), say=lambda line: None)
    return {one.check: one for one in found.findings}


def only(monkeypatch: pytest.MonkeyPatch, *wanted: str) -> None:
    """Leave out the trials that are not looked at, for time."""
    for name in {"probe", "resume", "overfit", "reload"} - set(wanted):
        monkeypatch.setattr(trials.Trials, name, lambda *args: ())
    if "quick" not in wanted:
        monkeypatch.setattr(doctor_trials, "_quick", lambda *args: iter(()))


def changed_weights(project: Any, change: Callable[[dict[str, torch.Tensor], str], None]) -> None:
    path = project.folder / "tiny-model" / "model.safetensors"
    weights = load_file(path)
    change(weights, "model.layers.1.mlp.down_proj.weight")
    save_file(weights, path, {"format": "pt"})


def drop(weights: dict[str, torch.Tensor], key: str) -> None:
    del weights[key]


def halve(weights: dict[str, torch.Tensor], key: str) -> None:
    weights[key] *= 0.5


def hooked(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """A model whose code detaches the output of a module."""
    load = doctor_trials.load_to_train

    def load_detached(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)

        def cut(module: Any, given: Any, output: Any) -> Any:
            return output.detach() if isinstance(output, torch.Tensor) else (output[0].detach(), *output[1:])

        model.get_base_model().get_submodule(module).register_forward_hook(cut)
        return model

    monkeypatch.setattr(doctor_trials, "load_to_train", load_detached)


def test_weights_that_are_damaged_are_told_once(project: Any) -> None:
    changed_weights(project, lambda weights, key: weights[key].fill_(float("nan")))
    found = examine(project)
    assert found["weights"].status == "fault" and "down_proj" in found["weights"].detail
    assert found["weights"].where == "model.id"
    assert [name for name, one in found.items() if one.status == "fault"] == ["weights"]
    assert {found[name].status for name in doctor_trials.TRIALS[1:]} == {"skipped"}


def test_a_model_that_cannot_be_loaded_does_not_hide_the_rest(project: Any) -> None:
    changed_weights(project, drop)
    found = examine(project)
    assert found["weights"].status == "fault" and "1 tensors missing" in found["weights"].detail
    assert found["EOS is a target"].status == found["memory forecast"].status == "ok"


def test_a_graph_that_is_cut_is_told_and_nothing_is_trained_on_it(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "probe")
    hooked(monkeypatch, "model.norm")
    found = examine(project)
    assert found["gradients"].status == "fault" and found["gradients"].remedy
    assert found["resume"].status == found["save and reload"].status == "skipped"


def test_a_graph_that_is_cut_in_part_is_told(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "probe")
    hooked(monkeypatch, "model.layers.0")
    found = examine(project)["gradients"]
    assert found.status == "fault" and found.where == "model.id" and "adapter.freeze" in found.remedy
    assert "14 of 28 trainable tensors" in found.detail and "layers.0" in found.detail


def test_a_resume_without_the_optimizer_s_state_differs(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "resume")
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)
    found = examine(project)["resume"]
    assert found.status == "fault" and found.measured is not None and found.measured > 0.0
    assert found.where and found.remedy


def spoil(folder: Path, change: Callable[[dict[str, torch.Tensor], str], None]) -> None:
    (path,) = folder.glob("adapter/*.safetensors")
    weights = load_file(path)
    change(weights, next(iter(weights)))
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize("fault", ["changed", "missing"])
def test_what_is_not_saved_as_it_is_does_not_come_back(
    project: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    only(monkeypatch, "overfit", "reload")
    overfit = trials.Trials.overfit

    def badly_saved(self: trials.Trials) -> Finding:
        found = overfit(self)
        spoil(
            Path(self.kept.name),
            halve if fault == "changed" else drop,
        )
        return found

    monkeypatch.setattr(trials.Trials, "overfit", badly_saved)
    found = examine(project)["save and reload"]
    assert found.status == "fault" and found.remedy


def test_micro_batches_that_are_averaged_alike_are_not_exact(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest mistake of accumulation: every micro-batch counts alike, however many targets it has."""
    only(monkeypatch, "quick")
    counted = ExactSftTrainer._get_num_items_in_batch
    monkeypatch.setattr(
        ExactSftTrainer,
        "_get_num_items_in_batch",
        lambda self, batches, device: counted(self, batches[:1], device) * len(batches),
    )
    found = examine(project)["accumulation"]
    assert found.status == "fault" and "gradient_accumulation_steps: 1" in found.remedy


def test_documents_of_a_pack_that_see_each_other_are_found(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "quick")
    find = attention.find_segments
    monkeypatch.setattr(
        attention,
        "find_segments",
        lambda n_rows, n_tokens, *boundaries: find(n_rows, n_tokens, None, None, None),
    )
    found = examine(project)["packing"]
    assert found.status == "fault" and "train.packing: false" in found.remedy


def test_a_trial_that_crashes_leaves_the_others(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "overfit", "reload")

    def crash(*_: Any) -> Iterator[Finding]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(trials.Trials, "probe", crash)
    monkeypatch.setattr(trials.Trials, "resume", crash)
    found = examine(project)
    assert "no such kernel" in found["longest batch"].detail and "no such kernel" in found["resume"].detail
    assert found["save and reload"].status == "ok"


def test_memory_that_ends_during_the_longest_batch_has_its_exit_code(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "probe")

    def full(*_: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(doctor_trials, "train_by_method", full)
    found = examine_recipe(str(project.recipe), say=lambda line: None)
    (told,) = [one for one in found.findings if one.status == "fault"]
    assert told.check == "longest batch" and "train.micro_batch_size" in told.remedy
    assert found.exit_code == 13
