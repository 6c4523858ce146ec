"""Floating-point work of a training step, and the device's measured peak: their ratio is the MFU of the events.

Work is counted for what the mathematics needs (Kaplan et al. 2020, arXiv:2001.08361, table 1), not for what an
implementation repeats: a multiply-add is two operations; recomputed activations are not counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

_GEMM_SIZE = 2048
_GEMM_REPEATS = 10


@dataclass(frozen=True)
class StepWork:
    """Matrix parameters of a model by what the backward pass needs of them."""

    frozen_parameters: int
    trainable_parameters: int
    head_parameters: int
    head_is_trainable: bool
    attention_width: int  # layers x query heads x head size

    def flops(self, n_tokens: int, n_targets: int, sum_squared_lengths: int) -> float:
        """Operations of forward and backward over `n_tokens`, of which `n_targets` pass the language-model head.

        Frozen matrices cost 2 (forward) + 2 (input gradient) a parameter and token, trainable ones 2 more. Causal
        attention costs 2 products of length x length / 2 forward, twice that backward.
        """
        body = n_tokens * (4 * self.frozen_parameters + 6 * self.trainable_parameters)
        head = n_targets * self.head_parameters * (6 if self.head_is_trainable else 4)
        attention = 6 * self.attention_width * sum_squared_lengths
        return float(body + head + attention)


def step_work(model: nn.Module) -> StepWork:
    """Count the matrices of a causal language model (adapters included, embeddings left out)."""
    config = model.config.get_text_config()  # type: ignore[operator,union-attr]
    head = model.get_output_embeddings()  # type: ignore[operator]
    frozen = trainable = 0
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or module is head or isinstance(module, nn.Embedding):
            continue
        if hasattr(module, "base_layer"):  # an adapter's wrapper shows its base's weight a second time
            continue
        shape = getattr(weight, "quant_state", None)
        size = shape.shape.numel() if shape is not None else weight.numel()
        if weight.dim() < 2 and shape is None:
            continue
        if weight.requires_grad or "lora_" in name:
            trainable += size
        else:
            frozen += size
    heads = int(getattr(config, "num_attention_heads", None) or 0)  # none where layers carry a state instead
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0
    return StepWork(
        frozen_parameters=frozen,
        trainable_parameters=trainable,
        head_parameters=int(head.weight.numel())
        if head is not None
        else 0,  # a reward model has none to speak of
        head_is_trainable=head is not None and bool(head.weight.requires_grad),
        attention_width=int(config.num_hidden_layers) * heads * head_size,
    )


@cache
def measure_peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of one large matrix product on this device: the practical ceiling, measured once a process.

    The fastest of ten products: whatever else the machine does can only slow one down, and a ceiling that was measured
    low would report a share above 100 %.
    """
    # Of a generator of its own: the first training of a process would else draw other dropout than the next ones.
    own = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(_GEMM_SIZE, _GEMM_SIZE, dtype=dtype, device=device, generator=own) for _ in range(2)
    )
    seconds = []
    for _ in range(_GEMM_REPEATS):
        start = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2.0 * _GEMM_SIZE**3 / min(seconds)
