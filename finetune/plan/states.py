"""Bytes of what lives as long as the training: weights, quantization constants, master copy, gradients, optimizer.

Sources: Rajbhandari et al. 2020 (arXiv:1910.02054) for the 16 bytes a parameter of mixed-precision Adam; Dettmers et al.
2023 (arXiv:2305.14314) for 4-bit blocks of 64 and double quantization in groups of 256; Dettmers et al. 2022
(arXiv:2110.02861) for blockwise 8-bit optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from finetune.errors import UserError, did_you_mean
from finetune.plan.architecture import LinearShape

Quantization = Literal["none", "nf4", "fp4", "int8"]

BYTES_PER_ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}

_BLOCK_SIZE_4BIT = 64
_BLOCK_SIZE_CONSTANTS = 256
_BLOCK_SIZE_8BIT_OPTIMIZER = 256


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """State of one optimizer in bytes a trainable parameter; `constant_bytes` are the scales of 8-bit blocks."""

    bytes_per_parameter: float
    constant_bytes_per_parameter: float = 0.0


def _eight_bit(n_states: int) -> OptimizerState:
    return OptimizerState(float(n_states), n_states * 4 / _BLOCK_SIZE_8BIT_OPTIMIZER)


# By the names a recipe uses. Paged states can move to the host; at the worst moment they are on the device. Adafactor keeps
# a row and a column of each matrix, Adam-mini one second moment a tensor. SOAP keeps two moments, and for each side of a
# matrix up to its limit a statistic and a basis: four more matrices of the size of a square weight, less for others.
OPTIMIZERS: dict[str, OptimizerState] = {
    "adamw_fused": OptimizerState(8.0),
    "adamw": OptimizerState(8.0),
    "adamw_8bit": _eight_bit(2),
    "adamw_paged": OptimizerState(8.0),
    "adamw_paged_8bit": _eight_bit(2),
    "ademamix": OptimizerState(12.0),
    "ademamix_8bit": _eight_bit(3),
    "lion": OptimizerState(4.0),
    "lion_8bit": _eight_bit(1),
    "lion_paged": OptimizerState(4.0),
    "momentum": OptimizerState(4.0),
    "sgd": OptimizerState(0.0),
    "adafactor": OptimizerState(0.25),
    "muon": OptimizerState(4.0),
    "soap": OptimizerState(24.0),
    "adam_mini": OptimizerState(4.0),
    "schedule_free_adamw": OptimizerState(8.0),
    "schedule_free_sgd": OptimizerState(4.0),
}


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of the states of a set of trainable parameters."""

    n_parameters: int
    weights: int
    master: int
    gradients: int
    optimizer: int
    optimizer_constants: int

    @property
    def total(self) -> int:
        return self.weights + self.master + self.gradients + self.optimizer + self.optimizer_constants

    @property
    def bytes_per_parameter(self) -> float:
        return self.total / self.n_parameters


def model_states(
    n_parameters: int,
    *,
    weight_bytes: int = 2,
    master_copy: bool = True,
    gradient_bytes: int = 2,
    optimizer: str = "adamw",
) -> ModelStates:
    """States of `n_parameters` that are all trained. `master_copy` is an fp32 copy beside weights of fewer bits.

    The defaults are classic mixed precision: bf16 weights and gradients, fp32 master, AdamW: 16 bytes a parameter.
    """
    if optimizer not in OPTIMIZERS:
        raise UserError(
            f"no optimizer is called '{optimizer}'",
            where="optimizer",
            fix=did_you_mean(optimizer, OPTIMIZERS),
        )
    state = OPTIMIZERS[optimizer]
    return ModelStates(
        n_parameters=n_parameters,
        weights=n_parameters * weight_bytes,
        master=n_parameters * 4 if master_copy else 0,
        gradients=n_parameters * gradient_bytes,
        optimizer=round(n_parameters * state.bytes_per_parameter),
        optimizer_constants=round(n_parameters * state.constant_bytes_per_parameter),
    )


def quantized_bytes(
    linears: Iterable[LinearShape], kind: Quantization, *, double_quantization: bool
) -> tuple[int, int]:
    """Bytes of the quantized blocks and of their constants for these matrices, of one layer.

    4-bit: half a byte an element; one fp32 absmax a block of 64, or with double quantization one byte a block and one
    fp32 for 256 blocks. 8-bit (LLM.int8): one byte an element and one fp32 scale a row.
    """
    blocks = constants = 0
    for linear in linears:
        n = linear.matrix_parameters
        if kind == "int8":
            blocks += n
            constants += 4 * linear.n_out
        elif kind in ("nf4", "fp4"):
            blocks += -(-n // 2)
            n_blocks = -(-n // _BLOCK_SIZE_4BIT)
            if double_quantization:
                constants += n_blocks + 4 * -(-n_blocks // _BLOCK_SIZE_CONSTANTS)
            else:
                constants += 4 * n_blocks
        else:
            raise ValueError(f"{kind} is no quantization")
    return blocks, constants
