"""Checkpoints that are whole or absent: written aside, fsynced, checksummed, renamed; damaged ones are passed over."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from finetune.digest import digest_folder
from finetune.errors import UserError
from finetune.model.source import PICKLE_SUFFIXES
from finetune.paths import disk_faults, read_json, write_json

_NAME = re.compile(r"step-(\d+)")
_SUMS = "sha256.json"
_WEIGHTS = re.compile(r"(adapter_model|model(-\d+-of-\d+)?)\.safetensors")
_REFUSED_SUFFIX = ".refused"
# What optimizers, schedules, generators and readers of files raise at contents that are not theirs.
_OF_CONTENTS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    RuntimeError,
    FileNotFoundError,
    SafetensorError,
)
PIN_SUFFIX = ".pinned"  # `touch checkpoints/step-200.pinned` keeps that checkpoint


class UnusableCheckpointError(UserError):
    """A checkpoint that is whole, but whose contents training cannot be continued from."""

    def __init__(self, checkpoint: Path, reason: str) -> None:
        self.checkpoint, self.reason = checkpoint, reason
        super().__init__(
            f"checkpoint {checkpoint.name} cannot be continued from: {reason}",
            where=str(checkpoint),
            why="it is whole, so its files were changed together with their checksums, or other software wrote them",
            fix="delete that checkpoint; the same command then continues from the one before it",
        )


@contextmanager
def contents_of(checkpoint: Path) -> Iterator[None]:
    """Take what fails inside for a fault of what `checkpoint` holds: UnusableCheckpointError.

    A full memory, a broken device and a disk that cannot be read keep their own errors.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except UserError as error:
        raise UnusableCheckpointError(checkpoint, error.faults[0].what) from error
    except _OF_CONTENTS as error:
        said = (
            f"it lacks {error.args[0]}" if isinstance(error, KeyError) and error.args else str(error).strip()
        )
        raise UnusableCheckpointError(checkpoint, said.partition("\n")[0] or type(error).__name__) from error


def fsync_tree(folder: Path) -> None:
    """Force every file and folder below `folder` to the disk."""
    for path in [folder, *folder.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def publish_folder(aside: Path, final: Path) -> None:
    """Rename a completed folder into place, durably; a reader never sees it half-written."""
    fsync_tree(aside)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    fsync_tree_entry(final.parent)


def fsync_tree_entry(folder: Path) -> None:
    """Force a folder's own entries (a rename in it) to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_checkpoint(
    root: Path,
    step: int,
    fill: Callable[[Path], None],
    *,
    owner: str,
    keep: int,
    keep_also: Collection[int] = (),
) -> Path:
    """Write `root/step-<step>` through `fill(folder)`, with checksums and the digest of the recipe that owns it.

    `keep` newest checkpoints survive, and those of `keep_also` and with a pin. Raises UserError when the disk is full or
    the folder not writable; the half-written folder is removed then.
    """
    final = root / f"step-{step}"
    aside = root / f".step-{step}.partial"
    with disk_faults(final):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            fill(aside)
            write_json(aside / _SUMS, {"owner": owner, "step": step, "files": digest_folder(aside)})
            publish_folder(aside, final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    prune_checkpoints(root, keep=keep, keep_also=keep_also)
    return final


def prune_checkpoints(root: Path, *, keep: int, keep_also: Collection[int] = ()) -> list[int]:
    """Remove all but the `keep` newest checkpoints, those of the steps `keep_also` and the pinned; returns what went.

    A checkpoint is renamed before it is removed, so that a half-removed one is never taken for whole.
    """
    for left in root.glob(".step-*.removed"):  # by a process that was killed while removing it
        shutil.rmtree(left)
    removed = []
    for old in list_checkpoints(root)[:-keep]:
        if checkpoint_step(old) in keep_also or old.with_name(old.name + PIN_SUFFIX).exists():
            continue
        doomed = old.with_name(f".{old.name}.removed")
        old.rename(doomed)
        shutil.rmtree(doomed)
        removed.append(checkpoint_step(old))
    return removed


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoint folders by step, oldest first."""
    named = [(path, match) for path in root.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    found = [(int(match[1]), path) for path, match in named if path.is_dir()]
    return [path for _, path in sorted(found)]


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint so that it counts as none any more, and is there to be looked at; returns its new place."""
    place = checkpoint.with_name(checkpoint.name + _REFUSED_SUFFIX)
    shutil.rmtree(place, ignore_errors=True)  # of an earlier time
    checkpoint.rename(place)
    return place


def checkpoint_step(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def damage(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None: every file there with its recorded SHA-256, none pickled.

    The sums do not stop somebody who writes them anew, and the trainer takes a pytorch_model.bin before the adapter.
    """
    try:
        note = read_json(checkpoint / _SUMS)
        recorded, step, _ = note["files"], note["step"], note["owner"]
    except (UserError, KeyError, TypeError):
        return f"its {_SUMS} is missing or unreadable"
    if step != checkpoint_step(checkpoint):
        return f"it was written as that of step {step}"
    found = digest_folder(checkpoint)
    found.pop(_SUMS, None)
    missing = sorted(set(recorded) - set(found))
    changed = sorted(name for name in recorded if name in found and found[name] != recorded[name])
    added = sorted(set(found) - set(recorded))
    for names, word in ((missing, "missing"), (changed, "changed"), (added, "not written by us")):
        if names:
            return f"{names[0]} is {word}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
    pickles = sorted(name for name in found if _may_be_pickle(name))
    if pickles:
        return f"{pickles[0]} is a pickle file and is refused"
    return None if weight_files(checkpoint) else "it holds no weights"


def weight_files(checkpoint: Path) -> list[Path]:
    """The files that hold the trained weights, by name."""
    return sorted(path for path in checkpoint.glob("*.safetensors") if _WEIGHTS.fullmatch(path.name))


def _may_be_pickle(name: str) -> bool:
    """Also the index of a model in pickled shards."""
    return name.endswith((*PICKLE_SUFFIXES, ".pkl", ".bin.index.json"))


def newest_usable(root: Path, *, owner: str, say: Callable[[str], None]) -> Path | None:
    """The newest undamaged checkpoint of this recipe, or None; every one passed over is reported through `say`.

    Raises UserError for a checkpoint that belongs to another recipe: continuing it would be another run.
    """
    for checkpoint in reversed(list_checkpoints(root)):
        if reason := damage(checkpoint):
            say(
                f"checkpoint {checkpoint} is damaged ({reason}) and is not used; training continues before it"
            )
            continue
        found = read_json(checkpoint / _SUMS).get("owner")
        if found != owner:
            raise UserError(
                f"checkpoint {checkpoint} belongs to another recipe",
                why=f"its recipe digest is {str(found)[:8]}, this run's is {owner[:8]}",
                fix="give the run another folder with --run-dir, or delete the checkpoints there",
            )
        return checkpoint
    return None
