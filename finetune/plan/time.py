"""Time: tokens, optimizer steps and hours of a training, from a measured rate or from a table of devices.

Work is counted like Kaplan et al. 2020 (arXiv:2001.08361): two operations a multiply-add. A frozen matrix costs 2 forward
and 2 for the input's gradient a parameter and token, a trained one 2 more, recomputation the forward once more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.errors import UserError, did_you_mean
from finetune.plan.architecture import Architecture
from finetune.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device by its data sheet: dense bf16 matrix peak in operations a second (fp16 where it has no bf16), memory."""

    name: str
    peak_flops: float
    memory_bytes: int


DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        DeviceSpec("t4", 65e12, 16_000_000_000),
        DeviceSpec("v100-32gb", 125e12, 32_000_000_000),
        DeviceSpec("rtx3090", 71e12, 24_000_000_000),
        DeviceSpec("rtx4090", 165e12, 24_000_000_000),
        DeviceSpec("rtx5090", 209e12, 32_000_000_000),
        DeviceSpec("l4", 121e12, 24_000_000_000),
        DeviceSpec("a10g", 70e12, 24_000_000_000),
        DeviceSpec("l40s", 362e12, 48_000_000_000),
        DeviceSpec("a100-40gb", 312e12, 40_000_000_000),
        DeviceSpec("a100-80gb", 312e12, 80_000_000_000),
        DeviceSpec("h100", 989e12, 80_000_000_000),
        DeviceSpec("h200", 989e12, 141_000_000_000),
        DeviceSpec("b200", 2250e12, 180_000_000_000),
    )
}

# Share of the peak that a tuning run of this size usually reaches; a probe on the device itself replaces the guess.
USUAL_UTILISATION = 0.35
# 4-bit weights are dequantized before every product; DoRA composes its weights. Factors on the time of a step.
QUANTIZED_SLOWDOWN = 1.35
DORA_SLOWDOWN = 1.35
CHECKPOINTING_SLOWDOWN = 1.30


@dataclass(frozen=True, slots=True)
class TrainingTime:
    """Length of a training. `basis` says where the rate comes from: 'given', a probe, or a device's name."""

    tokens: int
    steps: int
    tokens_per_second: float
    seconds: float
    basis: str


def device_spec(name: str, *, where: str = "--device") -> DeviceSpec:
    """The entry of the table, or a UserError with the nearest name."""
    spec = DEVICES.get(name.lower())
    if spec is None:
        raise UserError(f"no device is called '{name}'", where=where, fix=did_you_mean(name.lower(), DEVICES))
    return spec


def probe_rate(step_tokens: Sequence[int], step_seconds: Sequence[float]) -> float:
    """Tokens a second of a short probe: the median over its steps, the first left out as warm-up."""
    if len(step_tokens) != len(step_seconds) or len(step_tokens) < 2:
        raise ValueError("a probe needs two steps or more, each with its tokens and seconds")
    pairs = list(zip(step_tokens, step_seconds, strict=True))[1:]
    return statistics.median(tokens / seconds for tokens, seconds in pairs)


def flops_per_token(
    architecture: Architecture, recipe: Recipe, sequence_tokens: int, n_trainable: int
) -> float:
    """Operations a token of forward and backward, recomputation included, head and causal attention too."""
    matrices = architecture.linear_parameters + architecture.head_parameters
    if recipe.adapter.kind == "none":
        work, forward = 6.0 * matrices, 2.0 * matrices
    else:
        work, forward = 4.0 * matrices + 6.0 * n_trainable, 2.0 * (matrices + n_trainable)
    attention_forward = 2.0 * architecture.n_layers * architecture.query_width * sequence_tokens
    work += 3 * attention_forward
    if recipe.train.gradient_checkpointing:
        work += forward + attention_forward
    return work


def device_rate(
    spec: DeviceSpec, architecture: Architecture, recipe: Recipe, sequence_tokens: int, n_trainable: int
) -> float:
    """Tokens a second to expect on a device of the table: a guess within a factor of two, for planning only."""
    rate = USUAL_UTILISATION * spec.peak_flops
    rate /= flops_per_token(architecture, recipe, sequence_tokens, n_trainable)
    if recipe.model.quantize != "none":
        rate /= QUANTIZED_SLOWDOWN
    if recipe.adapter.kind == "dora":
        rate /= DORA_SLOWDOWN
    return rate


def training_time(
    recipe: Recipe,
    train_tokens: int,
    tokens_per_second: float,
    *,
    n_rows: int | None = None,
    n_examples: int | None = None,
    n_devices: int = 1,
    basis: str = "given",
) -> TrainingTime:
    """Steps and seconds to pass over `train_tokens` (one epoch's) as often as the recipe says.

    `tokens_per_second` is that of one device. `n_examples` is the number of packs or rows where it is known; otherwise
    packs are taken as full, and without packing a step counts rows, so `n_rows` must be given. `max_steps` cuts both steps
    and tokens.
    """
    if not 0 < tokens_per_second < math.inf or train_tokens < 1:
        raise UserError(
            "a training time needs tokens and a finite rate above zero",
            where="--train-tokens, --tokens-per-second",
            fix="give the tokens of one epoch, and a rate from a probe or --device",
        )
    settings = recipe.train
    if n_examples is not None:
        examples = n_examples
    elif settings.packing:
        examples = math.ceil(train_tokens / settings.pack_tokens)
    elif n_rows is not None:
        examples = n_rows
    else:
        raise UserError(
            "without packing a step counts rows", where="--rows", fix="give the number of train rows"
        )
    batches = math.ceil(examples / (settings.micro_batch_size * n_devices))
    per_epoch = max(math.ceil(batches / settings.gradient_accumulation_steps), 1)
    planned = math.ceil(settings.epochs * per_epoch)
    steps = min(planned, settings.max_steps) if settings.max_steps else planned
    tokens = round(train_tokens * settings.epochs * steps / planned)
    return TrainingTime(tokens, steps, tokens_per_second, tokens / (tokens_per_second * n_devices), basis)
