"""Merge models into one: planned from headers, written in chunks, read back, loaded, and only then put in place."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from finetune.merge.companions import copy_companions
from finetune.merge.execute import Begin, no_progress
from finetune.merge.models.card import merge_card, recipe_text
from finetune.merge.models.execute import SHARD_BYTES, ModelMerger
from finetune.merge.models.layers import with_layers
from finetune.merge.models.plan import MergePlan
from finetune.merge.models.prepare import costs, prepared
from finetune.merge.models.proof import check_differs, check_loads
from finetune.merge.models.stream import CHUNK_ELEMENTS, working
from finetune.merge.models.vocabulary import TOKENIZER_FILE
from finetune.merge.place import refuse_small_disk, refuse_used_folder, resumable_place
from finetune.paths import read_json, write_atomic, write_json
from finetune.recipe.merge_loader import LoadedMerge
from finetune.units import format_bytes, format_count

REPORT_FILE = "merge_report.json"
RECIPE_FILE = "merge_recipe.json"
DIAGNOSTICS_FILE = "diagnostics.json"
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(slots=True)
class ModelMerge:
    """What was done. `seconds` hold `proof_seconds`: every byte read back, compared with each model, and a forward pass."""

    method: str
    dialect: str
    models: list[dict[str, Any]]
    n_tensors: int
    n_parameters: int
    dtypes: list[str]
    read_bytes: int
    written_bytes: int
    shards_reused: int
    largest_logit: float | None
    n_vocabulary: int | None
    seconds: float
    proof_seconds: float = 0.0
    remarks: list[str] = field(default_factory=list)
    diagnostics: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def facts(self) -> dict[str, str]:
        """The figures in words, for a screen and a model card."""
        found = {
            "method": f"{self.method}, dialect {self.dialect}",
            "models": ", ".join(str(model["id"]) for model in self.models),
            "parameters": f"{format_count(self.n_parameters)} in {self.n_tensors} tensors, {', '.join(self.dtypes)}",
            "read, written": f"{format_bytes(self.read_bytes)}, {format_bytes(self.written_bytes)}",
        }
        if self.n_vocabulary is not None:
            found["vocabulary"] = f"{self.n_vocabulary} rows, matched by token"
        if self.shards_reused:
            found["taken up"] = f"{self.shards_reused} shards of an interrupted merge"
        loads = "" if self.largest_logit is None else "; loads in transformers, all logits finite"
        found["proof"] = (
            f"every byte read back{loads}; differs from each model ({self.proof_seconds:.1f} of {self.seconds:.1f} s)"
        )
        return found


def merge_models(
    loaded: LoadedMerge,
    out: Path,
    *,
    n_workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    chunk_elements: int = CHUNK_ELEMENTS,
    diagnostics: bool = False,
    load: bool = True,
    progress: Begin = no_progress,
) -> ModelMerge:
    """Carry out a recipe and write the model to `out`, which must be new.

    The written values depend on the recipe and the models' contents alone: not on `n_workers` (by default the cores, at
    most 8) or `shard_bytes`. (`chunk_elements` changes the order of sums in norms, and so a last bit.) A merge that was
    killed goes on where it stopped when it is called again with the same recipe and models. `load=False` leaves out the
    proof that transformers loads and computes with the result.
    Raises UserError, leaving nothing behind, for models that do not fit, NaN (tensor named), a used folder, a full disk,
    and a result that equals one of the models.
    """
    started = time.monotonic()
    refuse_used_folder(out)
    n_workers = n_workers or min(os.cpu_count() or 1, 8)
    with prepared(loaded) as plan:
        needed = costs(plan, out, n_workers)
        with resumable_place(out, plan.digest()) as folder:
            done = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            refuse_small_disk(out, max(needed.disk_bytes - done, 0))
            with working(n_workers) as workers:
                merger = ModelMerger(plan, workers, progress, diagnostics, chunk_elements)
                checksums = merger.write(folder, shard_bytes)
                written = time.monotonic()
                merger.verify(folder, checksums)
                check_differs(merger, folder)
                proof_seconds = time.monotonic() - written
            write_json(folder / "config.json", merged_config(plan))
            _write_companions(plan, folder)
            written = time.monotonic()
            largest = check_loads(folder) if load else None
            proof_seconds += time.monotonic() - written
            report = _report(plan, merger, largest)
            report.seconds = round(time.monotonic() - started, 2)
            report.proof_seconds = round(proof_seconds, 2)
            if diagnostics:
                write_json(folder / DIAGNOSTICS_FILE, _diagnoses(merger))
                report.diagnostics = _summary(merger)
            write_json(folder / REPORT_FILE, report.to_dict())
            write_atomic(folder / RECIPE_FILE, recipe_text(plan.recipe) + "\n")
            write_atomic(folder / "README.md", merge_card(plan, report.facts()))
            for leftover in folder.glob(".*.json"):
                leftover.unlink()
    return report


def merged_config(plan: MergePlan) -> dict[str, Any]:
    """The base's config.json with the result's type, layers and vocabulary."""
    config = {key: value for key, value in plan.base.config.items() if key != "torch_dtype"}
    if plan.layer_order is not None:
        config = with_layers(config, plan.layer_order)
    floating = [t.planned for t in plan.tensors if t.planned.dtype.is_floating_point]
    sizes: dict[torch.dtype, int] = {}
    for planned in floating:
        sizes[planned.dtype] = sizes.get(planned.dtype, 0) + planned.n_bytes
    dtype = str(max(sizes, key=lambda key: sizes[key])).removeprefix("torch.")
    config["dtype"] = dtype
    for section in [config, config.get("text_config")]:
        if not isinstance(section, dict):
            continue
        if "dtype" in section:
            section["dtype"] = dtype
        if plan.vocabulary is not None and "vocab_size" in section:
            section["vocab_size"] = plan.vocabulary.n_rows
        for key in _SPECIAL_IDS:
            if plan.tokenizer_model is not plan.base and key in plan.tokenizer_model.text_config:
                section[key] = plan.tokenizer_model.text_config[key]
    return config


def _write_companions(plan: MergePlan, folder: Path) -> None:
    copy_companions(plan.base.folder, plan.tokenizer_model.folder, folder)
    if plan.vocabulary is not None and plan.vocabulary.tokenizer is not None:
        _write_union(plan.vocabulary.tokenizer, folder)
    if plan.recipe.chat_template is not None:
        write_atomic(folder / "chat_template.jinja", plan.recipe.chat_template)


def _write_union(tokenizer: dict[str, Any], folder: Path) -> None:
    write_json(folder / TOKENIZER_FILE, tokenizer)
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    if "added_tokens_decoder" in config:
        for entry in tokenizer["added_tokens"]:
            fields = {key: value for key, value in entry.items() if key != "id"}
            config["added_tokens_decoder"].setdefault(str(entry["id"]), fields)
        write_json(path, config)


def _report(plan: MergePlan, merger: ModelMerger, largest: float | None) -> ModelMerge:
    return ModelMerge(
        method=plan.method,
        dialect=plan.dialect,
        models=[{"id": m.id, "revision": m.revision, "identity": m.identity()} for m in plan.models],
        n_tensors=len(plan.tensors),
        n_parameters=sum(t.planned.n_bytes // t.planned.dtype.itemsize for t in plan.tensors),
        dtypes=sorted({str(t.planned.dtype).removeprefix("torch.") for t in plan.tensors}),
        read_bytes=plan.read_bytes,
        written_bytes=plan.n_bytes,
        shards_reused=merger.reused,
        largest_logit=largest,
        n_vocabulary=None if plan.vocabulary is None else plan.vocabulary.n_rows,
        seconds=0.0,
        remarks=plan.remarks,
    )


def _diagnoses(merger: ModelMerger) -> dict[str, Any]:
    return {name: found.to_dict() for name, found in merger.diagnoses.items() if found.products is not None}


def _summary(merger: ModelMerger) -> dict[str, Any]:
    """Means over tensors, weighted by their elements, and the tensor that is worst in each respect."""
    tensors = _diagnoses(merger)
    summary: dict[str, Any] = {}
    for key, worst in (
        ("cosine", min),
        ("sign_conflict", max),
        ("norm_change", max),
        ("survives_share", min),
    ):
        known = {name: row for name, row in tensors.items() if row[key] is not None}
        if not known:
            continue
        total = sum(row["n_elements"] for row in known.values())
        name = worst(known, key=lambda name: known[name][key])
        mean = sum(row[key] * row["n_elements"] for row in known.values()) / max(total, 1)
        summary[key] = {"mean": mean, "worst": known[name][key], "tensor": name}
    return summary
