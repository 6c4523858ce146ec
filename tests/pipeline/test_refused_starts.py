"""Adapters that training cannot go on from, and bases that are stored otherwise: told before rows or weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import UserError
from finetune.model.adapter_files import ADAPTER_WEIGHTS, ORIGIN_FILE, save_adapter
from finetune.model.adapters import attach_adapter
from finetune.model.source import ADAPTER_CONFIG, resolve_model
from finetune.recipe.adapter_section import AdapterSection


@pytest.fixture(autouse=True)
def _nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("rows or weights were read")

    for name in ("build_dataset", "load_model", "load_before"):
        monkeypatch.setattr(f"finetune.pipeline.stages.{name}", read)
    monkeypatch.setattr("finetune.pipeline.run.ensure_generated", read)


@pytest.fixture
def start(project: Any, make_tiny_model: Callable[..., Any]) -> Path:
    """A LoRA of rank 8 on the project's model."""
    folder: Path = project.folder / "start"
    adapted = attach_adapter(make_tiny_model(), AdapterSection(rank=8, alpha=16), seed=0)
    save_adapter(adapted, folder, source=resolve_model(str(project.folder / "tiny-model")))
    return folder


def edit_tensors(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Callable[[Path], None]:
    return lambda folder: save_file(change(load_file(folder / ADAPTER_WEIGHTS)), folder / ADAPTER_WEIGHTS)


def reward(folder: Path) -> None:
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | {"task_type": "SEQ_CLS"}))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (edit_tensors(lambda t: {k: v for k, v in t.items() if "layers.1" not in k}), "14 missing"),
        (
            edit_tensors(lambda t: {k.replace("model.model", "model"): v for k, v in t.items()}),
            "28 unexpected",
        ),
        (edit_tensors(lambda t: {k: v[:, :4].contiguous() for k, v in t.items()}), "of another shape"),
        (edit_tensors(lambda t: {k: v * torch.nan for k, v in t.items()}), "not finite"),
        (lambda folder: (folder / ADAPTER_WEIGHTS).write_bytes(b"abc"), "cannot be read"),
        (
            lambda folder: (folder / ORIGIN_FILE).write_text('{"digest": "0", "id": "other"}'),
            "trained on other",
        ),
        (lambda folder: (folder / ORIGIN_FILE).write_text("[]"), "holds no keys"),
        (reward, "reward model"),
    ],
    ids=["layer", "prefix", "shape", "nan", "garbage", "base", "origin", "reward"],
)
def test_a_start_that_does_not_fit(edit: Callable[[Path], Any], said: str, project: Any, start: Path) -> None:
    edit(start)
    with pytest.raises(UserError, match=said) as refused:
        project.run(f"adapter.start={start}")
    assert all(fault.fix for fault in refused.value.faults)


def test_a_start_of_another_architecture_that_names_no_base(
    project: Any, start: Path, tmp_path: Path
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    (start / ORIGIN_FILE).unlink()
    small = GPT2Config(vocab_size=259, n_embd=64, n_layer=2, n_head=4, n_positions=512)
    GPT2LMHeadModel(small).save_pretrained(tmp_path / "gpt2")
    for path in (project.folder / "tiny-model").glob("*tok*"):
        (tmp_path / "gpt2" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="no module of the base matches"):
        project.run(f"adapter.start={start}", "model.id=gpt2")


def test_a_base_that_is_stored_in_codes(project: Any) -> None:
    path = project.folder / "tiny-model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(UserError, match=r"stored with quantized weights \(gptq\)") as refused:
        project.run("adapter.kind=none")
    assert "model.quantize: nf4" in refused.value.faults[0].fix
