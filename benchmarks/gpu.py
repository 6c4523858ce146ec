"""Training on one large GPU beside plain TRL: SFT and DPO, LoRA and QLoRA, in the shapes of Llama-3-8B and Qwen3-4B.

    python benchmarks/gpu.py [--models Qwen3-4B] [--steps 6] [--budget-seconds 480] [--out benchmarks/results]
    python benchmarks/gpu.py --tiny        # two layers, on the CPU, in seconds: shows that it runs, and no number

Nothing is downloaded: weights are random, rows are random tokens of uneven length. Per model and tuning there are two
contenders in this one process, one after the other, each on a model built anew: TRL with its best setting that fits
(activations kept, and recomputed when memory ends; its reference computed beforehand), and the trainer of `finetune run`.
Both take the same rows in every optimizer step, the same adapter and precision. The first step of each is thrown away.

Tokens are the rows' own, a DPO prompt counted once for its two answers; padding counts for nobody. MFU is the work that
the mathematics needs for those tokens (finetune/telemetry/flops.py; the reference is not counted) over the measured
peak of a large matrix product. When the budget of time is used up, what is left is named and not run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.model.adapters import attach_adapter, trainables_to_fp32
from finetune.model.attention import register_document_attention
from finetune.model.fast import speed_up
from finetune.model.memory import release_memory
from finetune.model.quantization import disable_cpu_repacking
from finetune.plan.memory import forecast_training
from finetune.recipe.schema import Recipe
from finetune.telemetry.callback import StepTally
from finetune.telemetry.flops import StepWork, step_work
from finetune.telemetry.memory import peak_memory_bytes, reset_peak_memory
from finetune.training.arguments import shared_arguments
from finetune.training.branches import BranchCollator, Pack, Packs
from finetune.training.dpo_trainer import ExactDpoTrainer
from finetune.training.memory_saving import keeps_in_place_products
from finetune.training.reference import add_reference
from finetune.training.sft_data import trainer_arguments
from finetune.training.sft_trainer import ExactSftTrainer

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_3_4B: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip
_TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
}  # fmt: skip
SHAPES = {"Llama-3-8B": LLAMA_3_8B, "Qwen3-4B": QWEN_3_4B}
METHODS, TUNINGS, CONTENDERS = ("sft", "dpo"), ("LoRA", "QLoRA"), ("TRL", "ours")
RANK, ALPHA = 16, 32
_GEMM_SIZES = {"cuda": 8192, "cpu": 1024}
_SHARE_OF_PROMPT = 0.6


@dataclass(frozen=True)
class Sizes:
    """Of one optimizer step: SFT rows and the range of their lengths; DPO pairs, tokens of a prompt and of an answer."""

    rows: int
    shortest: int
    longest: int
    pairs: int
    prompt: int
    answer: int


LARGE, SMALL = Sizes(12, 20, 700, 8, 300, 50), Sizes(4, 8, 32, 2, 12, 4)


@dataclass(frozen=True)
class Result:
    """One contender on one cell. `forecast_bytes` is finetune.plan's, for ours on a GPU; `note` says what setting fitted."""

    model: str
    method: str
    tuning: str
    contender: str
    tokens_per_step: int
    step_seconds: float
    reference_seconds_per_step: float
    tokens_per_second: float
    mfu: float
    peak_bytes: int
    forecast_bytes: int | None
    note: str


class Clock(TrainerCallback):
    """Seconds of every optimizer step, the device's work included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(now() - self._start)


class PairsAsTokens(DPOTrainer):
    """TRL's trainer on pairs that are tokens already; keeps how long its reference took beforehand."""

    reference_seconds = 0.0

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset

    def _precompute_ref_logps(self, *args: Any) -> Any:
        start = now()
        found = super()._precompute_ref_logps(*args)
        self.reference_seconds += now() - start
        return found


