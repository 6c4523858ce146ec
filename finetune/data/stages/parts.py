"""A part: the rows of one piece of the input on disk, with a table of keys from which everything else is decided.

A part's folder holds `rows.jsonl` (the lines as they will stand in a split file), `keys.arrow` (one record a row: see
KEYS), `dropped.jsonl` and `quarantined.jsonl` (ledger entries of rows that were not taken) and `part.json` (counts). It is
written aside and renamed when it is whole, so a part that is there is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import orjson
import pyarrow as pa

from finetune.data.fold import fold_text, fold_turns
from finetune.data.rows import KINDS, Row
from finetune.data.texts import calls_of
from finetune.digest import canonical_json
from finetune.errors import UserError
from finetune.paths import disk_faults, read_json

ROWS, KEYS_FILE, COUNTS = "rows.jsonl", "keys.arrow", "part.json"
DROPPED, QUARANTINED = "dropped.jsonl", "quarantined.jsonl"
HASH_BYTES = 16
ROWS_A_BATCH = 10_000

# One record a row. `content`, `prompt` and `answer` are hashes of what is learnt, of the folded prompt and of the folded
# answer, where there is one; `offset` and `length` say where the row's line is in rows.jsonl, without its line end;
# `words` is its size in words, whatever the tokenizer; `flags` are bits of `filter_rows.FLAGS`.
KEYS = pa.schema(
    [
        ("id", pa.large_string()),
        ("group", pa.large_string()),
        ("tags", pa.large_string()),
        ("source", pa.large_string()),
        ("content", pa.binary(HASH_BYTES)),
        ("prompt", pa.binary(HASH_BYTES)),
        ("answer", pa.binary(HASH_BYTES)),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("words", pa.int64()),
        ("flags", pa.int32()),
    ]
)


def json_line(value: Mapping[str, Any]) -> bytes:
    """One line of JSON without its end; what orjson refuses (half a surrogate pair, long integers) is written by json."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, allow_nan=False).encode()


def parse_line(line: bytes) -> dict[str, Any]:
    """The inverse of `json_line`. Lines by json have a space after the first colon, and only json reads all of them."""
    parsed: dict[str, Any] = json.loads(line) if line.startswith(b'{"id": ') else orjson.loads(line)
    return parsed


def iter_stored(path: Path) -> Iterator[tuple[bytes, Row]]:
    """The lines of the file of a side, with their ends, and the row of each.

    Raises UserError when the file is missing, and for a line that is no row.
    """
    again = "delete the folder and build it again"
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        raise UserError(f"no such file: {path}", fix=again) from None
    with stream:
        for number, line in enumerate(stream, start=1):
            try:
                row = Row.from_dict(parse_line(line))
                _require_sound(row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"not a row: {error}", where=f"{path}:{number}", fix=again) from None
            yield line, row


def _require_sound(row: Row) -> None:
    """Raise ValueError for a row that no build has written: the rest of the package relies on its types."""
    if not all(isinstance(text, str) for text in (row.id, row.group, row.source, row.text)):
        raise ValueError("id, group, source and text are texts")
    turns = (*row.messages, *row.chosen, *row.rejected)
    if not all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns):
        raise ValueError("a turn is no object with a role")
    if row.kind not in KINDS:
        raise ValueError(f"there is no kind '{row.kind}'")
    if row.kind in ("chat", "kto") and not any(turn["role"] == "assistant" for turn in row.messages):
        raise ValueError("it has no assistant turn")
    if not all(isinstance(step, dict) and isinstance(step.get("text"), str) for step in row.steps):
        raise ValueError("a step is no object with a text")


def prompt_hash(row: Row) -> bytes:
    """Of the folded prompt: equal for prompts that differ in case, compatibility forms and white space alone."""
    return _hash(fold_turns(row.prompt))


def answer_hash(row: Row) -> bytes | None:
    """The same of the answer, and of the calls of tools in it; None for running text."""
    if row.kind in ("text", "tokens"):
        return None
    return _hash(fold_text(row.answer) + calls_of(row))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()


