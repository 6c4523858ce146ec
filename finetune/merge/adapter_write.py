"""Write low-rank factors as a plain PEFT adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from finetune.merge.adapter_file import PREFIX
from finetune.merge.layout import Layout
from finetune.merge.low_rank import Factors
from finetune.merge.place import put_in_place, refuse_small_disk, refuse_used_folder
from finetune.model.adapter_files import ADAPTER_WEIGHTS, ORIGIN_FILE
from finetune.model.source import ADAPTER_CONFIG, ModelSource
from finetune.paths import write_json

_KEPT_KEYS = ("task_type", "fan_in_fan_out")


def write_adapter(
    out: Path,
    factors: Mapping[str, Factors],
    layout: Layout,
    *,
    base: ModelSource,
    template: Mapping[str, Any] | None = None,
) -> None:
    """Write `factors` (by module name in the model) to the new folder `out`, in fp32, with scale 1 (alpha = rank).

    Targets are full module names, so that PEFT adapts these modules and no others. `template` is an adapter's
    configuration whose task is taken over.
    """
    from safetensors.torch import save_file

    refuse_used_folder(out)
    refuse_small_disk(
        out, sum(4 * (part.a.numel() + part.b.numel()) for part in factors.values()) + (1 << 20)
    )
    tensors: dict[str, torch.Tensor] = {}
    for module, part in sorted(factors.items()):
        embedding = layout.kinds.get(module) == "embedding"
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        tensors[f"{PREFIX}{module}.{names[0]}"] = part.a.contiguous()
        tensors[f"{PREFIX}{module}.{names[1]}"] = part.b.contiguous()
    rank = Counter(part.rank for part in factors.values()).most_common(1)[0][0]
    others = {module: part.rank for module, part in sorted(factors.items()) if part.rank != rank}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **{key: template[key] for key in _KEPT_KEYS if template and template.get(key) is not None},
        "base_model_name_or_path": base.path,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(factors),
        "bias": "none",
    }
    with put_in_place(out) as folder:
        save_file(tensors, str(folder / ADAPTER_WEIGHTS), {"format": "pt"})
        write_json(folder / ADAPTER_CONFIG, config)
        origin = {"id": base.id, "revision": base.revision, "digest": base.digest}
        write_json(folder / ORIGIN_FILE, origin)
