"""What `finetune plan` reads beside the recipe: how long the suites' answers may be, and where the model's folder lies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune.cli.plan import app
from finetune.errors import UserError

RECIPE = "sft/home_intents_lora"
SUITE = "suite: 1\nname: {name}\nitems: {items}\ndecoding: {{max_new_tokens: {tokens}}}\nscorers: [exact_match]\nprimary_metric: exact_match\n"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


def plan(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def suite(folder: Path, name: str, tokens: int, items: str = "{jsonl: nowhere.jsonl}") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(SUITE.format(name=name, tokens=tokens, items=items))
    return str(path)


def test_the_longest_answer_of_the_suites_is_forecast_as_a_run_forecasts_it(tmp_path: Path) -> None:
    both = f"[{suite(tmp_path, 'short', 16)}, {suite(tmp_path, 'long', 700)}]"
    found = plan(RECIPE, "--set", f"eval.suites={both}")
    assert found["evaluation"]["assumptions"]["new_tokens"] == 700
    assert found["new_tokens"] == {
        "tokens": 700,
        "basis": "decoding.max_new_tokens of suite long",
        "notes": [],
    }
    assert plan(RECIPE)["new_tokens"]["tokens"] == 64
    text = CliRunner().invoke(app, [RECIPE, "--device", "cpu"]).stdout
    assert "64 new tokens: decoding.max_new_tokens of suite home_intents" in text


def test_a_flag_wins() -> None:
    found = plan(RECIPE, "--new-tokens", "9")
    assert found["evaluation"]["assumptions"]["new_tokens"] == 9
    assert found["new_tokens"]["basis"] == "--new-tokens"


@pytest.mark.parametrize(
    ("named", "part"),
    [
        ("lm_eval:arc_easy", "the task fixes its answers by itself"),
        ("{folder}/of_a_task.yaml", "the task fixes its answers by itself"),
        ("nowhere.yaml", "cannot be read (no such file"),
        ("{folder}/broken.yaml", "cannot be read ("),
    ],
)
def test_what_is_not_read_counts_with_the_default_and_a_note(tmp_path: Path, named: str, part: str) -> None:
    short = suite(tmp_path, "short", 16)
    (tmp_path / "of_a_task.yaml").write_text("suite: 1\nname: of_a_task\nitems: {lm_eval: arc_easy}\n")
    suite(tmp_path, "broken", -1)
    name = named.format(folder=tmp_path)
    arguments = [RECIPE, "--set", f"eval.suites=['{name}', '{short}']", "--device", "cpu"]
    found = plan(*arguments)["new_tokens"]
    assert found["tokens"] == 128
    assert found["basis"] == f"the default, for suite {name}"
    (note,) = found["notes"]
    assert part in note and name in note and "128 tokens" in note
    assert note in CliRunner().invoke(app, arguments).stdout


def test_suites_bring_neither_torch_nor_the_harness() -> None:
    code = (
        "import sys\nfrom finetune.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n"
        "    print('loaded:', *sorted({'torch', 'transformers', 'lm_eval', 'numpy'} & sys.modules.keys()))\n"
    )
    arguments = ["plan", RECIPE, "--set", "eval.suites=[home_intents, 'lm_eval:arc_easy']", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_a_model_folder_lies_beside_the_recipe_as_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"recipe: 1\nextends: {RECIPE}\nmodel: {{id: tiny}}\n")
    assert plan(str(recipe))["training"]["n_parameters"] < 1_000_000


@pytest.mark.parametrize(("text", "part"), [("[1]", "is no JSON object"), ("{", "is not valid JSON")])
def test_a_damaged_config_is_the_users_to_mend(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=part) as caught:
        plan(RECIPE, "--set", f"model.id={tmp_path}")
    assert "published" in caught.value.faults[0].fix
