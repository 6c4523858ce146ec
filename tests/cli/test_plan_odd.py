"""`finetune plan` on odd recipes, odd models and nonsense: nothing crashes, and nothing that was asked is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune.cli.plan import app
from finetune.errors import UserError

RECIPE, PAIRS = "sft/home_intents_lora", "dpo/home_intents_dpo"
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
}


def plan(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code in (0, 13), result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def model(folder: Path, config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return f"--set=model.id={folder}"


@pytest.mark.parametrize("sharding", ["zero3", "fsdp2"])
def test_a_seventieth_of_a_trillion_is_tuned_whole_on_eight_devices(tmp_path: Path, sharding: str) -> None:
    arguments = [RECIPE, model(tmp_path, LLAMA_70B), "--set=adapter.kind=none", "--set=model.dtype=fp32"]
    arguments += ["--device=h100", "--devices=8", f"--sharding={sharding}"]
    found = plan(*arguments)["training"]
    share = (
        found["n_parameters"] * 4 / 8
    )  # fp32 weights, as many bytes of gradients, and twice that for AdamW
    terms = found["terms_bytes"]
    assert terms["weights"] == terms["gradients"] == pytest.approx(share)
    assert terms["optimizer"] == pytest.approx(2 * share)
    text = CliRunner().invoke(app, arguments).stdout
    assert f"on 8 × h100 ({sharding}; figures of one)" in text


def test_dora_over_four_bits_counts_codes_and_what_dora_composes(tmp_path: Path) -> None:
    large = model(tmp_path, LLAMA_70B)
    of = {
        kind: plan(RECIPE, large, "--set=model.quantize=nf4", f"--set=adapter.kind={kind}", "--device=h100")
        for kind in ("lora", "dora")
    }
    terms = {kind: found["training"]["terms_bytes"] for kind, found in of.items()}
    assert terms["dora"]["weights"] == terms["lora"]["weights"] < 0.6 * 70.6e9
    assert terms["dora"]["adapters"] > terms["lora"]["adapters"]  # magnitudes
    assert terms["dora"]["buffers"] > terms["lora"]["buffers"]


def test_rows_without_packing_are_padded_to_a_batch() -> None:
    padded = plan(RECIPE, "--set=train.packing=false", "--set=train.micro_batch_size=8", "--device=cpu")
    assumed = padded["training"]["assumptions"]
    assert (assumed["tokens_per_forward"], assumed["attention"]) == (8 * 256, "sdpa")


@pytest.mark.parametrize(
    ("recipe", "changes", "answers"),
    [
        (PAIRS, [], 2),
        ("dpo/home_intents_reward", [], 2),
        ("dpo/home_intents_kto", [], 2),
        ("dpo/home_intents_kto", ["--set=train.preference.losses=[apo_zero_unpaired]"], 1),
        (RECIPE, [], 1),
    ],
)
def test_a_pair_without_packing_has_two_answers(recipe: str, changes: list[str], answers: int) -> None:
    """data.max_tokens limits a prompt with one answer to it."""
    found = plan(recipe, "--set=train.packing=false", "--device=cpu", *changes)["training"]["assumptions"]
    assert found["longest_row_tokens"] == answers * 256
    assert found["attention"] == ("sdpa" if recipe == RECIPE else "document")


def test_a_batch_of_pairs_is_attended_without_a_mask(tmp_path: Path) -> None:
    """With grouped heads a mask would repeat keys and values: eight rows in a batch keep as much as eight by themselves."""
    common = [PAIRS, model(tmp_path, LLAMA_70B), "--set=adapter.start=null", "--set=train.packing=false"]
    common += ["--set=train.micro_batch_size=8", "--device=cuda"]
    apart, masked = (plan(*common, f"--set=model.attention={name}") for name in ("document", "sdpa"))
    size = [one["training"]["moments_bytes"]["loss"] for one in (apart, masked)]
    assert json.dumps(size[0]) != json.dumps(size[1])


def test_a_multimodal_config_is_read_by_its_text_part(tmp_path: Path) -> None:
    whole = plan(RECIPE, model(tmp_path / "plain", LLAMA_70B), "--device=cuda")
    nested = {"model_type": "llava", "text_config": LLAMA_70B, "vision_config": {"hidden_size": 1024}}
    assert plan(RECIPE, model(tmp_path / "nested", nested), "--device=cuda") | {"model": ""} == whole | {
        "model": ""
    }


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "no memory model for model_type 'mixtral'"),
        ({"model_type": "llava", "text_config": [1]}, "no memory model for model_type 'llava'"),
        ({}, "it names no model_type"),
        ({"model_type": None}, "it names no model_type"),
        ({"model_type": "llama", "hidden_size": "wide"}, "'hidden_size' is 'wide'"),
        ({**LLAMA_70B, "num_hidden_layers": -1}, "'num_hidden_layers' is -1"),
    ],
)
def test_a_config_that_says_too_little_is_told(tmp_path: Path, config: Any, part: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(RECIPE, model(tmp_path, config))
    assert part in str(caught.value) and caught.value.faults[0].fix


TIME = ["--train-tokens=1000", "--tokens-per-second=10"]


@pytest.mark.parametrize(
    ("arguments", "where", "part"),
    [
        (["--memory=-24GB"], "--memory", "'-24GB' is not a size"),
        (["--memory=nan"], "--memory", "'nan' is not a size"),
        (["--probe-steps=5"], "--probe-steps", "there is no probe"),
        (["--rows=5"], "--rows", "without packing"),
        ([*TIME, "--rows=5"], "--rows", "without packing"),
        (["--set=train.packing=false", "--rows=5"], "--rows", "beside --train-tokens"),
        (["--set=train.packing=false", *TIME, "--rows=5000"], "--train-tokens", "5,000 rows cannot have"),
        (["--longest-pack=100000"], "--longest-pack", "longer than 512 tokens"),
        (["--sharding=fsdp2"], "--sharding", "there is one"),
    ],
)
def test_nonsense_and_what_would_be_passed_over_is_refused(
    arguments: list[str], where: str, part: str
) -> None:
    with pytest.raises(UserError) as caught:
        plan(RECIPE, "--device=cpu", *arguments)
    (fault,) = caught.value.faults
    assert part in fault.what and fault.where == where and fault.fix


@pytest.mark.parametrize("flag", ["--devices=0", "--devices=-2", "--price-per-hour=nan", "--new-tokens=0"])
def test_values_out_of_range_are_refused_by_the_command(flag: str) -> None:
    result = CliRunner().invoke(app, [RECIPE, *TIME, flag])
    assert result.exit_code == 2 and flag.partition("=")[0] in result.output


def test_one_device_may_offload() -> None:
    found = plan(RECIPE, "--device=h100", "--sharding=zero2", "--offload=optimizer")
    assert found["training"]["host_bytes"] > 0
