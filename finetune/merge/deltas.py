"""What a low-rank adapter adds to a weight: pure functions on rows, so that a tensor never has to be whole in memory.

Shapes: r rank, `rows` a slice of the stored weight's first dimension, W the stored base weight in fp32.
    straight    W [out, in]                      nn.Linear                  ΔW = s · B A
    transposed  W [in, out] or [tokens, width]   Conv1D (GPT-2), Embedding  ΔW = s · (B A)ᵀ
    A [r, in], B [out, r]; for an embedding A [r, tokens], B [width, r].
LoRA (arXiv:2106.09685) scales by s = α/r, rsLoRA (arXiv:2312.03732) by s = α/√r. DoRA (arXiv:2402.09353) writes
W' = m ⊙ (W + ΔW) / ‖W + ΔW‖ with one magnitude m and one norm for each output feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

RowReader = Callable[[int, int], torch.Tensor]
"""(start, stop) -> rows of the base weight in fp32 [stop - start, columns]."""


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """One adapted weight. `a` [r, in] and `b` [out, r] in fp32; `magnitude` [out] makes it a DoRA update."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    transposed: bool = False
    magnitude: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the stored weight that this update fits."""
        n_out, n_in = self.b.shape[0], self.a.shape[1]
        return (n_in, n_out) if self.transposed else (n_out, n_in)


def lora_scaling(alpha: float, rank: int, *, rank_stabilised: bool = False) -> float:
    """α/r, or α/√r for rsLoRA."""
    return alpha / math.sqrt(rank) if rank_stabilised else alpha / rank


def delta_rows(update: LowRankUpdate, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of s·BA, in the orientation of the stored weight; for DoRA this is ΔW before the norm."""
    if update.transposed:
        return (update.a[:, start:stop].T @ update.b.T) * update.scaling
    return (update.b[start:stop] @ update.a) * update.scaling


def column_norms(update: LowRankUpdate, base: RowReader, n_rows: int, chunk_rows: int) -> torch.Tensor:
    """‖W + ΔW‖ of each column [columns], accumulated in fp64: the DoRA norm of a transposed weight needs all rows."""
    squares = torch.zeros(update.shape[1], dtype=torch.float64)
    for start in range(0, n_rows, chunk_rows):
        stop = min(start + chunk_rows, n_rows)
        squares += (base(start, stop) + delta_rows(update, start, stop)).double().square().sum(dim=0)
    norms: torch.Tensor = squares.sqrt().float()
    return norms


def merged_rows(
    base_rows: torch.Tensor, update: LowRankUpdate, start: int, norms: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of the merged weight in fp32. `base_rows` [n, columns] are W's rows from `start` on, in fp32.

    `norms` [columns] is needed for a transposed DoRA weight only (`column_norms`); a straight one has its norm in the row.
    """
    merged = base_rows + delta_rows(update, start, start + base_rows.shape[0])
    if update.magnitude is None:
        return merged
    if update.transposed:
        assert norms is not None
        return merged * (update.magnitude / norms)
    row_norms: torch.Tensor = torch.linalg.vector_norm(merged, dim=1)
    return merged * (update.magnitude[start : start + merged.shape[0]] / row_norms).unsqueeze(1)


def true_delta(base: torch.Tensor, update: LowRankUpdate) -> torch.Tensor:
    """W' − W of a whole weight in fp32: what the adapter really adds, DoRA's rescaling included."""
    n_rows = base.shape[0]
    norms = None
    if update.magnitude is not None and update.transposed:
        norms = column_norms(update, lambda start, stop: base[start:stop], n_rows, n_rows)
    return merged_rows(base, update, 0, norms) - base
