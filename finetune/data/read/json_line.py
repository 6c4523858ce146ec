"""The JSON object in some bytes, exactly as written, or the reason why there is none.

orjson parses and infers nothing ("42", "007" and "2024-01-05" stay text). What it would change in silence — repeated
keys, integers beyond 64 bits — is parsed again by the strict rules below.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from finetune.data.read.record import RowError
from finetune.digest import each_key_once

_ESCAPED_COLON = re.compile(rb"\\u003[aA]")
_LONG_INTEGER = re.compile(rb"[0-9]{19}")  # the longest of 64 bits have 19 or 20 digits
_DIGITS = b"0123456789"
_NO_ROW = {None: "null", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises RowError for broken JSON, NaN and infinities, text that is not Unicode (a lone surrogate, bytes that are
    not UTF-8), a repeated key, nesting beyond 250 levels, and anything that is not an object.
    """
    parsed = parse_value(raw)
    if type(parsed) is dict:
        return parsed
    kind = "null" if parsed is None else _NO_ROW.get(type(parsed), type(parsed).__name__)
    raise RowError(f"a row must be a JSON object, this is a {kind}")


def parse_value(raw: bytes) -> Any:
    """Any JSON value, under the same rules."""
    try:
        parsed = orjson.loads(raw)
        written = orjson.dumps(parsed)
        if (
            written == raw  # quick, and mostly so
            # A repeated key that orjson dropped would be a colon less, unless one was written as an escape; the difference
            # of two lengths counts them twice as fast as bytes.count.
            or (
                len(raw) - len(raw.replace(b":", b"")) == len(written) - len(written.replace(b":", b""))
                and not (b"\\" in raw and _ESCAPED_COLON.search(raw))
                and not _holds_long_integer(raw)
            )
        ):
            return parsed
        return json.loads(raw, object_pairs_hook=_object_of_pairs)
    except (RecursionError, orjson.JSONEncodeError):  # orjson writes fewer levels than it reads
        raise RowError("not valid JSON: nested too deeply") from None
    except RowError:
        raise
    except ValueError as error:
        hint = "; source.encoding says what the bytes are" if "UTF-8" in str(error) else ""
        raise RowError(f"not valid JSON: {error}{hint}") from None


def _holds_long_integer(raw: bytes) -> bool:
    """Whether a run of 19 digits, which orjson may round, is in it: one of them is at a place that is a multiple of 19."""
    sample = raw[18::19]
    return len(sample.translate(None, _DIGITS)) != len(sample) and _LONG_INTEGER.search(raw) is not None


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    try:
        return each_key_once(pairs)
    except ValueError as error:
        raise RowError(str(error)) from None
