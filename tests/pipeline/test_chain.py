"""SFT, then answers generated and verified, then DPO on them, judged against where it started: one chain of runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from finetune.digest import digest_file, digest_folder
from finetune.errors import UserError
from finetune.merge.adapter import merge_adapter
from finetune.merge.inputs import resolve_inputs
from finetune.paths import read_json
from finetune.pipeline.generate import generate_rows
from finetune.telemetry.events import read_events

PAIRS = """\
dataset: 1
name: digit_pairs
source:
  kind: generated
  name: digit_pairs
  prompts: digits.yaml
  model: {run: runs/recipe}
  sampling: {answers: 4, max_new_tokens: 24, seed: 3, stop: [e, n]}
  verifier: {kind: function, function: "verify.py:judge"}
  keep: {rows_per_prompt: 2, reference_as_chosen: true}
split:
  shares: {train: 0.8, validation: 0.2}
"""

VERIFY = """\
def judge(row):
    return len(row["messages"][-1]["content"]) % 2 == 0, "odd"
"""

DPO = """\
extends: recipe.yaml
name: dpo
adapter: {start: runs/recipe}
data: {spec: pairs.yaml}
train:
  method: dpo
  epochs: 1
  learning_rate: 1e-3
eval:
  baselines: [start]
  against: start
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the SFT run is kept once a test has made it."""
    return tmp_path_factory.mktemp("kept") / "runs"


@pytest.fixture
def chain(project: Any, kept: Path) -> Any:
    """The project with a finished SFT run, and what a DPO run after it needs."""
    for name, text in (("pairs.yaml", PAIRS), ("verify.py", VERIFY), ("dpo.yaml", DPO)):
        (project.folder / name).write_text(text)
    if kept.is_dir():
        shutil.copytree(kept, project.folder / "runs")
    else:
        project.run("train.epochs=4")
        shutil.copytree(project.folder / "runs", kept)
    return project


def run_dpo(chain: Any, *overrides: str, **options: Any) -> Any:
    from finetune.pipeline.run import run_recipe

    chain.said.clear()
    return run_recipe(str(chain.folder / "dpo.yaml"), overrides, say=chain.said.append, **options)


def generated(chain: Any, **options: Any) -> Any:
    (made,) = generate_rows(chain.folder / "pairs.yaml", say=chain.said.append, **options)
    return made


def rows_of(made: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (made.folder / "rows.jsonl").read_text().splitlines()]


def test_sft_then_dpo_on_its_own_answers(chain: Any) -> None:
    first = next(chain.folder.glob("runs/recipe-*"))
    outcome = run_dpo(chain)
    manifest = read_json(outcome.folder / "manifest.json")
    assert manifest["inputs"]["start"] == manifest["stages"]["train"]["inputs"]["start"]
    steps = [event for event in read_events(outcome.folder / "events.jsonl") if event["event"] == "step"]
    assert steps[0]["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert steps[0]["reward_margin"] == 0.0
    trained = read_json(outcome.folder / "training.json")
    assert {"reward_accuracy", "reward_margin", "logp_chosen"} <= trained["validation"].keys()
    assert digest_folder(outcome.folder / "adapter") != digest_folder(first / "adapter")
    assert outcome.comparison["against"] == "start"
    # What it started from is asked as it was trained, and answers as the SFT run's tuned model does.
    records = [
        [json.loads(line)["output"] for line in (folder / name).read_text().splitlines()]
        for folder, name in (
            (outcome.folder / "baseline/digits", "start.jsonl"),
            (first / "eval/digits", "tuned.jsonl"),
        )
    ]
    assert records[0] == records[1]
    page = outcome.report.read_text()
    assert "the model it started from" in page
    run_dpo(chain)
    assert chain.said[-1].startswith("nothing to do")


def test_pairs_come_from_train_prompts_and_are_sorted_by_the_verifier(chain: Any) -> None:
    from finetune.data.build import build_dataset, default_builds_root

    made = generated(chain)
    build = build_dataset(chain.folder / "digits.yaml", default_builds_root())
    asked = {row.messages[0]["content"]: row for row in build.rows("train")}
    rows = rows_of(made)
    assert rows
    for row in rows:
        source = asked[row["prompt"][0]["content"]]  # a prompt of another side would not be there
        assert row["group"] == source.group
        chosen, rejected = row["chosen"][0]["content"], row["rejected"][0]["content"]
        assert len(chosen) % 2 == 0 or chosen == source.answer
        assert chosen != rejected
    found = made.manifest
    assert found["prompts"]["count"] == len(asked) == sum(c["prompts"] for c in found["difficulty"].values())
    assert 0 < found["passed"] < found["answers"] == 4 * len(asked)
    assert found["rows"] == len(rows)


def test_neither_the_batch_nor_an_interruption_changes_a_row(
    chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.data.generated.store import LineStore

    whole = digest_file(generated(chain).folder / "rows.jsonl")
    for path in (chain.folder / "runs/generated/digit_pairs").iterdir():
        path.unlink()
    added = {"n": 0}
    original = LineStore.add

    def dies(self: LineStore, record: Any) -> None:
        added["n"] += 1
        if added["n"] == 50:
            raise SystemExit
        original(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(LineStore, "add", dies)
        with pytest.raises(SystemExit):
            generated(chain, batch_size=5)
    answers = next((chain.folder / "runs/generated/digit_pairs").glob("answers-*"))
    saved = answers.read_bytes()
    answers.write_bytes(saved[:-7])  # and the last line is torn
    made = generated(chain, batch_size=3)
    assert made.fresh
    assert digest_file(made.folder / "rows.jsonl") == whole
    assert answers.read_bytes().startswith(saved[:-7])
    again = generated(chain)
    assert not again.fresh


def test_a_changed_verifier_sorts_the_same_answers_anew(chain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.pipeline import generate

    before = generated(chain).manifest
    (chain.folder / "verify.py").write_text(VERIFY.replace("== 0", "== 1"))

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("every answer is there")

    monkeypatch.setattr(generate, "draw_answers", never)
    after = generated(chain).manifest
    assert after["verifier"] != before["verifier"]
    # What was cut fails either way; every other verdict turns around.
    cut = before["reasons"].get("format: cut at sampling.max_new_tokens", 0)
    assert after["passed"] == before["answers"] - before["passed"] - cut


def test_what_the_verifier_failed_on_is_asked_anew(chain: Any) -> None:
    (chain.folder / "verify.py").write_text(
        VERIFY.replace(
            "    return", "    if LATER.exists():\n        raise ValueError('away')\n    return", 1
        ).replace(
            "def judge",
            f"from pathlib import Path\n\nLATER = Path({str(chain.folder / 'away')!r})\n\n\ndef judge",
        )
    )
    (chain.folder / "away").touch()
    with pytest.raises(UserError, match="the verifier failed on"):
        generated(chain)
    (chain.folder / "away").unlink()
    assert generated(chain).manifest["passed"] > 0


def test_rows_of_other_settings_are_not_used(chain: Any) -> None:
    from finetune.data.build import build_dataset, default_builds_root

    with pytest.raises(UserError, match="not generated yet"):
        build_dataset(chain.folder / "pairs.yaml", default_builds_root())
    generated(chain)
    build_dataset(chain.folder / "pairs.yaml", default_builds_root())
    (chain.folder / "pairs.yaml").write_text(PAIRS.replace("seed: 3", "seed: 4"))
    with pytest.raises(UserError, match="other settings"):
        build_dataset(chain.folder / "pairs.yaml", default_builds_root())


def test_the_command_says_what_passed(chain: Any) -> None:
    from typer.testing import CliRunner

    from finetune.cli.data import app

    said = CliRunner().invoke(app, ["generate", str(chain.folder / "pairs.yaml")])
    assert said.exit_code == 0, said.output
    assert "36 prompts of digits, 144 answers" in said.output
    again = CliRunner().invoke(app, ["generate", str(chain.folder / "pairs.yaml"), "--json"])
    (found,) = json.loads(again.stdout)["sources"]
    assert found["fresh"] is False
    assert found["answers"] == 144


def test_a_server_can_answer(chain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.evaluation.server import ServerModel

    asked: list[dict[str, Any]] = []

    def post(self: ServerModel, path: str, body: dict[str, Any], *, about: str = "") -> dict[str, Any]:
        asked.append(body)
        text = "a" * (1 + len(asked) % 3)
        return {"choices": [{"text": text, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}

    monkeypatch.setattr(ServerModel, "post", post)
    made = generated(chain, server=ServerModel("http://localhost:1/v1", "mine"), batch_size=1)
    assert len(asked) == made.manifest["answers"] == 144
    assert {body["model"] for body in asked} == {"mine"}
    assert len({body["seed"] for body in asked}) == 144


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapter.start=runs/nothing"], "no adapter and no run"),
        (["adapter.rank=16"], "adapter.rank is 16, and the adapter that training starts from has 8"),
        (["model.id=runs/recipe"], "a run that trained an adapter, not a model"),
        (["data.spec=digits.yaml"], "is of kind 'chat'"),
    ],
)
def test_what_a_chain_cannot_start_from(chain: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_dpo(chain, *overrides)


def test_generation_needs_a_finished_run(chain: Any) -> None:
    (chain.folder / "pairs.yaml").write_text(PAIRS.replace("runs/recipe", "runs/another"))
    with pytest.raises(UserError, match="there is no finished run 'runs/another'"):
        generated(chain)


def test_a_run_can_start_from_the_model_that_another_one_tuned_whole(chain: Any) -> None:
    generated(chain)
    chain.run("name=whole", "adapter.kind=none", "train.epochs=1", "train.learning_rate=1e-3")
    (chain.folder / "dpo.yaml").write_text(
        DPO.replace("adapter: {start: runs/recipe}", "model: {id: runs/whole}\nadapter: {kind: none}")
    )
    outcome = run_dpo(chain, "train.max_steps=2")
    folder = next(chain.folder.glob("runs/whole-*"))
    manifest = read_json(outcome.folder / "manifest.json")
    assert manifest["inputs"]["model"] != read_json(folder / "manifest.json")["inputs"]["model"]
    assert (outcome.folder / "model/config.json").is_file()


PAIR_SUITE = """\
suite: 1
name: digit_pairs
task: choice
items: {spec: reward_pairs.yaml, split: test}
scorers: [choice_accuracy]
primary_metric: choice_accuracy
"""

REWARD = """\
extends: recipe.yaml
name: reward
adapter: {init: eva}
data: {spec: reward_pairs.yaml}
train:
  method: reward
  epochs: 4
