"""A teacher beside the student is in the forecast, and one that is read from a cache is not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from finetune.plan.builtin import BUILTIN_CONFIGS
from finetune.plan.fits import fits, with_changes
from finetune.plan.forecast import Forecast
from finetune.plan.memory import forecast_training
from finetune.plan.teacher import TeacherPlan
from finetune.recipe.schema import Recipe

CONFIG = BUILTIN_CONFIGS["smollm2-135m-instruct"]
N_PARAMETERS = 134_515_008


def recipe(**distil: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r",
            "model": {"id": "builtin:smollm2-135m-instruct"},
            "data": {"spec": "home_intents", "max_tokens": 256},
            "train": {"method": "distil", "pack_tokens": 512},
            "distil": {"teacher": {"id": "builtin:smollm2-135m-instruct"}, **distil},
            "eval": {"suites": ["home_intents"]},
        }
    )


def forecast(given: Recipe, **teacher: Any) -> Forecast:
    return forecast_training(given, CONFIG, teacher=TeacherPlan(CONFIG, **teacher))


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_a_live_teacher_adds_its_weights_and_states(dtype: str, size: int) -> None:
    cached, live = forecast(recipe()), forecast(recipe(targets="live"), dtype=dtype)
    assert cached.terms_bytes["teacher"] == 0
    states = live.assumptions["tokens_per_forward"] * CONFIG["hidden_size"] * size
    assert live.terms_bytes["teacher"] == N_PARAMETERS * size + states
    assert live.total_bytes - cached.total_bytes == live.terms_bytes["teacher"]


def test_a_quantized_teacher_is_smaller_and_its_adapter_counts() -> None:
    live = recipe(targets="live")
    plain, small = forecast(live), forecast(live, quantize="nf4")
    assert small.terms_bytes["teacher"] < 0.7 * plain.terms_bytes["teacher"]
    assert forecast(live, adapter_parameters=1000).total_bytes == plain.total_bytes + 4000


def test_a_large_teachers_own_pass_can_be_the_worst_moment() -> None:
    large = {
        **CONFIG,
        "hidden_size": 9216,
        "intermediate_size": 500_000,
        "num_attention_heads": 144,
        "num_key_value_heads": 48,
    }
    found = forecast_training(recipe(targets="live"), CONFIG, teacher=TeacherPlan(large))
    assert found.moment == "teacher's pass"


def test_what_does_not_fit_beside_a_teacher_is_offered_the_cache() -> None:
    live = recipe(targets="live")
    needed = forecast(recipe())
    fit = fits(forecast(live), needed.total_bytes + 1, live, forecast)
    changes = [suggestion.changes for suggestion in fit.suggestions if suggestion.fits]
    assert {"distil.targets": "cache"} in changes
    changed = with_changes(live, {"distil.targets": "cache"})
    assert changed.distil is not None and changed.distil.targets == "cache"
    assert not any("distil.targets" in one for one in changes if len(one) > 1)


def test_way_answers_holds_no_teacher() -> None:
    assert forecast(recipe(way="answers")).terms_bytes["teacher"] == 0


def test_a_plan_with_a_live_teacher_leaves_torch_out() -> None:
    code = (
        "import sys\nfrom finetune.cli.main import main\n"
        "sys.argv = ['finetune', 'plan', 'distil/home_intents', '--set', 'distil.targets=live', '--json']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["training"]["terms_bytes"]["teacher"] > 2 * N_PARAMETERS
