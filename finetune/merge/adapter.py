"""Merge an adapter into its base: planned from headers, written tensor by tensor, proven, and only then put in place.

Order: refuse what cannot be right, before a byte is written → write into a folder beside the target → read back →
prove → rename. Whatever goes wrong, the target folder does not exist afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finetune.errors import UserError
from finetune.merge.adapter_file import AdapterFile, open_adapter
from finetune.merge.adapter_plan import MergePlan, merged_config, plan_merge, refuse_misfit
from finetune.merge.base_weights import DequantisedWeights, StoredWeights, quantized_parameters
from finetune.merge.companions import (
    check_tokenizers,
    companion_bytes,
    copy_companions,
    load_tokenizer_of,
    model_card,
)
from finetune.merge.execute import Begin, Merger, no_progress, refuse_broken_adapter
from finetune.merge.layout import Layout, read_layout
from finetune.merge.measure import MergeProof, measure
from finetune.merge.place import put_in_place, refuse_small_disk, refuse_used_folder
from finetune.merge.proof import make_probe
from finetune.merge.reference import Models
from finetune.merge.shards import MAX_SHARD_BYTES, TensorFiles, open_model
from finetune.model.load import DTYPES, embedding_rows, model_skeleton
from finetune.model.memory import returning_freed_memory
from finetune.model.source import ModelSource, read_config
from finetune.paths import write_atomic, write_json
from finetune.recipe.schema import ModelSection

PROOF_FILE = "merge_proof.json"
_SPARE_BYTES = 1 << 20

Dtype = Literal["bf16", "fp32"]
Onto = Literal["dequantised", "original"]


@dataclass(slots=True)
class _Job:
    """Everything about one merge that is known before writing."""

    source: ModelSource
    adapter: AdapterFile
    files: TensorFiles
    layout: Layout
    plan: MergePlan
    stored: StoredWeights
    base: StoredWeights
    dtype: Dtype
    quantization: ModelSection | None
    onto: Onto


def merge_adapter(
    base: ModelSource,
    adapter_folder: Path,
    out: Path,
    *,
    dtype: Dtype = "bf16",
    quantization: ModelSection | None = None,
    onto: Onto = "dequantised",
    trust_remote_code: bool | str = False,
    other_base: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Begin = no_progress,
) -> MergeProof:
    """Write base plus adapter as one plain model to `out` and prove that it answers as the two do.

    `quantization` is the model section the adapter was trained with when its base was quantized; the adapter is then
    added to what the codes decode to, or, with `onto='original'`, to the base as stored. `dtype` is the written type.
    `other_base` permits a base with other content than the one noted with the adapter. Raises UserError, leaving
    nothing behind, when adapter and base do not fit, a tensor is not finite, `out` holds
    files, the disk is too small, or the proof fails.
    """
    started = time.monotonic()
    if quantization is not None and quantization.quantize == "none":
        quantization = None
    refuse_used_folder(out)
    with _prepared(base, adapter_folder, dtype, quantization, onto, trust_remote_code) as job:
        models = Models(base, job.layout, job.adapter, job.plan, other_base)
        with models.with_adapter(job.base, "fp32"):
            pass  # PEFT itself must find a place for every tensor, before anything is written
        refuse_misfit(job.layout, job.adapter, job.plan)
        need = job.plan.n_bytes + companion_bytes(base.folder, adapter_folder) + _SPARE_BYTES
        refuse_small_disk(out, need)
        with put_in_place(out) as folder:
            merger = Merger(job.plan, job.base, job.adapter, progress)
            checksums = merger.write(folder, max_shard_bytes)
            _refuse_unchanged(merger, dtype)
            config = merged_config(read_config(base), job.plan, job.layout, DTYPES[dtype])
            write_json(folder / "config.json", config)
            copy_companions(base.folder, adapter_folder, folder)
            merger.verify(folder, checksums)
            n_rows = job.plan.n_vocabulary or embedding_rows(read_config(base))
            probe = make_probe(load_tokenizer_of(folder), min(n_rows, embedding_rows(read_config(base))))
            with returning_freed_memory():
                proof = measure(
                    models,
                    folder,
                    probe,
                    job.stored,
                    job.base,
                    dtype=dtype,
                    quantization=quantization,
                    onto=onto,
                    progress=progress,
                )
            proof.add_changes(merger.changes, job.plan)
            proof.seconds = round(time.monotonic() - started, 2)
            write_json(folder / PROOF_FILE, proof.to_dict())
            write_atomic(folder / "README.md", model_card(base_id=base.id, facts=proof.facts()))
    return proof


@contextmanager
def _prepared(
    source: ModelSource,
    adapter_folder: Path,
    dtype: Dtype,
    quantization: ModelSection | None,
    onto: Onto,
    trust_remote_code: bool | str,
) -> Iterator[_Job]:
    """Open both sides and refuse, from headers and configurations, whatever does not fit."""
    config = read_config(source)
    if "quantization_config" in config:
        raise UserError(
            f"the base {source.id} is stored quantized ({config['quantization_config'].get('quant_method')})",
            where=str(source.folder / "config.json"),
            why="merging would have to quantize again, which rounds the adapter away",
            fix="name the unquantized model with --base, and how it was quantized in training with --quantize",
        )
    if trust_remote_code:
        raise UserError(
            f"the base {source.id} runs on code of its own",
            where="model.trust_remote_code",
            why="a merged model must load, and be proven, with plain transformers",
            fix="serve the adapter unmerged",
        )
    adapter = open_adapter(adapter_folder)
    skeleton = model_skeleton(source)
    with adapter.files, open_model(source.folder) as files:
        refuse_broken_adapter(adapter)
        layout = read_layout(skeleton, files)
        plan = plan_merge(layout, files, adapter, DTYPES[dtype])
        check_tokenizers(source.folder, adapter_folder, plan.n_vocabulary or embedding_rows(config))
        stored = StoredWeights(files, layout)
        base = stored
        if quantization is not None and onto == "dequantised":
            base = DequantisedWeights(
                files, layout, quantization, quantized_parameters(skeleton, quantization)
            )
        yield _Job(source, adapter, files, layout, plan, stored, base, dtype, quantization, onto)


def _refuse_unchanged(merger: Merger, dtype: Dtype) -> None:
    """A merge that equals the base is never what was wanted, and nothing else would notice it."""
    if merger.changes.n_changed == 0:
        raise UserError(
            f"the merged model would equal its base: {dtype} rounds every change away",
            fix="merge with --dtype fp32, or check that the adapter was trained",
        )
