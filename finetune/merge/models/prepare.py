"""From a recipe to a plan: open the models, refuse what cannot be right, and say what the merge will cost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.merge.companions import companion_bytes
from finetune.merge.models.inputs import (
    MergeModel,
    check_architectures,
    check_tensors,
    is_vocabulary,
    open_models,
)
from finetune.merge.models.plan import MergePlan, plan_merge
from finetune.merge.models.stream import CHUNK_ELEMENTS
from finetune.merge.models.vocabulary import Vocabulary, align, check_same
from finetune.recipe.merge_loader import LoadedMerge
from finetune.recipe.merge_section import MergeRecipe
from finetune.units import format_bytes

_SPARE_BYTES = 1 << 20
_TEMPORARIES = 6
"""fp32 buffers of a chunk that a method holds beside its inputs, at most."""
_OTHER_BYTES = 1 << 25
"""Names, plans, histograms, and what an allocator keeps."""


@contextmanager
def prepared(loaded: LoadedMerge) -> Iterator[MergePlan]:
    """The plan of a recipe, its models open. Raises UserError for whatever can be told from headers and configurations."""
    recipe = loaded.recipe
    names = _names(recipe)
    if len(names) < 2 and recipe.merge_method != "passthrough":
        raise UserError(
            f"only one model is named: {names[0]}",
            where=str(loaded.path),
            fix="name at least two different models",
        )
    models = open_models(names)
    try:
        if recipe.slices is None:
            _refuse_same_folder(models)
        base = next((model for model in models if model.id == recipe.base_model), models[0])
        source = recipe.tokenizer.source if recipe.tokenizer else recipe.tokenizer_source
        others = [model for model in models if model is not base]
        remarks = check_architectures(others, base)
        vocabulary: Vocabulary | None = None
        if recipe.slices is None:
            check_tensors(others, base, aligned=source is not None)
        if source is not None:
            vocabulary = align(
                source,
                models,
                base,
                keep_padding=recipe.spoken != "mergekit",
                multiple=recipe.tokenizer.pad_to_multiple_of if recipe.tokenizer else None,
            )
            remarks += vocabulary.remarks if vocabulary else []
        else:
            remarks += check_same(models, base)
        plan = plan_merge(loaded, models, base, vocabulary)
        plan.tokenizer_model = next((model for model in models if model.id == source), base)
        plan.remarks += remarks
        yield plan
    finally:
        for model in models:
            model.files.close()


def _refuse_same_folder(models: list[MergeModel]) -> None:
    """One folder under two names (a link, a slash at the end) would count twice."""
    names: dict[Path, str] = {}
    for model in models:
        other = names.setdefault(model.folder.resolve(), model.id)
        if other != model.id:
            raise UserError(
                f"{other} and {model.id} are the same folder",
                why="a model that is merged with itself changes nothing",
                fix="name different models, or the same one by the same name",
            )


def _names(recipe: MergeRecipe) -> list[str]:
    """Every model once, the base first, then in the order of the recipe."""
    names = [recipe.base_model] if recipe.base_model else []
    names += [entry.model for entry in recipe.models or []]
    for piece in recipe.slices or []:
        names += [piece.base_model] if piece.base_model else []
        names += [source.model for source in piece.sources]
    return list(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Costs:
    """What a merge will take. `free_bytes` is what the disk of the output has now."""

    n_tensors: int
    n_models: int
    source_bytes: int
    read_bytes: int
    write_bytes: int
    disk_bytes: int
    free_bytes: int
    peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def lines(self) -> list[str]:
        times = self.read_bytes / self.source_bytes if self.source_bytes else 0.0
        return [
            f"tensors          {self.n_tensors}",
            f"reads            {format_bytes(self.read_bytes)} ({format_bytes(self.source_bytes)} of {self.n_models} models, "
            f"{times:.1f} times)",
            f"writes           {format_bytes(self.write_bytes)}",
            f"needs on disk    {format_bytes(self.disk_bytes)} ({format_bytes(self.free_bytes)} free)",
            f"peak memory      {format_bytes(self.peak_bytes)} above the interpreter",
        ]


def costs(plan: MergePlan, out: Path, n_workers: int) -> Costs:
    """Bytes read, written and held, from the plan alone."""
    parent = out.resolve().parent
    while not parent.exists():
        parent = parent.parent
    beside = companion_bytes(plan.base.folder, plan.tokenizer_model.folder)
    return Costs(
        n_tensors=len(plan.tensors),
        n_models=len(plan.models),
        source_bytes=plan.source_bytes,
        read_bytes=plan.read_bytes,
        write_bytes=plan.n_bytes,
        disk_bytes=plan.n_bytes + beside + _SPARE_BYTES,
        free_bytes=shutil.disk_usage(parent).free,
        peak_bytes=_peak_bytes(plan, n_workers),
    )


def _peak_bytes(plan: MergePlan, n_workers: int) -> int:
    """Chunks that exist at a time: inputs as stored and in fp32, a method's temporaries, results that wait to be written.

    The proof that the result computes holds one layer's largest matrix in fp32, which can be more.
    """
    largest = 0
    for tensor in plan.tensors:
        row = max(
            tensor.planned.n_bytes // tensor.planned.dtype.itemsize // max(tensor.planned.shape[:1] or (1,)),
            1,
        )
        n = max(CHUNK_ELEMENTS // row, 1) * row
        stored = sum(plan.models[s.model].entries[s.tensor].dtype.itemsize + 4 for s in tensor.sources)
        sorting = 24 if plan.method.startswith("della") else 0
        per_worker = n * (stored + 4 * _TEMPORARIES + sorting)
        largest = max(largest, n_workers * (per_worker + 2 * n * tensor.planned.dtype.itemsize))
    layers = [t.planned for t in plan.tensors if not is_vocabulary(t.planned.name)]
    proof = max((planned.n_bytes * 4 // planned.dtype.itemsize for planned in layers), default=0)
    return max(largest, proof) + _OTHER_BYTES
