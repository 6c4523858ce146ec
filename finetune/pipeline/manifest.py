"""The run manifest: which stages are complete, for which inputs. An interrupted run continues from what it says."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.digest import digest_file, digest_json
from finetune.errors import UserError
from finetune.paths import disk_faults, read_json, write_json

FILE_NAME = "manifest.json"
RESOLVED = "recipe.resolved.yaml"
LOCK_NAME = ".lock"  # held while a process works in the folder
FORMAT = 1


def refuse_foreign(folder: Path) -> None:
    """A folder with things in it that are not a run of ours is left as it is."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / FILE_NAME).exists():
        only_lock = all(path.name == LOCK_NAME for path in folder.iterdir())
        if not only_lock:
            raise UserError(
                f"{folder} is not empty and is not a run folder",
                fix="choose a new or empty folder with --run-dir",
            )


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Hold the run folder's lock: two processes in one folder would overwrite each other's checkpoints and answers."""
    lock = folder / LOCK_NAME
    with disk_faults(lock):
        stream = lock.open("w")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is working in {short_path(folder)}",
                fix="wait for it or stop it; `finetune run` can be given another folder with --run-dir",
            ) from None
        yield


def is_worked_on(folder: Path) -> bool:
    """Whether a process works in the run folder. A killed one does not: its lock went with it."""
    try:
        stream = (folder / LOCK_NAME).open("rb")
    except OSError:
        return False
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def short_path(path: Path) -> str:
    """Relative to the working folder where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@dataclass
class RunManifest:
    """`manifest.json` of a run folder; saved after every change."""

    folder: Path
    recipe_digest: str
    recipe_name: str
    created: str
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(
        default_factory=dict
    )  # key of the recipe -> where its relative paths start

    @classmethod
    def open(cls, folder: Path, *, recipe_digest: str, recipe_name: str) -> RunManifest:
        """Read the manifest of `folder` or begin one. A folder of another recipe is refused."""
        path = folder / FILE_NAME
        if not path.exists():
            manifest = cls(
                folder, recipe_digest, recipe_name, datetime.now(UTC).isoformat(timespec="seconds")
            )
            manifest.save()
            return manifest
        found = read_json(path)
        if found.get("recipe_digest") != recipe_digest:
            raise UserError(
                f"{folder} is the run folder of another recipe",
                why=f"it belongs to '{found.get('recipe_name')}' ({str(found.get('recipe_digest'))[:8]}), "
                f"this recipe is '{recipe_name}' ({recipe_digest[:8]})",
                fix="choose another folder with --run-dir, or move that one away",
            )
        return cls(
            folder,
            recipe_digest,
            recipe_name,
            found["created"],
            found.get("stages", {}),
            found.get("inputs", {}),
            found.get("folders", {}),
        )

    @classmethod
    def of_run(cls, folder: Path) -> RunManifest:
        """The manifest of a run as it was made, perhaps by an earlier version whose recipes had fewer keys.

        Raises UserError when the resolved recipe beside it was edited since.
        """
        found = read_json(folder / FILE_NAME)
        manifest = cls.open(folder, recipe_digest=found["recipe_digest"], recipe_name=found["recipe_name"])
        recorded = manifest.inputs.get(RESOLVED)
        if recorded is not None and recorded != digest_file(folder / RESOLVED):
            raise UserError(
                f"{folder / RESOLVED} was changed after the run",
                why="it says how the saved answers came about",
                fix="bring it back, or run the changed recipe: it gets a folder of its own",
            )
        return manifest

    def save(self) -> None:
        write_json(
            self.folder / FILE_NAME,
            {
                "format": FORMAT,
                "recipe_name": self.recipe_name,
                "recipe_digest": self.recipe_digest,
                "created": self.created,
                "inputs": self.inputs,
                "folders": self.folders,
                "stages": self.stages,
            },
        )

    def is_complete(self, name: str, inputs: dict[str, Any]) -> bool:
        """Whether a stage was completed for exactly these inputs and its output files are still what it wrote."""
        record = self.stages.get(name)
        if record is None or not record.get("completed") or record["digest"] != digest_json(inputs):
            return False
        return all(
            (self.folder / path).is_file() and digest_file(self.folder / path) == digest
            for path, digest in record["outputs"].items()
        )

    @contextmanager
    def running(self, name: str, inputs: dict[str, Any], outputs: list[Path]) -> Iterator[None]:
        """Run a stage: it is marked complete, with the digests of `outputs`, only when the block ends well.

        `outputs` may be filled inside the block.
        """
        self.stages[name] = {"digest": digest_json(inputs), "inputs": inputs, "completed": None}
        self.save()
        started = time.monotonic()
        yield
        self.stages[name] |= {
            "completed": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - started, 2),
            "outputs": {path.relative_to(self.folder).as_posix(): digest_file(path) for path in outputs},
        }
        self.save()

    def output_digest(self, name: str) -> str:
        """One digest over everything a complete stage wrote: what later stages depend on."""
        return digest_json(self.stages[name]["outputs"])
