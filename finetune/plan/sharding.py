"""What each of several devices holds: replicated (DDP), or divided (ZeRO stages 1 to 3, FSDP2), or offloaded.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054): stage 1 divides the optimizer, 2 the gradients too, 3 the weights too.
FSDP2 divides like stage 3. 4-bit weights are taken as divided, which needs `bnb_4bit_quant_storage` in bf16.
"""

from __future__ import annotations

from typing import Literal

from finetune.plan.architecture import Architecture

Sharding = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp2"]
Offload = Literal["none", "optimizer", "all"]

_STAGE = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}
_DIVIDED = (("optimizer", "master_copy"), ("gradients",), ("weights", "quantization_constants", "adapters"))
_GATHERED_LAYERS = 2  # a divided model holds the layer at work and the one being fetched


def shard(
    terms: dict[str, int], architecture: Architecture, world_size: int, sharding: Sharding, offload: Offload
) -> tuple[dict[str, int], int]:
    """Terms of one rank, and the bytes that offloading moves to the host."""
    stage = _STAGE[sharding]
    result = dict(terms)
    for names in _DIVIDED[:stage]:
        for name in names:
            result[name] = -(-result[name] // world_size)
    if stage == 3 and world_size > 1:
        whole = terms["weights"] + terms["quantization_constants"]
        in_layers = architecture.linear_parameters / architecture.n_parameters
        result["buffers"] += round(_GATHERED_LAYERS * whole * in_layers / architecture.n_layers)
    if stage < 3 and world_size > 1:
        result["buffers"] += terms["gradients"]  # buckets of the reduction
    host_bytes = 0
    moved: tuple[str, ...] = ()
    if offload != "none":
        moved = ("optimizer", "master_copy") + (
            ("weights", "quantization_constants") if offload == "all" else ()
        )
    for name in moved:
        host_bytes += result[name]
        result[name] = 0
    return result, host_bytes
