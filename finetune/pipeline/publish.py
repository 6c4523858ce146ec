"""A folder that can go onto a hub as it is: weights that were proven, tokenizer, recipe, and a card of where all came from.

Nothing is published that is not what was evaluated: weights are compared with what the run or the merge wrote down.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.merge.adapter import PROOF_FILE
from finetune.merge.adapter_file import open_adapter
from finetune.merge.companions import has_template
from finetune.merge.models.merge import RECIPE_FILE as MERGE_RECIPE
from finetune.merge.models.merge import REPORT_FILE
from finetune.merge.place import put_in_place, refuse_small_disk, refuse_used_folder
from finetune.merge.shards import open_model
from finetune.model.adapter_files import ORIGIN_FILE
from finetune.model.source import ADAPTER_CONFIG
from finetune.paths import read_json, write_atomic, write_json
from finetune.pipeline.provenance import Origin, find_origin, licence_of
from finetune.report.hub_card import RECIPE_FILE, Publication, hub_card, readable
from finetune.report.read import RunFiles, as_text

_KEPT = (
    "*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"
_PLACES = (
    "config.json", "tokenizer_config.json", ADAPTER_CONFIG, ORIGIN_FILE, PROOF_FILE, REPORT_FILE, MERGE_RECIPE,
)  # fmt: skip
"""Files that may name folders of this machine."""


@dataclass(frozen=True, slots=True)
class HubFolder:
    """A folder that was made ready. `unknown_licences` names the ingredients whose licence nobody wrote down."""

    out: str
    kind: str
    licence: str | None
    files: tuple[str, ...]
    n_bytes: int
    evaluated: bool
    unknown_licences: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def prepare_publication(
    target: Path,
    *,
    run: Path | None = None,
    licence: str | None = None,
    base_id: str | None = None,
    title: str | None = None,
    hub_id: str | None = None,
) -> tuple[Path, Publication, list[str]]:
    """(folder with the weights, what its card says, ingredients without a licence) of a run, an adapter or a model folder.

    run: whose evaluation a merged model has. licence: of the result; by default the base's. base_id: the hub id of a base that
    the run took from this machine. Raises UserError for folders that are something else, for weights that are not those the
    run trained, and for an adapter whose base nobody else could find.
    """
    found = find_origin(target, run)
    if base_id is not None:
        found.base_ids = [base_id]
    _look_up_licences(found, online=hub_id is not None)
    if found.kind == "adapter" and not found.base_ids:
        raise UserError(
            f"the base of this adapter is known on this machine only: {found.ingredients[0].name}",
            where="--base-id",
            why="whoever downloads an adapter needs the same base",
            fix="name the base's hub id with --base-id OWNER/NAME, or publish the merged model instead",
        )
    unknown = [
        f"the {one.what} {one.name}"
        for one in found.ingredients
        if one.licence is None and one.what != "adapter"
    ]
    if licence is None and not unknown:
        licence = next((one.licence for one in found.ingredients if one.what == "base"), None)
    name = title or (hub_id or "").rpartition("/")[2] or _name(found, target)
    publication = Publication(
        title=name,
        kind=found.kind,
        licence=licence,
        ingredients=tuple(found.ingredients),
        base_ids=tuple(found.base_ids),
        run=found.run,
        proof=found.proof,
        merge_recipe=found.merge_recipe,
        hub_id=hub_id,
        chat=has_template(found.folder),
    )
    return found.folder, publication, unknown


def write_hub_folder(source: Path, publication: Publication, out: Path, unknown: list[str]) -> HubFolder:
    """Write what was prepared to `out`, which must be new. Weights are linked where the file system can, else copied.

    Raises UserError for a used folder, damaged weights and a full disk; nothing is left then.
    """
    refuse_used_folder(out)
    chosen = _files(source)
    _check_weights(source, publication.kind)
    refuse_small_disk(out, sum(path.stat().st_size for path in chosen))
    with put_in_place(out) as folder:
        for path in chosen:
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            _place(path, target)
        if publication.kind == "adapter":
            _name_base(folder, publication.base_ids[0])
        if publication.run is not None:
            write_atomic(folder / RECIPE_FILE, _recipe_text(publication.run))
            if publication.run.comparison:
                write_json(folder / "evaluation.json", readable(publication.run.comparison))
        write_atomic(folder / "README.md", hub_card(publication))
        files = tuple(
            sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        )
        n_bytes = sum((folder / name).stat().st_size for name in files)
    remarks = [f"no licence is known of {', '.join(unknown)}"] if unknown else []
    evaluated = publication.run is not None and bool(publication.run.comparison)
    if not evaluated:
        remarks.append("no evaluation is known of this model, and the card says so")
    return HubFolder(
        str(out),
        publication.kind,
        publication.licence,
        files,
        n_bytes,
        evaluated,
        tuple(unknown),
        tuple(remarks),
    )


def _look_up_licences(found: Origin, *, online: bool) -> None:
    """Ask the card of the base, under the name that others find it by, where nothing here states its licence."""
    only = sum(one.what == "base" for one in found.ingredients) == len(found.base_ids) == 1
    for place, one in enumerate(found.ingredients):
        ids = [id for id in found.base_ids if only or id == one.name]
        if one.what == "base" and one.licence is None and ids:
            found.ingredients[place] = replace(one, licence=licence_of(ids[0], online=online))


def _name(found: Origin, target: Path) -> str:
    told = as_text(found.run.recipe_value("name")) if found.run else None
    return told or target.absolute().name


def _files(source: Path) -> list[Path]:
    """What belongs to the model, the card left out, which is written anew. Never pickle, never a trainer's state."""
    flat = {path for pattern in _KEPT for path in source.glob(pattern) if path.is_file()}
    nested = set(source.glob(f"{_TEMPLATES}/*.jinja"))
    return sorted(path for path in flat | nested if not path.name.startswith("."))


def _check_weights(source: Path, kind: str) -> None:
    if kind == "adapter":
        with open_adapter(source).files:
            return
    with open_model(source):
        return


def _place(path: Path, target: Path) -> None:
    if path.name in _PLACES:
        write_json(target, readable(read_json(path)))
        return
    if path.suffix == ".safetensors":
        try:
            os.link(path, target)
            return
        except OSError:  # another disk, or one that knows no links
            pass
    shutil.copyfile(path, target)


def _name_base(folder: Path, base_id: str) -> None:
    config = read_json(folder / ADAPTER_CONFIG)
    write_json(folder / ADAPTER_CONFIG, config | {"base_model_name_or_path": base_id})


def _recipe_text(run: RunFiles) -> str:
    """The resolved recipe, folders of this machine by their last name."""
    text = run.recipe_text or ""
    for value in _texts(run.recipe):
        text = text.replace(value, str(readable(value)))
    return text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and readable(value) != value:
        yield value
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(entry)
