"""Rows to look at: of a build's split, of a spec, or of a user's file that no spec describes yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from finetune.data.build import build_dataset, default_builds_root, open_build
from finetune.data.read.files import source_files
from finetune.data.read.record import Reject
from finetune.data.read.source import iter_rows
from finetune.data.rows import Progress, Row, Side
from finetune.data.spec_source import FilesSource
from finetune.errors import UserError
from finetune.paths import find_declarative


def rows_to_look_at(
    source: str,
    split: Side = "train",
    *,
    builds_root: Path | None = None,
    on_progress: Progress = lambda share: None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Row]:
    """The rows of `source`: the folder of a build, a data file of any readable kind, or a spec, which is built first.

    Of a file all rows are read whatever `split` says; faulty ones are passed over, and at the end `say` is told how many
    they were. Raises UserError when there is no such thing, no such split, or no sound row in a file.
    """
    path = Path(source)
    if path.is_dir():
        yield from open_build(path).iter_rows(split)
    elif path.is_file() and path.suffix not in (".yaml", ".yml"):
        yield from _rows_of_file(path, say)
    else:
        spec = find_declarative("data", source)
        made = build_dataset(spec, builds_root or default_builds_root(), on_progress=on_progress)
        yield from made.iter_rows(split)


def _rows_of_file(path: Path, say: Callable[[str], None]) -> Iterator[Row]:
    files = FilesSource(kind="files", files=[str(path.absolute())])
    n_rows = n_faulty = 0
    first: Reject | None = None
    for file in source_files(files, Path()):
        for found in iter_rows(file, files):
            if isinstance(found, Reject):
                n_faulty += 1
                first = first or found
            else:
                n_rows += 1
                yield found
    if not n_rows:
        raise UserError(
            f"no row of {path} can be used" if first else f"there are no rows in {path}",
            why=f"for example line {first.line}: {first.reason}" if first else "",
            fix=f"finetune data inspect {path}",
        )
    if n_faulty:
        say(f"{n_faulty} of {n_rows + n_faulty} rows are faulty and left out: finetune data inspect {path}")
