"""Rows to look at: of a build's split, of a spec, or of a user's file that no spec describes yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from finetune.data.build import build_dataset, default_builds_root, open_build
from finetune.data.read.files import source_files
from finetune.data.read.record import Reject
from finetune.data.read.source import iter_rows
from finetune.data.rows import Progress, Row, Side
from finetune.data.spec_source import FilesSource
from finetune.paths import find_declarative


def rows_to_look_at(
    source: str,
    split: Side = "train",
    *,
    builds_root: Path | None = None,
    on_progress: Progress = lambda share: None,
) -> Iterator[Row]:
    """The rows of `source`: the folder of a build, a data file of any readable kind, or a spec, which is built first.

    Of a file all rows are read whatever `split` says, and faulty ones are passed over (`finetune data inspect` shows
    them). Raises UserError when there is no such thing, or no such split.
    """
    path = Path(source)
    if path.is_dir():
        yield from open_build(path).iter_rows(split)
    elif path.is_file() and path.suffix not in (".yaml", ".yml"):
        files = FilesSource(kind="files", files=[str(path.absolute())])
        for file in source_files(files, Path()):
            yield from (row for row in iter_rows(file, files) if not isinstance(row, Reject))
    else:
        spec = find_declarative("data", source)
        made = build_dataset(spec, builds_root or default_builds_root(), on_progress=on_progress)
        yield from made.iter_rows(split)
