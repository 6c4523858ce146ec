"""The rule by which a loss has diverged: ten bad steps in a row, worse than before training."""

from __future__ import annotations

import math
import random

import pytest

from finetune.telemetry.divergence import STEPS, DivergenceRule, first_divergence, rewind_sentence

FALLING = [3.0 - 0.05 * step for step in range(30)]  # to 1.55


def test_a_rise_above_the_start_that_stays_is_a_divergence_from_its_first_step() -> None:
    assert first_divergence([*FALLING, *[6.0] * STEPS]) == len(FALLING)
    assert first_divergence([*FALLING, *[6.0] * (STEPS - 1)]) is None


@pytest.mark.parametrize(
    "after",
    [
        [9.0, 9.0, 9.0, *[1.5] * 30],  # a spike that recovers
        [2.4] * 30,  # worse than its best, better than the untrained model
        [*[9.0] * 6, *[1.5] * 4] * 5,  # spikes that recover, over and over
        [],
    ],
)
def test_what_is_none(after: list[float]) -> None:
    assert first_divergence([*FALLING, *after]) is None


def test_a_loss_over_few_examples_diverges_in_spite_of_its_good_steps() -> None:
    """Batches of a few pairs: of a broken model every fourth step still looks well, so that no ten in a row are bad."""
    draw = random.Random(5)
    before = [max(0.7 - 0.01 * step, 0.4) + draw.gauss(0, 0.08) for step in range(40)]
    after = [0.3 if step % 4 == 3 else draw.uniform(2, 6) for step in range(40)]
    assert first_divergence([*before, *after]) == 40
    assert (
        first_divergence([*before, *[draw.uniform(2, 6) if step % 3 else 0.4 for step in range(12)], *before])
        is None
    )


def test_a_loss_that_wavers_near_zero_is_not_lost() -> None:
    assert first_divergence([0.002] * 40 + [0.06 if step % 4 else 0.001 for step in range(60)]) is None


def test_losses_that_are_not_finite_count_as_bad() -> None:
    assert first_divergence([*FALLING, *[math.nan] * STEPS]) == len(FALLING)
    assert first_divergence([*FALLING, *[math.inf] * STEPS]) == len(FALLING)


def test_noise_around_the_start_is_none() -> None:
    """A loss that never falls and swings by a third says nothing about divergence."""
    assert first_divergence([2.0 + 0.7 * (-1) ** step for step in range(200)]) is None


def test_the_rule_is_told_step_by_step_and_names_the_onset() -> None:
    rule = DivergenceRule()
    said = [rule.add(loss) for loss in [*FALLING, *[7.0] * STEPS]]
    assert said == [False] * (len(FALLING) + STEPS - 1) + [True]
    assert rule.onset == len(FALLING)


def test_an_act_is_told_in_one_sentence() -> None:
    act = {"reason": "diverged", "onset": 21, "step": 20, "rate_factor": 0.5, "rate_share": 0.25, "rows": []}
    assert (
        rewind_sentence(act)
        == "After divergence at step 21 the run went back to step 20 and on with 0.25 of the rate."
    )
    rows = [f"row-{number}" for number in range(25)]
    told = rewind_sentence({**act, "reason": "not_finite", "rows": rows})
    assert told.startswith("After a loss or gradient that was not finite at step 21 ")
    assert "without rows row-0, row-1," in told and told.endswith("row-19 and 5 more.")
