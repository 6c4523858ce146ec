"""The e-process: its value, its decision, and its promise under repeated looks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from finetune.errors import UserError
from finetune.stats.binary import mcnemar_mid_p
from finetune.stats.sequential import EProcess


@pytest.mark.parametrize(("fixed", "broken"), [(0, 0), (1, 0), (7, 3), (40, 20)])
def test_value_by_definition(fixed: int, broken: int) -> None:
    expected = special.beta(fixed + 0.5, broken + 0.5) / special.beta(0.5, 0.5) * 2.0 ** (fixed + broken)
    process = EProcess(fixed=fixed, broken=broken)
    assert process.e_value == pytest.approx(expected)
    assert process.p_value == pytest.approx(min(1.0, 1.0 / expected))


def test_it_is_a_martingale() -> None:
    """Under equal arms the value after one more discordant item is on average what it was."""
    for fixed, broken in ((0, 0), (3, 5), (12, 4)):
        now = math.exp(EProcess.log_e_value(fixed, broken))
        later = (
            math.exp(EProcess.log_e_value(fixed + 1, broken))
            + math.exp(EProcess.log_e_value(fixed, broken + 1))
        ) / 2
        assert later == pytest.approx(now)


def test_decides_in_the_right_direction_and_only_when_sure() -> None:
    process = EProcess()
    assert process.decision is None
    process.update(fixed=4, broken=4)
    assert process.decision is None
    process.update(fixed=40, broken=2)
    assert process.decision == "improved"
    assert EProcess(fixed=2, broken=40).decision == "regressed"
    assert EProcess(alpha=0.0001, fixed=14, broken=2).decision is None


def test_overwhelming_evidence_does_not_overflow() -> None:
    process = EProcess(fixed=5000, broken=10)
    assert math.isfinite(process.e_value)
    assert 0.0 < process.p_value < 1e-100


def test_peeking_keeps_the_promise_that_a_fixed_test_breaks() -> None:
    """2,000 equal items, 20 % discordant: a fixed-n test after every 100 items against the e-process after every item."""
    generator = np.random.default_rng(0)
    discordant = generator.random((1000, 2000)) < 0.2
    fixed = (discordant & (generator.random((1000, 2000)) < 0.5)).cumsum(axis=1)
    broken = discordant.cumsum(axis=1) - fixed
    looks = slice(99, None, 100)
    naive = (mcnemar_mid_p(fixed[:, looks], broken[:, looks]) <= 0.05).any(axis=1).mean()
    process = (EProcess.log_e_value(fixed, broken) >= math.log(20)).any(axis=1).mean()
    assert naive == pytest.approx(0.239, abs=0.04)
    assert process == pytest.approx(0.033, abs=0.017)
    assert process <= 0.05


def test_bad_use() -> None:
    with pytest.raises(UserError, match="alpha"):
        EProcess(alpha=5)
    with pytest.raises(ValueError, match="negative"):
        EProcess().update(-1, 0)