def count_words(row: Row) -> int:
    """Size of a row for mixing by tokens: words, and characters of scripts without spaces at two a word."""
    if row.kind == "tokens":
        return len(row.input_ids)
    contents = [str(turn.get("content") or "") for turn in (*row.messages, *row.chosen, *row.rejected)]
    contents += [row.text, *(str(step.get("text", "")) for step in row.steps)]
    return sum(
        content.count(" ") + 1 if content.isascii() else max(content.count(" ") + 1, len(content) // 2)
        for content in contents
        if content
    )


class KeyColumns:
    """Collects the keys of rows, and hands them over a batch at a time."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in KEYS.names}

    def __len__(self) -> int:
        return len(self._columns["id"])

    def add(self, row: Row, offset: int, length: int, flags: int = 0) -> None:
        """A row whose line is `length` bytes long, `offset` bytes from the beginning of its file."""
        values = (
            _writable(row.id),
            _writable(row.group),
            _writable(canonical_json(row.tags)) if row.tags else "",
            _writable(row.source),
            bytes.fromhex(row.content_digest())[:HASH_BYTES],
            prompt_hash(row),
            answer_hash(row),
            offset,
            length,
            count_words(row),
            flags,
        )
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def take(self) -> pa.RecordBatch:
        """What was collected since the last time."""
        batch = pa.RecordBatch.from_pydict(self._columns, schema=KEYS)
        self._columns = {name: [] for name in KEYS.names}
        return batch


class PartWriter:
    """Writes one part; use as a context. The folder gets its name only when the block ends without an exception."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read = 0
        self.n_rows = 0
        self.dropped: Counter[str] = Counter()
        self.quarantined = 0
        self.kinds: Counter[str] = Counter()
        self.ignored_keys: Counter[str] = Counter()
        self.findings: Counter[str] = Counter()
        self._offset = 0
        self._keys = KeyColumns()

    def __enter__(self) -> PartWriter:
        with disk_faults(self.folder):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._aside = Path(tempfile.mkdtemp(dir=self.folder.parent, prefix=".part-"))
            self._rows: IO[bytes] = (self._aside / ROWS).open("wb")
            self._dropped: IO[bytes] = (self._aside / DROPPED).open("wb")
            self._quarantined: IO[bytes] = (self._aside / QUARANTINED).open("wb")
            self._key_stream: IO[bytes] = (self._aside / KEYS_FILE).open("wb")
            self._key_file = pa.ipc.new_file(self._key_stream, KEYS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                with disk_faults(self.folder):
                    self._finish()
        finally:
            for stream in (self._rows, self._dropped, self._quarantined, self._key_stream):
                stream.close()
            shutil.rmtree(self._aside, ignore_errors=True)

    def add(self, row: Row, flags: int = 0) -> None:
        """A row that is taken."""
        line = json_line(row.to_dict())
        self._rows.write(line + b"\n")
        self._keys.add(row, self._offset, len(line), flags)
        self._offset += len(line) + 1
        self.n_rows += 1
        self.kinds[row.kind] += 1
        if len(self._keys) == ROWS_A_BATCH:
            self._key_file.write_batch(self._keys.take())

    def drop(self, reason: str, entry: Mapping[str, Any]) -> None:
        """A row that is left out by plan."""
        self.dropped[reason] += 1
        self._dropped.write(json_line({"reason": reason, "kind": "dropped", **entry}) + b"\n")

    def quarantine(self, reason: str, entry: Mapping[str, Any]) -> None:
        """A faulty row."""
        self.quarantined += 1
        self._quarantined.write(json_line({"reason": reason, "kind": "quarantined", **entry}) + b"\n")

    def counts(self) -> dict[str, Any]:
        """As written to part.json."""
        return {
            "read": self.read,
            "rows": self.n_rows,
            "kinds": dict(self.kinds),
            "dropped": dict(self.dropped),
            "quarantined": self.quarantined,
            "ignored_keys": dict(self.ignored_keys),
            "findings": dict(self.findings),
        }

    def _finish(self) -> None:
        self._key_file.write_batch(self._keys.take())
        self._key_file.close()
        for stream in (self._rows, self._dropped, self._quarantined, self._key_stream):
            stream.flush()
            os.fsync(stream.fileno())
        (self._aside / COUNTS).write_bytes(orjson.dumps(self.counts()))
        self._aside.chmod(0o755)
        if self.folder.exists():  # another process wrote the same part
            return
        self._aside.rename(self.folder)


def _writable(text: str) -> str:
    """Arrow holds UTF-8 only; half a surrogate pair, which some JSON has, is replaced by its escape in the keys."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def read_counts(folder: Path) -> dict[str, Any]:
    """The counts of a complete part."""
    counts: dict[str, Any] = read_json(folder / COUNTS)
    return counts


def read_keys(folder: Path) -> pa.Table:
    """The keys of a complete part, in the order of its rows."""
    with pa.OSFile(str(folder / KEYS_FILE)) as stream:
        return pa.ipc.open_file(stream).read_all()


def iter_entries(folder: Path, file: str) -> Iterator[bytes]:
    """The ledger lines in DROPPED or QUARANTINED of a complete part, with their line ends."""
    with (folder / file).open("rb") as stream:
        yield from stream
