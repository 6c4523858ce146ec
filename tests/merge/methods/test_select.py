"""Order statistics by counting bits: exact, also with ties, zeros and tiny numbers."""

from __future__ import annotations

import pytest
import torch

from finetune.merge.methods.chunk import MemoryChunks
from finetune.merge.methods.select import (
    NotFiniteError,
    coarse_histogram,
    coarse_threshold,
    n_kept,
    order_statistics,
)


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_every_rank_is_the_value_that_sorting_finds(rows: int) -> None:
    values = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).abs()
    values[::7] = values[0, 0]
    values[1::11] = 0.0
    values[3, 3] = 1e-42  # no normal number
    ranks = [0, 1, 17, 100, 198, 199]
    found = order_statistics(MemoryChunks([values], rows=rows), lambda chunk: chunk.tensors, [ranks])
    assert found == [[float(values.flatten().sort().values[rank]) for rank in ranks]]


def test_values_that_are_not_finite_are_reported() -> None:
    values = torch.tensor([[1.0, float("nan")]])
    with pytest.raises(NotFiniteError):
        order_statistics(MemoryChunks([values]), lambda chunk: chunk.tensors, [[0]])
    with pytest.raises(NotFiniteError):
        coarse_threshold(coarse_histogram(torch.tensor([1.0, float("inf")])), 0.5)


@pytest.mark.parametrize("density", [0.01, 0.2, 0.5, 0.99])
def test_a_coarse_threshold_keeps_the_share_and_hardly_more(density: float) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).abs()
    threshold = coarse_threshold(coarse_histogram(values), density)
    kept = float((values >= threshold).float().mean())
    assert density <= kept <= density + 0.003
    assert coarse_threshold(coarse_histogram(values), 1.0) == 0.0
    assert coarse_threshold(coarse_histogram(values), 0.0) == float("inf")


def test_a_density_above_zero_keeps_something() -> None:
    assert [n_kept(density, 10) for density in (0.0, 0.01, 0.25, 1.0)] == [0, 1, 2, 10]
