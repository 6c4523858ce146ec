"""Our DPO step beside plain TRL, at its defaults and at its best setting: same model, pairs, batch, precision and adapter.

    python benchmarks/dpo_speed.py [--prompt 300] [--answer 50] [--pairs-per-batch 4] [--steps 6] [--dtype bf16] [--tiny]

All train LoRA (rank 32, all linear layers) on pairs of random tokens: a prompt and two answers of equal length, so that
nobody pads. TRL's default recomputes activations and asks the reference in every step; its best setting does neither.
What a reference costs once is added for one epoch, in which every pair is used once. The first step of each is thrown
away; every contender's peak memory is that of a process of its own. `--tiny` takes a random model of two layers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from contenders import in_order, tiny_source
from peft import LoraConfig
from results import table, write_section
from step_clock import StepClock
from trl import DPOConfig, DPOTrainer

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.model.adapters import attach_adapter
from finetune.model.attention import register_document_attention
from finetune.model.load import load_model, load_tokenizer
from finetune.model.source import resolve_model
from finetune.recipe.resolve import load_recipe
from finetune.telemetry.callback import StepTally
from finetune.telemetry.memory import peak_memory_bytes
from finetune.training.arguments import shared_arguments
from finetune.training.branches import BranchCollator, Pack, Packs
from finetune.training.dpo_trainer import ExactDpoTrainer
from finetune.training.reference import add_reference, weights_key

CONTENDERS = ("TRL, default", "TRL, best setting", "ours")
SETTINGS: dict[str, dict[str, Any]] = {
    "TRL, default": {},
    "TRL, best setting": {"gradient_checkpointing": False, "precompute_ref_log_probs": True},
}


class TokenisedDpo(DPOTrainer):
    """TRL's trainer on pairs that are tokenised already; how long its reference takes beforehand is kept."""

    reference_seconds = 0.0

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset

    def _precompute_ref_logps(self, *args: Any) -> Any:
        start = time.perf_counter()
        found = super()._precompute_ref_logps(*args)
        self.reference_seconds += time.perf_counter() - start
        return found


def make_pairs(options: argparse.Namespace, n_vocabulary: int) -> list[AnsweredPrompt]:
    draw = random.Random(17)

    def tokens(n: int) -> list[int]:
        return [draw.randrange(3, n_vocabulary) for _ in range(n)]

    pairs = []
    for index in range(options.pairs_per_batch * options.steps):
        answers = [tokens(options.answer) for _ in range(2)]
        pairs.append(
            AnsweredPrompt(
                str(index), tokens(options.prompt), tuple(Answer(ids, list(ids)) for ids in answers)
            )
        )
    return pairs


def plain_trl(name: str, source: Any, pairs: list[AnsweredPrompt], options: argparse.Namespace) -> Any:
    """TRL's trainer with the contender's settings; everything else is TRL's default."""
    from datasets import Dataset

    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    columns = [
        {"prompt_ids": pair.prompt, "chosen_ids": pair.chosen.ids, "rejected_ids": pair.rejected.ids}
        for pair in pairs
    ]
    return TokenisedDpo(
        model=load_model(source, dtype=options.dtype, attention="sdpa").to(dtype),
        args=DPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=options.pairs_per_batch,
            max_steps=options.steps,
            learning_rate=1e-5,
            bf16=options.dtype == "bf16",
            use_cpu=not torch.cuda.is_available(),
            max_length=None,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **SETTINGS[name],
        ),
        train_dataset=Dataset.from_list(columns),
        processing_class=load_tokenizer(source),
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def ours(source: Any, pairs: list[AnsweredPrompt], options: argparse.Namespace) -> tuple[Any, float]:
    """The trainer of `finetune run`, with packs that hold exactly the pairs of TRL's batches; seconds of its reference."""
    recipe = load_recipe(
        "sft/home_intents_lora",
        [f"model.dtype={options.dtype}", "train.method=dpo", "train.learning_rate=1e-5"],
    )
    register_document_attention()
    model = attach_adapter(
        load_model(source, dtype=options.dtype, attention="document"), recipe.adapter, seed=1
    )
    size = options.pairs_per_batch
    packs = Packs([Pack(pairs[start : start + size]) for start in range(0, len(pairs), size)])
    folder = Path(tempfile.mkdtemp())
    arguments = DPOConfig(**shared_arguments(recipe, options.steps, folder), max_length=None)
    arguments.save_strategy = "no"
    trainer = ExactDpoTrainer(
        preference=recipe.train.preference,
        starts_at_reference=True,
        checkpoint_root=folder,
        owner="bench",
        settings=recipe.train,
        tally=StepTally(),
        collator=BranchCollator(share_prompts=True),
        train_packs=packs,
        validation_packs=None,
        args=arguments,
        model=model,
        processing_class=load_tokenizer(source),
    )
    start = time.perf_counter()
    key = weights_key(source, model, "none", False)
    add_reference(trainer, model_key=key, base=False, folder=folder, say=lambda line: None)
    return trainer, time.perf_counter() - start


