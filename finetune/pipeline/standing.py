"""Ask a suite of any model by its name: a run, a merged model, a folder, a hub id. Nothing needs to be tuned for that.

Answers lie in the store that all runs share (`baseline_store`), so a base that a run has asked already costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.data.spec_generated import AnsweringModel
from finetune.errors import UserError
from finetune.evaluation.canary import adapter_sha256, canary_differs
from finetune.evaluation.prompts import ARMS, Arm
from finetune.evaluation.run import prepare_arm
from finetune.evaluation.saved_arms import TUNED, SavedArm
from finetune.evaluation.suite import Suite
from finetune.evaluation.suite_data import load_suite_data
from finetune.pipeline.answerer import Answerer, find_answerer
from finetune.pipeline.baseline_store import answer_in_store
from finetune.pipeline.manifest import FILE_NAME
from finetune.pipeline.starts import find_folder

Say = Callable[[str], None]
_CANARY_PROMPTS = 2


def find_model(name: str, *, dtype: str, say: Say) -> tuple[Answerer, Path | None]:
    """Who answers under a name, and the run whose tuned model it is, if any. dtype: compute type of any other model.

    Raises UserError where no model has that name.
    """
    folder = find_folder(name, Path.cwd())
    run = folder if folder is not None and (folder / FILE_NAME).is_file() else None
    asked = {"run": name} if run is not None else {"id": name, "dtype": dtype}
    section = AnsweringModel.model_validate(asked)
    return find_answerer(section, Path.cwd(), name, server=None, say=say), run


def answer_suite(
    name: str,
    suite: Suite,
    *,
    arm: str | None = None,
    max_items: int | None = None,
    batch_size: int = 32,
    dtype: str = "fp32",
    say: Say,
) -> SavedArm:
    """The answers of the model `name` to a suite, generated where the store lacks them.

    arm: the prompt it is asked with; by default a run's model is asked as it was trained (`tuned`), any other model with the
    best prompt of the suite for a model that was not. Raises UserError for an arm that the suite does not have.
    """
    answerer, run = find_model(name, dtype=dtype, say=say)
    chosen = _arm(arm, suite, of_run=run is not None)
    data = load_suite_data(suite, max_items=max_items)
    job = prepare_arm(
        answerer.tokenizer, suite, data.items, arm=chosen, few_shot=data.few_shot_rows, key=answerer.digest
    )

    def load() -> Any:
        say(f"evaluate: {suite.name}, {len(data.items)} items, {name} ({chosen})")
        model = answerer.load()
        if hasattr(model, "peft_config"):
            canary_differs(model, [prompt.ids for prompt in job.prompts[:_CANARY_PROMPTS]])
        return model

    folder = answer_in_store(
        job,
        model_key=answerer.digest,
        model=load,
        batch_size=batch_size,
        adapter_sha256=_adapter_of(run) if run is not None else None,
        say=say,
    )
    return SavedArm(folder, chosen)


def _adapter_of(run: Path) -> str | None:
    return adapter_sha256(run / "adapter") if (run / "adapter").is_dir() else None


def _arm(wanted: str | None, suite: Suite, *, of_run: bool) -> Arm:
    name = wanted or (TUNED if of_run else suite.baseline_arms(["few_shot"])[0])
    if name not in ARMS:
        raise UserError(f"there is no arm '{name}'", where="--arm", fix=f"one of: {', '.join(ARMS)}")
    if name == "few_shot" and suite.few_shot is None:
        raise UserError(
            f"suite {suite.name} shows no examples", where="--arm", fix="choose zero_shot or tuned"
        )
    return name