eval:
  suites: [pair_suite.yaml]
  baselines: [zero_shot]
  against: zero_shot
"""


def test_a_reward_model_is_judged_by_the_answers_it_prefers(chain: Any) -> None:
    from finetune.pipeline.run import run_recipe

    shares = PAIRS.replace("{train: 0.8, validation: 0.2}", "{train: 0.6, validation: 0.2, test: 0.2}")
    for name, text in (
        ("reward_pairs.yaml", shares.replace("name: digit_pairs\nsource", "name: reward_pairs\nsource")),
        ("pair_suite.yaml", PAIR_SUITE),
        ("reward.yaml", REWARD),
    ):
        (chain.folder / name).write_text(text)
    outcome = run_recipe(str(chain.folder / "reward.yaml"), say=chain.said.append)
    (compared,) = outcome.comparison["comparisons"]
    assert compared["metric"] == "choice_accuracy"
    assert compared["mean_b"] > 0.5
    records = [
        json.loads(line)
        for line in (outcome.folder / "eval/digit_pairs/tuned.jsonl").read_text().splitlines()
    ]
    assert len(records) == compared["n"] > 5
    firsts = [json.loads(record["output"])["choices"][0] == record["reference"] for record in records]
    assert 0 < sum(firsts) < len(firsts)  # the right answer is not always the first choice
    assert read_json(outcome.folder / "training.json")["validation"]["reward_accuracy"] > 0.5
    found = resolve_inputs(outcome.folder)
    with pytest.raises(UserError, match="belongs to a reward model"):
        merge_adapter(found.source, found.adapter_folder, chain.folder / "merged")
    assert not (chain.folder / "merged").exists()


def test_a_reward_model_is_not_asked_to_write(chain: Any) -> None:
    (chain.folder / "dpo.yaml").write_text(
        DPO.replace("adapter: {start: runs/recipe}\n", "").replace("method: dpo", "method: reward")
    )
    with pytest.raises(UserError, match="a reward model scores whole answers"):
        run_dpo(chain)
    assert not list(chain.folder.glob("runs/dpo-*"))  # it is said before anything is done


def test_a_reward_model_does_not_start_from_an_adapter_that_writes(chain: Any) -> None:
    with pytest.raises(UserError, match="a reward model has another head"):
        run_dpo(chain, "train.method=reward")
