"""Weights that are not those of their configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.model.load import check_context, load_model, model_skeleton
from finetune.model.source import resolve_model


def test_weights_of_another_shape_than_the_configuration_says(tiny_model_folder: Path) -> None:
    path = tiny_model_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 100}))
    with pytest.raises(UserError, match=r"0 tensors missing, 6 of another shape") as refused:
        load_model(resolve_model(str(tiny_model_folder)))
    assert refused.value.faults[0].fix


def test_a_configuration_no_model_can_be_built_from(tiny_model_folder: Path) -> None:
    path = tiny_model_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": "yes"}))
    with pytest.raises(UserError, match=r"no model can be built from config.json: .*tie_word_embeddings"):
        model_skeleton(resolve_model(str(tiny_model_folder)))


def test_virtual_tokens_count_against_the_context(tiny_model_folder: Path) -> None:
    source = resolve_model(str(tiny_model_folder))
    check_context(source, 492, in_front=20)
    with pytest.raises(UserError, match="493 tokens behind 20 virtual ones do not fit") as refused:
        check_context(source, 493, in_front=20)
    assert "at most 492" in refused.value.faults[0].fix
