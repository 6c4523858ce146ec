"""Local tasks of the lm-evaluation-harness: YAML files over JSONL beside them, so that no test needs the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.evaluation.suite import Suite, load_suite

ROWS = [
    {"question": f"Which is larger, {n} or {n + 3}?", "choices": [f"{n}", f"{n + 3}, clearly"], "gold": 1,
     "answer": f"{n + 3}", "text": f"Line {n}. " * (1 + 6 * n)}
    for n in range(7)
]  # fmt: skip
TASKS = {
    "larger_choice": """\
output_type: multiple_choice
doc_to_text: "{{question}} Answer:"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
  - {metric: f1}
""",
    "larger_write": """\
output_type: generate_until
doc_to_text: "Q: {{question}}\\nA:"
doc_to_target: answer
fewshot_split: train
num_fewshot: 2
generation_kwargs: {until: ["\\n", "Q:"], max_gen_toks: 9, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
filter_list:
  - name: whole
    filter: [{function: take_first}]
  - name: first-letter
    filter: [{function: regex, regex_pattern: "(.)"}, {function: take_first}]
""",
    "larger_text": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    "larger_last": """\
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{answer}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "larger_set": """\
output_type: multiple_choice
doc_to_text: "{{question}} Answer:"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - {metric: f1}
""",
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of task files with their data."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "tasks"
    folder.mkdir()
    for split, rows in (
        ("test", ROWS),
        ("train", [{**row, "question": f"Train: {row['question']}"} for row in ROWS]),
    ):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {json.dumps(files)}}}\n"
        (folder / f"{name}.yaml").write_text(
            head + "test_split: test\ntraining_split: train\nmetadata: {version: 1.0}\n" + text
        )
    (folder / "group.yaml").write_text("group: larger\ntask: [larger_choice, larger_last]\n")
    return folder


@pytest.fixture
def task_suite(tasks: Path, tmp_path: Path) -> Callable[..., Suite]:
    """A suite over one of the local tasks; more lines of YAML may be given."""

    def make(task: str, *more: str, items: str = "") -> Suite:
        path = tmp_path / f"{task}-suite.yaml"
        lines = [f"suite: 1\nname: {task}", f"items: {{lm_eval: {task}, include_path: tasks{items}}}", *more]
        path.write_text("\n".join(lines) + "\n")
        return load_suite(path)

    return make


@pytest.fixture
def samples_of(tasks: Path) -> Callable[..., list[dict[str, Any]]]:
    """What the harness's own `hf` backend makes of a task, document by document."""

    def samples(model: Any, tokenizer: Any, task: str, **options: Any) -> list[dict[str, Any]]:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        results = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1),
            tasks=[task],
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            bootstrap_iters=0,
            **options,
        )
        assert results is not None
        return list(results["samples"][task])

    return samples
