"""Learning from a cached teacher's top 64 beside TRL's GKD with the teacher live: speed, memory, and where both end.

    python benchmarks/distil_speed.py [--model tuned|base|tiny] [--rows-per-batch 10] [--steps 60]

Each side is a process of its own: the same student (every third layer of the teacher, tuned in full), rows, batches, steps,
optimizer and precision; GKD with lmbda 0 and beta 0 minimises the same forward KL over all tokens. The teacher is that of the
embedded recipe; of the untuned one (`--model base`), which is unsure of these answers, 64 tokens hold less. The first step is
thrown away; memory is the highest resident set (or CUDA allocation) of the training over that of the empty process. `--model tiny`
shows that the script works; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from contenders import in_order
from datasets import Dataset
from results import table, write_section
from spine import COMMAND
from spine import RECIPE as TEACHER_RECIPE
from step_clock import StepClock
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.data.build import build_dataset, default_builds_root
from finetune.data.tokenise import TokenisedRow, tokenise_rows
from finetune.distil.cache.layout import CacheIdentity, rows_digest
from finetune.distil.cache.read import CachedTeaching, TeacherCache
from finetune.distil.cache.write import ModelSaying, cache_teacher, coding_of, padded
from finetune.distil.head import live_targets
from finetune.distil.losses import divergence, target_places
from finetune.distil.student import cut_layers
from finetune.distil.trainer import DistilTrainer
from finetune.errors import UserError
from finetune.model.adapters import trainables_to_fp32
from finetune.model.load import load_model, load_tokenizer
from finetune.model.source import resolve_model
from finetune.paths import find_declarative
from finetune.pipeline.inputs import gather_inputs
from finetune.pipeline.teacher import Teacher
from finetune.recipe.resolve import load_recipe
from finetune.telemetry.callback import StepTally
from finetune.telemetry.memory import current_memory_bytes, peak_memory_bytes, reset_peak_memory
from finetune.training.sft_data import trainer_arguments

RECIPE = "distil/home_intents"
OURS, GKD = "ours, cached top 64", "TRL 1.16 GKD, live teacher"
LAYERS = (0, 3, 6, 10, 13, 16, 19, 23, 26, 29)
K = 64
BASE = "builtin:smollm2-135m-instruct"


def make_teacher(model: str) -> Any:
    """`tuned`: that of the embedded recipe, its adapter merged; `base`: the same untuned; `tiny`: made up from a seed."""
    if model == "base":
        return load_model(resolve_model(BASE), dtype="bf16", attention="sdpa")
    if model == "tuned":
        return teacher_of_recipe().load(dtype="fp32").merge_and_unload().bfloat16()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


def teacher_of_recipe() -> Teacher:
    """The run that the embedded distillation names; made first where it is not there."""
    try:
        teacher = gather_inputs(RECIPE).teacher
    except UserError:
        subprocess.run(
            [COMMAND, "run", TEACHER_RECIPE], check=False, stdout=sys.stderr
        )  # its code is a verdict
        teacher = gather_inputs(RECIPE).teacher
    assert teacher is not None
    return teacher


def write_models(model: str, layers: Sequence[int], folder: Path) -> None:
    """`teacher` and `student`, cut from it, in bf16: both sides start from these very weights."""
    found, tokenizer = make_teacher(model), load_tokenizer(resolve_model(BASE))
    for name in ("teacher", "student"):
        if name == "student":
            cut_layers(found, layers if model != "tiny" else (0, 2, 5))
        found.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def load_teacher(folder: Path, *, dtype: str = "bf16") -> Any:
    source = resolve_model(str(folder / "teacher"))
    return load_model(source, dtype=dtype, attention="sdpa").requires_grad_(False).eval()


def load_student(folder: Path, *, dtype: str, attention: str) -> Any:
    """The student, in train mode, all of it trained but the embeddings."""
    student = load_model(
        resolve_model(str(folder / "student")), dtype=dtype, attention=attention
    ).requires_grad_(True)
    student.get_input_embeddings().weight.requires_grad_(False)
    return student.train()


def train_rows(options: argparse.Namespace) -> tuple[Any, list[TokenisedRow]]:
    tokenizer = load_tokenizer(resolve_model(BASE))
    build = build_dataset(find_declarative("data", "home_intents"), default_builds_root())
    wanted = build.rows("train")[: options.rows_per_batch * options.steps]
    return tokenizer, tokenise_rows(wanted, tokenizer, max_tokens=256).rows


def settings(options: argparse.Namespace) -> Any:
    return load_recipe(
        RECIPE,
        [
            "train.learning_rate=3e-4",
            "train.warmup_share=0",
            "train.schedule=constant",
            "distil.loss.answer_weight=0",
        ],
    )


def our_trainer(options: argparse.Namespace, folder: Path) -> Any:
    """The trainer of `finetune run`, with packs that hold exactly the rows of GKD's batches, reading from the cache."""
    tokenizer, rows = train_rows(options)
    recipe = settings(options)
    student = load_student(folder, dtype="bf16", attention="document")
    cache = TeacherCache.open(folder / "cache", rows, identity_of(rows))
    batches = [
        range(i, min(i + options.rows_per_batch, len(rows)))
        for i in range(0, len(rows), options.rows_per_batch)
    ]
    packs = [
        {
            "input_ids": [token for row in batch for token in rows[row].input_ids],
            "labels": [label for row in batch for label in rows[row].labels],
            "rows": list(batch),
            "seq_lengths": [len(rows[row].input_ids) for row in batch],
        }
        for batch in batches
    ]
    arguments = trainer_arguments(recipe, options.steps, folder)
    arguments.save_strategy = "no"
    trainer = DistilTrainer(
        teaching=CachedTeaching(cache, 1.0),
        loss=recipe.distil.loss,
        n_vocabulary=len(tokenizer),
        checkpoint_root=folder,
        owner="bench",
        settings=recipe.train,
        tally=StepTally(),
        model=student,
        args=arguments,
        train_dataset=Dataset.from_list(packs),
        processing_class=tokenizer,
    )
    trainables_to_fp32(trainer.model)
    return trainer


