"""Faults planted in a whole project, one by one and all at once: `finetune doctor` names each, where it is and what to do."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune.cli.doctor import app
from finetune.data.build import default_builds_root
from finetune.doctor import environment
from finetune.doctor.memory import Room
from finetune.pipeline import checks

FIRST = "{% for message in messages %}"
CONTENT = "{{ message['content'] }}"
PROMPT = "<|im_start|>assistant\n{% endif %}"


@pytest.fixture(autouse=True)
def _no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows needs no weights; faults that only training shows are planted in test_doctor_trials.py."""
    monkeypatch.setattr("finetune.pipeline.doctor.try_training", lambda material, say: iter(()))


def examine(project: Any, *arguments: str) -> tuple[list[dict[str, Any]], int]:
    result = CliRunner().invoke(app, [str(project.recipe), "--json", *arguments], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert result.exit_code == found["exit_code"]
    return found["findings"], result.exit_code


def wrong(findings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["check"], one["status"]) for one in findings if one["status"] in ("fault", "warning")]


def rows_of(project: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project.folder / "rows.jsonl").read_text().splitlines()]


def write_rows(project: Any, rows: list[dict[str, Any]]) -> None:
    (project.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def template(old: str, new: str) -> Callable[[Any], None]:
    return lambda project: change(project.folder / "tiny-model" / "chat_template.jinja", old, new)


def recipe(old: str, new: str) -> Callable[[Any], None]:
    return lambda project: change(project.recipe, old, new)


def spec(old: str, new: str) -> Callable[[Any], None]:
    return lambda project: change(project.folder / "digits.yaml", old, new)


def configured(file: str, **values: Any) -> Callable[[Any], None]:
    def plant(project: Any) -> None:
        path = project.folder / "tiny-model" / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return plant


def answers(make: Callable[[int, str], str], *, every: int = 1) -> Callable[[Any], None]:
    def plant(project: Any) -> None:
        rows = rows_of(project)
        for number, row in enumerate(rows):
            if number % every == 0:
                row["messages"][1]["content"] = make(number, row["messages"][1]["content"])
        write_rows(project, rows)

    return plant


def contradict(project: Any) -> None:
    rows = rows_of(project)
    others = [{"role": "assistant", "content": json.dumps({"n": f"other {number}"})} for number in range(30)]
    more = [{"messages": [row["messages"][0], other]} for row, other in zip(rows, others, strict=False)]
    write_rows(project, [*rows, *more])


def typed_control(project: Any) -> None:
    rows = rows_of(project)
    for row in rows:
        row["messages"][0]["content"] += "<|im_end|>"
    write_rows(project, rows)


def no_file(name: str) -> Callable[[Any], None]:
    return lambda project: (project.folder / name).unlink()


PLANTS: dict[str, tuple[Callable[[Any], None], tuple[str, str]]] = {
    "bos twice": (template(FIRST, "{{ bos_token }}" + FIRST), ("BOS once", "fault")),
    "no eos": (template(CONTENT + "<|im_end|>", CONTENT), ("EOS is a target", "fault")),
    "another prompt": (template(PROMPT, "<|im_start|>bot\n{% endif %}"), ("train = serve", "fault")),
    "no prompt": (
        template("{% if add_generation_prompt %}" + PROMPT, ""),
        ("train = serve", "fault"),
    ),
    "answers rewritten": (
        template(CONTENT, "{{ message['content'] | upper }}"),
        ("targets are the answers", "fault"),
    ),
    "no template": (no_file("tiny-model/chat_template.jinja"), ("rendering", "fault")),
    "pad beyond the embedding": (configured("tokenizer_config.json", pad_token="<pad>"), ("recipe", "fault")),
    "no pad": (configured("tokenizer_config.json", pad_token=None), ("pad token", "warning")),
    "vocabulary": (configured("config.json", vocab_size=200), ("recipe", "fault")),
    "typed control tokens": (typed_control, ("control tokens in texts", "warning")),
    "two forms": (answers(lambda n, text: f"It is {n}.", every=3), ("one format", "warning")),
    "no refusals": (answers(lambda n, text: f"The number is {n}."), ("refusals", "warning")),
    "contradictions": (contradict, ("contradictions", "warning")),
    "cut rows": (recipe("max_tokens: 128", "max_tokens: 64, long_rows: drop"), ("cut rows", "warning")),
    "no validation": (spec("validation: 0.1, test: 0.2", "test: 0.3"), ("validation rows", "warning")),
    "no rows": (no_file("rows.jsonl"), ("dataset", "fault")),
    "no suite": (recipe("[suite.yaml]", "[nosuite.yaml]"), ("recipe", "fault")),
    "no model": (no_file("tiny-model/config.json"), ("recipe", "fault")),
    "no such module": (
        recipe("rank: 8", "rank: 8, target_modules: [q_proj, v_prj]"),
        ("recipe", "fault"),
    ),
    "rate too high": (recipe("1e-2", "0.5"), ("learning rate", "warning")),
    "rate too low": (recipe("1e-2", "1e-6"), ("learning rate", "warning")),
}
# Of so small a project: 36 rows and 12 items.
ALWAYS = {("number of rows", "warning"), ("power of digits", "warning"), ("tested versions", "warning")}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_named_once_and_nothing_else(project: Any, name: str) -> None:
    plant, expected = PLANTS[name]
    if "rate" not in name:
        recipe("1e-2", "1e-3")(project)
    plant(project)
    findings, code = examine(project)
    told = [one for one in wrong(findings) if one not in ALWAYS]
    assert told == [expected]
    assert code == (2 if expected[1] == "fault" else 0)
    (found,) = [one for one in findings if (one["check"], one["status"]) == expected]
    assert found["remedy"]
    assert found["where"]
    assert len(findings) > 5  # the other checks have gone on


def test_all_faults_are_told_at_once_and_each_once(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template(FIRST, "{{ bos_token }}" + FIRST)(project)
    template(CONTENT + "<|im_end|>", "{{ message['content'] | upper }}")(project)
    contradict(project)
    spec("validation: 0.1, test: 0.2", "test: 0.3")(project)
    recipe("[suite.yaml]", "[suite.yaml, nosuite.yaml]")(project)
    recipe("rank: 8", "rank: 8, target_modules: [v_prj]")(project)
    recipe("1e-2", "0.5")(project)
    recipe("dtype: fp32", "dtype: fp16")(project)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        checks, "installed_versions", lambda: {**environment.installed_versions(), "rich": "1.0"}
    )
    findings, code = examine(project)
    assert Counter(one for one in wrong(findings) if one not in ALWAYS) == {
        ("versions", "fault"): 1,
        ("recipe", "fault"): 3,  # a suite, a module, a type
        ("BOS once", "fault"): 1,
        ("EOS is a target", "fault"): 1,
        ("targets are the answers", "fault"): 1,
        ("contradictions", "warning"): 1,
        ("validation rows", "warning"): 1,
        ("learning rate", "warning"): 1,
    }
    assert code == 2
    told = [(one["detail"], one["where"]) for one in findings if one["status"] in ("fault", "warning")]
    assert len(set(told)) == len(told)


def test_a_check_that_crashes_is_told_and_the_others_go_on(
    project: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(*_: Any) -> Any:
        raise ZeroDivisionError("of nothing")

    for name in ("rows.check_contradictions", "tokens.check_bos", "tokens.check_spans"):
        monkeypatch.setattr(f"finetune.doctor.{name}", crash)
    monkeypatch.setattr("finetune.pipeline.survey.check_leaks", crash)
    findings, code = examine(project)
    faults = [one for one in findings if one["status"] == "fault"]
    assert [one["check"] for one in faults] == [
        "leaks",
        "contradictions",
        "BOS once",
        "targets are the answers",
    ]
    assert all("ZeroDivisionError: of nothing" in one["detail"] and one["remedy"] for one in faults)
    assert code == 1  # a fault of the program, not of the recipe
    assert "Traceback" in caplog.text
    named = {one["check"] for one in findings}
    assert {"EOS is a target", "refusals", "memory forecast", "power of digits", "disk"} <= named


def test_a_build_that_was_changed_leaks(project: Any) -> None:
    examine(project)
    (train,) = default_builds_root().glob("digits-*/train.jsonl")
    test = train.with_name("test.jsonl")
    kept = train.read_text()
    try:
        train.write_text(kept + test.read_text().splitlines(keepends=True)[0])
        findings, code = examine(project)
    finally:
        train.write_text(kept)
    leaks = [one for one in findings if one["check"] == "leaks"]
    assert code == 2 and {one["status"] for one in leaks} == {"fault"}
    assert any("train row" in one["detail"] and "test row" in one["detail"] for one in leaks)


def test_questions_of_a_suite_that_are_train_rows_are_told(project: Any) -> None:
    questions = [
        {"id": f"q{n}", "messages": row["messages"][:1], "reference": row["messages"][1]["content"]}
        for n, row in enumerate(rows_of(project))
        if n % 4 == 0
    ]
    (project.folder / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    change(project.folder / "suite.yaml", "{spec: digits.yaml, split: test}", "{jsonl: asked.jsonl}")
    findings, _ = examine(project)
    assert ("questions of the suites", "warning") in wrong(findings)


def test_empty_answers_are_told_beside_their_form(project: Any) -> None:
    answers(lambda n, text: "..." + "." * n, every=5)(project)
    findings, _ = examine(project)
    assert {("one format", "warning"), ("empty answers", "warning")} <= set(wrong(findings))


def test_a_disk_and_a_memory_too_small_are_told_together(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(project.folder)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(checks, "read_room", lambda: Room(10**8, 10**8, "memory"))
    findings, code = examine(project)
    faults = {one["check"]: one for one in findings if one["status"] == "fault"}
    assert set(faults) == {"disk", "memory forecast", "evaluation forecast"}
    assert faults["disk"]["where"] == str(project.folder / "runs")
    assert {one: faults[one]["exit_code"] for one in faults} == {
        "disk": 2,
        "memory forecast": 13,
        "evaluation forecast": 13,
    }
    assert code == 2  # not the memory alone


def test_rows_that_are_too_long_are_mended(project: Any) -> None:
    recipe("1e-2", "1e-3")(project)
    recipe("max_tokens: 128", "max_tokens: 60")(project)
    findings, code = examine(project)
    told = [one for one in findings if one["check"] == "long rows"]
    assert code == 2 and {one["where"] for one in told} == {"data.max_tokens"}
    assert len([one for one in told if one["detail"].startswith("of the validation rows")]) == 1
    findings, code = examine(project, "--fix")
    assert (code, [one for one in wrong(findings) if one not in ALWAYS]) == (0, [])


def test_turn_weights_that_teach_nothing_are_not_mended_by_longer_packs(project: Any) -> None:
    recipe("epochs: 2", "loss: {turn_weights: [1, 0]}")(project)
    before = project.recipe.read_text()
    findings, code = examine(project, "--fix")
    assert code == 2 and ("turn weights", "fault") in wrong(findings)
    assert project.recipe.read_text() == before
