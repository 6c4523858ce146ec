"""Files as streams of bytes or of UTF-8 lines, whatever their compression and encoding, in constant memory."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import zstandard

from finetune.errors import UserError

CHUNK_BYTES = 1 << 20
UTF8_BOM = codecs.BOM_UTF8
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
# What a compressed stream that breaks off, or is damaged, raises while it is read.
BREAKS = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError, OSError)


TextLine = tuple[int, int, bytes]
"""Number from 1, offset of the first byte in the decompressed file, and the line in UTF-8 with its end."""
_FAULTY = "\udcff"  # stands for bytes that the encoding does not know; no UTF-8 holds it, so that the row is refused


def open_file(path: Path) -> IO[bytes]:
    """The file as it is. Raises UserError when it cannot be opened."""
    try:
        return path.open("rb", buffering=CHUNK_BYTES)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}", fix="check source.files; paths are relative to the spec"
        ) from None


def compression_of(start: bytes) -> str:
    """'gzip', 'zstd', 'bzip2', 'xz' or '' from the first bytes of a file; its name does not matter."""
    return next((name for magic, name in MAGIC.items() if start.startswith(magic)), "")


def open_plain(path: Path, compression: str) -> IO[bytes]:
    """The decompressed bytes of a file; reading may raise any of BREAKS."""
    if not compression:
        return open_file(path)
    stream = open_file(path)
    if compression == "gzip":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if compression == "bzip2":
        return cast("IO[bytes]", bz2.BZ2File(stream))
    if compression == "xz":
        return cast("IO[bytes]", lzma.LZMAFile(stream))
    return io.BufferedReader(_Zstandard(stream), CHUNK_BYTES)


def read_some(stream: IO[bytes], n_bytes: int) -> bytes:
    """Up to `n_bytes`, b"" at the end: what is there already, before a break further on is noticed."""
    return cast("io.BufferedReader", stream).read1(n_bytes)


class _Zstandard(io.RawIOBase):
    """Zstandard frames one after another. The reader of the library ends in silence where a file was cut; this raises."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._given = b""  # compressed bytes that belong to the next frame
        self._ready = memoryview(b"")
        self._inside = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            given = self._given or self._stream.read(CHUNK_BYTES // 8)
            self._given = b""
            if not given:
                if self._inside:
                    raise EOFError("the last frame is not complete")
                return 0
            self._ready = memoryview(self._frame.decompress(given))
            self._inside = not self._frame.eof
            if self._frame.eof:
                self._given = self._frame.unused_data
                self._frame = zstandard.ZstdDecompressor().decompressobj()
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._stream.close()
        super().close()


def text_lines(
    stream: IO[bytes], encoding: str, number: int = 1, byte: int = 0, stop: float = math.inf
) -> Iterator[TextLine]:
    """Lines of a stream in any encoding, as UTF-8, without byte order mark; split at line feeds only.

    What is not valid in its encoding comes out as bytes that are not valid UTF-8, for the reader to refuse that row.
    `number` and `byte` are those of the first line, for a stream that does not begin with the file; lines of UTF-8 that
    begin at the byte `stop` or later are left.
    """
    if encoding == "utf-8":
        if number == 1 and (raw := stream.readline()):
            mark = len(UTF8_BOM) if raw.startswith(UTF8_BOM) else 0
            yield number, byte + mark, raw[mark:]
            number += 1
            byte += len(raw)
        if byte < stop:
            for raw in stream:
                yield number, byte, raw
                number += 1
                byte += len(raw)
                if byte >= stop:
                    return
        return
    for line in text_stream(stream, encoding):
        text = line
        if number == 1 and line.startswith("\ufeff"):
            text, byte = line[1:], len("\ufeff".encode(encoding))
        yield number, byte, text.encode("utf-8", errors="surrogatepass")
        number += 1
        byte += len(text.encode(encoding, errors="replace"))


def text_stream(stream: IO[bytes], encoding: str) -> io.TextIOWrapper:
    """Decoded text, line ends as written; what is not valid becomes a lone surrogate, which no UTF-8 can hold."""
    return io.TextIOWrapper(stream, encoding, errors="finetune_faulty", newline="\n")


def _mark_faulty(error: UnicodeError) -> tuple[str, int]:
    if isinstance(error, UnicodeDecodeError):
        return _FAULTY, error.end
    raise error


codecs.register_error("finetune_faulty", _mark_faulty)
