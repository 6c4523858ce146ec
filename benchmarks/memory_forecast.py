"""Is the memory forecast right? Every case is trained for a few steps in a process of its own; its peak is compared.

    python benchmarks/memory_forecast.py [--only NAME …] [--steps 2] [--json FILE]

What is measured is what a run reports as used: on CPU the highest resident set while training, base process included; on
CUDA the allocator's peak, compared with the forecast's `allocated_bytes`. Rows are random tokens, packs are full. The model is
the embedded one, and another shape (untied, wider, fewer layers) built on the spot. A validation is measured after the training
has given back what it freed, and compared with that moment of the forecast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from results import table, write_section

from finetune.plan.kernel_cache import limit_kernel_caches

EMBEDDED = "builtin:smollm2-135m-instruct"
WIDE_SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
TARGET_SHARE = 0.6
MEDIAN_GOAL, WORST_GOAL = 0.05, 0.12


@dataclass(frozen=True)
class Case:
    """One configuration. `row_tokens` is the length of every row; `sections` are keys of the recipe."""

    name: str
    sections: dict[str, dict[str, Any]]
    row_tokens: int = 128
    wide: bool = False
    mixed_steps: int | None = (
        None  # rows of 28 to 55 tokens for so many steps, whose packs have ever other lengths
    )
    pairs: bool = False  # rows are pairs: 60 % prompt, and two answers of 20 % each
    validation: bool = False  # the validation after the training, instead of the training
    answers: tuple[int, int, int] | None = (
        None  # generation instead of training: batch, prompt tokens, new tokens
    )
    run: str | None = None  # a whole `finetune run` of this shipped recipe, with what it says of itself


@dataclass
class Result:
    """Bytes of one case."""

    name: str
    forecast: int
    measured: int
    terms: dict[str, int] = field(default_factory=dict)
    tokens_per_second: float = 0.0

    @property
    def error(self) -> float:
        return self.forecast / self.measured - 1


def packed(n_tokens: int, **train: Any) -> dict[str, Any]:
    return {"pack_tokens": n_tokens, **train}


def padded(rows: int, **train: Any) -> dict[str, Any]:
    return {"packing": False, "micro_batch_size": rows, **train}


PAIR_TARGET_SHARE = 0.4
DPO = {"method": "dpo", "learning_rate": 1e-5}
FULL, DORA, NF4 = {"kind": "none"}, {"kind": "dora"}, {"quantize": "nf4"}
CASES = (
    Case("lora 256", {"train": packed(256)}),
    Case("lora 512", {"train": packed(512)}),
    Case("lora 1024", {"train": packed(1024)}),
    Case("lora 2048", {"train": packed(2048)}),
    Case("lora 1024, documents of 512", {"train": packed(1024)}, row_tokens=512),
    Case("lora 1024, rank 128", {"train": packed(1024), "adapter": {"rank": 128, "alpha": 256}}),
    Case("lora 1024, dropout", {"train": packed(1024), "adapter": {"dropout": 0.1}}),
    Case("lora 1024, two micro-batches", {"train": packed(1024, gradient_accumulation_steps=2)}),
    Case("lora 1024, checkpointing", {"train": packed(1024, gradient_checkpointing=True)}),
    Case("lora 2048, checkpointing", {"train": packed(2048, gradient_checkpointing=True)}),
    Case("lora 4 x 256, not packed", {"train": padded(4), "data": {"max_tokens": 256}}, row_tokens=256),
    Case("lora 512, ever other lengths", {"train": packed(512)}, mixed_steps=40),
    Case("lora 512, fp32", {"train": packed(512), "model": {"dtype": "fp32"}}),
    Case("qlora 512", {"train": packed(512), "model": NF4}),
    Case("qlora 1024", {"train": packed(1024), "model": NF4}),
    Case("qlora 1024, checkpointing", {"train": packed(1024, gradient_checkpointing=True), "model": NF4}),
    Case("dora 512", {"train": packed(512), "adapter": DORA}),
    Case("dora 1024, checkpointing", {"train": packed(1024, gradient_checkpointing=True), "adapter": DORA}),
    Case("dpo 1024", {"train": packed(1024, **DPO)}, row_tokens=256, pairs=True),
    Case("dpo 2048", {"train": packed(2048, **DPO)}, row_tokens=512, pairs=True),
    Case("dpo qlora 1024", {"train": packed(1024, **DPO), "model": NF4}, row_tokens=256, pairs=True),
    Case("full 512", {"train": packed(512), "adapter": FULL}),
    Case("full 1024, checkpointing", {"train": packed(1024, gradient_checkpointing=True), "adapter": FULL}),
    Case("wide, lora 1024", {"train": packed(1024)}, wide=True),
    Case("wide, qlora 1024", {"train": packed(1024), "model": NF4}, wide=True),
    Case("wide, full 512", {"train": packed(512), "adapter": FULL}, wide=True),
    Case("validation of lora 1024", {"train": packed(1024)}, validation=True),
    Case("validation of qlora 512", {"train": packed(512), "model": NF4}, validation=True),
    Case("answers 32 x (256 + 32), fp32", {}, answers=(32, 256, 32)),
    Case("answers 64 x (512 + 16), fp32", {}, answers=(64, 512, 16)),
    Case("answers 32 x (512 + 16), bf16", {"eval": {"dtype": "bf16"}}, answers=(32, 512, 16)),
    Case("whole run of sft/home_intents_lora", {}, run="sft/home_intents_lora"),
)


def recipe_of(case: Case, steps: int) -> Any:
    from finetune.recipe.schema import Recipe

    sections = {name: dict(keys) for name, keys in case.sections.items()}
    steps = case.mixed_steps or steps
    train = {"max_steps": steps, "epochs": float(steps), "checkpoint_every_steps": 10_000}
    return Recipe.model_validate(
        {
            "name": "measured",
            "model": {"id": EMBEDDED, **sections.get("model", {})},
            "adapter": sections.get("adapter", {}),
            "data": {"spec": "random", **sections.get("data", {})},
            "train": train | sections.get("train", {}),
            "eval": {"suites": ["none"], **sections.get("eval", {})},
        }
    )


def measure_answers(case: Case) -> Result:
    """Answer random prompts in this process, as the evaluation does, and read the peak."""
    import random

    import finetune.pipeline.run  # noqa: F401  a run has all of this loaded
    from finetune.evaluation.generate import generate
    from finetune.evaluation.stopping import StopRule
    from finetune.model.load import load_model, load_tokenizer
    from finetune.model.source import read_config, resolve_model
    from finetune.plan.memory import forecast_generation
    from finetune.telemetry.memory import memory_basis, peak_memory_bytes, reset_peak_memory

    assert case.answers is not None
    batch, prompt_tokens, new_tokens = case.answers
    dtype = recipe_of(case, 1).eval.dtype
    source = resolve_model(EMBEDDED)
    config = read_config(source)
    tokenizer = load_tokenizer(source)
    generator = random.Random(0)
    prompts = [
        [generator.randrange(10, config["vocab_size"]) for _ in range(prompt_tokens)] for _ in range(batch)
    ]
    reset_peak_memory()
    model = load_model(source, dtype=dtype, attention="sdpa")
    rule = StopRule(tokenizer, new_tokens, frozenset())
    answers = list(generate(model, prompts, rule, batch_size=batch))
    peak = peak_memory_bytes()
    assert len(answers) == batch
    forecast = forecast_generation(
        config, batch, prompt_tokens, new_tokens, dtype, device=_device(memory_basis()), distinct_lengths=1
    )
    return _result(case, forecast, peak, 0.0)


def measure_run(case: Case) -> Result:
    """Every step of a shipped recipe behind its baseline, on few items: what the run forecast, and what it then used."""
    assert case.run is not None
    with tempfile.TemporaryDirectory() as folder:
        program = "from finetune.cli.main import main; main()"
        command = [sys.executable, "-c", program, "run", case.run, "--set", "eval.max_items=16"]
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"FINETUNE_RUNS": folder})
        (said,) = (json.loads(path.read_text()) for path in Path(folder).glob("*/forecast.json"))
    terms = {name: size for name, size in said["terms_bytes"].items() if size}
    return Result(case.name, said["total_bytes"], said["used_peak_bytes"], terms)


def measure(case: Case, steps: int) -> Result:
    """Train in this process, as the pipeline does, and read the peak. Called in a fresh process."""
    import finetune.pipeline.run  # noqa: F401  a run has all of this loaded
    from finetune.model.adapters import attach_adapter
    from finetune.model.load import load_model, load_tokenizer
    from finetune.model.source import read_config, resolve_model
    from finetune.plan.memory import forecast_training
    from finetune.telemetry.memory import memory_basis, peak_memory_bytes, reset_peak_memory
    from finetune.training.preference import train_preference
    from finetune.training.sft import train_sft

    recipe = recipe_of(case, steps)
    source = resolve_model(EMBEDDED)
    tokenizer = load_tokenizer(source)
    with tempfile.TemporaryDirectory() as folder:
        if case.wide:
            source = build_wide(Path(folder) / "wide")
        reset_peak_memory()
        model = load_model(
            source, dtype=recipe.model.dtype, quantize=recipe.model.quantize, attention=recipe.attention
        )
        if recipe.adapter.kind != "none":
            model = attach_adapter(model, recipe.adapter, seed=recipe.seed)
        vocabulary = read_config(source)["vocab_size"]
        options: Any = {
            "run_folder": Path(folder) / "run",
            "owner": "benchmark",
            "say": lambda line: print(line, file=sys.stderr),
            "callbacks": [after_training()] if case.validation else [],
        }
        if case.pairs:
            pairs = random_pairs(case, recipe, vocabulary)
            references = Path(folder) / "references"
            result = train_preference(recipe, model, tokenizer, pairs, [], references=references, **options)
        else:
            rows = random_rows(case, recipe, vocabulary)
            result = train_sft(recipe, model, tokenizer, rows, rows if case.validation else [], **options)
        peak = peak_memory_bytes()
        forecast = forecast_training(
            recipe,
            read_config(source),
            target_share=PAIR_TARGET_SHARE if case.pairs else TARGET_SHARE,
            distinct_lengths=None if case.mixed_steps else 1,
            device=_device(memory_basis()),
        )
    return _result(case, forecast, peak, result.tokens_per_second)


def after_training() -> Any:
    """A callback that gives back what the training has freed and starts a new peak when it ends."""
    from transformers import TrainerCallback

    from finetune.model.memory import release_memory
    from finetune.telemetry.memory import reset_peak_memory

    class AfterTraining(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            release_memory()
            reset_peak_memory()

    return AfterTraining()


def _result(case: Case, forecast: Any, peak: int, tokens_per_second: float) -> Result:
    predicted = forecast.allocated_bytes if forecast.basis == "cuda" else forecast.total_bytes
    if case.validation:
        outside = sum(forecast.terms_bytes[name] for name in ("process", "kernel_cache"))
        predicted = forecast.moments_bytes["validation"] - (outside if forecast.basis == "cuda" else 0)
    terms = {name: size for name, size in forecast.terms_bytes.items() if size}
    return Result(case.name, predicted, peak, terms, tokens_per_second)


def _device(basis: str) -> Any:
    return "cuda" if basis == "cuda" else "cpu"


def build_wide(folder: Path) -> Any:
    """A random model of another shape, saved so that it is loaded like any other."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune.model.source import ModelSource

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**WIDE_SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    return ModelSource("wide", str(folder), None, "wide")


