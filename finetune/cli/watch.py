"""`finetune watch RUN`: follow a run from another shell, also over SSH; only its files are read."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.output import JsonFlag, emit, note
from finetune.errors import UserError

if TYPE_CHECKING:
    from finetune.telemetry.terminal import RunView

_LOG_INTERVAL_SECONDS = 10.0
_UP_AND_CLEAR = "\x1b[{}A\x1b[J"


def watch(
    run: Annotated[
        str,
        typer.Argument(help="Run folder, or the name of a recipe for its newest run.", show_default=False),
    ],
    once: Annotated[bool, typer.Option("--once", help="Show how it stands and leave.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a run's curves, time left and answers while it trains; ends when the run ends.

    With --json every event is printed as it comes, one line each; with --once too, one object of how it stands.
    """
    from finetune.pipeline.manifest import is_worked_on
    from finetune.telemetry.follow import follow_events
    from finetune.telemetry.sparkline import can_draw
    from finetune.telemetry.terminal import RunView

    folder = find_run(run)
    if not any((folder / held).is_file() for held in ("manifest.json", "events.jsonl")):
        raise UserError(f"{folder} is no run folder", fix="name the folder that `finetune run` printed first")
    view = RunView()
    if once:
        for batch in follow_events(folder, is_alive=lambda _: False):
            _add(view, batch)
        summary = {"run": str(folder), "is_running": is_worked_on(folder), **view.summary()}
        emit(summary, "\n".join(view.lines(_size().columns, draws=can_draw(sys.stdout))), as_json=as_json)
        return
    screen = _Screen(view, as_json=as_json)
    for batch in follow_events(folder, is_alive=is_worked_on):
        _add(view, batch)
        screen.show(batch)
    screen.end()
    note(f"no process works in {folder} any more")
    if view.stage.get("status") == "running":
        note(
            f"it ended inside the stage {view.stage.get('name')}: the same `finetune run` goes on from there"
        )


def find_run(name: str) -> Path:
    """A run folder by path, by its name below the runs, or the newest run of a recipe: by its name or its file.

    Raises UserError when there is none.
    """
    from finetune.paths import runs_root

    for folder in (Path(name), runs_root() / name):
        if folder.is_dir():
            return folder
    names = _recipe_names(name)
    found = [path.parent for path in runs_root().glob("*/manifest.json") if path.parent.name[:-9] in names]
    if not found:
        raise UserError(
            f"no run folder {name}, and no run of a recipe of that name under {runs_root()}",
            fix="name the folder that `finetune run` printed first",
        )
    return max(found, key=lambda folder: (folder / "manifest.json").stat().st_mtime)


def _recipe_names(name: str) -> set[str]:
    """What runs of a recipe are called: by its file's stem, unless the file gives another name."""
    from contextlib import suppress

    from finetune.recipe.resolve import read_recipe

    names = {Path(name).name.removesuffix(".yaml")}
    with suppress(UserError):
        names.add(read_recipe(name).value.name)
    return names


def _add(view: RunView, batch: list[dict[str, object]]) -> None:
    for event in batch:
        view.add(event)


def _size() -> os.terminal_size:
    """Columns and lines of the terminal; 100 and 24 where there is none."""
    import shutil

    return shutil.get_terminal_size((100, 24))


def _print_text(text: str) -> None:
    """With escapes for what the stream's encoding does not have."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="backslashreplace").decode(encoding), flush=True)


class _Screen:
    """A picture that is drawn over on a terminal; lines, at most one in ten seconds, in a log."""

    def __init__(self, view: RunView, *, as_json: bool) -> None:
        from finetune.telemetry.sparkline import can_draw, can_redraw

        self._view, self._as_json = view, as_json
        self._is_terminal = can_redraw(sys.stdout)
        self._draws = can_draw(sys.stdout)
        self._n_lines = 0
        self._last, self._printed = float("-inf"), ""

    def show(self, batch: list[dict[str, object]]) -> None:
        if self._as_json:
            import json

            for event in batch:
                print(json.dumps(event, ensure_ascii=not self._draws), flush=True)
        elif self._is_terminal:
            self._draw()
        elif batch and time.monotonic() - self._last >= _LOG_INTERVAL_SECONDS:
            self._print_line()

    def end(self) -> None:
        """What the last batches added, in full."""
        if not self._as_json and not self._is_terminal:
            _print_text("\n".join(self._view.lines(_size().columns, draws=self._draws)))

    def _draw(self) -> None:
        """Over what was drawn before; no more lines than the cursor can go back by."""
        columns, rows = _size()
        lines = self._view.lines(columns, draws=self._draws)
        if len(lines) >= rows > 2:
            lines = [
                *lines[: rows - 2],
                f"and {len(lines) - rows + 2} lines more: make the window higher"[:columns],
            ]
        above = _UP_AND_CLEAR.format(self._n_lines) if self._n_lines else ""
        _print_text(above + "\n".join(lines))
        self._n_lines = len(lines)

    def _print_line(self) -> None:
        from finetune.telemetry.terminal import step_line

        if not self._view.steps:
            return
        line = step_line(self._view)
        if line != self._printed:
            _print_text(line)
            self._last, self._printed = time.monotonic(), line
