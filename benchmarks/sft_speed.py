"""Our SFT step beside plain TRL at its settings: same model, rows in each batch, precision and adapter, one process.

    python benchmarks/sft_speed.py [--rows-per-batch 4] [--common-tokens 0] [--steps 6] [--dtype bf16] [--tiny]

All train LoRA (rank 32, all linear layers) on rows of random tokens, 20 to 500 long, of which the first 60 % are a prompt
without loss. TRL pads the rows of a batch (its default but for checkpointing, which is off), takes them one by one with
accumulation, so that nothing is padded, or lays them end to end (`padding_free`); the fastest of these is what ours is
compared with. The first step of each is thrown away. Tokens are the rows' own: padding counts for nobody. Peak memory is
that of a process of its own over two steps. `--tiny` takes a random model of two layers. With `--common-tokens` every row
begins with so many tokens that are the same in all, as far as its prompt goes: a system prompt, which ours computes once a
pack.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from contenders import in_order, tiny_source
from datasets import Dataset
from peft import LoraConfig
from results import table, write_section
from step_clock import StepClock
from trl import SFTConfig, SFTTrainer

from finetune.model.adapters import attach_adapter
from finetune.model.attention import register_document_attention
from finetune.model.fast import speed_up
from finetune.model.load import load_model, load_tokenizer
from finetune.model.source import resolve_model
from finetune.recipe.resolve import load_recipe
from finetune.telemetry.callback import StepTally
from finetune.telemetry.flops import measure_peak_flops, step_work
from finetune.telemetry.memory import peak_memory_bytes
from finetune.training.sft import trainer_arguments
from finetune.training.sft_trainer import ExactSftTrainer

Rows = list[dict[str, list[int]]]
OURS = "ours"
# What each way of TRL says of a batch of n rows.
TRL_WAYS: dict[str, Any] = {
    "TRL, padded": lambda n: {"per_device_train_batch_size": n},
    "TRL, row by row": lambda n: {"per_device_train_batch_size": 1, "gradient_accumulation_steps": n},
    "TRL, padding-free": lambda n: {"per_device_train_batch_size": n, "padding_free": True},
    "TRL, padded, checkpointing": lambda n: {
        "per_device_train_batch_size": n,
        "gradient_checkpointing": True,
    },
}
CONTENDERS = (*TRL_WAYS, OURS)


def make_rows(
    n_rows: int, n_vocabulary: int, n_common: int = 0, shortest: int = 20, longest: int = 500
) -> Rows:
    """Rows of random tokens, lengths uniform, the first 60 % of each without loss, the first `n_common` all the same."""
    draw = random.Random(17)
    common = [random.Random(place).randrange(3, n_vocabulary) for place in range(n_common)]
    rows = []
    for _ in range(n_rows):
        ids = [draw.randrange(3, n_vocabulary) for _ in range(draw.randint(shortest, longest))]
        prompt = round(0.6 * len(ids))
        ids[: min(n_common, prompt - 1)] = common[: prompt - 1]
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return rows


def plain_trl(name: str, source: Any, rows: Rows, options: argparse.Namespace) -> SFTTrainer:
    """TRL's trainer; everything that is not said by the contender's name or needed for equal work is its default."""
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    said = {"gradient_checkpointing": False} | TRL_WAYS[name](options.rows_per_batch)
    return SFTTrainer(
        model=load_model(source, dtype=options.dtype, attention="sdpa").to(dtype),
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=options.steps,
            learning_rate=1e-4,
            bf16=options.dtype == "bf16",
            use_cpu=not torch.cuda.is_available(),
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            save_strategy="no",
            logging_strategy="steps",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            shuffle_dataset=False,
            **said,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(source),
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def ours(source: Any, rows: Rows, options: argparse.Namespace) -> ExactSftTrainer:
    """The trainer of `finetune run`, with packs that hold exactly the rows of TRL's batches."""
    recipe = load_recipe(
        "sft/home_intents_lora",
        [
            f"model.dtype={options.dtype}",
            "train.learning_rate=1e-4",
            "train.schedule=linear",
            "train.warmup_share=0",
            "train.floor_share=0",
            f"train.gradient_accumulation_steps={options.packs_per_step}",
        ],
    )
    register_document_attention()
    model = load_model(source, dtype=options.dtype, attention="document")
    model = attach_adapter(model, recipe.adapter, seed=1)
    speed_up(model)
    packs = [
        {
            "input_ids": [token for row in pack for token in row["input_ids"]],
            "labels": [label for row in pack for label in row["labels"]],
            "seq_lengths": [len(row["input_ids"]) for row in pack],
        }
        for batch in batches_of(rows, options.rows_per_batch)
        for pack in balanced(batch, options.packs_per_step)
    ]
    folder = Path(tempfile.mkdtemp())
    arguments = trainer_arguments(recipe, options.steps, folder)
    arguments.save_strategy = "no"
    arguments.logging_strategy, arguments.logging_steps = "steps", 1
    trainer = ExactSftTrainer(
        checkpoint_root=folder,
        owner="bench",
        settings=recipe.train,
        tally=StepTally(),
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(packs),
        processing_class=load_tokenizer(source),
    )
    trainer.share_prefixes()
    return trainer


