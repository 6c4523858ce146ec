"""Checkpoints are whole or absent; damaged ones are passed over and named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.paths import read_json, write_json
from finetune.training.checkpoints import (
    checkpoint_step,
    damage,
    list_checkpoints,
    newest_usable,
    save_checkpoint,
)


def fill(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "optimizer.safetensors").write_bytes(b"moments")


def save(root: Path, step: int, *, owner: str = "a" * 64, keep: int = 9) -> Path:
    return save_checkpoint(root, step, fill, owner=owner, keep=keep)


def test_newest_is_found_and_old_ones_are_pruned(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        save(tmp_path, step, keep=2)
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [10, 100]
    assert newest_usable(tmp_path, owner="a" * 64, say=pytest.fail) == tmp_path / "step-100"


def test_a_crash_while_writing_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 5)

    def killed(folder: Path) -> None:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 10, killed, owner="a" * 64, keep=9)
    # kill -9 leaves the partial folder itself behind: it must not count either
    (tmp_path / ".step-15.partial").mkdir()
    fill(tmp_path / ".step-15.partial")
    assert newest_usable(tmp_path, owner="a" * 64, say=pytest.fail) == tmp_path / "step-5"


def test_pinned_checkpoints_and_those_still_needed_survive(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    (tmp_path / "step-5.pinned").touch()
    for step in (15, 20, 25):
        save_checkpoint(tmp_path, step, fill, owner="a" * 64, keep=1, keep_also={15})
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [5, 15, 25]


def test_a_checkpoint_half_removed_by_a_killed_process_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 5).rename(tmp_path / ".step-5.removed")
    assert newest_usable(tmp_path, owner="a" * 64, say=pytest.fail) is None
    save(tmp_path, 10, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "scheduler.pkl", "pytorch_model.bin"])
def test_a_pickle_in_a_checkpoint_is_refused_whatever_its_name(tmp_path: Path, name: str) -> None:
    def with_pickle(folder: Path) -> None:
        fill(folder)
        (folder / name).write_bytes(b"payload")

    checkpoint = save_checkpoint(tmp_path, 5, with_pickle, owner="a" * 64, keep=1)
    assert damage(checkpoint) == f"{name} is a pickle file and is refused"


@pytest.mark.parametrize(
    "harm", ["flip", "truncate", "delete", "add", "no sums", "no owner", "another step's"]
)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, harm: str) -> None:
    save(tmp_path, 5)
    newest = save(tmp_path, 10)
    weights = newest / "adapter_model.safetensors"
    if harm == "flip":
        weights.write_bytes(b"weightz")
    elif harm == "truncate":
        weights.write_bytes(b"")
    elif harm == "delete":
        weights.unlink()
    elif harm == "add":
        (newest / "pytorch_model.bin").write_bytes(b"payload")
    elif harm == "no owner":
        note = read_json(newest / "sha256.json")
        write_json(newest / "sha256.json", {key: note[key] for key in ("step", "files")})
    elif harm == "another step's":  # its own state would say where training goes on, not its name
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "step-5", newest)
    else:
        (newest / "sha256.json").unlink()
    said: list[str] = []
    assert damage(newest) is not None
    assert newest_usable(tmp_path, owner="a" * 64, say=said.append) == tmp_path / "step-5"
    assert "step-10" in said[0] and "damaged" in said[0]


def test_a_file_with_the_name_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "step-10").write_text("left by a copy")
    assert newest_usable(tmp_path, owner="a" * 64, say=pytest.fail) == tmp_path / "step-5"


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5, owner="b" * 64)
    with pytest.raises(UserError, match="belongs to another recipe"):
        newest_usable(tmp_path, owner="a" * 64, say=pytest.fail)


def test_a_file_where_the_folder_should_be_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(UserError, match="cannot write"):
        save(tmp_path / "checkpoints", 1)