def gkd_trainer(options: argparse.Namespace, folder: Path) -> Any:
    """TRL's defaults but for what must be equal; padded batches, checkpointing off (its faster setting)."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    tokenizer, rows = train_rows(options)
    recipe = settings(options)
    student = load_student(folder, dtype="fp32", attention="sdpa")
    arguments = GKDConfig(
        output_dir=str(folder),
        per_device_train_batch_size=options.rows_per_batch,
        max_steps=options.steps,
        learning_rate=recipe.train.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=recipe.train.weight_decay,
        max_grad_norm=recipe.train.max_grad_norm,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        lmbda=0.0,
        beta=0.0,
        max_length=None,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GKDTrainer(
        model=student,
        teacher_model=load_teacher(folder),
        args=arguments,
        data_collator=lambda members: padded([rows[member["row"]] for member in members]),
        train_dataset=Dataset.from_list([{"row": row} for row in range(len(rows))]),
        processing_class=tokenizer,
    )


def identity_of(rows: list[TokenisedRow]) -> CacheIdentity:
    return CacheIdentity(teacher="bench", tokenizer="bench", data=rows_digest(rows))


def fill(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    tokenizer, rows = train_rows(options)
    write_models(options.model, LAYERS, folder)
    teacher = load_teacher(folder)
    start = time.perf_counter()
    manifest = cache_teacher(
        ModelSaying(teacher),
        rows,
        folder / "cache",
        identity=identity_of(rows),
        coding=coding_of(k=K, vocabulary=len(tokenizer)),
    )
    return {
        "seconds": time.perf_counter() - start,
        "bytes_per_target": manifest.coding.bytes_per_target,
        "coverage": manifest.to_dict()["coverage"]["1.0"]["mean"],
    }


@torch.no_grad()
def distance(student: Any, teacher: Any, rows: list[TokenisedRow], n_vocabulary: int) -> float:
    """Mean forward KL over all tokens of the vocabulary and all targets of the rows, whichever trainer it was."""
    student.eval()
    total, n_targets = 0.0, 0
    for start in range(0, len(rows), 8):
        inputs = padded(rows[start : start + 8])
        inputs = {name: value.to(next(student.parameters()).device) for name, value in inputs.items()}
        said = live_targets(teacher.to(inputs["labels"].device), inputs, n_vocabulary)
        places, _ = target_places(inputs["labels"])
        plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        logits: Tensor = student(**plain, use_cache=False).logits[places]
        total += float(divergence("forward_kl", logits[:, :n_vocabulary], said).sum())
        n_targets += len(said)
    return total / n_targets


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train one side; what it took, and how far the student then is from the teacher."""
    empty = current_memory_bytes()
    reset_peak_memory()
    trainer = (our_trainer if options.side == OURS else gkd_trainer)(options, folder)
    clock = StepClock()
    trainer.add_callback(clock)
    in_order(trainer)
    trainer.train()
    peak = peak_memory_bytes() - empty
    tokenizer, rows = train_rows(options)
    trainer.model.__dict__.pop("forward", None)
    trainer.model.set_attn_implementation("sdpa")
    teacher = load_teacher(folder, dtype="fp32")
    n_tokens = [
        sum(len(row.input_ids) for row in rows[i : i + options.rows_per_batch])
        for i in range(0, len(rows), options.rows_per_batch)
    ]
    rates = [n / seconds for n, seconds in zip(n_tokens, clock.seconds, strict=True)][1:]
    return {
        "tokens_per_second": statistics.median(rates),
        "peak_bytes": peak,
        "distance": distance(trainer.model.float(), teacher, rows, len(tokenizer)),
    }


