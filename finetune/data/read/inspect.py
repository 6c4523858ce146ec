"""What files of rows are: format, shape and why, how every reading of them would fare, and the facts behind a spec.

Readings are guessed from a sample; then every row of every file is read by each, so that the counts are of the whole.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from finetune.data.read.files import SourceFile
from finetune.data.read.guess import Guess, guesses
from finetune.data.read.record import Record, Reject, RowError, reject
from finetune.data.read.row_maker import RowMaker
from finetune.data.read.source import iter_records
from finetune.data.rows import Progress, Row
from finetune.data.spec_source import RowsSource
from finetune.errors import UserError

SAMPLE_ROWS = 1000
_SHOWN = 3
_MOST_VALUES = 1000  # distinct values counted of a column, and groups counted of a reading
_WORTH_A_TRY = 0.01  # share of faulty rows from which another way to read the text is tried
_MAX_READINGS = 4


@dataclass
class Tally:
    """One reading of the rows and how it fared. Lengths are in characters."""

    guess: Guess
    source: RowsSource
    rows: int = 0
    rejected: int = 0
    first_rejects: list[Reject] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    ignored_keys: Counter[str] = field(default_factory=Counter)
    prompt_lengths: array[int] = field(default_factory=lambda: array("Q"))
    answer_lengths: array[int] = field(default_factory=lambda: array("Q"))
    turns: Counter[int] = field(default_factory=Counter)
    groups: set[str] = field(default_factory=set)

    def add(self, row: Row) -> None:
        """Count a row."""
        self.rows += 1
        self.kinds[row.kind] += 1
        self.turns[len(row.messages)] += 1
        self.prompt_lengths.append(sum(len(str(turn.get("content") or "")) for turn in row.prompt))
        self.answer_lengths.append(len(row.answer))
        if len(self.groups) < _MOST_VALUES:
            self.groups.add(row.group)
        if len(self.samples) < _SHOWN:
            self.samples.append(row)

    def refuse(self, fault: Reject) -> None:
        """Count a row that this reading cannot use."""
        self.rejected += 1
        if len(self.first_rejects) < _SHOWN:
            self.first_rejects.append(fault)


@dataclass
class Inspection:
    """What was found. `readings` are in the order in which they are preferred; the first is the one to use."""

    files: Sequence[SourceFile]
    source: RowsSource
    read: int = 0
    unreadable: int = 0
    first_unreadable: list[Reject] = field(default_factory=list)
    complete: bool = True
    readings: list[Tally] = field(default_factory=list)
    columns: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def chosen(self) -> Tally:
        """The reading that makes the most rows; of equals the one guessed first."""
        return self.readings[0]

    @property
    def reject_rate(self) -> float:
        """Share of the rows that the chosen reading cannot use."""
        return 1 - self.chosen.rows / self.read


def inspect_files(
    files: Sequence[SourceFile],
    source: RowsSource,
    *,
    max_rows: int | None = None,
    on_progress: Progress = lambda share: None,
) -> Inspection:
    """Read all rows (or the first `max_rows` of each file) in every way that their keys suggest.

    Where more than 1 % cannot be read, other ways to take the text are tried too: quotes that are plain characters,
    an eight-bit encoding. Raises UserError when there are no rows, or no way to read one of them.
    """
    found = _inspect(files, source, max_rows, on_progress)
    for change in _other_ways(found):
        other = _inspect(_again(files, change), source.model_copy(update=change), max_rows, on_progress)
        if other.readings and (not found.readings or other.chosen.rows > found.chosen.rows):
            found = other
    if not found.read:
        raise UserError(
            f"there are no rows in {', '.join(file.name for file in files)}",
            fix="name files that hold rows; source.format says what a file is when its name and content do not",
        )
    if not found.readings or not found.chosen.rows:
        raise _nothing_fits(found)
    return found


def _inspect(
    files: Sequence[SourceFile], source: RowsSource, max_rows: int | None, on_progress: Progress
) -> Inspection:
    found = Inspection(files, source)
    if source.shape == "auto" and not source.columns:
        sample = [
            record.value for file in files for record in _sampled(file, source, SAMPLE_ROWS // len(files) + 1)
        ]
        found.readings = [
            Tally(guess, with_guess(source, guess)) for guess in guesses(sample)[:_MAX_READINGS]
        ]
    else:
        found.readings = [Tally(Guess(source.shape, "stated"), source)]
    total = sum(file.size_bytes for file in files) or 1
    done = 0
    for file in files:
        for one in _count(found, file, max_rows):
            on_progress(min(1.0, (done + (one.byte or 0)) / total))
        done += file.size_bytes
    found.readings.sort(key=lambda tally: -tally.rows)
    return found


def _sampled(file: SourceFile, source: RowsSource, n_rows: int) -> Iterator[Record]:
    records = (one for one in iter_records(file, source) if isinstance(one, Record))
    return islice(records, n_rows)


def _count(found: Inspection, file: SourceFile, max_rows: int | None) -> Iterator[Record]:
    """Read one file in every way; yields a record now and then, for the progress."""
    makers = [(tally, RowMaker(tally.source, file.name, tally.ignored_keys)) for tally in found.readings]
    for number, one in enumerate(iter_records(file, found.source)):
        if number == max_rows:
            found.complete = False
            return
        found.read += 1
        if isinstance(one, Reject):
            found.unreadable += 1
            if len(found.first_unreadable) < _SHOWN:
                found.first_unreadable.append(one)
            continue
        _count_values(found.columns, one.value)
        for tally, make in makers:
            try:
                tally.add(make(one))
            except RowError as fault:
                tally.refuse(reject(file.name, one.line, one.byte, fault, one.raw))
        if number % SAMPLE_ROWS == 0:
            yield one


def _count_values(columns: dict[str, Counter[str]], value: dict[str, Any]) -> None:
    """The values of columns that hold few different ones: those could be tags, or groups."""
    for key, item in value.items():
        counted = columns.setdefault(key, Counter())
        if isinstance(item, (str, int, bool)) and len(counted) <= _MOST_VALUES and len(str(item)) <= 100:
            counted[str(item)] += 1


def with_guess(source: RowsSource, guess: Guess) -> RowsSource:
    """The source section with what the guess states, checked."""
    return type(source)(**{**source.model_dump(exclude_unset=True), **guess.section()})


def _other_ways(found: Inspection) -> Iterator[dict[str, Any]]:
    """Changes of the source section under which more rows might be read."""
    if not found.read or found.unreadable / found.read <= _WORTH_A_TRY:
        return
    formats = {file.format for file in found.files}
    reasons = " ".join(entry.reason for entry in found.first_unreadable)
    if formats <= {"csv", "tsv"} and "not well formed" in reasons:
        yield {"quoted": False}
    if formats <= {"jsonl", "json"} and "UTF-8" in reasons and found.source.encoding == "auto":
        yield {"encoding": "cp1252"}


def _again(files: Sequence[SourceFile], change: dict[str, Any]) -> list[SourceFile]:
    """The same files, to be decoded in another encoding if the change names one."""
    return [file.decoded_as(change["encoding"]) if "encoding" in change else file for file in files]


def _nothing_fits(found: Inspection) -> UserError:
    keys = list(found.columns)
    what = (
        f"{found.unreadable} of {found.read} rows cannot be read: {found.first_unreadable[0].reason}"
        if not keys
        else f"no shape fits the keys of the rows: {', '.join(keys[:20])}"
    )
    first = found.readings[0].first_rejects if found.readings else found.first_unreadable
    return UserError(
        what,
        where=", ".join(file.name for file in found.files[:3]),
        why=f"for example line {first[0].line}: {first[0].reason}" if first and keys else "",
        fix="say in a spec what the columns mean, e.g. source.columns: {prompt: QUESTION, completion: ANSWER}; "
        "data/README.md lists the shapes",
    )