@dataclass
class Cell:
    """Rows, shapes and settings that both contenders of a cell are given."""

    model_name: str
    method: str
    tuning: str
    shape: dict[str, Any]
    sizes: Sizes
    steps: int
    device: torch.device

    @property
    def title(self) -> str:
        return f"{self.model_name}, {self.method.upper()}, {self.tuning}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def recipe(self, *, recompute: bool) -> Recipe:
        """The cell as a recipe; `recompute` is gradient checkpointing."""
        sizes = self.sizes
        longest = sizes.longest if self.method == "sft" else sizes.prompt + 2 * sizes.answer
        return Recipe.model_validate(
            {
                "name": "gpu",
                "model": {
                    "id": self.model_name,
                    "dtype": "bf16" if self.dtype == torch.bfloat16 else "fp32",
                    "quantize": "nf4" if self.tuning == "QLoRA" else "none",
                },
                "adapter": {"rank": RANK, "alpha": ALPHA},
                "data": {"spec": "random", "max_tokens": longest},
                "train": {
                    "method": self.method,
                    "learning_rate": 1e-5,
                    "pack_tokens": max(self.step_tokens()),
                    "gradient_checkpointing": recompute,
                },
                "eval": {"suites": ["none"]},
            }
        )

    def rows(self) -> list[list[int]]:
        """SFT rows, step by step: random tokens of uneven length."""
        draw, sizes = random.Random(17), self.sizes
        lengths = [draw.randint(sizes.shortest, sizes.longest) for _ in range(sizes.rows * self.steps)]
        return [[draw.randrange(3, self.shape["vocab_size"]) for _ in range(length)] for length in lengths]

    def labels(self, row: list[int]) -> list[int]:
        """The first part of a row is its prompt."""
        n_prompt = max(int(len(row) * _SHARE_OF_PROMPT), 1)
        return [-100] * n_prompt + row[n_prompt:]

    def pairs(self) -> list[AnsweredPrompt]:
        draw, sizes = random.Random(17), self.sizes

        def tokens(n: int) -> list[int]:
            return [draw.randrange(3, self.shape["vocab_size"]) for _ in range(n)]

        pairs = []
        for index in range(sizes.pairs * self.steps):
            answers = tuple(Answer(ids, list(ids)) for ids in (tokens(sizes.answer), tokens(sizes.answer)))
            pairs.append(AnsweredPrompt(str(index), tokens(sizes.prompt), answers))
        return pairs

    def step_tokens(self) -> list[int]:
        """Tokens of each optimizer step."""
        if self.method == "dpo":
            return [self.sizes.pairs * (self.sizes.prompt + 2 * self.sizes.answer)] * self.steps
        lengths, size = [len(row) for row in self.rows()], self.sizes.rows
        return [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]

    def step_flops(self, work: StepWork) -> list[float]:
        """Operations that each optimizer step needs."""
        sizes = self.sizes
        if self.method == "dpo":
            answer, prompt = sizes.answer, sizes.prompt
            squares = (prompt + answer) ** 2 + answer**2 + 2 * answer * prompt
            one = work.flops(prompt + 2 * answer, 2 * answer, squares)
            return [one * sizes.pairs] * self.steps
        found = []
        rows = self.rows()
        for start in range(0, len(rows), sizes.rows):
            step = rows[start : start + sizes.rows]
            targets = sum(label != -100 for row in step for label in self.labels(row))
            squares = sum(len(row) ** 2 for row in step)
            found.append(work.flops(sum(map(len, step)), targets, squares))
        return found

    def build(self, attention: str) -> nn.Module:
        """A model with random weights on the device; its linear layers in 4 bits for QLoRA."""
        from transformers import AutoConfig

        shape = dict(self.shape)
        config = AutoConfig.for_model(shape.pop("model_type"), **shape, pad_token_id=2, eos_token_id=2)
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        if self.tuning == "QLoRA":
            quantize(model, self.dtype)
        model.set_attn_implementation(attention)
        return model.eval()


def quantize(model: Any, dtype: torch.dtype) -> None:
    """Put every linear layer but the head into nf4 with double quantization, in place, layer by layer."""
    import bitsandbytes as bnb

    head = model.get_output_embeddings()
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, module in linear:
        if module is head:
            continue
        device = module.weight.device
        coded = bnb.nn.Linear4bit(
            module.in_features, module.out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
        )  # fmt: skip
        coded.weight = bnb.nn.Params4bit(
            module.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
        ).to(device)
        parent, _, short = name.rpartition(".")
        setattr(model.get_submodule(parent), short, coded)
    model.is_loaded_in_4bit = True
    disable_cpu_repacking(model)


def tokenizer_for(vocab_size: int) -> Any:
    """TRL asks for one; nothing is tokenised with it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(vocab_size)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", pad_token="t2")


def trl_trainer(cell: Cell, recompute: bool) -> Any:
    """TRL's trainer with its fastest settings for this cell."""
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": cell.steps,
        "learning_rate": 1e-5,
        "bf16": cell.device.type == "cuda",
        "use_cpu": cell.device.type == "cpu",
        "gradient_checkpointing": recompute,
        "max_length": None,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    shared = {
        "model": cell.build("sdpa"),
        "processing_class": tokenizer_for(min(cell.shape["vocab_size"], 256)),
        "peft_config": LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    }
    if cell.method == "sft":
        rows = [{"input_ids": row, "labels": cell.labels(row)} for row in cell.rows()]
        arguments = SFTConfig(
            per_device_train_batch_size=cell.sizes.rows, dataset_kwargs={"skip_prepare_dataset": True}, **settings
        )  # fmt: skip
        return SFTTrainer(args=arguments, train_dataset=Dataset.from_list(rows), **shared)
    pairs = [
        {"prompt_ids": pair.prompt, "chosen_ids": pair.chosen.ids, "rejected_ids": pair.rejected.ids}
        for pair in cell.pairs()
    ]
    arguments = DPOConfig(
        per_device_train_batch_size=cell.sizes.pairs, precompute_ref_log_probs=True, **settings
    )
    return PairsAsTokens(args=arguments, train_dataset=Dataset.from_list(pairs), **shared)


