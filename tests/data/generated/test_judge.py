"""Verifiers of generated answers: hassil, a function beside the spec, a command, a model behind a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import load_spec
from finetune.data.curate.judge import JudgeVerifier
from finetune.data.generated.judge import hassil_verifier, open_verifier, verifier_digest
from finetune.data.spec import DatasetSpec
from finetune.data.spec_generated import (
    CommandVerifierSection,
    FunctionVerifier,
    HassilVerifier,
    JudgeVerifierSection,
)
from finetune.data.spec_source import HomeIntentsSource
from finetune.errors import UserError
from finetune.paths import find_declarative


@pytest.fixture(scope="module")
def home_spec() -> DatasetSpec:
    return load_spec(find_declarative("data", "home_intents")).value


@pytest.fixture(scope="module")
def hassil(home_spec: DatasetSpec) -> Any:
    (source,) = home_spec.sources
    assert isinstance(source, HomeIntentsSource)
    return hassil_verifier(source)


def row(said: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ('{"intent":"HassTurnOn","area":"kitchen","domain":"light"}', ""),
        ('{ "domain": "light", "area": "kitchen", "intent": "HassTurnOn" }', ""),
        ('{"intent":"HassTurnOff","area":"kitchen","domain":"light"}', "another intent than HassTurnOn"),
        ('{"intent":"HassTurnOn","area":"bedroom","domain":"light"}', "other slots"),
        ('{"intent":"HassTurnOn","domain":"light"}', "other slots"),
        ('{"intent":"HassTurnOn","area":"kitchen","domain":"light","color":"red"}', "other slots"),
        ("I turned it on.", "format: the answer is no JSON"),
        ('["HassTurnOn"]', "format: the answer is no object with an intent"),
        ('{"intent":"HassTurnOn","intent":"HassTurnOn"}', "format: the key 'intent' is written twice"),
        ('{"intent":"HassTurnOn","area":NaN}', "format: NaN is no JSON"),
        ('{"intent":"HassTurnOn"', "format: the answer is no JSON"),
    ],
)
def test_hassil_passes_what_it_hears_and_nothing_else(hassil: Any, answer: str, reason: str) -> None:
    verdict = hassil(row("turn on the lights in the kitchen", answer))
    assert verdict.keep == (reason == ""), verdict
    assert reason in verdict.reason


def test_numbers_are_equal_as_numbers_and_true_is_not_one(hassil: Any) -> None:
    said = "set kitchen brightness to 1 percent"
    assert hassil(
        row(said, '{"intent":"HassLightSet","area":"kitchen","domain":"light","brightness":1.0}')
    ).keep
    assert not hassil(
        row(said, '{"intent":"HassLightSet","area":"kitchen","domain":"light","brightness":true}')
    ).keep
    assert not hassil(
        row(said, '{"intent":"HassLightSet","area":"kitchen","domain":"light","brightness":"1"}')
    ).keep


def test_the_datasets_own_answers_pass(hassil: Any, home_spec: DatasetSpec) -> None:
    from itertools import islice

    from finetune.data.home_intents import sample_rows
    from finetune.data.rows import Ledger

    (source,) = home_spec.sources
    assert isinstance(source, HomeIntentsSource)
    rows = list(islice(sample_rows(source, 3, Ledger(), lambda share: None), 40))
    assert [one.id for one in rows if not hassil({"messages": list(one.messages)}).keep] == []


def test_a_function_beside_the_spec_and_a_command(tmp_path: Path, home_spec: DatasetSpec) -> None:
    (tmp_path / "mine.py").write_text(
        "def judge(row):\n    return {'keep': row['messages'][-1]['content'] == row['reference'], 'reason': 'no'}\n"
    )
    (tmp_path / "mine_command.py").write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    row = json.loads(line)\n"
        "    print(json.dumps(row['messages'][-1]['content'] == row['reference']), flush=True)\n"
    )
    sections = [
        FunctionVerifier(kind="function", function="mine.py:judge"),
        CommandVerifierSection(kind="command", command=[sys.executable, "mine_command.py"]),
    ]
    for section in sections:
        with open_verifier(section, prompts=home_spec, folder=tmp_path) as verify:
            verdicts = [verify({**row("q", answer), "reference": "yes"}).keep for answer in ("yes", "no")]
        assert verdicts == [True, False]
    before = [verifier_digest(section, prompts=home_spec, folder=tmp_path) for section in sections]
    for file in tmp_path.glob("*.py"):
        file.write_text(file.read_text() + "\n# changed\n")
    after = [verifier_digest(section, prompts=home_spec, folder=tmp_path) for section in sections]
    assert all(left != right for left, right in zip(before, after, strict=True))


def test_a_model_behind_a_server_judges_beside_the_prompts_own_answer(
    home_spec: DatasetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = JudgeVerifierSection(
        kind="judge",
        server="http://localhost:1/v1",
        model="m",
        criterion="It means the reference.",
        threshold=0.7,
    )

    def reply(self: JudgeVerifier, body: bytes) -> str:
        told, asked = (turn["content"] for turn in json.loads(body)["messages"])
        assert "It means the reference." in told
        shown = json.loads(asked)
        score = 0.9 if shown["messages"][-1]["content"] == shown["reference"] else 0.6
        return json.dumps({"score": score, "reason": "so it is"})

    monkeypatch.setattr(JudgeVerifier, "_reply", reply)
    with open_verifier(section, prompts=home_spec, folder=tmp_path) as verify:
        assert [verify({**row("q", answer), "reference": "yes"}).keep for answer in ("yes", "no")] == [
            True,
            False,
        ]
    digests = {
        verifier_digest(one, prompts=home_spec, folder=tmp_path)
        for one in (section, section.model_copy(update={"criterion": "It is short."}))
    }
    assert len(digests) == 2


def test_hassil_is_for_prompts_of_its_own_templates(tmp_path: Path) -> None:
    spec = DatasetSpec.model_validate({"name": "mine", "source": {"kind": "jsonl", "files": ["rows.jsonl"]}})
    with (
        pytest.raises(UserError, match="hassil cannot judge answers to the prompts of mine"),
        open_verifier(HassilVerifier(kind="hassil"), prompts=spec, folder=tmp_path),
    ):
        pass
