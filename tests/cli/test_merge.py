from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from finetune.cli.main import app, main
from finetune.errors import UserError


@pytest.fixture
def tuned(tmp_path: Path, tiny_model_folder: Path) -> Path:
    """An adapter of `tiny_model_folder` in a folder whose name says nothing."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    model.save_pretrained(tmp_path / "run7")
    return tmp_path / "run7"


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["merge", "adapter", *map(str, arguments)])


def test_the_screen_says_in_words_that_the_merge_is_good_and_the_model_loads(
    tmp_path: Path, tuned: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = run(tuned, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for word in (
        "The merge is good",
        "would say the same next token in",
        "of what the tuning changed",
        "does by itself (3 times is permitted)",
        "merge_proof.json",
        "merged and proven",
    ):
        assert word in result.stdout
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_json_holds_the_whole_proof(tmp_path: Path, tuned: Path) -> None:
    result = run(tuned, "--out", tmp_path / "out", "--dtype", "fp32", "--json")
    answer = json.loads(result.stdout)
    assert answer["out"] == str(tmp_path / "out")
    assert answer["max_logit_difference"] <= 1e-4
    assert answer["greedy_identical"] == answer["greedy_tokens"]
    assert answer["noise_floor_kl"] is None


def test_quantized_training_prints_both_drifts(tmp_path: Path, tuned: Path) -> None:
    result = run(tuned, "--out", tmp_path / "out", "--quantize", "nf4")
    assert result.exit_code == 0, result.output
    assert "trained on nf4 weights" in result.stdout
    assert result.stdout.count("(KL ") == 2  # merged onto the decoded base, and onto the original one


@pytest.mark.parametrize(
    "options",
    [("--onto", "original"), ("--single-quantization",), ("--single-quantization", "--quantize", "int8")],
)
def test_options_about_a_quantization_that_is_not_there_are_refused(
    tmp_path: Path, tuned: Path, options: tuple[str, ...]
) -> None:
    result = run(tuned, "--out", tmp_path / "out", *options)
    assert isinstance(result.exception, UserError)
    assert options[0] in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_used_folder_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    result = run(tmp_path / "nowhere", "--out", tmp_path / "out")
    assert isinstance(result.exception, UserError)
    assert "holds weights already" in str(result.exception)


def test_a_user_error_exits_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["merge", "adapter", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out"), "--json"])
    assert caught.value.code == 2
    assert "no such folder" in json.loads(capsys.readouterr().out)["error"][0]["what"]


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["merge", *map(str, arguments)])


def test_two_adapters_are_combined_and_the_result_merges(tmp_path: Path, tuned: Path) -> None:
    result = command("combine", tuned, tuned, "--weights", "0.25,0.75", "--out", tmp_path / "sum", "--json")
    answer = json.loads(result.stdout)
    assert (answer["method"], answer["rank"], answer["error"]) == ("sum", 8, 0.0)
    one, both = run(tuned, "--out", tmp_path / "a"), run(tmp_path / "sum", "--out", tmp_path / "b")
    assert (one.exit_code, both.exit_code) == (0, 0)
    weights = [tmp_path / name / "model.safetensors" for name in "ab"]
    assert weights[0].stat().st_size == weights[1].stat().st_size


def test_a_list_of_weights_that_is_none(tmp_path: Path, tuned: Path) -> None:
    result = command("combine", tuned, tuned, "--weights", "half", "--out", tmp_path / "sum")
    assert "'half' is not a list of numbers" in str(result.exception)


def test_the_difference_of_two_models_becomes_an_adapter(
    tmp_path: Path, tuned: Path, tiny_model_folder: Path
) -> None:
    assert run(tuned, "--out", tmp_path / "tuned", "--dtype", "fp32").exit_code == 0
    result = command(
        "extract", tmp_path / "tuned", "--base", tiny_model_folder, "--rank", "2", "--out", tmp_path / "lora"
    )
    assert result.exit_code == 0, result.output
    assert "rank    error left" in result.stdout
    assert "2 layers, rank 2, relative error" in result.stdout
    assert (tmp_path / "lora" / "adapter_model.safetensors").is_file()
