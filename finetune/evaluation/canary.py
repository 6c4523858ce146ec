"""Proof that the adapter is active: on a few prompts the tuned model must not give the base model's logits.

A run that evaluates the base under the name of the tuned model looks like 'no gain' and is never noticed otherwise.
The base is the same model with its adapters switched off: wrapping changes the module in place, so a model object
kept from before the wrapping is no base any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.model.adapters import base_only

CANARY_THRESHOLD = 1e-3
_WEIGHTS = "adapter_model.safetensors"


@torch.no_grad()
def canary_logits(model: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Last-position logits [prompts, vocabulary] in fp32, one prompt at a time (no padding can blur them).

    Of a model with a score head, the scores [prompts, 1]."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        rows = [
            model(input_ids=torch.tensor([list(prompt)], device=device), use_cache=False)
            .logits[0, -1]
            .reshape(-1)
            for prompt in prompts
        ]
    finally:
        model.train(was_training)
    return torch.stack(rows).float().cpu()


def canary_differs(
    model: Any, prompts: Sequence[Sequence[int]], *, base_logits: Tensor | None = None
) -> float:
    """The largest logit difference between the tuned model and its base; raises UserError at or below 1e-3.

    base_logits: from `canary_logits` of the untuned model; needed when `model` carries no adapter (full tuning or a
    merged model). With an adapter they default to the same model with the adapter off.
    """
    if base_logits is None:
        if not hasattr(model, "peft_config"):
            raise UserError(
                "this model carries no adapter, so there is nothing that could have been tuned",
                fix="load the adapter, or give the base model's logits for a fully tuned model",
            )
        with base_only(model) as base:
            base_logits = canary_logits(base, prompts)
    known = base_logits.shape[-1]  # tokens that the tuning added have no logit in the base
    difference = float((canary_logits(model, prompts)[:, :known] - base_logits).abs().max())
    if not difference > CANARY_THRESHOLD:
        raise UserError(
            f"the tuned model answers like its base: largest logit difference {difference:.2g}",
            why=f"an active adapter moves some logit by more than {CANARY_THRESHOLD:g}",
            fix="train for more steps or at a higher train.learning_rate; of an adapter from elsewhere, check that it was trained",
        )
    return difference


def refuse_same_answers(baseline: Sequence[str], tuned: Sequence[str]) -> None:
    """Where logits cannot be seen (a server): the tuned model must answer at least one item otherwise."""
    if list(baseline) == list(tuned):
        raise UserError(
            f"the tuned model gives the base's answer to all {len(tuned)} items",
            why="an adapter that is active changes some answer",
            fix="check that the server serves the adapter under the name given for the tuned model",
        )


def adapter_sha256(folder: Path) -> str:
    """SHA-256 of the adapter's weights file, as `sha256sum adapter_model.safetensors` prints it."""
    path = folder / _WEIGHTS
    if not path.is_file():
        raise UserError(
            f"no adapter in {folder}", why=f"{_WEIGHTS} is missing", fix="finish the training first"
        )
    return digest_file(path)
