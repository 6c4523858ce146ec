"""What training starts from when it is not the bare base: another run's adapter, or another run's model.

A chain of stages, such as SFT and then DPO, is a chain of runs: the later one names the earlier one in its recipe, and
its manifest names what it started from by digest.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import Fault, UserError
from finetune.model.source import ADAPTER_CONFIG
from finetune.paths import read_json, runs_root
from finetune.pipeline.manifest import FILE_NAME
from finetune.recipe.adapter_section import AdapterSection


@dataclass(frozen=True)
class AdapterStart:
    """The adapter that training goes on from."""

    name: str
    folder: Path
    digest: str


def find_folder(name: str, relative_to: Path) -> Path | None:
    """A folder by path: beside the recipe, from the working folder, or `runs/<id>` wherever runs are kept.

    `runs/<recipe name>`, without the digest, is that recipe's newest run whose training is complete.
    """
    given = Path(name).expanduser()
    candidates = [relative_to / given, given]
    if given.parts[:1] == ("runs",):
        candidates.append(runs_root().joinpath(*given.parts[1:]))
    found = next((folder.absolute() for folder in candidates if folder.is_dir()), None)
    if found is None and given.parts[:1] == ("runs",) and len(given.parts) == 2:
        finished = sorted(_finished_runs(given.parts[1]))
        found = finished[-1][1].absolute() if finished else None
    return found


def _finished_runs(recipe_name: str) -> Iterator[tuple[str, Path]]:
    """When each run of a recipe finished its training, and its folder."""
    for path in runs_root().glob(f"{glob.escape(recipe_name)}-*/{FILE_NAME}"):
        manifest = read_json(path)
        completed = manifest.get("stages", {}).get("train", {}).get("completed")
        if manifest.get("recipe_name") == recipe_name and completed:
            yield completed, path.parent


def model_folder(name: str, relative_to: Path, where: str) -> str:
    """`model.id` with a run's folder replaced by the model that the run trained or merged.

    Raises UserError for a run that trained an adapter: a model is what `finetune merge` makes of it.
    """
    folder = find_folder(name, relative_to)
    if folder is None or name.startswith("builtin:"):
        return name
    if not (folder / FILE_NAME).is_file():
        return str(folder)
    if (folder / "model").is_dir():
        return str(folder / "model")
    raise UserError(
        f"{name} is a run that trained an adapter, not a model",
        where=where,
        fix=f"set model.id to its base and adapter.start: {name}; or merge it first: finetune merge {name} --out …",
    )


def find_start(section: AdapterSection, relative_to: Path, where: str) -> AdapterStart | None:
    """The adapter of `adapter.start`: a run's folder, or an adapter's own. Raises UserError when there is none, or
    when it is not the kind of adapter that the recipe describes."""
    if section.start is None:
        return None
    from finetune.model.adapter_files import adapter_digest, read_adapter_config  # they need torch

    found = find_folder(section.start, relative_to)
    folder = found / "adapter" if found is not None and (found / FILE_NAME).is_file() else found
    if folder is None or not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"'{section.start}' is no adapter and no run that has trained one",
            where=where,
            why="there is no such folder" if folder is None else f"{folder} holds no {ADAPTER_CONFIG}",
            fix="name a finished run (runs/<id> or runs/<recipe name>) or a folder that PEFT saved; `ls runs` lists the runs",
        )
    saved = read_adapter_config(folder)
    if saved.get("task_type") == "SEQ_CLS":
        raise UserError(
            f"'{section.start}' is the adapter of a reward model or classifier, which has another head",
            where=where,
            fix="name a run that trained a model that writes",
        )
    faults = _differences(section, saved, where)
    if faults:
        raise UserError(faults)
    return AdapterStart(section.start, folder, adapter_digest(folder))


def _differences(section: AdapterSection, saved: dict[str, Any], where: str) -> list[Fault]:
    """Where the recipe describes another adapter than the one it starts from: it would be the recipe that is wrong."""
    if saved.get("peft_type") != "LORA" or section.kind not in ("lora", "dora"):
        return []
    kind = "dora" if saved.get("use_dora") else "lora"
    pairs: list[tuple[str, Any, Any]] = [
        ("kind", section.kind, kind),
        ("rank", section.rank, saved.get("r")),
        ("alpha", section.alpha, saved.get("lora_alpha")),
        ("rslora", section.rslora, bool(saved.get("use_rslora"))),
    ]
    return [
        Fault(
            f"adapter.{key} is {said}, and the adapter that training starts from has {found}",
            where=where,
            why="a saved adapter keeps its shape and its scale",
            fix=f"set adapter.{key}: {str(found).lower() if isinstance(found, bool) else found}",
        )
        for key, said, found in pairs
        if said != found
    ]