def contend(
    name: str, source: Any, pairs: list[AnsweredPrompt], options: argparse.Namespace
) -> dict[str, float]:
    """Median seconds of a step, and what the reference takes for a step's pairs when it is computed beforehand."""
    if name == "ours":
        trainer, reference_seconds = ours(source, pairs, options)
    else:
        trainer = plain_trl(name, source, pairs, options)
        reference_seconds = trainer.reference_seconds
    clock = StepClock()
    trainer.add_callback(clock)
    in_order(trainer)
    trainer.train()
    return {
        "step_seconds": statistics.median(clock.seconds[1:]),
        "reference_seconds": reference_seconds / options.steps,
        "peak_bytes": peak_memory_bytes(),
    }


def peak_alone(name: str, options: argparse.Namespace) -> float:
    """Peak memory of a contender in a process of its own, over two steps."""
    given = ["--only", name, "--steps", "2", "--dtype", options.dtype]
    given += ["--prompt", str(options.prompt), "--answer", str(options.answer)]
    given += ["--pairs-per-batch", str(options.pairs_per_batch), *(["--tiny"] if options.tiny else [])]
    said = subprocess.run([sys.executable, __file__, *given], capture_output=True, text=True, check=True)
    return float(json.loads(said.stdout.splitlines()[-1])["peak_bytes"])


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--answer", type=int, default=50)
    parser.add_argument("--pairs-per-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=CONTENDERS, help="Measure one contender and print it as JSON.")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    source = tiny_source() if options.tiny else resolve_model("builtin:smollm2-135m-instruct")
    pairs = make_pairs(options, 256 if options.tiny else 40_000)
    if options.only:
        print(json.dumps(contend(options.only, source, pairs, options)))
        return
    found = {name: contend(name, source, pairs, options) for name in CONTENDERS}
    peaks = {name: peak_alone(name, options) for name in CONTENDERS}
    whole = {name: one["step_seconds"] + one["reference_seconds"] for name, one in found.items()}
    rows = [
        [
            name,
            f"{options.pairs_per_batch / whole[name]:.2f}",
            f"{found[name]['step_seconds']:.2f}",
            f"{found[name]['reference_seconds']:.2f}",
            f"{whole[name] / whole['ours']:.2f}",
            f"{peaks[name] / 1e9:.2f}",
        ]
        for name in CONTENDERS
    ]
    lines = table(
        ["trainer", "pairs/s", "step [s]", "reference, once [s a step]", "ours is faster by", "peak [GB]"],
        rows,
    )
    best = min(peaks["TRL, default"], peaks["TRL, best setting"])
    lines += [
        "",
        f"Prompts of {options.prompt} tokens, two answers of {options.answer}, {options.pairs_per_batch} pairs a step, "
        f"{options.dtype}, LoRA rank 32; median of {options.steps - 1} steps, the reference of one epoch included.",
        f"Ours needs {peaks['ours'] / best:.2f} of the memory of TRL where it needs least.",
    ]
    if options.tiny:
        print("\n".join(lines))  # a model of no size: the numbers mean nothing and are not kept
    else:
        write_section(f"DPO speed, {options.dtype}", lines)


if __name__ == "__main__":
    main()
