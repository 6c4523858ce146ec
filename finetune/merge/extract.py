"""A LoRA out of the difference of two models: the spectrum of what tuning changed, and the error of every rank."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from finetune.errors import UserError
from finetune.merge.adapter_write import write_adapter
from finetune.merge.layout import Layout, read_layout
from finetune.merge.low_rank import Factors, truncate
from finetune.merge.shards import TensorFiles, open_model
from finetune.model.load import model_skeleton
from finetune.model.source import ModelSource, read_config


@dataclass(slots=True)
class Extraction:
    """What an extraction found. `error_by_rank` maps a rank to ‖W' − W − B A‖ / ‖W' − W‖ over all adapted layers.

    `spectrum` is the mean over layers of the share of a layer's squared change that each singular direction holds, for
    the first directions. `not_carried` are changed tensors that a LoRA has no place for (norms, biases, embeddings), with
    `not_carried_share` their share of the whole squared change.
    """

    rank: int
    error: float
    n_modules: int
    error_by_rank: dict[int, float]
    spectrum: list[float]
    not_carried: list[str] = field(default_factory=list)
    not_carried_share: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def extract_adapter(base: ModelSource, tuned: ModelSource, out: Path, *, rank: int) -> Extraction:
    """Write the best LoRA of `rank` for tuned − base to the new folder `out`.

    Every linear layer that changed is adapted, the output head excepted. Raises UserError when the two models do not have
    the same tensors and shapes (counted, named), or when nothing changed.
    """
    if rank < 1:
        raise UserError(f"a rank of {rank} holds nothing", where="--rank", fix="e.g. --rank 32")
    with open_model(base.folder) as ours, open_model(tuned.folder) as theirs:
        layout = read_layout(model_skeleton(base), ours)
        copies = layout.duplicates | read_layout(model_skeleton(tuned), theirs).duplicates
        _refuse_other_tensors(base, tuned, ours, theirs, copies)
        widest = max((min(e.shape) for e in ours.entries.values() if len(e.shape) == 2), default=1)
        if rank > widest:
            raise UserError(
                f"a rank of {rank} is more than any layer of {base.id} has ({widest})",
                where="--rank",
                fix=f"--rank {widest} holds the whole change; fewer make a smaller adapter",
            )
        factors: dict[str, Factors] = {}
        sigmas: list[torch.Tensor] = []
        not_carried: dict[str, float] = {}
        for tensor, parameter in layout.owners().items():
            delta = _difference(ours, theirs, tensor)
            if delta is None:
                continue
            module = parameter.rpartition(".")[0]
            if not _adaptable(layout, parameter, module):
                not_carried[parameter] = float(delta.square().sum(dtype=torch.float64))
                continue
            truncation = truncate(delta.T if layout.kinds[module] == "conv1d" else delta, rank)
            factors[module] = truncation.factors
            sigmas.append(truncation.singular_values)
        if not factors:
            raise UserError(
                f"no linear layer of {tuned.id} differs from {base.id}",
                fix="check that the two folders are the right ones",
            )
        write_adapter(out, factors, layout, base=base)
    return _report(rank, sigmas, len(factors), not_carried)


def _adaptable(layout: Layout, parameter: str, module: str) -> bool:
    return (
        parameter.endswith(".weight")
        and layout.kinds.get(module) in ("linear", "conv1d")
        and module != layout.output_embedding
    )


def _difference(ours: TensorFiles, theirs: TensorFiles, tensor: str) -> torch.Tensor | None:
    """tuned − base in fp32, None when the two hold the same values."""
    one, two = ours.read(tensor), theirs.read(tensor)
    if not one.is_floating_point() or torch.equal(one, two):
        return None
    delta = two.float() - one.float()
    if not bool(torch.isfinite(delta).all()):
        raise UserError(
            f"the tensor {tensor} holds NaN or infinity in one of the models", fix="copy the model again"
        )
    return delta if bool(delta.any()) else None


def _refuse_other_tensors(
    base: ModelSource,
    tuned: ModelSource,
    ours: TensorFiles,
    theirs: TensorFiles,
    copies: frozenset[str],
) -> None:
    """`copies` are tied heads that were written out beside their embedding; a model may have one and the other not."""
    names = sorted((set(ours.entries) ^ set(theirs.entries)) - copies)
    shapes = [
        f"{name} ({list(entry.shape)} and {list(theirs.entries[name].shape)})"
        for name, entry in ours.entries.items()
        if name in theirs.entries and theirs.entries[name].shape != entry.shape
    ]
    if names or shapes:
        raise UserError(
            f"{base.id} and {tuned.id} are not one architecture: {len(names)} tensors are in one only, {len(shapes)} have "
            f"another shape, e.g. {(names + shapes)[0]}",
            why=f"model types {read_config(base).get('model_type')} and {read_config(tuned).get('model_type')}",
            fix="name the model that the tuning started from with --base",
        )


def _report(
    rank: int, sigmas: list[torch.Tensor], n_modules: int, not_carried: dict[str, float]
) -> Extraction:
    squares = [sigma.square() for sigma in sigmas]
    total = sum(float(square.sum()) for square in squares)
    longest = max(len(square) for square in squares)
    ranks = sorted({*(2**power for power in range(longest.bit_length()) if 2**power <= longest), rank})
    errors = {r: math.sqrt(sum(float(square[r:].sum()) for square in squares) / total) for r in ranks}
    shown = min(longest, 16)
    padded = torch.stack(
        [torch.nn.functional.pad(s[:shown] / s.sum(), (0, shown - len(s[:shown]))) for s in squares]
    )
    aside = sum(not_carried.values())
    return Extraction(
        rank=rank,
        error=errors[rank],
        n_modules=n_modules,
        error_by_rank=errors,
        spectrum=[float(share) for share in padded.mean(0)],
        not_carried=sorted(not_carried),
        not_carried_share=aside / (aside + total),
    )
