"""What a file is: its compression, format, encoding and delimiter, told from its content first and its name second."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import orjson

from finetune.data.read.streams import BREAKS, CHUNK_BYTES, compression_of, open_file, open_plain, read_some
from finetune.data.spec_source import Format, RowsSource
from finetune.errors import UserError, did_you_mean

HEAD_BYTES = 1 << 18
NAMED_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
COMPRESSED_NAMES = frozenset({".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz"})
# Files that describe a dataset and hold none of its rows.
_ABOUT_OTHERS = frozenset(
    {
        "dataset_info.json",
        "dataset_infos.json",
        "state.json",
        "dataset_dict.json",
        "croissant.json",
        "config.json",
    }
)
_TABLES: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
_REFUSED = {
    b"version https://git-lfs.github.com/": "a pointer of Git LFS; fetch the file itself: git lfs pull",
    b"PK\x03\x04": "a zip archive (or a spreadsheet); unpack it, or save it as CSV",
    b"SQLite format 3": "an SQLite database; export the table as CSV",
    b"%PDF": "a PDF document; extract its text",
    b"\x89HDF": "an HDF5 file; export it as Parquet",
    b"\x93NUMPY": "a NumPy array; write its rows as JSON lines",
    b"\x80\x04\x95": "a Python pickle, which could run code; write its rows as JSON lines",
    b"\x80\x05\x95": "a Python pickle, which could run code; write its rows as JSON lines",
}
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    codecs.BOM_UTF8: "utf-8",
}
_ZEROS_AT_START: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "utf-32-le",
    (True, True, True, False): "utf-32-be",
    (False, True, False, True): "utf-16-le",
    (True, False, True, False): "utf-16-be",
}
_DELIMITERS = ",;\t|"
# Keys under which documents keep their rows; any other object at the top is itself a row.
ROW_KEYS = frozenset({"data", "rows", "examples", "items", "records", "instances", "samples", "train"})
_DOCUMENT = re.compile(rf'\s*\{{\s*"({"|".join(sorted(ROW_KEYS))})"\s*:\s*\[\s*[{{\]]')


@dataclass(frozen=True, slots=True)
class Nature:
    """How a file is to be read; `encoding` is '' for formats that are not text. `why` says what the format shows in."""

    format: Format
    compression: str
    encoding: str
    delimiter: str
    why: str = ""


def format_of_name(name: str) -> Format | None:
    """The format that a file's name promises, with the name of a compression taken off."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if suffixes and suffixes[-1] in COMPRESSED_NAMES:
        suffixes.pop()
    return NAMED_FORMATS.get(suffixes[-1]) if suffixes else None


def is_data_name(name: str) -> bool:
    """Whether a file below a folder, by its relative name, is one of rows: not hidden, and no record about the others."""
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "_")) for part in path.parts)
    return not hidden and path.name not in _ABOUT_OTHERS and format_of_name(name) is not None


def sniff(path: Path, source: RowsSource) -> Nature:
    """The nature of a file; what the spec states is taken, and checked against the content.

    Raises UserError for files that cannot be read, formats that are none of ours, and an unknown encoding.
    """
    head, compression = read_head(path)
    stated = None if source.format == "auto" else source.format
    binary = b"\0" in head
    for magic, what in _REFUSED.items():
        if head.startswith(magic) and (binary or stated is None):
            kind, _, remedy = what.partition("; ")
            raise UserError(f"{path} is {kind}, not a file of rows", fix=remedy)
    table = next((name for magic, name in _TABLES.items() if binary and head.startswith(magic)), None)
    if table is not None:
        return _table(path, table, stated, compression)
    encoding = _encoding(path, head, source.encoding)
    decoded = head.decode(encoding, errors="replace").removeprefix("\ufeff")
    mapped = bool(source.columns)
    format_, why = (stated, "source.format says so") if stated else _text_format(path, decoded, mapped)
    if format_ in ("parquet", "arrow"):
        raise UserError(
            f"{path} is called {format_} and is not: "
            + (f"its first bytes are {head[:8]!r}" if head else "it is empty"),
            fix="name its real format in source.format, or fetch the file again",
        )
    if format_ in ("csv", "tsv", "text") and source.encoding == "auto" and encoding == "utf-8":
        encoding = _eight_bit(path, compression)
        decoded = head.decode(encoding, errors="replace").removeprefix("\ufeff")
    return Nature(format_, compression, encoding, _delimiter(format_, source, decoded), why)


def read_head(path: Path) -> tuple[bytes, str]:
    """The first decompressed bytes of a file, as far as they can be read, and its compression."""
    with open_file(path) as stream:
        compression = compression_of(stream.read(8))
    parts: list[bytes] = []
    with open_plain(path, compression) as plain:
        try:
            while sum(map(len, parts)) < HEAD_BYTES and (part := read_some(plain, HEAD_BYTES)):
                parts.append(part)
        except BREAKS:
            pass  # the reader of the rows reports where it breaks off
    return b"".join(parts), compression


def _table(path: Path, found: Format, stated: Format | None, compression: str) -> Nature:
    if stated is not None and stated != found:
        raise UserError(f"{path} is {found}, not {stated}", fix=f"source.format: {found}, or leave it out")
    if compression:
        raise UserError(
            f"{path} is {found} inside {compression}, and can only be read from its end",
            fix="unpack it; such files are compressed inside already",
        )
    return Nature(found, "", "", "", "its first bytes say so")


