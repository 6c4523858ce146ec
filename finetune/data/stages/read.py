"""The first stage: what a spec names is divided into pieces, and each piece is read into a part.

A piece is a file, a range of one, or a source that makes its own rows. Its key covers everything that decides its part:
the bytes of the file, the source section and the code. A part that is there under its key is never read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.data.read import Range, Reject, SourceFile, iter_rows, source_files, split_ranges
from finetune.data.rows import Ledger, Progress, Row
from finetune.data.spec import DatasetSpec
from finetune.data.spec_curate import CurateSection
from finetune.data.spec_source import GeneratedSource, HomeIntentsSource, HubSource, RowsSource, Source
from finetune.data.stages.filter_rows import Left, RowFilter, filter_digest
from finetune.data.stages.parts import PartWriter, read_counts
from finetune.data.stages.pinned import iter_pinned_rows, pinned_source
from finetune.data.stages.runner import Runner
from finetune.digest import digest_file, digest_json
from finetune.errors import UserError

Where = Callable[[str], str]
PIECE_BYTES = 16 << 20
# Keys of a source that do not decide what a row is: a change of them reads nothing again.
_UNREAD = frozenset({"files", "max_reject_rate", "weight", "licence", "origin"})
_SMALL_BYTES_OF_OWN_ROWS = 1  # a source that makes its rows is small, whatever it costs


@dataclass(frozen=True, slots=True)
class HashedFile:
    """A file, the SHA-256 of its bytes, and its size and time of change before it was hashed."""

    file: SourceFile
    digest: str
    stamp: tuple[int, int]

    @classmethod
    def of(cls, file: SourceFile) -> HashedFile:
        stamp = _stamp(file)
        return cls(file, digest_file(file.path), stamp)


@dataclass(frozen=True, slots=True)
class Input:
    """One source of the spec with the files that it names. `pinned`: its rows are the regressions side."""

    origin: int
    source: Source
    files: tuple[HashedFile, ...]
    pinned: bool = False

    def describe(self) -> dict[str, Any]:
        """What decides its rows besides the spec: versions of packages, or the SHA-256 of every file."""
        if isinstance(self.source, HomeIntentsSource):
            from finetune.data import home_intents  # parses a grammar: only when asked for

            return {"kind": self.source.kind, "packages": home_intents.source_versions()}
        return {"kind": self.source.kind, "files": {one.file.name: one.digest for one in self.files}}

    def provenance(self) -> dict[str, str]:
        """Where it is from and under which licence, as far as the spec says; it decides no row."""
        source = self.source
        said = {"licence": source.licence, "origin": source.origin}
        if isinstance(source, HubSource):
            said["dataset"] = f"{source.id}@{source.revision}"
        elif isinstance(source, GeneratedSource):
            said["prompts"] = source.prompts
            said["model"] = source.model.id or source.model.run
            said["model_licence"] = source.model.licence
        return {key: value for key, value in said.items() if value}


@dataclass(frozen=True, slots=True)
class Span:
    """A file, or a range of one."""

    whole: HashedFile
    within: Range | None

    @property
    def file(self) -> SourceFile:
        return self.whole.file

    @property
    def n_bytes(self) -> int:
        return self.file.size_bytes if self.within is None else self.within.stop - self.within.start

    def decided_by(self) -> list[Any]:
        """What tells it from any other."""
        bounds = None if self.within is None else [self.within.start, self.within.stop]
        return [self.file.name, self.whole.digest, bounds]

    def require_unchanged(self) -> None:
        """Raise UserError when the file is no longer the one that was hashed."""
        if _stamp(self.file) != self.whole.stamp:
            raise UserError(
                f"{self.file.path} was changed while it was read",
                fix="run the same command again when nothing writes to the file any more",
            )


@dataclass(frozen=True, slots=True)
class Piece:
    """What is read at one go, by a worker that knows nothing else: some spans, or none where a source makes its rows."""

    key: str
    origin: int
    source: Source
    spans: tuple[Span, ...]
    seed: int
    pinned: bool
    curate: CurateSection
    marks: Path | None
    folder: Path  # of the spec

    @property
    def n_bytes(self) -> int:
        return sum(span.n_bytes for span in self.spans) or _SMALL_BYTES_OF_OWN_ROWS


@dataclass(frozen=True, slots=True)
class ReadPart:
    """A complete part and the piece it was read from."""

    piece: Piece
    folder: Path
    counts: Mapping[str, Any]


def gather_input(origin: int, source: Source, spec_folder: Path, where: Where) -> Input:
    """Find and hash the files of a source; `where` gives the place of a key of the spec. Raises UserError for missing ones."""
    if not isinstance(source, RowsSource):
        return Input(origin, source, ())
    files = source_files(source, spec_folder, where=where)
    return Input(origin, source, tuple(HashedFile.of(file) for file in files))


def gather_pinned(file: str, like: Source, spec_folder: Path, where: str) -> Input:
    """The same for the file of pinned rows, which are read as the rows of the source `like`."""
    source = pinned_source(file, like, spec_folder, where)
    found = gather_input(-1, source, spec_folder, lambda key: where)
    return replace(found, pinned=True)


def pieces_of(
    given: Input, spec: DatasetSpec, folder: Path, code: str, piece_bytes: int = PIECE_BYTES
) -> Iterator[Piece]:
    """The pieces of a source, in the order of its rows, each of about `piece_bytes`: big files are divided where they
    can be, small ones are put together."""
    section = given.source.model_dump(mode="json", exclude=set(_UNREAD))
    marks = None if spec.marks is None else folder / spec.marks
    decided_by = {
        "source": section,
        "seed": spec.seed,
        "pinned": given.pinned,
        "curate": filter_digest(spec.curate, marks, folder),
        "code": code,
    }

    def piece(spans: list[Span]) -> Piece:
        own = [span.decided_by() for span in spans] or given.describe()
        key = digest_json({**decided_by, "spans": own})[:24]
        return Piece(
            key=key,
            origin=given.origin,
            source=given.source,
            spans=tuple(spans),
            seed=spec.seed,
            pinned=given.pinned,
            curate=spec.curate,
            marks=marks,
            folder=folder,
        )

    if not given.files:
        yield piece([])
    waiting: list[Span] = []
    waiting_bytes = 0
    for whole in given.files:
        for within in [None] if given.pinned else split_ranges(whole.file, piece_bytes):
            span = Span(whole, within)
            if waiting and waiting_bytes + span.n_bytes > piece_bytes:
                yield piece(waiting)
                waiting, waiting_bytes = [], 0
            waiting.append(span)
            waiting_bytes += span.n_bytes
    if waiting:
        yield piece(waiting)


def read_pieces(
    pieces: Sequence[Piece], folder: Path, runner: Runner, on_progress: Progress
) -> list[ReadPart]:
    """The part of every piece, in their order; those that are complete in `folder` are not read again."""
    total = sum(piece.n_bytes for piece in pieces) or 1
    missing = [piece for piece in pieces if not (folder / piece.key).is_dir()]
    done = total - sum(piece.n_bytes for piece in missing)
    tasks = [ReadTask(piece, folder, on_progress if len(pieces) == 1 else None) for piece in missing]
    for index, _ in runner.map(read_piece, tasks, [piece.n_bytes for piece in missing]):
        done += missing[index].n_bytes
        on_progress(done / total)
    return [ReadPart(piece, folder / piece.key, read_counts(folder / piece.key)) for piece in pieces]


@dataclass(frozen=True, slots=True)
class ReadTask:
    """A piece and the folder its part goes to. `on_progress` is for a piece that is read in this process."""

    piece: Piece
    folder: Path
    on_progress: Progress | None = None


def read_piece(task: ReadTask) -> str:
    """Read one piece into a part; returns its key."""
    piece = task.piece
    with (
        PartWriter(task.folder / piece.key) as part,
        RowFilter(piece.curate, piece.marks, piece.folder) as row_filter,
    ):
        rows = _rows_of(piece, part, task.on_progress or _nobody)
        if piece.pinned:  # they are used as they are
            for row in rows:
                part.add(row)
            return piece.key
        for judged in row_filter(rows):
            if isinstance(judged, Left):
                entry = {"source": judged.row.source, "id": judged.row.id, **judged.entry}
                part.drop(judged.reason, entry)
            else:
                part.add(*judged)
        part.findings.update(row_filter.counts)
    return piece.key


def _rows_of(piece: Piece, part: PartWriter, on_progress: Progress) -> Iterator[Row]:
    """The sound rows of a piece; the part is told of all others."""
    if not piece.spans:
        yield from _make_rows(piece, part, on_progress)
    for span in piece.spans:
        assert isinstance(piece.source, RowsSource)
        found_in = (
            iter_pinned_rows(span.file, piece.source, part.ignored_keys)
            if piece.pinned
            else iter_rows(span.file, piece.source, within=span.within, ignored_keys=part.ignored_keys)
        )
        for found in found_in:
            part.read += 1
            if isinstance(found, Reject):
                entry = found.to_dict()
                part.quarantine(entry.pop("reason"), entry)
            else:
                yield found
        span.require_unchanged()


def _make_rows(piece: Piece, part: PartWriter, on_progress: Progress) -> Iterator[Row]:
    assert isinstance(piece.source, HomeIntentsSource)
    from finetune.data import home_intents  # parses a grammar: only when asked for

    ledger = Ledger()
    yield from home_intents.sample_rows(piece.source, piece.seed, ledger, on_progress)
    part.read = ledger.read
    for entry in ledger.entries:
        part.drop(
            entry["reason"], {key: value for key, value in entry.items() if key not in ("reason", "kind")}
        )


def _stamp(file: SourceFile) -> tuple[int, int]:
    found = file.path.stat()
    return found.st_size, found.st_mtime_ns


def _nobody(share: float) -> None:
    """Nobody is watching."""
