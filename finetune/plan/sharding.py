"""What each of several devices holds: replicated (DDP), or divided (ZeRO stages 1 to 3, FSDP2), or offloaded.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054): stage 1 divides the optimizer, 2 the gradients too, 3 the weights too.
FSDP2 divides like stage 3. 4-bit weights are taken as divided, which needs `bnb_4bit_quant_storage` in bf16.

Trained weights are fp32 here and computed with as they are (finetune/training/zero.py). So stages 1 and 2 hold them whole, and
DeepSpeed keeps an fp32 copy of the part that this rank steps beside them; in stage 3 the part is the copy.
"""

from __future__ import annotations

from typing import Literal

from finetune.errors import UserError
from finetune.plan.architecture import Architecture

Sharding = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp2"]
Offload = Literal["none", "optimizer", "all"]

_STAGE = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}
_DIVIDED = (("optimizer",), ("gradients",), ("weights", "quantization_constants", "master_copy", "adapters"))
_GATHERED_LAYERS = 2  # FSDP2 holds the layer at work and the one being fetched
_ZERO_GATHERED_PARAMETERS = (
    1_000_000_000  # DeepSpeed's stage3_max_live_parameters: gathered weights stay until then
)
_ZERO_BUCKET_BYTES = 4 * 500_000_000  # DeepSpeed's reduce_bucket_size in elements, of fp32 gradients


def shard(
    terms: dict[str, int], architecture: Architecture, world_size: int, sharding: Sharding, offload: Offload
) -> tuple[dict[str, int], int]:
    """Terms of one rank, and the bytes that offloading moves to the host. Raises UserError where nothing can be offloaded."""
    check_offload(sharding, offload)
    stage = _STAGE[sharding]
    result = dict(terms)
    for names in _DIVIDED[:stage]:
        for name in names:
            result[name] = -(-result[name] // world_size)
    if stage in (1, 2):  # what is trained is as large as its gradients: both are fp32
        result["weights"] += result["master_copy"]
        result["master_copy"] = -(-terms["gradients"] // world_size)
    if world_size > 1:
        result["buffers"] += _in_exchange(terms, architecture, sharding)
    host_bytes = 0
    for name in _moved(sharding, offload):
        host_bytes += result[name]
        result[name] = 0
    if sharding == "zero3" and offload != "none":  # DeepSpeed steps a copy of the part there
        host_bytes += -(-terms["gradients"] // world_size)
    return result, host_bytes


def check_offload(sharding: Sharding, offload: Offload) -> None:
    """Raise UserError for what neither DeepSpeed nor FSDP2 can hold in the host's memory."""
    if offload == "none":
        return
    if _STAGE[sharding] == 0:
        raise UserError(
            "nothing is offloaded where every device holds the whole model",
            where="--offload",
            fix="add --sharding zero2 or zero3 (one device will do), or fsdp2",
        )
    if offload == "all" and sharding in ("zero1", "zero2"):
        raise UserError(
            f"{sharding} holds the weights on the device",
            where="--offload",
            fix="take --offload optimizer, or --sharding zero3",
        )
    if offload == "optimizer" and sharding == "fsdp2":
        raise UserError(
            "FSDP2 offloads weights, gradients and optimizer together, or nothing",
            where="--offload",
            fix="take --offload all, or --sharding zero3",
        )


def _in_exchange(terms: dict[str, int], architecture: Architecture, sharding: Sharding) -> int:
    """What lies beside a rank's own part while ranks exchange: gradients on their way, and gathered layers."""
    gradients = terms["gradients"]
    if _STAGE[sharding] == 0:
        return gradients  # the buckets of DDP hold all of them
    if _STAGE[sharding] < 3:
        return min(gradients, _ZERO_BUCKET_BYTES)
    whole = terms["weights"] + terms["quantization_constants"] + terms["master_copy"]
    if sharding == "zero3":
        gathered = round(whole * min(1.0, _ZERO_GATHERED_PARAMETERS / architecture.n_parameters))
        return gathered + min(gradients, _ZERO_BUCKET_BYTES)
    in_layers = architecture.linear_parameters / architecture.n_parameters
    gathered = round(_GATHERED_LAYERS * whole * in_layers / architecture.n_layers)
    return gathered + gradients // architecture.n_layers


def _moved(sharding: Sharding, offload: Offload) -> tuple[str, ...]:
    """The terms that lie with the host. DeepSpeed's optimizer steps there, so it needs the gradients of its part there too."""
    if offload == "none":
        return ()
    if offload == "all":
        return ("optimizer", "gradients", "weights", "quantization_constants", "master_copy", "adapters")
    of_stage = {"zero1": ("master_copy",), "zero2": ("master_copy", "gradients"), "zero3": ("gradients",)}
    return ("optimizer", *of_stage[sharding])
