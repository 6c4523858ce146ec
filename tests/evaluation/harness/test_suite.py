"""A task as a suite: its metrics, its digest, and everything that can be wrong about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.evaluation.context_window import refuse_too_long
from finetune.evaluation.harness import definition
from finetune.evaluation.harness.definition import define
from finetune.evaluation.prompts import build_prompts
from finetune.evaluation.suite import Suite, load_suite, suite_stem
from finetune.evaluation.suite_data import load_suite_data

Make = Callable[..., Suite]


def test_a_shipped_task_is_a_guarding_suite_by_name() -> None:
    suite = load_suite("lm_eval:arc_easy")
    assert (suite.name, suite.role, suite.task) == ("lm_eval-arc_easy", "regression", "lm_eval")
    assert (suite.metrics, suite.primary_metric, suite.prompt_format) == (["acc", "acc_norm"], "acc", "raw")
    assert suite_stem("lm_eval:arc_easy") == suite.name
    assert load_suite("lm_eval-arc_easy").digest == suite.digest
    assert suite.baseline_arms(["few_shot", "zero_shot"]) == ["zero_shot"]


def test_perplexities_are_taken_as_logarithms_and_filters_are_named() -> None:
    assert [metric.name for metric in define("wikitext").metrics] == [
        "log_word_perplexity", "log_byte_perplexity", "bits_per_byte"
    ]  # fmt: skip
    assert [metric.name for metric in define("gsm8k").metrics] == [
        "exact_match,strict-match", "exact_match,flexible-extract"
    ]  # fmt: skip


def test_a_suite_may_choose_among_the_metrics(task_suite: Make) -> None:
    suite = task_suite("larger_choice", "primary_metric: acc_norm", "role: task", "margin: 0.05")
    assert (suite.primary_metric, suite.role) == ("acc_norm", "task")
    scorer = "{scorer: lm_eval, metric: mine, parameters: {metric: acc_norm}}"
    suite = task_suite("larger_choice", f"scorers: [{scorer}]", "primary_metric: mine")
    assert suite.metrics == ["mine"]


def test_the_digest_holds_the_task(task_suite: Make, tasks: Path) -> None:
    before = task_suite("larger_choice").digest
    assert task_suite("larger_choice").digest == before
    file = tasks / "larger_choice.yaml"
    file.write_text(file.read_text().replace("Answer:", "So:"))
    definition._define.cache_clear()
    assert task_suite("larger_choice").digest != before


def test_the_items_of_two_prompts_differ(task_suite: Make) -> None:
    plain = load_suite_data(task_suite("larger_write"))
    fewer = load_suite_data(task_suite("larger_write", items=", num_fewshot: 1"))
    chat = load_suite_data(task_suite("larger_write", "prompt_format: chat"))
    assert len({plain.digest, fewer.digest, chat.digest}) == 3
    assert load_suite_data(task_suite("larger_write")).digest == plain.digest
    assert len(load_suite_data(task_suite("larger"), max_items=9).items) == 9


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        ("larger_choise", [], "lm_eval has no task 'larger_choise'"),
        ("larger_set", [], "names no metric that is one number a document"),
        ("larger_choice", ["primary_metric: f1"], "no scorer gives 'f1'"),
        ("larger_choice", ["decoding: {max_new_tokens: 5}"], "'decoding': the lm-eval task itself fixes"),
        ("larger_choice", ["few_shot: {k: 2}"], "'few_shot': the lm-eval task itself fixes"),
        ("larger_choice", ["task: choice"], "go with task: lm_eval, not choice"),
        ("larger_choice", ["scorers: [text_match]", "primary_metric: text_match"], "not lm_eval"),
    ],
)
def test_faults_are_named(
    task_suite: Make, task: str, more: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_local_tasks(monkeypatch)
    with pytest.raises(UserError) as caught:
        task_suite(task, *more)
    assert message in str(caught.value)


def _only_local_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexing every shipped task takes many seconds."""
    import lm_eval.tasks

    class Few(lm_eval.tasks.TaskManager):
        def __init__(self, include_path: Any = None, include_defaults: bool = True) -> None:
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Few)
    monkeypatch.setattr(definition, "_folders_naming", lambda name: [])


def test_a_name_nearby_is_offered(task_suite: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _only_local_tasks(monkeypatch)
    with pytest.raises(UserError, match="did you mean 'larger_choice'"):
        task_suite("larger_choise")


def test_without_the_package_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match="is not installed") as caught:
        load_suite("lm_eval:arc_easy", where="recipe.yaml:3:9")
    assert "pip install 'finetune-pipeline[lm-eval]'" in str(caught.value)
    assert "recipe.yaml:3:9" in str(caught.value)