def random_rows(case: Case, recipe: Any, vocabulary: int) -> list[Any]:
    """Enough rows for two full optimizer steps, or for one pass of mixed ones; the last 60 % of each are targets."""
    import random

    from finetune.data.tokenise import TokenisedRow

    generator = random.Random(0)
    settings = recipe.train
    per_batch = settings.micro_batch_size * (
        settings.pack_tokens // case.row_tokens if settings.packing else 1
    )
    n_rows = 2 * per_batch * settings.gradient_accumulation_steps
    lengths = [case.row_tokens] * n_rows
    if case.mixed_steps:
        lengths = [generator.randrange(28, 56) for _ in range(13 * case.mixed_steps)]
    rows = []
    for index, length in enumerate(lengths):
        n_targets = int(length * TARGET_SHARE)
        ids = [generator.randrange(10, vocabulary) for _ in range(length)]
        labels = [-100] * (length - n_targets) + ids[-n_targets:]
        rows.append(TokenisedRow(str(index), ids, labels, n_targets))
    return rows


def random_pairs(case: Case, recipe: Any, vocabulary: int) -> list[Any]:
    """Pairs of random tokens for two full optimizer steps."""
    import random

    from finetune.data.pair_tokens import Answer, AnsweredPrompt

    generator = random.Random(0)

    def some(n_tokens: int) -> list[int]:
        return [generator.randrange(10, vocabulary) for _ in range(n_tokens)]

    n_answer = int(case.row_tokens * PAIR_TARGET_SHARE / 2)
    n_pairs = 2 * (recipe.train.pack_tokens // case.row_tokens) * recipe.train.gradient_accumulation_steps
    pairs = []
    for index in range(n_pairs):
        prompt, chosen, rejected = (some(n) for n in (case.row_tokens - 2 * n_answer, n_answer, n_answer))
        pairs.append(AnsweredPrompt(str(index), prompt, (Answer(chosen, chosen), Answer(rejected, rejected))))
    return pairs


def in_fresh_process(case: Case, steps: int) -> Result:
    done = subprocess.run(
        [sys.executable, __file__, "--child", case.name, "--steps", str(steps)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{case.name} failed:\n{done.stderr[-3000:]}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def report(results: list[Result]) -> list[str]:
    """Markdown: every case, then the median and the worst error."""
    rows = [
        [
            result.name,
            f"{result.forecast / 1e9:.3f}",
            f"{result.measured / 1e9:.3f}",
            f"{result.forecast / result.measured:.3f}",
        ]
        for result in results
    ]
    errors = sorted(abs(result.error) for result in results)
    return [
        *table(["case", "forecast, GB", "measured, GB", "forecast / measured"], rows),
        "",
        f"{len(results)} cases: median error {statistics.median(errors):.1%} (goal {MEDIAN_GOAL:.0%}), "
        f"worst {errors[-1]:.1%} (goal {WORST_GOAL:.0%}).",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of cases; default: all")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of each case")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    by_name = {case.name: case for case in CASES}
    if arguments.child:
        limit_kernel_caches()  # as the command line does
        case = by_name[arguments.child]
        if case.run is not None:
            result = measure_run(case)
        else:
            result = measure(case, arguments.steps) if case.answers is None else measure_answers(case)
        print(json.dumps(asdict(result)))
        return
    results = []
    for name in arguments.only or by_name:
        results.append(in_fresh_process(by_name[name], arguments.steps))
        print(f"{name}: {results[-1].error:+.1%}", file=sys.stderr, flush=True)
    if arguments.only:
        print("\n".join(report(results)))
    else:
        write_section("Memory: forecast beside what was used", report(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
