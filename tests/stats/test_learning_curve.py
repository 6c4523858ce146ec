"""The power law: recovered from points that lie on one, and honest where nothing falls."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.errors import UserError
from finetune.stats.learning_curve import fit_learning_curve

SIZES = [120, 250, 500, 1000]


def _rows(losses: list[float], n_rows: int, noise: float, seed: int) -> tuple[list[list[float]], list[int]]:
    """Rows of 10 targets; each keeps its own hardness at every size, with a little noise of the training."""
    generator = np.random.default_rng(seed)
    hardness = generator.normal(0, 0.3, n_rows)
    sums = [list(10 * (loss + hardness + generator.normal(0, noise, n_rows))) for loss in losses]
    return sums, [10] * n_rows


def test_a_power_law_is_found_again() -> None:
    losses = [0.5 + 8.0 * size**-0.4 for size in SIZES]
    found = fit_learning_curve(SIZES, [[10 * loss] * 5 for loss in losses], [10] * 5)
    assert found.exponent == pytest.approx(0.4, abs=0.03)
    assert found.floor == pytest.approx(0.5, abs=0.05)
    assert found.change == pytest.approx(8.0 * (2000**-0.4 - 1000**-0.4), abs=2e-3)
    assert found.low <= found.change <= found.high


def test_the_order_of_sizes_does_not_matter() -> None:
    losses = [0.5 + 8.0 * size**-0.4 for size in SIZES]
    sums, targets = _rows(losses, 40, 0.05, 1)
    turned = fit_learning_curve(SIZES[::-1], sums[::-1], targets)
    assert turned == fit_learning_curve(SIZES, sums, targets)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Over 60 draws of validation rows; the truth is the change of the curve that the losses came from."""
    losses = [0.5 + 8.0 * size**-0.4 for size in SIZES]
    truth = 8.0 * (2000**-0.4 - 1000**-0.4)
    held = 0
    for seed in range(60):
        sums, targets = _rows(losses, 100, 0.05, seed)
        found = fit_learning_curve(SIZES, sums, targets, seed=seed)
        held += found.low <= truth <= found.high
    assert held >= 50  # 57 are expected, fewer than 50 in one of 5,000


@pytest.mark.parametrize("spread", [0.005, 0.02])
def test_with_repeats_it_does_so_although_seeds_differ(spread: float) -> None:
    losses = [0.5 + 8.0 * size**-0.4 for size in SIZES]
    truth = 8.0 * (2000**-0.4 - 1000**-0.4)
    held = {True: 0, False: 0}
    for seed in range(60):
        noise = np.random.default_rng(1000 + seed).normal(0.0, spread, len(SIZES) + 2)
        measured = [loss + off for loss, off in zip([*losses, losses[0], losses[0]], noise, strict=True)]
        sums, targets = _rows(measured, 100, 0.05, seed)
        for repeats in held:
            more = {"repeats": sums[len(SIZES) :]} if repeats else {}
            found = fit_learning_curve(SIZES, sums[: len(SIZES)], targets, seed=seed, **more)
            held[repeats] += found.low <= truth <= found.high
            assert (found.seed_spread is not None) == repeats == ("seeds of training (which" in found.line())
    assert held[True] >= 50 > held[False]  # of 60; without repeats 73 % and 32 % were found


def test_a_flat_curve_promises_nothing() -> None:
    found = fit_learning_curve(SIZES, [[10.0] * 5] * 4, [10] * 5)
    assert found.change == 0.0 and found.low == found.high == 0.0
    assert "no gain is shown" in found.line()


def test_two_sizes_are_no_curve() -> None:
    with pytest.raises(UserError, match="needs 3 sizes"):
        fit_learning_curve([10, 20], [[1.0], [1.0]], [1])