def test_data_that_cannot_be_fetched_is_told_with_its_remedy() -> None:
    with pytest.raises(UserError, match="the lm-eval task arc_easy cannot be read") as caught:
        load_suite_data(load_suite("lm_eval:arc_easy"))
    assert "HF_HUB_OFFLINE" in str(caught.value)


def test_code_of_the_model_is_not_run_unless_allowed(
    task_suite: Make, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FINETUNE_ALLOW_CODE_EXECUTION", raising=False)
    file = tasks / "larger_choice.yaml"
    file.write_text(file.read_text() + "unsafe_code: true\n")
    definition._define.cache_clear()
    with pytest.raises(UserError, match="runs code that the model wrote"):
        load_suite_data(task_suite("larger_choice"))


def test_a_metric_that_the_task_does_not_give_is_an_error(
    task_suite: Make, lively_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    from finetune.evaluation.run import evaluate_arm

    scorer = "{scorer: lm_eval, metric: mine, parameters: {metric: acc_nrm}}"
    suite = task_suite("larger_choice", f"scorers: [{scorer}]", "primary_metric: mine")
    with pytest.raises(UserError, match="the task gives no 'acc_nrm,none'") as caught:
        evaluate_arm(
            lively_model, tiny_tokenizer, suite, load_suite_data(suite).items,
            arm="zero_shot", batch_size=1, out_folder=tmp_path / "out", key="k",
        )  # fmt: skip
    assert "did you mean 'acc_norm,none'" in str(caught.value)


def test_documents_longer_than_the_context_are_named(task_suite: Make, tiny_tokenizer: Any) -> None:
    suite = task_suite("larger_write")
    items = load_suite_data(suite, max_items=2).items
    prompts = build_prompts(suite, items, tiny_tokenizer, arm="tuned")
    longest = max(len(prompt.ids) for prompt in prompts)
    refuse_too_long(suite, items, prompts, longest + 9, "tuned", tiny_tokenizer)
    with pytest.raises(UserError, match="num_fewshot"):
        refuse_too_long(suite, items, prompts, longest + 8, "tuned", tiny_tokenizer)


def test_decoding_that_we_cannot_follow_is_refused() -> None:
    from finetune.evaluation.harness.model import decoding_of

    assert decoding_of({"until": "\n", "do_sample": False, "temperature": 0.7}).temperature == 0.0
    sampled = decoding_of({"until": ["\n", ""], "do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert (sampled.temperature, sampled.top_p, sampled.stop, sampled.max_new_tokens) == (
        0.7,
        0.9,
        ["\n"],
        256,
    )
    with pytest.raises(UserError, match="'num_beams: 4', which is not supported"):
        decoding_of({"num_beams": 4})
    with pytest.raises(UserError, match=r"'repetition_penalty: 1\.2', which is not supported"):
        decoding_of({"repetition_penalty": 1.2})


def test_items_of_a_task_cannot_be_pinned(task_suite: Make, tmp_path: Path) -> None:
    from finetune.evaluation.pin import pin_items

    suite = task_suite("larger_choice")
    with pytest.raises(UserError, match="no items that could be pinned"):
        pin_items(suite, load_suite_data(suite).items, [], folder=tmp_path)


def test_a_recipe_names_a_task_as_a_suite(tiny_model_folder: Path, tmp_path: Path) -> None:
    from finetune.pipeline.inputs import gather_inputs
    from finetune.recipe.resolve import resolved_yaml

    (tmp_path / "mine.yaml").write_text("name: mine\nsource: {kind: jsonl, files: [rows.jsonl]}\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"recipe: 1\nname: mine\nmodel: {{id: {tiny_model_folder}}}\ndata: {{spec: mine.yaml}}\n"
        "eval: {suites: [home_intents, 'lm_eval:arc_easy']}\n"
    )
    inputs = gather_inputs(str(recipe))
    assert [suite.name for suite in inputs.suites] == ["home_intents", "lm_eval-arc_easy"]
    assert "lm_eval:arc_easy" in resolved_yaml(inputs.recipe)
    recipe.write_text(recipe.read_text().replace("arc_easy", ""))
    with pytest.raises(UserError, match="names no task"):
        gather_inputs(str(recipe))
