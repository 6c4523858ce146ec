"""Our SFT step beside plain TRL: same model, same rows in each batch, same precision and adapter, one process.

    python benchmarks/sft_speed.py [--rows-per-batch 10] [--steps 6] [--dtype bf16]

Both train LoRA (rank 32, all linear layers) on the embedded model and the smart-home rows. Steps of the two alternate in
blocks, so that a drift of the machine's speed meets both; the first step of each is thrown away. Tokens are the rows' own:
padding counts for nobody.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from results import table, write_section
from step_clock import StepClock
from trl import SFTConfig, SFTTrainer

from finetune.data.build import build_dataset, default_builds_root
from finetune.data.tokenise import TokenisedRow, tokenise_rows
from finetune.model.adapters import attach_adapter
from finetune.model.attention import register_document_attention
from finetune.model.load import load_model, load_tokenizer
from finetune.model.source import resolve_model
from finetune.paths import find_declarative
from finetune.recipe.resolve import load_recipe
from finetune.telemetry.callback import StepTally
from finetune.telemetry.flops import measure_peak_flops, step_work
from finetune.training.sft import trainer_arguments
from finetune.training.sft_trainer import ExactSftTrainer


def plain_trl(
    source: Any, tokenizer: Any, rows: list[TokenisedRow], options: argparse.Namespace
) -> SFTTrainer:
    """TRL's defaults but for what must be equal; padded batches, checkpointing off (its faster setting here)."""
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    model = load_model(source, dtype=options.dtype, attention="sdpa").to(dtype)
    return SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=options.rows_per_batch,
            max_steps=options.steps,
            learning_rate=1e-4,
            bf16=options.dtype == "bf16",
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list([{"input_ids": row.input_ids, "labels": row.labels} for row in rows]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def ours(
    source: Any, tokenizer: Any, rows: list[TokenisedRow], options: argparse.Namespace
) -> ExactSftTrainer:
    """The trainer of `finetune run`, with packs that hold exactly the rows of TRL's batches."""
    recipe = load_recipe("sft/home_intents_lora", [f"model.dtype={options.dtype}"])
    register_document_attention()
    model = load_model(source, dtype=options.dtype, attention="document")
    model = attach_adapter(model, recipe.adapter, seed=1)
    batches = [rows[i : i + options.rows_per_batch] for i in range(0, len(rows), options.rows_per_batch)]
    packs = [
        {
            "input_ids": [token for row in batch for token in row.input_ids],
            "labels": [label for row in batch for label in row.labels],
            "seq_lengths": [len(row.input_ids) for row in batch],
        }
        for batch in batches
    ]
    folder = Path(tempfile.mkdtemp())
    arguments = trainer_arguments(recipe, options.steps, folder)
    arguments.save_strategy = "no"
    return ExactSftTrainer(
        checkpoint_root=folder,
        owner="bench",
        settings=recipe.train,
        tally=StepTally(),
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(packs),
        processing_class=tokenizer,
    )


def measure(trainer: Any) -> list[float]:
    clock = StepClock()
    trainer.add_callback(clock)
    trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    return clock.seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows-per-batch", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    options = parser.parse_args()
    source = resolve_model("builtin:smollm2-135m-instruct")
    tokenizer = load_tokenizer(source)
    build = build_dataset(find_declarative("data", "home_intents"), default_builds_root())
    rows = tokenise_rows(
        build.rows("train")[: options.rows_per_batch * options.steps], tokenizer, max_tokens=256
    ).rows
    n_tokens = [
        sum(len(row.input_ids) for row in rows[i : i + options.rows_per_batch])
        for i in range(0, len(rows), options.rows_per_batch)
    ][1:]
    mine = ours(source, tokenizer, rows, options)
    work, dtype = step_work(mine.model), torch.bfloat16 if options.dtype == "bf16" else torch.float32
    peak = measure_peak_flops(dtype, mine.args.device)
    seconds = {"plain TRL": measure(plain_trl(source, tokenizer, rows, options)), "ours": measure(mine)}
    rates = {
        name: statistics.median(n / s for n, s in zip(n_tokens, taken, strict=True))
        for name, taken in seconds.items()
    }
    targets = sum(row.n_targets for row in rows) / len(rows) * options.rows_per_batch
    tokens = statistics.mean(n_tokens)
    share = work.flops(int(tokens), int(targets), int(tokens * 48)) / tokens * rates["ours"] / peak
    ratio = rates["ours"] / rates["plain TRL"]
    lines = table(
        ["trainer", "tokens/s (median of 5 steps)", "ratio"],
        [
            ["plain TRL 1.16, padded batch", f"{rates['plain TRL']:.0f}", "1.00"],
            ["ours, packed", f"{rates['ours']:.0f}", f"{ratio:.2f}"],
        ],
    )
    lines += [
        "",
        f"{options.rows_per_batch} rows a step ({tokens:.0f} tokens, {targets:.0f} of them targets), {options.dtype}, LoRA rank 32.",
        f"Ours reaches {share:.0%} of the measured {options.dtype} GEMM peak ({peak / 1e9:.0f} GFLOP/s); the rest goes to "
        "attention, norms, rotary embeddings and activations, which move memory and multiply little.",
    ]
    write_section(f"SFT speed, {options.dtype}", lines)


if __name__ == "__main__":
    main()
