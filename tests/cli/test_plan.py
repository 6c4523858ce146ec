"""`finetune plan`: what a person and a machine are told, the exit code, and that nothing heavy is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune.cli.plan import app
from finetune.errors import ExitCode, UserError

RECIPE = "sft/home_intents_lora"
BREAK_EVEN = ["break-even", "--tuning-cost", "5000", "--large-price", "5", "--small-price", "0.3"]
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def answer(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


@pytest.fixture
def large(tmp_path: Path) -> str:
    """`--set` for a model of which only config.json is there."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return f"--set=model.id={tmp_path}"


def test_the_recipe_may_stand_first_or_behind_its_flags() -> None:
    first = answer(RECIPE, "--memory", "24GB")
    assert answer("--memory", "24GB", RECIPE) == first
    assert answer("recipe", RECIPE, "--memory", "24GB") == first


def test_every_term_is_shown_and_they_add_up() -> None:
    plan = answer(RECIPE, "--device", "cpu", "--memory", "24GB")
    assert sum(plan["training"]["terms_bytes"].values()) == plan["training"]["total_bytes"]
    assert plan["training"]["n_parameters"] == 134_515_008
    assert plan["training"]["basis"] == "rss"
    assert plan["peak_bytes"] == max(plan["training"]["total_bytes"], plan["evaluation"]["total_bytes"])
    assert plan["fit"]["fits"]
    text = run(RECIPE, "--device", "cpu", "--memory", "24GB").stdout
    for words in ("weights", "activations", "process and libraries", "fits in 24 GB"):
        assert words in text


def test_what_does_not_fit_exits_13_and_names_the_keys_to_set(large: str) -> None:
    plan = answer(RECIPE, large, "--device", "cuda", "--memory", "20GB", exit_code=int(ExitCode.WILL_NOT_FIT))
    assert not plan["fit"]["fits"]
    suggestions = plan["fit"]["suggestions"]
    assert suggestions
    assert suggestions[0]["fits"]
    flags = [f"--set={key}={value}" for key, value in suggestions[0]["changes"].items()]
    again = answer(RECIPE, large, *flags, "--device", "cuda", "--memory", "20GB")
    assert again["fit"]["fits"]
    assert again["peak_bytes"] == suggestions[0]["total_bytes"]


def test_the_printed_flags_are_those_to_type(large: str) -> None:
    result = run(RECIPE, large, "--device", "cuda", "--memory", "20GB")
    assert result.exit_code == ExitCode.WILL_NOT_FIT
    assert "does not fit in 20 GB" in result.stdout
    line = next(line for line in result.stdout.splitlines() if line.strip().startswith("--set"))
    assert run(RECIPE, large, *line.split(), "--device", "cuda", "--memory", "20GB").exit_code == 0


def test_a_known_gpu_brings_its_memory_and_speed(large: str) -> None:
    plan = answer(
        RECIPE,
        large,
        "--set=eval.dtype=bf16",
        "--device",
        "a100-80gb",
        "--train-tokens=10000000",
        "--price-per-hour=2",
    )
    assert plan["fit"]["memory_bytes"] == 80_000_000_000
    assert plan["time"]["basis"] == "a100-80gb"
    assert plan["time"]["tokens"] == 20_000_000
    assert plan["cost"] == pytest.approx(plan["time"]["seconds"] / 3600 * 2)


def test_a_measured_rate_wins() -> None:
    plan = answer(RECIPE, "--device", "cpu", "--train-tokens", "40000", "--tokens-per-second", "400")
    assert plan["time"]["seconds"] == pytest.approx(200.0)
    assert plan["time"]["basis"] == "given"


def test_several_devices_share(large: str) -> None:
    common = (RECIPE, large, "--set=adapter.kind=none", "--device", "h100", "--devices", "8")
    ddp = answer(*common, exit_code=int(ExitCode.WILL_NOT_FIT))
    fsdp = answer(*common, "--sharding", "fsdp2", "--set=eval.dtype=bf16")
    assert fsdp["training"]["total_bytes"] < ddp["training"]["total_bytes"] / 4


