"""A recipe is mended in its file: only what changes, comments kept, and not where the command line would win."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.doctor.remedies import mend_recipe, mended_text
from finetune.errors import UserError
from finetune.recipe.resolve import load_recipe, read_recipe

TEXT = """\
# what it is for
recipe: 1
model:
  id: base  # the base
  dtype: fp16  # the precision
data: {spec: rows, max_tokens: 128}
train:
  learning_rate: 1e-3  # found by a sweep
eval:
  suites: [suite]

profiles:
  smoke:  # minutes
    train.epochs: 1
    data.max_tokens: 64
"""


def test_only_the_value_changes_and_comments_stay(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    patch = mend_recipe(read_recipe(path), {"model.dtype": "bf16", "train.pack_tokens": 2048})
    changed = [line for line in patch.splitlines() if line[:1] in "+-" and line[:3] not in ("---", "+++")]
    assert changed == [
        "-  dtype: fp16  # the precision",
        "+  dtype: bf16  # the precision",
        "+  pack_tokens: 2048",
    ]
    recipe = load_recipe(path)
    assert (recipe.model.dtype, recipe.train.pack_tokens, recipe.train.learning_rate) == ("bf16", 2048, 1e-3)
    assert mend_recipe(read_recipe(path), {"model.dtype": "bf16"}) == ""


def test_a_value_of_the_profile_is_mended_there(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    mend_recipe(read_recipe(path, ["profile=smoke"]), {"data.max_tokens": 256})
    assert load_recipe(path).data.max_tokens == 128
    assert load_recipe(path, ["profile=smoke"]).data.max_tokens == 256


def test_what_a_base_gives_is_written_into_the_own_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(TEXT)
    own = tmp_path / "own.yaml"
    own.write_text("extends: base.yaml\n")
    mend_recipe(read_recipe(own), {"data.max_tokens": 512})
    assert (tmp_path / "base.yaml").read_text() == TEXT
    assert load_recipe(own).data.max_tokens == 512


def test_a_flag_would_win_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    with pytest.raises(UserError, match="comes from the command line"):
        mend_recipe(read_recipe(path, ["data.max_tokens=32"]), {"data.max_tokens": 512})
    assert path.read_text() == TEXT


def test_sections_that_are_not_there_are_added() -> None:
    assert mended_text("name: x\n", {("train", "fp8"): False}) == "name: x\ntrain:\n  fp8: false\n"