def batches_of(rows: Rows, size: int) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def balanced(rows: Rows, n_packs: int) -> list[Rows]:
    """The rows of a step as packs of about the same length: the longest first, each to the shortest pack so far."""
    packs: list[Rows] = [[] for _ in range(n_packs)]
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        min(packs, key=lambda pack: sum(len(one["input_ids"]) for one in pack)).append(row)
    return packs


def contend(name: str, source: Any, rows: Rows, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step after the first, the first step's loss and the peak memory of this process."""
    if name == OURS:
        trainer: Any = ours(source, rows, options)
    else:
        trainer = plain_trl(name, source, rows, options)
    clock = StepClock()
    trainer.add_callback(clock)
    in_order(trainer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"seconds": clock.seconds[1:], "losses": losses, "peak_bytes": peak_memory_bytes()}


def peak_alone(name: str, options: argparse.Namespace) -> float:
    given = ["--only", name, "--steps", "2", "--dtype", options.dtype]
    given += [
        "--rows-per-batch",
        str(options.rows_per_batch),
        "--packs-per-step",
        str(options.packs_per_step),
        "--common-tokens",
        str(options.common_tokens),
    ]
    given += [*(["--tiny"] if options.tiny else [])]
    said = subprocess.run([sys.executable, __file__, *given], capture_output=True, text=True, check=True)
    return float(json.loads(said.stdout.splitlines()[-1])["peak_bytes"])


def share_of_peak(source: Any, rows: Rows, rate: float, options: argparse.Namespace) -> tuple[float, float]:
    """The share of the measured GEMM peak that a rate in tokens/s is, and that peak in FLOP/s."""
    mine = ours(source, rows, options)
    peak = measure_peak_flops(torch.bfloat16 if options.dtype == "bf16" else torch.float32, mine.args.device)
    lengths = [len(row["input_ids"]) for row in rows]
    targets = sum(label != -100 for row in rows for label in row["labels"])
    work = step_work(mine.model).flops(sum(lengths), targets, sum(length**2 for length in lengths))
    return work / sum(lengths) * rate / peak, peak


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows-per-batch", type=int, default=4)
    parser.add_argument("--packs-per-step", type=int, default=2, help="Micro-batches of ours in a step.")
    parser.add_argument("--common-tokens", type=int, default=0, help="Length of the rows' system prompt.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=CONTENDERS, help="Measure one contender and print it as JSON.")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    source = tiny_source() if options.tiny else resolve_model("builtin:smollm2-135m-instruct")
    n_vocabulary = 256 if options.tiny else 40_000
    rows = make_rows(options.rows_per_batch * options.steps, n_vocabulary, options.common_tokens)
    if options.only:
        print(json.dumps(contend(options.only, source, rows, options)))
        return
    n_tokens = [
        sum(len(row["input_ids"]) for row in batch) for batch in batches_of(rows, options.rows_per_batch)
    ]
    found = {name: contend(name, source, rows, options) for name in CONTENDERS}
    peaks = {name: peak_alone(name, options) for name in CONTENDERS}
    rates = {
        name: statistics.median(n / s for n, s in zip(n_tokens[1:], one["seconds"], strict=True))
        for name, one in found.items()
    }
    best = max(TRL_WAYS, key=lambda name: rates[name])
    lines = table(
        ["trainer", "tokens/s", "ours is faster by", "peak [GB]", "loss of the last step"],
        [
            [
                name,
                f"{rates[name]:.0f}",
                f"{rates[OURS] / rates[name]:.2f}",
                f"{peaks[name] / 1e9:.2f}",
                f"{found[name]['losses'][-1]:.3f}" if found[name]["losses"] else "",
            ]
            for name in CONTENDERS
        ],
    )
    lines += [
        "",
        f"{options.rows_per_batch} rows of 20 to 500 tokens a step ({statistics.mean(n_tokens):.0f} tokens, 40 % of them "
        f"targets), {options.dtype}, LoRA rank 32; medians of {options.steps - 1} steps.",
        f"Beside TRL's fastest setting, {best!r}: {rates[OURS] / rates[best]:.2f} times as fast (goal 2.0), "
        f"{peaks[OURS] / peaks[best]:.2f} of its memory, {peaks[OURS] / min(peaks[name] for name in TRL_WAYS):.2f} of TRL's "
        "leanest (goal 0.7).",
    ]
    title = f"SFT speed, {options.dtype}"
    if options.common_tokens:
        title += f", with a system prompt of {options.common_tokens} tokens"
        lines.append(
            f"Every row begins with the same {options.common_tokens} tokens, or as many as its prompt has; ours takes "
            f"{options.packs_per_step} pack(s) a step and computes them once in each."
        )
    else:
        share, peak = share_of_peak(source, rows, rates[OURS], options)
        lines.append(
            f"Ours reaches {share:.0%} of the measured {options.dtype} GEMM peak ({peak / 1e9:.0f} GFLOP/s; goal 55 %); the "
            "rest goes to attention, norms, rotary embeddings and activations, which move memory and multiply little."
        )
    if options.tiny:
        print("\n".join(lines))  # a model of no size: the numbers mean nothing and are not kept
    else:
        write_section(title, lines)


if __name__ == "__main__":
    main()
