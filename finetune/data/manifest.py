"""What the manifest of a dataset build must hold for a build to be read, checked or shown; all else in it is told only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from finetune.data.rows import SIDES, Side
from finetune.data.spec_split import GuardSection
from finetune.errors import Fault, UserError
from finetune.paths import read_json

_FAULTS_SHOWN = 5


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Split(_Part):
    rows: int
    digest: str


class _Ledger(_Part):
    read: int
    kept: int
    dropped: dict[str, int]
    quarantined: int


class _File(_Part):
    bytes: int
    sha256: str


class _Source(_Part):
    ignored_keys: dict[str, int]


class _Manifest(_Part):
    digest: str
    name: str
    seed: int
    source: _Source
    splits: dict[Side, _Split]
    ledger: _Ledger
    leaks: dict[str, int]
    files: dict[str, _File] = {}  # builds of the first versions have none
    guard: GuardSection | None = None
    unique_by: list[str] | None = None
    unite_by: list[str] | None = None
    repeated: int = 0
    warnings: list[str] = []
    curation: dict[str, Any] = {}


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a build. Raises UserError, with what is wrong in it, for a file that is none."""
    given = read_json(path)
    again = "delete the folder and build it again"
    if not isinstance(given, dict):
        raise UserError("not the manifest of a dataset build: it is no object", where=str(path), fix=again)
    try:
        held = _Manifest.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        faults = [
            Fault(
                f"not the manifest of a dataset build: {'.'.join(map(str, one['loc']))}: {one['msg']}",
                str(path),
                "",
                again,
            )
            for one in found[:_FAULTS_SHOWN]
        ]
        raise UserError(faults) from None
    missing = [side for side in SIDES if side not in held.splits]
    if missing:
        raise UserError(
            f"not the manifest of a dataset build: splits names no {missing[0]}", where=str(path), fix=again
        )
    manifest: dict[str, Any] = given
    return manifest
