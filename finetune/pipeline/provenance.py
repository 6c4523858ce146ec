"""Where a model that is to be published comes from: base, data and adapter by digest, licences, and whose evaluation it has.

Nothing is taken on trust: weights are compared with what the run or the merge wrote down.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.merge.adapter import PROOF_FILE
from finetune.merge.adapter_file import is_adapter_folder
from finetune.merge.inputs import refuse_changed_weights
from finetune.merge.measure import MergeProof
from finetune.merge.models.merge import RECIPE_FILE as MERGE_RECIPE
from finetune.merge.models.merge import REPORT_FILE, ModelMerge
from finetune.model.adapter_files import ADAPTER_WEIGHTS, read_origin
from finetune.model.embedded import BUILTIN_MODELS
from finetune.model.source import ADAPTER_CONFIG, BUILTIN_PREFIX
from finetune.paths import read_json
from finetune.pipeline.manifest import FILE_NAME
from finetune.report.hub_card import Ingredient, readable
from finetune.report.read import RunFiles, as_dict, as_text, read_run

Record = TypeVar("Record")


@dataclass(slots=True)
class Origin:
    """What is published, and what is known of it."""

    folder: Path
    kind: str
    ingredients: list[Ingredient] = field(default_factory=list)
    base_ids: list[str] = field(default_factory=list)
    run: RunFiles | None = None
    proof: dict[str, str] = field(default_factory=dict)
    merge_recipe: str | None = None


def find_origin(target: Path, run: Path | None) -> Origin:
    if not target.is_dir():
        raise UserError(f"no such folder: {target}", fix="name a run, a merged model, or an adapter folder")
    if (target / FILE_NAME).is_file():
        return _of_run(target, run)
    if is_adapter_folder(target):
        found = _adapter(target)
    elif (target / "config.json").is_file():
        found = _model(target)
    else:
        raise UserError(
            f"{target} is neither a run, nor a model, nor an adapter",
            fix="name a run folder, or what `finetune merge` wrote",
        )
    if run is not None:
        _attach_run(found, run)
    return found


def _of_run(target: Path, run: Path | None) -> Origin:
    if run is not None:
        raise UserError(f"{target} is a run itself", where="--run", fix="leave --run out")
    folder = target / "adapter" if is_adapter_folder(target / "adapter") else target / "model"
    if not folder.is_dir():
        raise UserError(
            f"{target} has not trained anything yet", fix=f"finish it first: finetune run {target}"
        )
    refuse_changed_weights(target, folder)
    found = _adapter(folder) if is_adapter_folder(folder) else Origin(folder, "model")
    found.run = read_run(target)
    found.ingredients = [*_run_ingredients(found.run), *_own_adapter(folder)]
    found.base_ids = _hub_ids([str(found.run.recipe_value("model.id"))])
    return found


def _attach_run(found: Origin, run: Path) -> None:
    """The evaluation of a run may stand on the card of what it trained, or of a merge of that, and of nothing else."""
    files = read_run(run)
    weights = run / "adapter" / ADAPTER_WEIGHTS
    theirs = digest_file(weights) if weights.is_file() else None
    mine = next((one.sha256 for one in found.ingredients if one.what == "adapter"), None)
    if theirs is None or mine != theirs:
        raise UserError(
            f"{found.folder} was not made of the adapter of {run}",
            where="--run",
            why="the run's evaluation is about other weights",
            fix="name the run whose adapter was merged",
        )
    refuse_changed_weights(run, run / "adapter")
    found.run = files
    own = [one for one in found.ingredients if one.what == "adapter"]
    found.ingredients = [*_run_ingredients(files), *own]
    found.base_ids = _hub_ids([str(files.recipe_value("model.id"))])


def _run_ingredients(run: RunFiles) -> list[Ingredient]:
    base = str(run.recipe_value("model.id"))
    digest = as_text(as_dict(run.manifest.get("inputs")).get("model"))
    data = run.data_manifest
    rows = as_dict(as_dict(data.get("splits")).get("train")).get("rows")
    name = f"{as_text(data.get('name')) or 'unknown'} ({rows} rows trained on)"
    found = [Ingredient("base", called(base), digest, licence_of(base))]
    if data:
        found.append(Ingredient("data", name, as_text(data.get("digest")), as_text(data.get("licence"))))
    if teacher := as_dict(run.distillation.get("teacher")):
        taught_by = called(as_text(teacher.get("name")) or "unknown")
        terms = as_text(teacher.get("licence"))
        found.append(Ingredient("teacher", taught_by, as_text(teacher.get("digest")), terms))
    return found


def _own_adapter(folder: Path) -> list[Ingredient]:
    weights = folder / ADAPTER_WEIGHTS
    return (
        [Ingredient("adapter", "trained by this recipe", digest_file(weights), None)]
        if weights.is_file()
        else []
    )


def _adapter(folder: Path) -> Origin:
    origin = read_origin(folder)
    base = str(
        origin.get("id") or read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "unknown"
    )
    found = Origin(
        folder, "adapter", [Ingredient("base", called(base), origin.get("digest"), licence_of(base))]
    )
    found.ingredients += _own_adapter(folder)
    found.base_ids = _hub_ids([base])
    return found


def _model(folder: Path) -> Origin:
    """What a merge wrote says of what it was made; any other model folder is of unknown origin."""
    if (folder / PROOF_FILE).is_file():
        proof = _record(MergeProof, folder / PROOF_FILE)
        found = Origin(folder, "merged", base_ids=_hub_ids([proof.base]), proof=proof.facts())
        found.ingredients = [
            Ingredient("base", called(proof.base), proof.base_digest, licence_of(proof.base)),
            Ingredient("adapter", proof.kind, proof.adapter_sha256, None),
        ]
        found.proof["Base"] = called(proof.base)
        return found
    if (folder / REPORT_FILE).is_file():
        report = _record(ModelMerge, folder / REPORT_FILE)
        names = [str(model["id"]) for model in report.models]
        found = Origin(folder, "merge", base_ids=_hub_ids(names), proof=report.facts())
        found.proof["models"] = ", ".join(map(called, names))
        found.ingredients = [Ingredient("base", called(name), None, licence_of(name)) for name in names]
        recipe = folder / MERGE_RECIPE
        if recipe.is_file():
            found.merge_recipe = json.dumps(readable(read_json(recipe)), indent=2, ensure_ascii=False)
        return found
    return Origin(folder, "model", [Ingredient("base", "(not recorded)", None, None)])


def licence_of(model: str, *, online: bool = False) -> str | None:
    """The licence that a model's own files state: of an embedded model, a folder's card, or the card of a hub id.

    online: a card that is not in the cache may be fetched.
    """
    if model.startswith(BUILTIN_PREFIX):
        known = BUILTIN_MODELS.get(model.removeprefix(BUILTIN_PREFIX))
        return known.licence if known else None
    card = Path(model).expanduser() / "README.md"
    if card.is_file():
        return _licence_in(card)
    return _licence_in(_hub_card_of(model, online=online)) if _hub_ids([model]) else None


def _licence_in(card: Path | None) -> str | None:
    from huggingface_hub import ModelCard

    if card is None:
        return None
    try:
        data = ModelCard(card.read_text(encoding="utf-8"), ignore_metadata_errors=True).data
    except (OSError, ValueError):
        return None
    name = data.get("license_name") if data.get("license") == "other" else data.get("license")
    return as_text(name)


def _hub_card_of(id: str, *, online: bool) -> Path | None:
    """The card of a hub model, from the cache or, where asked, the hub; None without either."""
    import httpx2
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(id, "README.md", local_files_only=not online))
    except (OSError, ValueError, httpx2.HTTPError):
        return None


def _hub_ids(names: list[str]) -> list[str]:
    """Those names that a hub can link to: owner/name, and no folder here."""
    return [
        name.partition("@")[0]
        for name in names
        if name.count("/") == 1 and name[:1] not in "./~" and ":" not in name and not Path(name).exists()
    ]


def called(model: str) -> str:
    return str(readable(model))


def _record(kind: type[Record], path: Path) -> Record:
    """What a merge wrote down. Raises UserError where the file is that of another version."""
    content = as_dict(read_json(path))
    try:
        return kind(**{one.name: content[one.name] for one in fields(kind) if one.name in content})  # type: ignore[arg-type]
    except TypeError:
        raise UserError(
            f"{path} does not hold what this version writes there",
            fix="merge again, or delete the file: the card then says that nothing is known of the merge",
        ) from None
