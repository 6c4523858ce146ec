"""What the other processes of a run do: wait while the first one works alone, then train with it, and end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.data.build import open_build
from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.paths import runs_root
from finetune.pipeline.inputs import gather_inputs
from finetune.pipeline.manifest import FILE_NAME, RunManifest
from finetune.pipeline.stages import RunContext, train_depends_on, train_model, training_rows
from finetune.training.processes import END, TRAIN, Processes


def follow_run(
    path: str, overrides: Sequence[str] = (), *, run_dir: Path | None = None, processes: Processes
) -> None:
    """Take part in the training of `run_recipe`, called with the same arguments in the first process.

    Nothing is said, evaluated or written here. Raises UserError when this process reads another recipe, other rows or
    another run folder than the first one, and what training raises; EndedElsewhereError when another process failed.
    """
    word, rows_digest = processes.await_any(TRAIN, END)
    if word == END:
        return
    inputs = gather_inputs(path, overrides)
    folder = (run_dir or runs_root() / inputs.folder_name).absolute()
    if not (folder / FILE_NAME).is_file():
        raise UserError(
            f"process {processes.rank} does not see the run folder {folder}",
            why="all processes read checkpoints and events there",
            fix="put runs on a disk that all machines share: FINETUNE_RUNS or --run-dir",
        )
    manifest = RunManifest.open(folder, recipe_digest=inputs.digest, recipe_name=inputs.recipe.name)
    context = RunContext(inputs, manifest, _silent)
    rows = training_rows(context, open_build(folder / "data"))
    if rows.digest != rows_digest:
        raise UserError(
            f"process {processes.rank} reads other rows than the first process",
            why=f"their digests are {rows.digest[:8]} and {rows_digest[:8]}",
            fix="give every machine the same installation, and see that the disk of the runs is the same",
        )
    train_model(context, rows, owner=digest_json(train_depends_on(context, rows)))


def _silent(line: str) -> None:
    """Only the first process speaks."""
