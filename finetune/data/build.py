"""From a dataset spec to a dataset build: read, check, split, select, and a manifest in which every row is accounted for.

A build is a folder named by the digest of everything that decides its rows: the spec, the bytes of the files, the
versions of the packages and the code of this package. The same inputs find the same folder and build nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.data.leaks import find_leaks
from finetune.data.read import Reject, check_reject_rate, iter_rows, source_files
from finetune.data.rows import SIDES, Ledger, Progress, Row, Side
from finetune.data.spec import DatasetSpec
from finetune.data.spec_source import FilesSource, HomeIntentsSource
from finetune.data.split import require_train, select_rows, split_rows
from finetune.digest import digest_bytes, digest_file, digest_json
from finetune.errors import UserError, did_you_mean
from finetune.paths import disk_faults, read_json, read_jsonl, runs_root, write_json, write_jsonl
from finetune.recipe.yaml_loader import Loaded, load_typed

MANIFEST = "manifest.json"
LEDGER = "ledger.jsonl"
REJECTS = "rejects.jsonl"
# Modules that have no say in which rows come out; a change in any other module of this package makes a new build.
_DOWNSTREAM = frozenset({"tokenise.py", "row_tokens.py", "chat_spans.py", "long_rows.py", "packing.py"})


@dataclass(frozen=True)
class DatasetBuild:
    """A complete build on disk."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def digest(self) -> str:
        """Of everything that decided the rows."""
        return str(self.manifest["digest"])

    def rows(self, split: Side) -> list[Row]:
        """The rows of one side, in the seeded order in which they are used."""
        if split not in SIDES:
            raise UserError(f"a dataset build has no split '{split}'", fix=did_you_mean(split, SIDES))
        return [Row.from_dict(given) for given in read_jsonl(self.folder / f"{split}.jsonl")]

    @cached_property
    def by_side(self) -> dict[Side, list[Row]]:
        """All sides."""
        return {side: self.rows(side) for side in SIDES}


def default_builds_root() -> Path:
    """Where builds are kept when the caller names no place: `data/` beside the runs."""
    return runs_root() / "data"


def load_spec(path: Path) -> Loaded[DatasetSpec]:
    """Read and check a dataset spec. Raises UserError with every fault, its line and its column."""
    return load_typed(path, DatasetSpec)


def build_dataset(spec_path: Path, builds_root: Path, *, on_progress: Progress | None = None) -> DatasetBuild:
    """Build the dataset of a spec, or find the complete build of the same inputs.

    The folder appears under `builds_root` in one step, when everything in it is written: a build that was killed
    leaves nothing that could be taken for a complete one. Raises UserError for a faulty spec, missing files, too many
    faulty rows, no rows, or a split without train rows. `on_progress` is told the share of the source read so far.
    """
    loaded = load_spec(spec_path)
    spec = loaded.value
    inputs = _source_inputs(spec, spec_path.parent)
    digest = digest_json({"spec": _spec_digest(spec), "inputs": inputs, "code": _code_digest(), "format": 1})
    folder = builds_root / f"{spec.name}-{digest[:8]}"
    found = _complete_build(folder, digest)
    if found is not None:
        return found
    with disk_faults(builds_root):
        builds_root.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=builds_root, prefix=f".{folder.name}."))
    try:
        manifest = _build_into(beside, loaded, spec_path, digest, inputs, on_progress or _no_progress)
        return DatasetBuild(_publish(beside, folder, digest), manifest)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def open_build(folder: Path) -> DatasetBuild:
    """A build by its folder. Raises UserError when the folder is none."""
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} is not a dataset build: it holds no {MANIFEST}",
            fix="make one with: finetune data build SPEC",
        )
    return DatasetBuild(folder, read_json(folder / MANIFEST))


