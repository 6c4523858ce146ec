"""Numbers that mergekit 0.1.5 gives in fp32 on small tensors, frozen; our `mergekit` dialect must reproduce them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.merge.methods.chunk import Settings, merge_tensors
from finetune.merge.methods.registry import METHODS

BASE = torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.5, 0.0, -0.75, 1.0]])
TUNED = [
    torch.tensor([[0.9, -1.3, 2.1, 0.25], [1.0, 0.4, -0.70, 1.6]]),
    torch.tensor([[0.3, -1.12, 2.6, 0.15], [1.9, 0.3, -1.25, 0.91]]),
    torch.tensor([[0.7, -0.2, 1.8, 0.65], [1.4, -0.5, -0.60, 1.3]]),
]
WEIGHT = (0.5, 0.3, 0.7)
DENSE: dict[str, Any] = {"weight": WEIGHT, "density": (0.5, 0.75, 0.5)}
CRUMBS = {**DENSE, "gamma": (0.25, 0.125, 0.25)}

# (method, number of models, whether there is a base, settings, mergekit's result)
CASES: list[tuple[str, int, bool, dict[str, Any], list[list[float]]]] = [
    (
        "linear", 3, False, {"weight": WEIGHT},
        [[0.6866667, -0.7506667, 2.0599999, 0.4166667], [1.3666667, -0.04, -0.7633333, 1.322]],
    ),
    (
        "slerp", 1, True, {"t": 0.3},
        [[0.6266088, -1.1010895, 2.0500507, 0.2524531], [1.3625906, 0.1217026, -0.7421466, 1.1923664]],
    ),
    (
        "nuslerp", 2, True, {"weight": (0.4, 0.6)},
        [[0.5830358, -1.2962781, 2.5840952, 0.1633329], [1.5262059, 0.5163715, -1.1512895, 1.3065548]],
    ),
    (
        "nuslerp", 2, False, {"weight": (0.4, 0.6), "nuslerp_flatten": False},
        [[0.5457109, -1.2038531, 2.4232974, 0.1919363], [1.5927634, 0.352367, -1.0654147, 1.2299591]],
    ),
    (
        "karcher", 3, False, {"weight": (1.0, 1.0, 1.0)},
        [[0.6816462, -0.8713108, 2.2384679, 0.3914106], [1.4849883, 0.0305175, -0.8634759, 1.3492488]],
    ),
    (
        "model_stock", 3, True, {},
        [[0.261963, -1.2261349, 1.7024539, 0.0714723], [1.6190186, -0.1190185, -0.5714723, 0.5179753]],
    ),
    (
        "model_stock", 3, True, {"filter_wise": True},
        [[0.2636386, -1.2245431, 1.7045484, 0.0727291], [1.6325841, -0.1325842, -0.5511237, 0.4630344]],
    ),
    (
        "sce", 3, True, {"select_topk": 0.5},
        [[0.5, -0.2, 2.3752115, 0.25], [1.2593104, 0.3449577, -0.75, 1.0]],
    ),
    (
        "task_arithmetic", 3, True, {"weight": WEIGHT, "lambda_": 0.7},
        [[0.696, -0.7382, 2.063, 0.425], [1.36, -0.042, -0.764, 1.3381]],
    ),
    ("ties", 3, True, DENSE, [[0.9, -0.2, 2.5999999, 0.65], [1.0, -0.5, -1.25, 1.425]]),
    (
        "ties", 3, True, {**DENSE, "normalize": False, "rescale": True},
        [[0.7473684, -0.2580001, 2.1961319, 0.6209999], [1.1907895, -0.46375, -0.9134434, 1.6493026]],
    ),
    ("breadcrumbs", 3, True, CRUMBS, [[0.78, -1.186, 1.91, 0.5], [1.62, 0.29, -0.9, 1.2099999]]),
    ("breadcrumbs_ties", 3, True, CRUMBS, [[0.84, -1.186, 1.86, 0.53], [1.62, 0.29, -0.9, 1.2099999]]),
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("method", "n", "has_base", "given", "expected"), CASES)
def test_the_mergekit_dialect_gives_mergekits_numbers(
    method: str, n: int, has_base: bool, given: dict[str, Any], expected: list[list[float]], rows: int
) -> None:
    settings = Settings(dialect="mergekit", **given)
    merged = merge_tensors(METHODS[method], TUNED[:n], settings, base=BASE if has_base else None, rows=rows)
    assert torch.allclose(merged, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_a_zero_sum_of_weighted_deltas_is_divided_by_weights_in_mergekit_and_by_counts_in_peft() -> None:
    """Delta (1, −1, 0), weights (.2, 1, 1): −1.0 in mergekit, 0.2 in PEFT."""
    deltas = [torch.tensor([value]) for value in (1.0, -1.0, 0.0)]
    results = {}
    for dialect in ("mergekit", "peft"):
        settings = Settings(dialect=dialect, weight=(0.2, 1.0, 1.0), density=(1.0, 1.0, 1.0))  # type: ignore[arg-type]
        results[dialect] = float(merge_tensors(METHODS["ties"], deltas, settings, base=torch.zeros(1)))
    assert results == pytest.approx({"mergekit": -1.0, "peft": 0.2})


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties"])
def test_the_peft_dialect_gives_what_peft_computes_on_whole_deltas(method: str) -> None:
    from peft.utils import merge_utils

    draw = torch.Generator().manual_seed(0)
    deltas = [torch.randn(12, 10, generator=draw) for _ in range(3)]
    weights = torch.tensor([0.5, 0.3, 0.7])
    # The draws of DARE are PEFT's own generator's: without a drop the rest of the method is compared.
    density = 0.5 if method == "ties" else 1.0
    theirs = getattr(merge_utils, method)(deltas, weights, density)
    settings = Settings(
        dialect="peft", weight=(0.5, 0.3, 0.7), density=(density,) * 3, streams=(1, 2, 3), normalize=None
    )
    ours = merge_tensors(METHODS[method], deltas, settings, base=torch.zeros(12, 10), rows=5)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