def our_trainer(cell: Cell, recompute: bool) -> Any:
    """The trainer of `finetune run`, its packs holding exactly the rows of TRL's batches."""
    recipe, folder = cell.recipe(recompute=recompute), Path(tempfile.mkdtemp())
    register_document_attention()
    model = attach_adapter(cell.build("document"), recipe.adapter, seed=1)
    options: dict[str, Any] = {
        "checkpoint_root": folder,
        "owner": "bench",
        "settings": recipe.train,
        "tally": StepTally(),
        "model": model,
        "processing_class": tokenizer_for(min(cell.shape["vocab_size"], 256)),
    }
    if cell.method == "sft":
        arguments: Any = trainer_arguments(recipe, cell.steps, folder, validates=False)
        arguments.save_strategy = "no"
        trainer: Any = ExactSftTrainer(args=arguments, train_dataset=_packs(cell), **options)
        trainables_to_fp32(model)
        if keeps_in_place_products(recipe.train):
            speed_up(model)
        return trainer
    arguments = DPOConfig(**shared_arguments(recipe, cell.steps, folder, validates=False), max_length=None)
    arguments.save_strategy = "no"
    pairs, size = cell.pairs(), cell.sizes.pairs
    packs = Packs([Pack(pairs[start : start + size]) for start in range(0, len(pairs), size)])
    trainer = ExactDpoTrainer(
        args=arguments,
        preference=recipe.train.preference,
        starts_at_reference=True,
        collator=BranchCollator(share_prompts=True),
        train_packs=packs,
        validation_packs=None,
        **options,
    )
    start = now()
    add_reference(trainer, model_key={"base": cell.title}, base=False, folder=folder, say=lambda line: None)
    trainer.reference_seconds = now() - start
    return trainer


def _packs(cell: Cell) -> Dataset:
    """One pack an optimizer step."""
    rows, size, packs = cell.rows(), cell.sizes.rows, []
    for start in range(0, len(rows), size):
        step = rows[start : start + size]
        packs.append(
            {
                "input_ids": [token for row in step for token in row],
                "labels": [label for row in step for label in cell.labels(row)],
                "seq_lengths": [len(row) for row in step],
            }
        )
    return Dataset.from_list(packs)


MAKERS: dict[str, Callable[[Cell, bool], Any]] = {"TRL": trl_trainer, "ours": our_trainer}


def measure(cell: Cell, contender: str, peak_flops: float) -> Result:
    """Train the cell's steps; activations are kept, and recomputed when that does not fit."""
    for recompute in (False, True):
        release_memory()
        reset_peak_memory()
        try:
            return _train(cell, contender, peak_flops, recompute)
        except torch.OutOfMemoryError:
            if recompute:
                raise
    raise AssertionError("one of the two returns")


def _train(cell: Cell, contender: str, peak_flops: float, recompute: bool) -> Result:
    trainer = MAKERS[contender](cell, recompute)
    flops, clock = cell.step_flops(step_work(trainer.model)), Clock()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    reference = getattr(trainer, "reference_seconds", 0.0) / cell.steps
    taken = [seconds + reference for seconds in clock.seconds[1:]]
    tokens = cell.step_tokens()[1:]
    forecast = None
    if contender == "ours" and cell.device.type == "cuda":
        recipe = cell.recipe(recompute=recompute)
        forecast = forecast_training(
            recipe, cell.shape, longest_pack_tokens=max(cell.step_tokens()), device="cuda"
        ).total_bytes
    return Result(
        cell.model_name,
        cell.method,
        cell.tuning,
        contender,
        round(statistics.mean(tokens)),
        statistics.median(clock.seconds[1:]),
        reference,
        statistics.median(n / seconds for n, seconds in zip(tokens, taken, strict=True)),
        statistics.median(
            n / seconds / peak_flops for n, seconds in zip(flops[1:], clock.seconds[1:], strict=True)
        ),
        peak_memory_bytes(),
        forecast,
        "activations recomputed" if recompute else "",
    )