def in_process(options: argparse.Namespace, side: str, folder: Path) -> dict[str, Any]:
    command = [
        sys.executable, __file__, "--side", side, "--folder", str(folder), "--model", options.model,
        "--rows-per-batch", str(options.rows_per_batch), "--steps", str(options.steps),
    ]  # fmt: skip
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tuned", choices=["tuned", "base", "tiny"])
    parser.add_argument("--rows-per-batch", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        work = fill if options.side == "fill" else measure
        print(json.dumps(work(options, options.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        cached = in_process(options, "fill", Path(folder))
        found = {side: in_process(options, side, Path(folder)) for side in (OURS, GKD)}
    mine, theirs = found[OURS], found[GKD]
    rows = [
        [
            side,
            f"{one['tokens_per_second']:.0f}",
            f"{one['peak_bytes'] / 1e9:.2f} GB",
            f"{one['distance']:.4f}",
        ]
        for side, one in found.items()
    ]
    lines = table(
        ["trainer", "tokens/s (median)", "memory of training", "KL to the teacher afterwards"], rows
    )
    lines += [
        "",
        f"Ours: {mine['tokens_per_second'] / theirs['tokens_per_second']:.2f}× the tokens/s, "
        f"{mine['peak_bytes'] / theirs['peak_bytes']:.2f}× the memory, final KL {mine['distance'] / theirs['distance'] - 1:+.1%}. "
        f"The cache took {cached['seconds']:.1f} s once, {cached['bytes_per_target']} bytes a target token; its top {K} hold "
        f"{cached['coverage']:.2%} of the teacher's mass.",
        f"Teacher: {options.model}; {options.rows_per_batch} rows a step, {options.steps} steps, full tuning of the cut student, bf16.",
    ]
    if options.model == "tiny":
        print("\n".join(lines))
    else:
        write_section("Distillation speed", lines)


if __name__ == "__main__":
    main()
