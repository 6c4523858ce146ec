"""Cluster-robust means against explicit matrix algebra and against statsmodels."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.stats.clusters import (
    UnitTotals,
    cluster_codes,
    design_degrees_of_freedom,
    effective_items,
    intra_cluster_correlation,
    robust_mean,
    skewness,
    unit_totals,
)


def inverse_root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return vectors @ np.diag(values**-0.5) @ vectors.T


def cr2_by_matrices(values: np.ndarray, codes: np.ndarray, correlation: float) -> tuple[float, float]:
    """(standard error, Satterthwaite degrees of freedom) of an intercept-only regression, from the definitions."""
    n, groups = len(values), codes.max() + 1
    hat = np.full((n, n), 1 / n)
    residual_maker = np.eye(n) - hat
    rows = np.zeros((groups, n))
    for group in range(groups):
        inside = np.flatnonzero(codes == group)
        adjusted = inverse_root(np.eye(len(inside)) - hat[np.ix_(inside, inside)])
        selector = np.zeros((len(inside), n))
        selector[np.arange(len(inside)), inside] = 1
        rows[group] = np.ones(len(inside)) @ adjusted @ selector @ residual_maker
    variance = float(((rows @ values) ** 2).sum()) / n**2
    covariance = np.where(codes[:, None] == codes[None, :], correlation, 0.0)
    np.fill_diagonal(covariance, 1.0)
    form = rows @ covariance @ rows.T
    return np.sqrt(variance), float(np.trace(form) ** 2 / np.trace(form @ form))


def test_unequal_clusters_against_matrices() -> None:
    generator = np.random.default_rng(0)
    codes = np.repeat(np.arange(7), [1, 2, 3, 5, 8, 13, 4])
    values = generator.normal(size=7)[codes] + generator.normal(size=len(codes))
    totals = unit_totals(values, codes.tolist())
    found = robust_mean(totals)
    error, dof = cr2_by_matrices(values, codes, float(intra_cluster_correlation(totals)))
    assert found.standard_error == pytest.approx(error)
    assert found.degrees_of_freedom == pytest.approx(dof)
    assert found.degrees_of_freedom < 6.0


@pytest.mark.parametrize("correlation", [0.0, 0.3, 1.0])
def test_degrees_of_freedom_of_a_design(correlation: float) -> None:
    sizes = [1, 2, 3, 5, 8]
    codes = np.repeat(np.arange(5), sizes)
    _, dof = cr2_by_matrices(np.zeros(len(codes)), codes, correlation)
    found = design_degrees_of_freedom(np.array(sizes, dtype=float), correlation)
    assert found == pytest.approx(min(dof, 4.0))


def test_equal_clusters_against_statsmodels() -> None:
    generator = np.random.default_rng(1)
    codes = np.repeat(np.arange(20), 6)
    values = generator.normal(size=20)[codes] + generator.normal(size=120)
    found = robust_mean(unit_totals(values, codes.tolist()))
    fitted = sm.OLS(values, np.ones((120, 1))).fit(
        cov_type="cluster", cov_kwds={"groups": codes, "use_correction": True}
    )
    assert found.mean == pytest.approx(fitted.params[0])
    assert found.standard_error == pytest.approx(fitted.bse[0])
    assert found.degrees_of_freedom == pytest.approx(19.0)


def test_single_items_give_the_ordinary_standard_error() -> None:
    values = np.random.default_rng(2).normal(size=30)
    found = robust_mean(unit_totals(values, None))
    assert found.standard_error == pytest.approx(values.std(ddof=1) / np.sqrt(30))
    assert found.degrees_of_freedom == pytest.approx(29.0)


def test_one_cluster_has_no_finite_error() -> None:
    found = robust_mean(unit_totals(np.array([1.0, 2.0]), ["a", "a"]))
    assert found.standard_error == np.inf
    assert found.degrees_of_freedom == 0.0


def test_correlation_at_its_ends() -> None:
    alike = unit_totals(np.repeat([0.0, 1.0, 2.0], 4), [0] * 4 + [1] * 4 + [2] * 4)
    assert intra_cluster_correlation(alike) == pytest.approx(1.0)
    unlike = unit_totals(np.array([0.0, 1.0] * 3), [0, 0, 1, 1, 2, 2])
    assert intra_cluster_correlation(unlike) == 0.0
    assert intra_cluster_correlation(unit_totals(np.array([0.0, 1.0, 5.0]), None)) == 0.0


def test_effective_items() -> None:
    assert effective_items(0.25, 0.05, 1000, 50) == pytest.approx(100.0)
    assert effective_items(0.0, 0.0, 1000, 50) == 50.0
    assert effective_items(0.25, 0.0, 1000, 50) == 1000.0


def test_batches_equal_single_data_sets() -> None:
    generator = np.random.default_rng(3)
    sums, sizes = generator.normal(size=(4, 6)), generator.integers(1, 5, (4, 6)).astype(float)
    squares = sums**2 + generator.random((4, 6))
    together = robust_mean(UnitTotals(sums, sizes, squares))
    for row in range(4):
        alone = robust_mean(UnitTotals(sums[row], sizes[row], squares[row]))
        assert together.standard_error[row] == pytest.approx(alone.standard_error)
        assert together.degrees_of_freedom[row] == pytest.approx(alone.degrees_of_freedom)
        assert skewness(UnitTotals(sums, sizes, squares))[row] == pytest.approx(
            float(skewness(UnitTotals(sums[row], sizes[row], squares[row])))
        )


def test_labels_of_any_type() -> None:
    assert cluster_codes(["x", 3, (1, 2), "x", 3]).tolist() == [0, 1, 2, 0, 1]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(-1, 1)), min_size=2, max_size=30),
    st.randoms(use_true_random=False),
)
def test_order_and_names_change_nothing(rows: list[tuple[int, float]], random: object) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one = unit_totals(np.array([value for _, value in rows]), [label for label, _ in rows])
    two = unit_totals(np.array([value for _, value in shuffled]), [f"name {label}" for label, _ in shuffled])
    for name in ("sums", "sizes", "squares"):
        assert getattr(one, name).tolist() == getattr(two, name).tolist()