def test_an_unnamed_gpu_without_memory_is_only_forecast() -> None:
    assert answer(RECIPE, "--device", "cuda")["fit"] is None


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([RECIPE, "--device", "h1000"], "did you mean 'h100'"),
        ([RECIPE, "--memory", "lots"], "'lots' is not a size"),
        ([RECIPE, "--memory", "0GB"], "'0GB' is 0 B, and holds nothing"),
        ([RECIPE, "--memory", "24"], "'24' is 24 B, and holds nothing"),
        ([RECIPE, "--price-per-hour", "2"], "without the length of the training"),
        ([RECIPE, "--tokens-per-second", "200"], "without the length of the training"),
        ([RECIPE, "--train-tokens", "10", "--tokens-per-second", "nan"], "a finite rate above zero"),
        ([RECIPE, "--train-tokens", "10", "--tokens-per-second", "inf"], "a finite rate above zero"),
        (
            [RECIPE, "--train-tokens", "10", "--tokens-per-second", "9", "--price-per-hour", "inf"],
            "inf is not",
        ),
        ([RECIPE, "--probe", "--train-tokens", "10"], "counts the tokens and measures the rate"),
        ([RECIPE, "--offload", "optimizer"], "every device holds the whole model"),
        ([RECIPE, "--device", "cpu", "--train-tokens", "10"], "no rate is known"),
        ([RECIPE, "--set", "model.id=builtin:smollm"], "no embedded model"),
        ([RECIPE, "--set", "model.id=./nowhere"], "holds no config.json"),
        ([RECIPE, "--set", "model.revision=v1"], "revision 'v1' says nothing about builtin:"),
        ([RECIPE, "--set", "train.epoch=1"], "epochs"),
        (["no_such_recipe"], "no_such_recipe"),
    ],
)
def test_what_a_user_can_mend_is_said(arguments: list[str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        run(*arguments)
    assert part in str(caught.value)


def test_break_even_of_the_published_example() -> None:
    result = answer(*BREAK_EVEN, "--gpu-per-month", "700")
    assert result["million_tokens_per_month"] == pytest.approx(237.6, abs=0.05)
    assert result["of_which_gpu_only"] == pytest.approx(148.9, abs=0.05)
    assert len(result["curve"]) > 5
    text = run(*BREAK_EVEN, "--gpu-per-month", "700").stdout
    assert "pays from 237.6 million tokens a month" in text
    assert "tuned is cheaper" in text


def test_small_volumes_keep_their_digits() -> None:
    text = run("break-even", "--tuning-cost", "10", "--large-price", "5", "--small-price", "1").stdout
    assert "pays from 0.208 million tokens" in text
    volumes = [line.split()[0] for line in text.splitlines()[4:]]
    assert len(set(volumes)) == len(volumes) == 13


def test_break_even_compares_a_query_with_and_without_examples() -> None:
    prompts = ["--large-prompt-tokens", "900", "--small-prompt-tokens", "60", "--output-tokens", "40"]
    costs = answer(*BREAK_EVEN, *prompts)["query_cost"]
    assert costs == {"large": pytest.approx(940 * 5e-6), "tuned": pytest.approx(100 * 0.3e-6)}


def test_no_volume_pays_when_the_small_model_is_not_cheaper() -> None:
    arguments = [*BREAK_EVEN[:-1], "6"]
    assert answer(*arguments)["million_tokens_per_month"] is None
    assert "no volume pays" in run(*arguments).stdout


PROGRAM = """
import sys
from finetune.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("loaded:", *sorted({"torch", "transformers", "peft", "numpy"} & sys.modules.keys()), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments", [["plan", RECIPE], ["plan", *BREAK_EVEN]], ids=lambda a: " ".join(a[:2])
)
def test_nothing_heavy_is_loaded(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "loaded:"


def test_break_even_as_a_page(tmp_path: Path) -> None:
    path = tmp_path / "break_even.html"
    result = run(*BREAK_EVEN, "--gpu-per-month", "700", "--page", str(path))
    assert result.exit_code == 0 and str(path) in result.stderr
    page = path.read_text()
    assert "cheaper from 237.6 million tokens a month on, and from 148.9 once" in page
    assert page.count("<title>break-even</title>") == 1 and page.count("<tr>") == 14
    free = run(
        "break-even", "--tuning-cost", "1", "--large-price", "1", "--small-price", "2", "--page", str(path)
    )
    assert free.exit_code == 0 and "no volume pays for it" in path.read_text()
