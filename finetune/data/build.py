"""From a dataset spec to a dataset build: read, check, split, select, and a manifest in which every row is accounted for.

A build is a folder named by the digest of everything that decides its rows: the spec, the bytes of the files, the
versions of the packages and the code of this package. The same inputs find the same folder and build nothing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.data.manifest import read_manifest
from finetune.data.questions import read_questions
from finetune.data.rows import SIDES, Progress, Row, Side
from finetune.data.spec import DatasetSpec
from finetune.data.stages.assemble import ASSIGNMENT, MANIFEST, Plan, make_build
from finetune.data.stages.curate import curation_digest
from finetune.data.stages.digests import split_digest
from finetune.data.stages.parts import iter_stored
from finetune.data.stages.read import PIECE_BYTES, gather_input, gather_pinned, pieces_of
from finetune.data.stages.runner import LocalRunner, Runner
from finetune.data.stages.sides import read_assignment
from finetune.data.stages.work import WorkFolder, locked_work
from finetune.data.stages.write import LEDGER, REJECTS, side_file
from finetune.digest import digest_bytes, digest_file, digest_json
from finetune.errors import UserError, did_you_mean
from finetune.paths import disk_faults, runs_root
from finetune.recipe.yaml_loader import Loaded, load_typed

__all__ = [
    "ASSIGNMENT",
    "LEDGER",
    "MANIFEST",
    "REJECTS",
    "DatasetBuild",
    "build_dataset",
    "code_digest",
    "complete_build",
    "default_builds_root",
    "load_spec",
    "open_build",
    "split_digest",
]
_IMPORTED = re.compile(rb"from finetune\.data(?:\.([a-z_.]+))? import (?:\(([^)]*)\)|([^\n]*))")
_READER, _ASSEMBLY = "stages/read.py", "build.py"
_TELLING = frozenset(
    {"card.py", "manifest.py"}
)  # what it writes beside the rows says nothing that decides one


@dataclass(frozen=True)
class DatasetBuild:
    """A complete build on disk."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def digest(self) -> str:
        """Of everything that decided the rows."""
        return str(self.manifest["digest"])

    def path(self, split: Side) -> Path:
        """The file of one side. Raises UserError when there is no such side."""
        if split not in SIDES:
            raise UserError(f"a dataset build has no split '{split}'", fix=did_you_mean(split, SIDES))
        return self.folder / side_file(split)

    def iter_rows(self, split: Side) -> Iterator[Row]:
        """The rows of one side, one after the other, in the seeded order in which they are used."""
        for _, row in iter_stored(self.path(split)):
            yield row

    def rows(self, split: Side) -> list[Row]:
        """The rows of one side as a list; `iter_rows` holds one at a time."""
        return list(self.iter_rows(split))

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


def build_dataset(
    spec_path: Path,
    builds_root: Path,
    *,
    on_progress: Progress | None = None,
    runner: Runner | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> DatasetBuild:
    """Build the dataset of a spec, or find the complete build of the same inputs.

    The folder appears under `builds_root` in one step, when everything in it is written. What a killed build has done
    waits in a hidden folder beside it, and the next build of the same name continues there: pieces of the input that
    were read are not read again. Raises UserError for a faulty spec, missing files, too many faulty rows, no rows, or a
    split without train rows. `on_progress` is told the share that is done. `runner` does the pieces (default: one
    process a core), `piece_bytes` is their size; neither changes which rows come out.
    """
    plan = _plan(load_spec(spec_path), spec_path.parent)
    folder = builds_root / f"{plan.spec.name}-{plan.digest[:8]}"
    found = complete_build(folder, plan.digest)
    if found is not None:
        return found
    with locked_work(builds_root, plan.spec.name) as work:
        found = complete_build(folder, plan.digest)  # another process may have made it meanwhile
        if found is None:
            pieces = [
                piece
                for given in plan.inputs
                for piece in pieces_of(given, plan.spec, spec_path.parent, plan.reader, piece_bytes)
            ]
            manifest = make_build(plan, pieces, work, runner or LocalRunner(), on_progress or _nobody)
            _publish(work, folder)
            found = DatasetBuild(folder, manifest)
    return found


def open_build(folder: Path) -> DatasetBuild:
    """A build by its folder. Raises UserError when the folder is none, or its manifest is damaged."""
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} is not a dataset build: it holds no {MANIFEST}",
            fix="make one with: finetune data build SPEC",
        )
    return DatasetBuild(folder, read_manifest(folder / MANIFEST))


