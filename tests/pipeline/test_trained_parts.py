"""What is trained, through whole runs: kinds of adapters, parts of the model, new tokens, running text, the doctor."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune.errors import UserError

QUICK = ("eval.max_items=4", "train.epochs=1", "eval.suites=[suite.yaml]")
UNPACKED = ("train.packing=false", "train.micro_batch_size=4")
RUNS = {
    "vera": ("adapter.kind=vera", "train.learning_rate=0.1"),
    "ia3": ("adapter.kind=ia3", "train.learning_rate=0.1"),
    "prompt": ("adapter.kind=prompt", "adapter.virtual_tokens=3", "train.learning_rate=0.3", *UNPACKED),
    "prefix": ("adapter.kind=prefix", "adapter.virtual_tokens=3", "train.learning_rate=0.3", *UNPACKED),
    "pissa": ("adapter.init=pissa",),
    "eva": ("adapter.init=eva",),
    "loftq": ("adapter.init=loftq", "model.quantize=nf4"),
    "last layer": ("adapter.kind=none", "adapter.layers=[-1]", "adapter.freeze=[embed_tokens]"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_evaluates_and_compares(name: str, project: Any) -> None:
    outcome = project.run(*QUICK, *RUNS[name])
    assert "evaluate digits" in outcome.worked
    summary = json.loads((outcome.folder / "eval/digits/tuned.summary.json").read_text())
    assert summary["n"] == 4
    assert outcome.exit_code in (0, 10, 11, 12)
    assert project.run(*QUICK, *RUNS[name]).worked == ()


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_new_tokens_are_trained_and_only_the_tuned_model_reads_them(kind: str, project: Any) -> None:
    rows = (project.folder / "rows.jsonl").read_text().replace('{\\"n\\": ', '{\\"<n>\\": ')
    assert "<n>" in rows
    (project.folder / "rows.jsonl").write_text(rows)
    outcome = project.run(*QUICK, "model.new_tokens=[<n>, <m>]", f"adapter.kind={kind}")
    folder = outcome.folder / ("adapter" if kind == "lora" else "model")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(["<n>", "<m>"]) == [259, 260]
    untuned = json.loads((outcome.folder / "baseline/digits/zero_shot.summary.json").read_text())
    assert untuned["n"] == 4
    if kind == "lora":
        from finetune.cli.main import app

        merged = project.folder / "merged"
        done = CliRunner().invoke(
            app, ["merge", "adapter", str(outcome.folder), "--out", str(merged), "--dtype", "fp32"]
        )
        assert done.exit_code == 0, done.output
        assert json.loads((merged / "config.json").read_text())["vocab_size"] == 261


def test_running_text_is_trained_in_packs_with_an_end_between_documents(project: Any) -> None:
    """Continued pre-training: every token but a document's first is a target, and EOS is one too."""
    texts = [{"text": f"Document {n} tells of {n} things. " * (1 + n % 3)} for n in range(40)]
    (project.folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    spec = (project.folder / "digits.yaml").read_text()
    (project.folder / "texts.yaml").write_text(
        spec.replace("name: digits", "name: texts").replace("rows.jsonl", "texts.jsonl")
    )
    outcome = project.run(
        *QUICK, "data.spec=texts.yaml", "data.max_tokens=256", "train.pack_tokens=512", "train.epochs=3"
    )
    tokenised = json.loads((outcome.folder / "data/tokenised.json").read_text())
    train = tokenised["splits"]["train"]
    rows = [json.loads(line) for line in (outcome.folder / "data/train.jsonl").read_text().splitlines()]
    # A byte a token, one EOS a document, and its first token is predicted by nothing.
    assert train["target_tokens"] == sum(len(row["text"].encode()) for row in rows)
    events = [json.loads(line) for line in (outcome.folder / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("adapter.kind=bitfit",), "has no biases"),
        (("adapter.modules_to_save=[lm_hed]",), "lm_head"),
        (("adapter.rank_pattern={q_prj: 4}",), "q_proj"),
        (("adapter.layers=[7]",), "there is no layer 7"),
        (("adapter.kind=none", "adapter.freeze=[embed_token]"), "embed_tokens"),
        (("train.optimizer_options={beta: [0.8, 0.9]}",), "betas"),
        (("model.dtype=fp16",), "fp16 needs CUDA"),
        (("model.new_tokens=['<|im_end|>']",), "token of this model already"),
        (
            ("model.quantize=nf4", "adapter.modules_to_save=[q_proj]", "adapter.target_modules=[k_proj]"),
            "quantized",
        ),
    ],
    ids=lambda given: given[0].replace("=", "-") if isinstance(given, tuple) else "",
)
def test_what_cannot_be_trained_is_refused_before_weights_are_loaded(
    overrides: tuple[str, ...], said: str, project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("finetune.pipeline.stages.load_model", loaded)
    monkeypatch.setattr("finetune.pipeline.stages.load_before", loaded)
    with pytest.raises(UserError, match=said):
        project.run(*QUICK, *overrides)


def test_the_doctor_measures_a_recipes_invariants(project: Any) -> None:
    from finetune.cli.doctor import app

    runner = CliRunner()
    done = runner.invoke(app, ["invariants", str(project.recipe), "--rows", "4", "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["faults"] == 0
    status = {finding["check"]: finding["status"] for finding in answer["findings"]}
    assert status["accumulation"] == status["rendering"] == status["packing, document, gradient"] == "ok"
    told = runner.invoke(app, ["invariants", str(project.recipe), "--rows", "4"])
    assert "hold, 0 are broken" in told.stdout


def test_the_doctor_exits_with_a_fault_when_an_invariant_is_broken(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.cli.doctor import app
    from finetune.training import invariants

    monkeypatch.setattr(invariants, "accumulation_error", lambda *args: 0.5)
    done = CliRunner().invoke(app, ["invariants", str(project.recipe), "--rows", "4"])
    assert done.exit_code == 1
    assert "fault   accumulation (0.5" in done.stdout
