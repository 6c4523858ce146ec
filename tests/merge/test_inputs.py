from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.merge.inputs import resolve_inputs
from finetune.model.source import resolve_model
from finetune.recipe.resolve import resolved_yaml
from finetune.recipe.schema import Recipe


def make_run(pair: Any, folder: Path, *, model: dict[str, Any] | None = None, **sections: Any) -> Path:
    """A run folder around the pair's adapter, with the manifest a run writes."""
    recipe = Recipe.model_validate(
        {
            "name": "mine",
            "model": {"id": str(pair.base), **(model or {})},
            "data": {"spec": "home_intents"},
            "eval": {"suites": ["home_intents"]},
            **sections,
        }
    )
    folder.mkdir(parents=True)
    (folder / "recipe.resolved.yaml").write_text(resolved_yaml(recipe))
    pair.adapter.rename(folder / "adapter")
    weights = folder / "adapter" / "adapter_model.safetensors"
    manifest = {
        "format": 1,
        "inputs": {"model": resolve_model(str(pair.base)).digest},
        "stages": {"train": {"outputs": {"adapter/adapter_model.safetensors": digest_file(weights)}}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_an_adapter_folder_is_known_by_its_content_and_names_its_base(make_pair: Any) -> None:
    pair = make_pair()
    found = resolve_inputs(pair.adapter)
    assert found.adapter_folder == pair.adapter
    assert found.source.folder == pair.base
    assert found.quantization is None


def test_quantization_of_a_plain_adapter_is_told_by_the_flag(make_pair: Any) -> None:
    found = resolve_inputs(make_pair().adapter, quantize="nf4", double_quantization=False)
    assert found.quantization is not None
    assert (found.quantization.quantize, found.quantization.double_quantization) == ("nf4", False)


def test_a_run_names_base_and_quantization(tmp_path: Path, make_pair: Any) -> None:
    pair = make_pair()
    run = make_run(
        pair, tmp_path / "run", model={"quantize": "fp4", "double_quantization": False, "dtype": "fp32"}
    )
    found = resolve_inputs(run)
    assert found.adapter_folder == run / "adapter"
    assert found.source.folder == pair.base
    assert found.quantization is not None
    assert found.quantization.quantize == "fp4"
    assert found.quantization.dtype == "fp32"
    assert resolve_inputs(run, quantize="none").quantization is None


def test_a_revision_that_was_recorded_beside_a_folder(tmp_path: Path, make_pair: Any) -> None:
    """Runs and adapters of the time when it was ignored, and adapters whose base was downloaded since, still merge."""
    pair = make_pair()
    path = pair.adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"revision": "v1"}))
    assert resolve_inputs(pair.adapter).source.folder == pair.base
    run = make_run(pair, tmp_path / "run", model={"revision": "v1"})
    assert resolve_inputs(run).source.folder == pair.base


def test_a_run_of_all_weights_has_nothing_to_merge(tmp_path: Path, make_pair: Any) -> None:
    run = make_run(make_pair(), tmp_path / "run", adapter={"kind": "none"})
    with pytest.raises(UserError, match="tuned all weights"):
        resolve_inputs(run)


def test_a_run_that_is_not_trained_yet(tmp_path: Path, make_pair: Any) -> None:
    run = make_run(make_pair(), tmp_path / "run")
    (run / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="holds no adapter yet"):
        resolve_inputs(run)


def test_an_adapter_that_is_not_the_one_the_run_trained(tmp_path: Path, make_pair: Any) -> None:
    run = make_run(make_pair(), tmp_path / "run")
    weights = run / "adapter" / "adapter_model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(bytes(raw))
    with pytest.raises(UserError, match="is not the adapter that this run trained"):
        resolve_inputs(run)


def test_a_base_that_changed_since_the_run(tmp_path: Path, make_pair: Any, make_tiny_model: Any) -> None:
    pair = make_pair()
    run = make_run(pair, tmp_path / "run")
    make_tiny_model(seed=9).save_pretrained(pair.base)
    with pytest.raises(UserError, match="is not the base this adapter was trained on"):
        resolve_inputs(run)
    assert resolve_inputs(run, other_base=True).source.folder == pair.base


def test_another_base_of_the_same_shapes_needs_a_flag(tmp_path: Path, make_pair: Any) -> None:
    pair = make_pair("one")
    stranger = make_pair("two", seed=2)
    assert resolve_inputs(pair.adapter, base=str(stranger.base)).source.folder == stranger.base
    (stranger.base / "LICENSE.txt").write_text("another release")
    with pytest.raises(UserError, match="is not the base this adapter was trained on"):
        resolve_inputs(pair.adapter, base=str(stranger.base))
    found = resolve_inputs(pair.adapter, base=str(stranger.base), other_base=True)
    assert found.source.folder == stranger.base


def test_a_base_that_moved_is_named_with_the_flag(tmp_path: Path, make_pair: Any) -> None:
    pair = make_pair()
    moved = pair.base.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="no such model folder"):
        resolve_inputs(pair.adapter)
    assert resolve_inputs(pair.adapter, base=str(moved)).source.folder == moved


def test_an_adapter_that_names_no_base(make_pair: Any) -> None:
    pair = make_pair()
    config = json.loads((pair.adapter / "adapter_config.json").read_bytes())
    config["base_model_name_or_path"] = None
    (pair.adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not say which base"):
        resolve_inputs(pair.adapter)


def test_folders_that_are_something_else(tmp_path: Path, make_pair: Any) -> None:
    pair = make_pair()
    with pytest.raises(UserError, match="no such folder"):
        resolve_inputs(tmp_path / "nowhere")
    with pytest.raises(UserError, match="it holds a whole model"):
        resolve_inputs(pair.base)
    with pytest.raises(UserError, match=r"did you mean .*run7\?"):
        resolve_inputs(pair.adapter.parent)
