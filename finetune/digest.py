"""Hashing of inputs and outputs: SHA-256 everywhere, over bytes that do not depend on dict order or platform."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


def digest_bytes(data: bytes) -> str:
    """SHA-256 hex of `data`."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 hex of a file's bytes, read in chunks."""
    state = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; refuses NaN, which has no canonical form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from its pairs, for `json.loads(…, object_pairs_hook=each_key_once)`.

    Raises ValueError for a key that is written twice, of which the library would drop one value in silence.
    """
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key '{repeated}' is written twice in one object")
    return made


def digest_json(value: Any) -> str:
    """SHA-256 hex of the canonical JSON of `value`."""
    return digest_bytes(canonical_json(value).encode())


def digest_folder(folder: Path) -> dict[str, str]:
    """Relative POSIX path -> SHA-256 of every file below `folder`, sorted by path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest_file(path) for path in files}
