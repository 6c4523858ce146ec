"""Merge recipes and mergekit files: what is read, and every fault with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.paths import find_declarative, shipped_names
from finetune.recipe.merge_loader import load_merge
from finetune.recipe.merge_section import Conditional
from finetune.recipe.merge_settings import evaluate

MERGEKIT = """\
merge_method: ties
base_model: base
models:
  - model: base
  - model: one
    parameters:
      density: [0.5, 0.3]
      weight:
        - filter: mlp
          value: 0.5
        - value: 1e-1
  - model: two
parameters:
  normalize: true
  int8_mask: true
dtype: float16
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "merge.yaml"
    path.write_text(text)
    return path


def faults(tmp_path: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        load_merge(write(tmp_path, text))
    return str(caught.value)


def test_a_mergekit_file_is_read_as_it_is(tmp_path: Path) -> None:
    loaded = load_merge(write(tmp_path, MERGEKIT))
    recipe = loaded.recipe
    assert recipe.spoken == "mergekit"
    assert recipe.models is not None
    assert recipe.models[1].parameters.density == [0.5, 0.3]
    assert recipe.models[1].parameters.weight == [
        Conditional(value=0.5, filter="mlp"),
        Conditional(value=0.1),
    ]
    assert loaded.remarks == ()
    assert (
        load_merge(write(tmp_path, "merge: 1\n" + MERGEKIT.replace("  int8_mask: true\n", ""))).recipe.spoken
        == "paper"
    )


def test_everything_that_cannot_be_done_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    text = MERGEKIT.replace(
        "dtype: float16", "dtype: float8\nmodules: {}\ntokenizer:\n  source: union\n  tokens: {}"
    )
    found = faults(tmp_path, text.replace("density: [0.5, 0.3]", "densty: 1\n      gamma: 1.5"))
    for line in (
        "7:7: unknown key 'models[1].parameters.densty'",
        "8:",
        "17:8: 'dtype' must be",
        "18:1: unknown key 'modules'",
    ):
        assert f"merge.yaml:{line}" in found
    assert "unknown key 'tokenizer.tokens'" in found
    assert "must lie between 0 and 1, 1.5 does not" in found


def test_a_parameter_without_effect_is_a_fault_in_ours_and_a_remark_in_mergekits(tmp_path: Path) -> None:
    text = MERGEKIT.replace("normalize: true", "normalize: true\n  t: 0.5")
    assert load_merge(write(tmp_path, text)).remarks == (
        "ties does not read 't'; it has no effect, as in mergekit",
    )
    found = faults(tmp_path, "merge: 1\n" + text)
    assert "merge.yaml:16:3: ties does not read 't'" in found
    assert "merge.yaml:17:3: ties does not read 'int8_mask'" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("merge_method: multislerp\nmodels: [{model: a}]", "'merge_method' must be one of"),
        ("merge_method: ties\nmodels: [{model: a}]", "ties needs a base_model"),
        (
            "merge_method: slerp\nbase_model: a\nmodels: [{model: b}, {model: c}]",
            "1 model beside the base, not 2",
        ),
        (
            "merge_method: model_stock\nbase_model: a\nmodels: [{model: b}]",
            "at least 2 models beside the base, not 1",
        ),
        ("merge_method: linear", "the recipe names no models"),
        (
            "merge_method: linear\nmodels: [{model: a}]\nslices: [{sources: [{model: a, layer_range: [0, 1]}]}]",
            "not both",
        ),
        (
            "merge_method: linear\nbase_model: a\nmodels: [{model: b}, {model: c}]",
            "and it has no weight here",
        ),
        ("merge_method: linear\nmodels: [{model: a+lora}, {model: b}]", "names an adapter after '+'"),
        ("merge_method: linear\nmodels: [{model: a+x/lora}, {model: b}]", "names an adapter after '+'"),
        (
            "merge_method: slerp\ndialect: peft\nbase_model: a\nmodels: [{model: b}]",
            "PEFT has no slerp of whole deltas",
        ),
        ("merge_method: linear\nmodels: [{model: a}]\nchat_template: auto", "write the template itself"),
        (
            "merge_method: linear\nslices: [{sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 1]}]}]",
            "equally many layers",
        ),
        (
            "merge_method: linear\nmodels: [{model: a, parameters: {normalize: true}}, {model: b}]",
            "one for all models",
        ),
        (
            "merge_method: linear\nmodels: [{model: a}]\ntokenizer_source: base\ntokenizer: {source: base}",
            "keep one",
        ),
    ],
)
def test_what_makes_no_merge_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in faults(tmp_path, text)


def test_flags_name_the_models_of_a_shipped_recipe() -> None:
    names = shipped_names("merges")
    assert "merge/ties" in names
    assert all(name.startswith("merge/") for name in names)
    assert not set(names) & set(shipped_names("recipes"))
    for name in names:
        path = find_declarative("merges", name)
        models = ["one"] if "slerp" in path.read_text() else ["one", "two"]
        recipe = load_merge(path, base="base", models=models, overrides=["dtype=float32"]).recipe
        assert recipe.spoken == "paper"
        assert recipe.base_model == "base"
        assert recipe.dtype == "float32"


def test_gradients_and_filters() -> None:
    assert [evaluate([0.0, 1.0, 0.5], "x", position) for position in (0, 0.25, 0.5, 0.75, 1)] == [
        0,
        0.5,
        1,
        0.75,
        0.5,
    ]
    assert [evaluate([True, False], "x", position) for position in (0, 0.9, 1)] == [True, True, False]
    choice = [Conditional(value=[0, 1], filter="mlp"), Conditional(value=2, filter="*")]
    assert evaluate(choice, "model.layers.1.mlp.up", 0.25) == 0.25  # type: ignore[arg-type]
    assert evaluate(choice, "model.norm", 0.25) == 2  # type: ignore[arg-type]
    assert evaluate([Conditional(value=1, filter="mlp")], "model.norm", 0.0) is None
    assert evaluate([], "x", 0.0) is None
