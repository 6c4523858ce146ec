"""`finetune data build | show | check`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from finetune.cli.data import app
from finetune.errors import ExitCode, UserError
from finetune.paths import read_jsonl, write_jsonl


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": f"[red]a{n}[/red]"},
            ]
        }
        for n in range(40)
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nsource: {kind: jsonl, files: [rows.jsonl]}\nsplit: {shares: {train: 0.6, test: 0.4}}\n"
    )
    return path


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def build(spec: Path) -> Path:
    return Path(
        json.loads(call("build", spec, "--builds", spec.parent / "builds", "--json").stdout)["folder"]
    )


def test_build_accounts_for_every_row_and_finds_itself_again(spec: Path) -> None:
    said = call("build", spec, "--builds", spec.parent / "builds").stdout
    assert "rows read 40 = kept 40 + dropped 0 + quarantined 0" in said
    assert "leaks between sides: exact 0, group 0" in said
    folder = build(spec)
    assert said.startswith(str(folder))
    assert len(list((spec.parent / "builds").glob("[!.]*"))) == 1


def test_builds_are_kept_beside_the_runs_by_default(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_RUNS", str(spec.parent / "my runs"))
    call("build", spec)
    assert [path.name[:5] for path in (spec.parent / "my runs" / "data").glob("[!.]*")] == ["mine-"]


def test_an_unknown_spec_is_a_user_error() -> None:
    with pytest.raises(UserError, match="did you mean 'home_intents'"):
        call("build", "home_intent")


def test_show_prints_the_tokens_and_the_trained_spans(spec: Path, tiny_model_folder: Path) -> None:
    folder = build(spec)
    answer = read_jsonl(folder / "train.jsonl")[2]["messages"][1]["content"]
    said = call("show", folder, "--row", "2", "--model", tiny_model_folder).stdout
    assert f"trained span 0: '{answer}<|im_end|>'" in said
    table = json.loads(call("show", spec, "--row", "2", "--model", tiny_model_folder, "--json").stdout)
    assert table["spans"] == [f"{answer}<|im_end|>"]
    targets = [token["text"] for token in table["tokens"] if token["target"]]
    assert "".join(targets) == f"{answer}<|im_end|>"
    assert table["n_targets"] == len(targets) < len(table["tokens"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--row", "999"], "no row 999 in train"),
        (["--split", "tset"], "did you mean 'test'"),
        (["--train-on", "some"], "use all or last"),
    ],
)
def test_show_refuses_what_is_not_there(
    spec: Path, tiny_model_folder: Path, flags: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        call("show", build(spec), "--model", tiny_model_folder, *flags)


def test_check_finds_no_leak_in_a_build(spec: Path) -> None:
    folder = build(spec)
    assert "no leaks between train (" in call("check", folder).stdout
    assert json.loads(call("check", folder, "--json").stdout)["leaks"] == {
        "exact": 0,
        "group": 0,
        "near": 0,
        "ngram": 0,
    }


def test_check_exits_2_with_the_pairs_when_a_row_is_on_two_sides(spec: Path) -> None:
    folder = build(spec)
    train, test = (read_jsonl(folder / f"{side}.jsonl") for side in ("train", "test"))
    copied = {**train[0], "id": "copied", "group": "other"}
    copied["messages"] = [
        {"role": "user", "content": train[0]["messages"][0]["content"].upper() + " "},
        *test[0]["messages"][1:],
    ]
    write_jsonl(
        folder / "test.jsonl", [*test, copied, {**test[0], "id": "regrouped", "group": train[1]["group"]}]
    )
    with pytest.raises(UserError) as caught:
        call("check", folder)
    assert caught.value.exit_code is ExitCode.USER_ERROR
    said = str(caught.value)
    assert f"exact leak: train row {train[0]['id']} and test row copied" in said
    assert f"group leak: train row {train[1]['id']} and test row regrouped" in said
    assert "the test rows are not those of the manifest" in said


def test_check_notices_a_changed_file_without_leak(spec: Path) -> None:
    folder = build(spec)
    write_jsonl(folder / "train.jsonl", read_jsonl(folder / "train.jsonl")[1:])
    with pytest.raises(UserError, match="the train rows are not those of the manifest"):
        call("check", folder)


def test_check_lists_all_pairs_as_json_and_exits_2(spec: Path) -> None:
    folder = build(spec)
    train, test = (read_jsonl(folder / f"{side}.jsonl") for side in ("train", "test"))
    write_jsonl(folder / "test.jsonl", [*test, {**train[0], "id": "copied"}])
    answer = CliRunner().invoke(app, ["check", str(folder), "--json"])
    assert answer.exit_code == ExitCode.USER_ERROR
    found = json.loads(answer.stdout)
    assert not found["passed"]
    assert found["leaks"]["exact"] == found["leaks"]["group"] == 1
    assert {pair["kind"] for pair in found["pairs"]} >= {"exact", "group"}
    assert found["damage"][0]["what"].startswith("the test rows are not those")