def _plan(loaded: Loaded[DatasetSpec], spec_folder: Path) -> Plan:
    """Find and hash everything that the spec names, and the code that will make rows of it."""
    spec = loaded.value
    code = code_digest(_ASSEMBLY)
    inputs = [
        gather_input(origin, source, spec_folder, _where_in(loaded, origin))
        for origin, source in enumerate(spec.sources)
    ]
    if spec.split.pinned is not None:
        inputs.append(
            gather_pinned(spec.split.pinned, spec.sources[0], spec_folder, loaded.where("split.pinned"))
        )
    frozen_path = None if spec.split.frozen_from is None else spec_folder / spec.split.frozen_from
    questions = [
        read_questions(file, spec_folder, loaded.where("split.guard.files"))
        for file in spec.split.guard.files
    ]
    decided_by = {
        "spec": spec.model_dump(mode="json"),
        "inputs": [given.describe() for given in inputs],
        "frozen": None
        if frozen_path is None
        else _digest_named(frozen_path, loaded.where("split.frozen_from")),
        "questions": [one.digest for one in questions],
        "curation": curation_digest(spec, spec_folder),
        "code": code,
        "format": 1,
    }
    return Plan(
        spec=spec,
        digest=digest_json(decided_by),
        code=code,
        reader=code_digest(_READER),
        inputs=inputs,
        folder=spec_folder,
        frozen={} if frozen_path is None else read_assignment(frozen_path),
        questions=questions,
        where=loaded.where,
    )


def _where_in(loaded: Loaded[DatasetSpec], origin: int) -> Callable[[str], str]:
    """The place of a key of one source, which is `source` itself or a member of that list."""
    is_list = isinstance(loaded.value.source, list)
    return lambda key: loaded.where(key.replace("source", f"source[{origin}]", 1) if is_list else key)


def _digest_named(path: Path, where: str) -> str:
    if not path.is_file():
        raise UserError(
            f"no such file: {path}",
            where=where,
            fix="correct the path; relative paths are taken from the folder of the spec",
        )
    return digest_file(path)


def code_digest(start: str, package: Path = Path(__file__).parent) -> str:
    """Of the modules of this package that decide the rows, so that a changed reader never finds an old build.

    Those are `start`, the modules that it imports, and what they import, here or inside a function; but not those that
    only tell of rows that are decided.
    """
    waiting = [package / start]
    found: dict[str, bytes] = {}
    while waiting:
        path = waiting.pop()
        name = path.relative_to(package).as_posix()
        if name in found or name in _TELLING:
            continue
        found[name] = path.read_bytes()
        for module, *names in _IMPORTED.findall(found[name]):
            place = package.joinpath(*filter(None, module.decode().split(".")))
            members = [place / member.decode() for member in re.findall(rb"\w+", b" ".join(names))]
            modules = [one.with_suffix(".py") for one in (place, *members)]
            waiting += [one for one in (*modules, place / "__init__.py") if one.is_file()]
    return digest_json([[name, digest_bytes(found[name])] for name in sorted(found)])


def complete_build(folder: Path, digest: str) -> DatasetBuild | None:
    """The build in `folder` when it is whole and of this digest; anything else there is set aside by the next build."""
    with disk_faults(folder):  # a name that is too long for the disk is noticed here
        if not (folder / MANIFEST).is_file():
            return None
        files = [folder / side_file(side) for side in SIDES]
        if not all(path.is_file() for path in files):
            return None
    try:
        found = open_build(folder)
    except UserError:  # damaged, and made anew
        return None
    return found if found.digest == digest else None


def _publish(work: WorkFolder, folder: Path) -> None:
    """Give the finished build its name, and remove the work behind it."""
    with disk_faults(folder):
        if folder.exists():
            shutil.rmtree(folder)
        work.out.chmod(0o755)
        work.out.rename(folder)
    work.remove()


def _nobody(share: float) -> None:
    """Nobody is watching."""