def _encoding(path: Path, head: bytes, stated: str) -> str:
    """Exact encoding: a byte order mark decides, then what is stated, then zero bytes where ASCII would have them."""
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return name
    if stated == "auto":
        return _by_first_bytes(head) or _by_zeros(head) or "utf-8"
    try:
        name = codecs.lookup(stated).name
        b"a".decode(
            stated, "replace"
        )  # rot13, base64, idna and their like are codecs and no encodings of text
        if name == "punycode":
            raise LookupError(name)
    except (LookupError, UnicodeError):
        known = (
            "utf-8",
            "utf-16",
            "utf-32",
            "cp1252",
            "latin-1",
            "shift_jis",
            "gb18030",
            "big5",
            "euc-kr",
            "koi8-r",
        )
        raise UserError(
            f"source.encoding is '{stated}', which is no encoding", fix=did_you_mean(stated, known)
        ) from None
    if name in ("utf-16", "utf-32"):
        return _by_first_bytes(head) or _by_zeros(head) or f"{name}-le"
    return "utf-8" if name == "utf-8-sig" else name


def _by_first_bytes(head: bytes) -> str | None:
    """UTF-16 or UTF-32 without byte order mark, told as in RFC 4627, section 3: the first two characters are ASCII, so the
    zeros among the first four bytes show the width and the order; the rest may be in any script."""
    name = _ZEROS_AT_START.get(tuple(byte == 0 for byte in head[:4]))
    if name is None:
        return None
    try:
        codecs.getincrementaldecoder(name)().decode(head)
    except UnicodeDecodeError:
        return None
    return name


def _by_zeros(head: bytes) -> str | None:
    """UTF-16 without byte order mark: the first line feed, brace or letter is followed or preceded by a zero byte."""
    sample = head[: min(len(head), 4096) // 2 * 2]
    pairs = len(sample) // 2
    if pairs == 0:
        return None
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    if odd > pairs // 3 and even == 0:
        return "utf-16-le"
    return "utf-16-be" if even > pairs // 3 and odd == 0 else None


def _eight_bit(path: Path, compression: str) -> str:
    """'utf-8', or 'cp1252' for a file that is not UTF-8 and has no character beyond ASCII written as UTF-8 anywhere.

    The whole file is looked at, so that the answer does not depend on where its first accent stands.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
    faulty = False
    with open_plain(path, compression) as stream:
        try:
            while chunk := read_some(stream, CHUNK_BYTES):
                if chunk.isascii() and not decoder.getstate()[0]:
                    continue
                text = decoder.decode(chunk)
                if not text.isascii():
                    return "utf-8"
                faulty = faulty or len(text) != len(chunk)
            faulty = faulty or bool(decoder.getstate()[0])
        except BREAKS:
            pass
    return "cp1252" if faulty else "utf-8"


def _text_format(path: Path, head: str, mapped: bool) -> tuple[Format, str]:
    named = format_of_name(path.name)
    if named not in (None, "jsonl", "json"):
        return named, "its name says so"
    start = head.lstrip()[:1]
    if named is not None or start in ("{", "["):
        return _json_format(head, start, named, mapped)
    raise UserError(
        f"cannot tell the format of {path} from its name or content",
        fix="name it in source.format: jsonl, json, csv, tsv, parquet, arrow or text",
    )


def _json_format(head: str, start: str, named: Format | None, mapped: bool) -> tuple[Format, str]:
    """`json` for one document over many lines or several objects on a line, `jsonl` when lines are objects.

    Of the whole lines at the start of the file, at least half must be objects for `jsonl`: in a document with a value a
    line the brackets and commas between them are none.
    """
    if start not in ("{", "["):
        return (named if named in ("jsonl", "json") else "jsonl"), "its name says so"
    lines = [line for line in head.split("\n") if line.strip()]
    if len(head) >= HEAD_BYTES // 2 and len(lines) > 1:
        lines.pop()  # cut by the end of the sample
    objects = sum(map(_is_object, lines))
    if named == "json" and len(lines) == 1 and objects == 1:
        return "json", "it is one object: a row, or a document with the rows under a key"
    if len(lines) == 1 and not mapped and (held := _DOCUMENT.match(head)):
        return "json", f"it is one object with the rows under '{held[1]}'"
    if len(lines) == 1 and objects == 0 and len(head) >= HEAD_BYTES // 2 and start == "{":
        return (named or "jsonl"), "its first line is longer than what is looked at"
    why = f"{objects} of its first {len(lines)} lines are objects"
    return ("jsonl" if objects * 2 >= len(lines) else "json"), why


def _is_object(line: str) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except ValueError:
        return False


def _delimiter(format_: Format, source: RowsSource, head: str) -> str:
    if format_ not in ("csv", "tsv"):
        return ""
    if source.delimiter != "auto":
        return {"tab": "\t", "\\t": "\t"}.get(source.delimiter, source.delimiter)
    return "\t" if format_ == "tsv" else _best_delimiter(head)


def _best_delimiter(head: str) -> str:
    """The character that cuts the header and the most of the first rows into the same number of columns, at least two."""
    best, best_score = ",", (0.0, 0)
    for delimiter in _DELIMITERS:
        rows: list[list[str]] = []
        with contextlib.suppress(csv.Error):  # judged by the rows before it
            rows.extend(row for row in csv.reader(io.StringIO(head, newline=""), delimiter=delimiter) if row)
        if not rows or len(rows[0]) < 2:
            continue
        width = len(rows[0])
        alike = sum(len(row) == width for row in rows[:100]) / min(len(rows), 100)
        if (round(alike, 1), width) > best_score:
            best, best_score = delimiter, (round(alike, 1), width)
    return best
