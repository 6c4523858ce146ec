"""Reading JSON lines as bytes: text stays exactly as written, and one bad line never loses the others.

Lines are parsed by orjson, which infers nothing ("42", "007" and "2024-01-05" stay text). What it would change in
silence — repeated keys, integers beyond 64 bits — is parsed again by the strict rules below.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from finetune.errors import UserError

_UTF8_BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"
_OTHER_ENCODINGS = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"{\x00": "UTF-16LE",  # without a byte order mark: an object's brace, then a zero byte
    b"\x00{": "UTF-16BE",
    b"\x28\xb5\x2f\xfd": "compressed with zstandard",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file",
}
_LONG_INTEGER = re.compile(rb"[0-9]{19}")
_ESCAPED_COLON = re.compile(rb"\\u003a", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file: `number` counts from 1, `byte` is the offset of its first byte in the decompressed file."""

    number: int
    byte: int
    raw: bytes


class LineError(ValueError):
    """A line that is no row; the message is the reason given in the ledger."""


def read_lines(path: Path) -> Iterator[Line | LineError]:
    """The lines of a file that are not blank, without line end; gzip is recognised by content, a UTF-8 BOM is skipped.

    A compressed stream that breaks off yields every whole line before the break and then one LineError.
    Raises UserError for a missing file and for encodings that are not lines of UTF-8.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}", fix="check source.files; paths are relative to the spec"
        ) from None
    with stream:
        start = stream.read(4)
        stream.seek(0)
        for magic, name in _OTHER_ENCODINGS.items():
            if start.startswith(magic):
                hint = f": iconv -f {name} -t UTF-8" if name.startswith("UTF-16") else ""
                raise UserError(
                    f"{path} is {name}, not lines of UTF-8 text",
                    fix=f"convert it to JSON lines in UTF-8{hint}",
                )
        if start.startswith(_GZIP_MAGIC):
            yield from _numbered(gzip.GzipFile(fileobj=stream))
        else:
            yield from _numbered(stream)


def _numbered(stream: IO[bytes] | gzip.GzipFile) -> Iterator[Line | LineError]:
    byte = 0
    number = 0
    try:
        for number, raw in enumerate(stream, start=1):
            content = raw.rstrip(b"\r\n")
            skipped = 0
            if number == 1 and content.startswith(_UTF8_BOM):
                skipped, content = len(_UTF8_BOM), content.removeprefix(_UTF8_BOM)
            if content.strip():
                yield Line(number, byte + skipped, content)
            byte += len(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield LineError(f"the compressed file breaks off after line {number}: {error}")


def parse_line(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises LineError for broken JSON, NaN and infinities, text that is not Unicode (a lone surrogate, bytes that are
    not UTF-8), a repeated key, and anything that is not an object.
    """
    try:
        parsed = orjson.loads(raw)
        if _may_be_changed(raw, parsed):
            parsed = json.loads(raw, object_pairs_hook=_object_of_pairs)
    except (RecursionError, orjson.JSONEncodeError):  # orjson writes fewer levels than it reads
        raise LineError("not valid JSON: nested too deeply") from None
    except LineError:
        raise
    except ValueError as error:
        raise LineError(f"not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise LineError(f"a row must be a JSON object, this is a {_json_type(parsed)}")
    return parsed


def _may_be_changed(raw: bytes, parsed: Any) -> bool:
    """Whether orjson may have dropped a repeated key (then colons are missing) or rounded a long integer."""
    if _LONG_INTEGER.search(raw) or _ESCAPED_COLON.search(raw):
        return True
    return raw.count(b":") != orjson.dumps(parsed).count(b":")


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise LineError(f"the key '{repeated}' is written twice in one object")
    return made


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)