def peak_of_products(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the fastest of ten large matrix products, after one to warm up."""
    size = _GEMM_SIZES[device.type]
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = []
    for _ in range(11):
        start = now()
        left @ right
        seconds.append(now() - start)
    return 2.0 * size**3 / min(seconds[1:])


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def cells(options: argparse.Namespace, device: torch.device) -> Iterator[Cell]:
    """Every cell, the largest model last, so that a short budget still shows something."""
    sizes = SMALL if options.tiny else LARGE
    for name in sorted(options.models, key=lambda name: SHAPES[name]["hidden_size"]):
        shape = SHAPES[name] | (_TINY if options.tiny else {})
        for method in METHODS:
            for tuning in TUNINGS:
                yield Cell(name, method, tuning, shape, sizes, options.steps, device)


def run(options: argparse.Namespace) -> tuple[list[Result], list[str], float]:
    """Results, what was left out and why, and the peak of matrix products."""
    device = torch.device("cuda" if torch.cuda.is_available() and not options.tiny else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak, started = peak_of_products(device, dtype), time.monotonic()
    results: list[Result] = []
    left_out: list[str] = []
    longest = 0.0
    for cell in cells(options, device):
        if time.monotonic() - started + longest > options.budget_seconds:
            left_out.append(f"{cell.title}: the budget of {options.budget_seconds:.0f} s was used up")
            continue
        begun = time.monotonic()
        for contender in CONTENDERS:
            try:
                results.append(measure(cell, contender, peak))
            except torch.OutOfMemoryError:
                left_out.append(f"{cell.title}, {contender}: out of memory, activations recomputed or not")
        longest = max(longest, time.monotonic() - begun)
        print(f"{cell.title}: {time.monotonic() - begun:.1f} s", flush=True)
    return results, left_out, peak


def page(results: list[Result], left_out: list[str], peak: float) -> list[str]:
    """The results as Markdown."""
    lines = [
        "| model | method | tuning | trainer | tokens a step | tokens/s | ratio | MFU | peak [GB] | forecast [GB] | setting |",
        "|" + "---|" * 11,
    ]
    by_cell = {(one.model, one.method, one.tuning, one.contender): one for one in results}
    for one in results:
        other = by_cell.get((one.model, one.method, one.tuning, "TRL"))
        ratio = f"{one.tokens_per_second / other.tokens_per_second:.2f}" if other else ""
        forecast = f"{one.forecast_bytes / 1e9:.1f}" if one.forecast_bytes is not None else ""
        lines.append(
            f"| {one.model} | {one.method.upper()} | {one.tuning} | {one.contender} | {one.tokens_per_step:,} | "
            f"{one.tokens_per_second:,.0f} | {ratio} | {one.mfu:.0%} | {one.peak_bytes / 1e9:.1f} | {forecast} | {one.note} |"
        )
    lines += ["", f"Peak of matrix products: {peak / 1e12:.1f} TFLOP/s."]
    return lines + [f"- left out: {line}" for line in left_out]


def save(folder: Path, results: list[Result], left_out: list[str], peak: float) -> Path:
    """Write page and numbers, named after the device and the day."""
    import trl

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    day = datetime.now(UTC).date().isoformat()
    stem = f"gpu-{device.lower().replace(' ', '-')}-{day}"
    folder.mkdir(parents=True, exist_ok=True)
    head = [f"# {device}, {day}", "", f"torch {torch.__version__}, TRL {trl.__version__}.", ""]
    (folder / f"{stem}.md").write_text("\n".join(head + page(results, left_out, peak)) + "\n")
    record = {
        "device": device,
        "day": day,
        "peak_flops": peak,
        "left_out": left_out,
        "results": list(map(asdict, results)),
    }
    (folder / f"{stem}.json").write_text(json.dumps(record, indent=2) + "\n")
    return folder / f"{stem}.md"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=6, help="optimizer steps of a contender; the first is thrown away"
    )
    parser.add_argument(
        "--budget-seconds", type=float, default=480.0, help="no cell is begun that would pass it"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for the page and the numbers")
    parser.add_argument("--tiny", action="store_true", help="two layers on the CPU; its numbers mean nothing")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    options = parser.parse_args(given)
    if not options.tiny and not torch.cuda.is_available():
        print("there is no GPU here; --tiny shows on the CPU that everything runs")
        return 2
    results, left_out, peak = run(options)
    print("\n".join(page(results, left_out, peak)))
    if options.out is not None:
        print(f"written to {save(options.out, results, left_out, peak)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
