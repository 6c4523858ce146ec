"""How a model's parameters lie in its files: names on both sides, shared (tied) tensors, kinds of modules.

A parameter has one name in the model (`model.layers.0.mlp.up_proj.weight`) and often another in the file (without
`model.`, with `transformer.`); tied parameters have one tensor for two names. Merging writes under the file's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.merge.shards import TensorFiles, as_bytes

CHUNK_BYTES = 1 << 23
"""Bytes of fp32 values handled at a time: 8 MiB, about ten such buffers are alive at once."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`stored` maps parameter -> tensor name in the files; `tied` maps parameter -> the parameter whose tensor it shares.

    `shapes` holds every persistent parameter and buffer of the model; `missing` those that the files do not hold under
    any name (fused or renamed by transformers while loading); `duplicates` are tensors of the files that tying makes
    superfluous; `kinds` maps an adaptable module to linear, conv1d or
    embedding; `keep_fp32` names parameters that transformers keeps in fp32 whatever type is asked for.
    """

    shapes: dict[str, tuple[int, ...]]
    stored: dict[str, str]
    tied: dict[str, str]
    kinds: dict[str, str]
    missing: tuple[str, ...]
    duplicates: frozenset[str]
    keep_fp32: frozenset[str]
    input_embedding: str | None
    output_embedding: str | None

    def canonical(self, parameter: str) -> str:
        """The parameter that owns the tensor."""
        return self.tied.get(parameter, parameter)

    def owners(self) -> dict[str, str]:
        """Tensor of the files -> the parameter it belongs to; tensors the model does not know are absent."""
        return {tensor: parameter for parameter, tensor in self.stored.items()}


def read_layout(skeleton: nn.Module, files: TensorFiles) -> Layout:
    """Match the parameters of a model without storage (meta device) with the tensors of its files."""
    model: Any = skeleton
    shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict(keep_vars=True).items()}
    prefix = str(getattr(skeleton, "base_model_prefix", "")) + "."
    stored: dict[str, str] = {}
    for name in shapes:
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in files.entries:
                stored[name] = candidate
                break
    tied: dict[str, str] = {}
    duplicates: set[str] = set()
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        if target in stored and source in stored and not equal_tensors(files, stored[target], stored[source]):
            continue  # the files disagree with the configuration: transformers does not tie them either
        own = stored.pop(target, None)
        if own is not None and stored.setdefault(source, own) != own:
            duplicates.add(own)
        tied[target] = source
    missing = tuple(name for name in shapes if name not in stored and name not in tied)
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return Layout(
        shapes=shapes,
        stored=stored,
        tied=tied,
        kinds={name: kind for name, module in skeleton.named_modules() if (kind := _kind(module))},
        missing=missing,
        duplicates=frozenset(duplicates),
        keep_fp32=frozenset(name for name in shapes if kept & set(name.split("."))),
        input_embedding=_name_of(skeleton, model.get_input_embeddings()),
        output_embedding=_name_of(skeleton, model.get_output_embeddings()),
    )


def row_chunks(n_rows: int, n_columns: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive rows of which each chunk fills at most CHUNK_BYTES in fp32."""
    step = chunk_rows(n_columns)
    for start in range(0, n_rows, step):
        yield start, min(start + step, n_rows)


def chunk_rows(n_columns: int) -> int:
    """Rows of a chunk; at least one."""
    return max(1, CHUNK_BYTES // (4 * max(n_columns, 1)))


def equal_tensors(files: TensorFiles, left: str, right: str) -> bool:
    """Whether two tensors of the files hold the same bytes, compared in chunks."""
    one, two = files.entries[left], files.entries[right]
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return all(
        torch.equal(as_bytes(files.read(left, start, stop)), as_bytes(files.read(right, start, stop)))
        for start, stop in row_chunks(one.n_rows, one.n_elements // max(one.n_rows, 1))
    )


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "conv1d" if type(module).__name__ == "Conv1D" else None


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is wanted and name), None)
