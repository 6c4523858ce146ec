"""Run folders that somebody edited, cut off or lost a file of: refused by name, never judged, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.evaluation.records import read_summary, saved_answers, write_arm
from finetune.paths import read_json, read_jsonl, write_json, write_jsonl

Edit = Callable[[list[dict[str, Any]]], object]
TUNED, BASE = Path("eval/task/tuned.jsonl"), Path("baseline/task/zero_shot.jsonl")


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must be a user error, and gives what it said on its first fault."""

    def call(*arguments: str | Path) -> str:
        with pytest.raises(SystemExit) as stop:
            main([*map(str, arguments), "--json"])
        assert stop.value.code == 2
        fault = json.loads(capsys.readouterr().out)["error"][0]
        return f"{fault['where']}: {fault['what']} ({fault['fix']})"

    return call


def _changed(path: Path, edit: Edit) -> None:
    rows = read_jsonl(path)
    edit(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


EDITS: dict[str, Edit] = {
    "an item less": lambda rows: rows.pop(),
    "an item twice": lambda rows: rows.append(rows[0]),
    "another answer": lambda rows: rows[0].update(output="other"),
    "another score": lambda rows: rows[0]["scores"].update(text_match=0.5),
    "a score less": lambda rows: rows[0]["scores"].pop("text_match"),
    "another cluster": lambda rows: rows[0].update(cluster="other"),
}


@pytest.mark.parametrize("name", EDITS)
def test_answers_edited_afterwards_are_not_the_models(
    make_answered_run: Any, refused: Any, name: str
) -> None:
    run = make_answered_run()
    _changed(run / TUNED, EDITS[name])
    said = refused("eval", "gate", run)
    assert "tuned.jsonl was changed after it was written" in said
    assert "finetune eval run RUN" in said


def test_the_same_item_lost_on_both_sides_is_noticed(make_answered_run: Any, refused: Any) -> None:
    run = make_answered_run()
    for path in (TUNED, BASE):
        _changed(run / path, EDITS["an item less"])
    for command in ("gate", "score", "pin"):
        assert "was changed after it was written" in refused("eval", command, run)


SHAPES: dict[str, tuple[Edit, str]] = {
    "no item": (lambda rows: rows[0].pop("item"), "record number 1: no 'item'"),
    "a number as item": (lambda rows: rows[0].update(item=3), "'item' is 3, not text"),
    "no cluster": (lambda rows: rows[0].pop("cluster"), "no 'cluster'"),
    "no scores": (lambda rows: rows[0].pop("scores"), "no 'scores'"),
    "a text as score": (lambda rows: rows[0]["scores"].update(text_match="1"), "is '1', not a number"),
    "a list as score": (lambda rows: rows[0]["scores"].update(text_match=[1]), "is .1., not a number"),
    "NaN as score": (lambda rows: rows[1]["scores"].update(text_match=float("nan")), "of item 'i1' is nan"),
    "a list as record": (lambda rows: rows.insert(0, [1]), "not a JSON object"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_no_record_is_named_by_its_number(make_answered_run: Any, refused: Any, name: str) -> None:
    run = make_answered_run()
    alone = run.parent / "alone.jsonl"  # a file from elsewhere, without a summary
    alone.write_bytes((run / TUNED).read_bytes())
    edit, message = SHAPES[name]
    _changed(alone, edit)
    said = refused("eval", "gate", run, "--baseline", alone)
    assert message.replace(".1.", "[1]") in said
    assert "stats compare" in said


def test_items_of_one_name_must_be_the_same_items(make_answered_run: Any, refused: Any) -> None:
    run = make_answered_run()
    for key, value in (("reference", "maybe"), ("cluster", "other")):
        alone = run.parent / f"{key}.jsonl"
        alone.write_bytes((run / BASE).read_bytes())
        _changed(alone, lambda rows, key=key, value=value: rows[3].update({key: value}))
        assert "1 items of one name are not the same item on both sides (i3)" in refused(
            "eval", "compare", alone, run, "--suite", run.parent / "eval-run" / "task.yaml"
        )


def test_an_arm_without_its_summary_is_not_complete(make_answered_run: Any, refused: Any) -> None:
    run = make_answered_run()
    summary = run / "eval" / "task" / "tuned.summary.json"
    kept = read_json(summary)
    summary.unlink()
    assert "has no summary beside it (finish the arm" in refused("eval", "gate", run)
    for damaged in ("{", "[]", "{}"):
        summary.write_text(damaged)
        assert "delete it" in refused("eval", "gate", run)
    write_json(summary, {**kept, "n": 0, "finish_reasons": {}})
    assert "it counts 0 answers" in refused("eval", "gate", run)


@pytest.mark.parametrize("text", [b"{", b"[]", b"", b"a: 1\n", b"\xff\xfe", b"eval: {suites: 3}\n"])
def test_a_damaged_recipe_is_a_fault_of_the_folder(make_answered_run: Any, refused: Any, text: bytes) -> None:
    run = make_answered_run()
    (run / "recipe.resolved.yaml").write_bytes(text)
    assert "is not the resolved recipe of a run" in refused("eval", "gate", run)


def test_a_run_is_no_baseline_of_itself(make_answered_run: Any, refused: Any) -> None:
    run = make_answered_run()
    assert "is the run itself" in refused("eval", "gate", run, "--baseline", run)


def test_a_baseline_of_another_version_or_template_is_named(make_answered_run: Any, refused: Any) -> None:
    run, other = make_answered_run(), make_answered_run("other", more="version: 2\n")
    assert "the suite differs" in refused("eval", "gate", run, "--baseline", other)
    third = make_answered_run("third")
    summary = third / "eval" / "task" / "tuned.summary.json"
    write_json(summary, {**read_json(summary), "template_sha256": "x" * 64})
    said = refused("eval", "gate", run, "--baseline", third)
    assert "the chat template differs: xxxxxxxxxxxx in the baseline (tuned)" in said


def test_a_page_that_cannot_be_written_is_a_user_error(make_answered_run: Any, refused: Any) -> None:
    run = make_answered_run()
    assert "Is a directory" in refused("eval", "gate", run, "--junit", run.parent)


def test_edited_answers_are_given_again(make_answered_run: Any) -> None:
    """They lie in the folder, but the model did not give them."""
    run = make_answered_run()
    folder = run / "eval" / "task"
    keyed = [{**record, "key": record["item"]} for record in read_jsonl(run / TUNED)]
    write_arm(folder, read_summary(folder, "tuned"), keyed)
    wanted = {record["item"] for record in keyed}
    assert set(saved_answers([folder], "tuned", wanted).by_key) == wanted
    write_jsonl(run / TUNED, [{**record, "output": "mine"} for record in keyed])
    assert saved_answers([folder], "tuned", wanted).by_key == {}


def test_files_in_a_run_folder_find_its_suite(
    make_answered_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_answered_run()
    monkeypatch.chdir(run.parent.parent)
    with pytest.raises(SystemExit) as stop:
        main(["eval", "compare", str(run / BASE), str(run / TUNED), "--json"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["fixed"] == 40


def test_prices_are_finite(make_answered_run: Any, refused: Any) -> None:
    run = make_answered_run()
    assert "--price-per-hour" in refused("eval", "compare", run / BASE, run, "--price-per-hour", "inf")
    assert "--price-per-hour" in refused("eval", "compare", run / BASE, run, "--price-per-hour", "nan")


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        '{"item": "i0"}',
        '{"suite": "task", "item": 3, "right": {}, "answers": {}}',
        '{"suite": "task", "item": "i0", "right": null, "answers": null}',
        '{"suite": "task", "item": "i0", "right": {"tuned": "yes"}, "answers": {"tuned": "x"}}',
        '{"suite": "task", "item": "i0", "right": {"tuned": true}, "answers": {}}',
    ],
)
def test_a_damaged_review_is_named_by_its_line(make_answered_run: Any, refused: Any, line: str) -> None:
    run = make_answered_run()
    (run / "eval" / "review.jsonl").write_text(line + "\n")
    for command in (["gate", run], ["compare", run / BASE, run]):
        said = refused("eval", *command)
        assert "verdict number 1: this line is no verdict" in said


def test_a_rubric_that_cannot_be_read_is_named(make_answered_run: Any, refused: Any, tmp_path: Path) -> None:
    run = make_answered_run()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "gone", tmp_path, tmp_path / "bytes"):
        said = refused(
            "eval", "judge", run, "--server", "http://127.0.0.1:9", "--model", "m", "--rubric", path
        )
        assert f"--rubric: cannot read {path}" in said


def test_two_processes_do_not_work_in_one_run_folder(make_answered_run: Any, refused: Any) -> None:
    from finetune.pipeline.manifest import only_process

    run = make_answered_run()
    with only_process(run):
        assert "another process is working in" in refused("eval", "score", run)
        assert "another process is working in" in refused("eval", "run", run)


def test_a_folder_that_is_no_run_gets_no_lock(tmp_path: Path, refused: Any) -> None:
    assert "is not a run folder" in refused("eval", "run", tmp_path)
    assert list(tmp_path.iterdir()) == []
