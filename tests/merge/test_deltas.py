from __future__ import annotations

import math

import pytest
import torch

from finetune.merge.deltas import (
    LowRankUpdate,
    column_norms,
    delta_rows,
    lora_scaling,
    merged_rows,
    true_delta,
)

N_OUT, N_IN, RANK = 10, 6, 3


def update(*, transposed: bool = False, dora: bool = False) -> LowRankUpdate:
    generator = torch.Generator().manual_seed(0)
    return LowRankUpdate(
        a=torch.randn(RANK, N_IN, generator=generator),
        b=torch.randn(N_OUT, RANK, generator=generator),
        scaling=0.7,
        transposed=transposed,
        magnitude=torch.rand(N_OUT, generator=generator) + 0.5 if dora else None,
    )


def base(made_for: LowRankUpdate) -> torch.Tensor:
    return torch.randn(made_for.shape, generator=torch.Generator().manual_seed(1))


def expected(weight: torch.Tensor, made_for: LowRankUpdate) -> torch.Tensor:
    """The formulas of the papers, in fp64, in the orientation [out, in]."""
    upright = weight.double().T if made_for.transposed else weight.double()
    merged = upright + made_for.scaling * made_for.b.double() @ made_for.a.double()
    if made_for.magnitude is not None:
        merged = made_for.magnitude.double()[:, None] * merged / merged.norm(dim=1, keepdim=True)
    return (merged.T if made_for.transposed else merged).float()


def test_scaling_of_lora_and_of_rslora() -> None:
    assert lora_scaling(16, 4) == 4
    assert lora_scaling(16, 4, rank_stabilised=True) == 8
    assert lora_scaling(16, 3, rank_stabilised=True) == pytest.approx(16 / math.sqrt(3))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("step", [1, 3, 100])
def test_rows_in_chunks_are_the_rows_of_the_formula(transposed: bool, dora: bool, step: int) -> None:
    made = update(transposed=transposed, dora=dora)
    weight = base(made)
    n_rows = weight.shape[0]
    norms = column_norms(made, lambda start, stop: weight[start:stop], n_rows, step) if transposed else None
    chunks = [
        merged_rows(weight[start : start + step], made, start, norms) for start in range(0, n_rows, step)
    ]
    torch.testing.assert_close(torch.cat(chunks), expected(weight, made), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        true_delta(weight, made), expected(weight, made) - weight, rtol=1e-4, atol=1e-5
    )


def test_the_delta_before_the_norm_is_bilinear() -> None:
    made = update()
    doubled = LowRankUpdate(2 * made.a, made.b, made.scaling)
    torch.testing.assert_close(2 * delta_rows(made, 0, N_OUT), delta_rows(doubled, 0, N_OUT))
