"""Is the merged folder a model? Its own configuration must find every tensor in its own files, and it must compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from finetune.errors import UserError
from finetune.merge.base_weights import StoredWeights
from finetune.merge.layout import read_layout
from finetune.merge.models.execute import ModelMerger
from finetune.merge.shards import open_model
from finetune.merge.streamed import StreamedModel

_N_TOKENS = 16


def check_loads(folder: Path) -> float:
    """Load the folder with transformers, layer by layer, on one sequence of tokens; returns the largest logit.

    Raises UserError when a parameter has no tensor, a tensor no parameter, a shape differs, or a logit is not finite.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)
    with open_model(folder) as files:
        layout = read_layout(skeleton, files)
        owners = layout.owners()
        surplus = [name for name in files.entries if name not in owners and name not in layout.duplicates]
        wrong = [
            name
            for parameter, name in layout.stored.items()
            if parameter in layout.shapes and layout.shapes[parameter] != files.entries[name].shape
        ]
        if layout.missing and surplus:  # an architecture that transformers rearranges while loading
            return _largest_whole(folder, config)
        faults = [*layout.missing, *surplus, *wrong]
        if faults:
            raise UserError(
                f"transformers would not load the merged model as it is: {len(layout.missing)} parameters without a tensor, "
                f"{len(surplus)} tensors without a parameter, {len(wrong)} of other shapes, e.g. {faults[0]}",
                why="the models' files do not hold what their configuration names, or the recipe puts layers together that "
                "make no model of it",
                fix="check that the folders are complete, then slices and models of the recipe",
            )
        in_bf16 = all(entry.dtype == torch.bfloat16 for entry in files.entries.values())
        dtype = torch.bfloat16 if in_bf16 else torch.float32
        streamed = StreamedModel(config, StoredWeights(files, layout), layout, dtype)
        streamed.attach_hooks()
        return _largest_logit(streamed.model, config)


def _largest_whole(folder: Path, config: Any) -> float:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        str(folder), local_files_only=True, output_loading_info=True
    )
    lacking = [*report["missing_keys"], *report["mismatched_keys"]]
    if lacking:
        raise UserError(f"transformers finds no tensor for {len(lacking)} parameters, e.g. {lacking[0]}")
    return _largest_logit(model.eval(), config)


@torch.no_grad()
def _largest_logit(model: Any, config: Any) -> float:
    n = int(config.get_text_config().vocab_size)
    tokens = torch.randint(0, n, (1, _N_TOKENS), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
    largest = float(logits.abs().max())
    if not bool(torch.isfinite(logits).all()):
        raise UserError(
            "the merged model computes NaN or infinity",
            why="weights that are finite each can still overflow together",
            fix="choose smaller weights, or another method",
        )
    return largest


def check_differs(merger: ModelMerger, folder: Path) -> None:
    """A merge that equals one of its models, value for value, is never what was wanted, and nothing else would tell."""
    if merger.plan.method == "passthrough":
        return
    for number, model in enumerate(merger.plan.models):
        if merger.equals(number, folder):
            raise UserError(
                f"the merged model equals {model.id}, value for value",
                why="the weights leave the other models out, or the written type rounds every difference away",
                fix="check weights and t of the recipe, or write dtype: float32",
            )