def _build_into(
    folder: Path,
    loaded: Loaded[DatasetSpec],
    spec_path: Path,
    digest: str,
    inputs: dict[str, Any],
    on_progress: Progress,
) -> dict[str, Any]:
    spec = loaded.value
    ledger = Ledger()
    ignored_keys: Counter[str] = Counter()
    rows = _read_source(spec, spec_path, ledger, ignored_keys, on_progress)
    by_side = split_rows(rows, spec.split, ledger)
    by_side = select_rows(by_side, spec.select, spec.seed, ledger)
    require_train(by_side, loaded.where("split"))
    ledger.close(sum(len(members) for members in by_side.values()))
    leaks = {kind: len(found) for kind, found in find_leaks(by_side, spec.split.unique_by).items()}
    if any(leaks.values()):
        raise AssertionError(f"the split put rows on two sides: {leaks}")
    manifest: dict[str, Any] = {
        "format": 1,
        "digest": digest,
        "name": spec.name,
        "description": spec.description,
        "licence": spec.licence,
        "seed": spec.seed,
        "spec_digest": _spec_digest(spec),
        "code_digest": _code_digest(),
        "unique_by": spec.split.unique_by,
        "source": {
            "kind": spec.source.kind,
            **inputs,
            "ignored_keys": dict(sorted(ignored_keys.items())),
        },
        "splits": {
            side: {"rows": len(by_side[side]), "digest": split_digest(by_side[side])} for side in SIDES
        },
        "ledger": ledger.to_dict(),
        "leaks": leaks,
    }
    for side in SIDES:
        write_jsonl(folder / f"{side}.jsonl", [row.to_dict() for row in by_side[side]])
    write_jsonl(folder / LEDGER, ledger.entries)
    write_jsonl(folder / REJECTS, [entry for entry in ledger.entries if entry["kind"] == "quarantined"])
    write_json(folder / MANIFEST, manifest)
    return manifest


def _read_source(
    spec: DatasetSpec, spec_path: Path, ledger: Ledger, ignored_keys: Counter[str], on_progress: Progress
) -> list[Row]:
    if isinstance(spec.source, HomeIntentsSource):
        from finetune.data import home_intents  # parses a grammar: only when asked for

        return list(home_intents.sample_rows(spec.source, spec.seed, ledger, on_progress))
    assert isinstance(spec.source, FilesSource)
    return _read_files(spec.source, spec_path, ledger, ignored_keys, on_progress)


def _read_files(
    source: FilesSource, spec_path: Path, ledger: Ledger, ignored_keys: Counter[str], on_progress: Progress
) -> list[Row]:
    rows: list[Row] = []
    rejects: list[Reject] = []
    files = source_files(source, spec_path.parent)
    for number, file in enumerate(files):
        on_progress(number / len(files))
        for found in iter_rows(file, source, ignored_keys=ignored_keys):
            ledger.read += 1
            if isinstance(found, Reject):
                rejects.append(found)
                ledger.quarantine(**found.to_dict())
            else:
                rows.append(found)
    on_progress(1.0)
    names = [file.name for file in files]
    check_reject_rate(source, ledger.read, len(rejects), rejects[:5], names, str(spec_path))
    return rows


def _source_inputs(spec: DatasetSpec, spec_folder: Path) -> dict[str, Any]:
    """What the source reads besides the spec: package versions, or the SHA-256 of every file."""
    if isinstance(spec.source, HomeIntentsSource):
        from finetune.data import home_intents

        return {"packages": home_intents.source_versions()}
    assert isinstance(spec.source, FilesSource)
    return {"files": {file.name: digest_file(file.path) for file in source_files(spec.source, spec_folder)}}


def _no_progress(share: float) -> None:
    """Nobody is watching."""


def split_digest(rows: list[Row]) -> str:
    """Of the content and order of a side; where a row came from (file and line) does not count."""
    return digest_json([[row.id, row.messages, row.tools, row.group, row.tags] for row in rows])


def _spec_digest(spec: DatasetSpec) -> str:
    return digest_json(spec.model_dump(mode="json"))


def _code_digest(package: Path = Path(__file__).parent) -> str:
    """Of the modules of this package that decide the rows, so that a changed reader never finds an old build."""
    modules = sorted(package.rglob("*.py"))
    return digest_json(
        [
            [path.relative_to(package).as_posix(), digest_bytes(path.read_bytes())]
            for path in modules
            if path.name not in _DOWNSTREAM
        ]
    )


def _complete_build(folder: Path, digest: str) -> DatasetBuild | None:
    """The build in `folder` when it is whole and of this digest; anything else there is set aside by the next build."""
    if not (folder / MANIFEST).is_file():
        return None
    found = open_build(folder)
    files = [folder / f"{side}.jsonl" for side in SIDES]
    return found if found.digest == digest and all(path.is_file() for path in files) else None


def _publish(beside: Path, folder: Path, digest: str) -> Path:
    """Give a finished folder its name. When another process was faster, its build is the same: keep that one."""
    with disk_faults(folder):
        if folder.exists():
            if _complete_build(folder, digest) is not None:
                return folder
            shutil.rmtree(folder)
        beside.chmod(0o755)
        beside.rename(folder)
    return folder
