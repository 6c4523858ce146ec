"""Prompt and prefix tuning behind the face of a plain causal model: logits of the real tokens only, with or without a cache.

PEFT's forward returns logits of the virtual tokens too, puts them in front again at every decoding step, and drops the
positions it is given, so that an answer depends on how far its row was padded. Here n virtual tokens come once, at
positions 0 to n - 1, and every real token is n later.

Shapes: B rows, T real tokens, n virtual tokens, V vocabulary.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

_TYPES = ("PROMPT_TUNING", "PREFIX_TUNING")


def has_virtual_tokens(model: Any) -> bool:
    """Whether `model` is a PeftModel with prompt or prefix tuning."""
    config = getattr(model, "peft_config", {}).get("default")
    return config is not None and str(getattr(config.peft_type, "value", config.peft_type)) in _TYPES


def align_virtual_tokens(model: Any) -> None:
    """Replace the forward pass of a PeftModel with prompt or prefix tuning; others are left alone."""
    if has_virtual_tokens(model):
        model.forward = types.MethodType(_forward, model)


def _forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    labels: Tensor | None = None,
    **options: Any,
) -> Any:
    """input_ids [B, T] -> the base model's output with logits [B, T, V], or as many as `logits_to_keep` asks for."""
    assert input_ids is not None, "virtual tokens stand before token ids, not before embeddings"
    config = self.active_peft_config
    n_virtual, n_rows = int(config.num_virtual_tokens), input_ids.shape[0]
    if attention_mask is not None:
        attention_mask = torch.cat([attention_mask.new_ones(n_rows, n_virtual), attention_mask], dim=1)
    if position_ids is not None:
        position_ids = position_ids + n_virtual
    arguments = {"attention_mask": attention_mask, **options}
    begun = past_key_values is not None and past_key_values.get_seq_length() > 0
    prefix = str(getattr(config.peft_type, "value", config.peft_type)) == "PREFIX_TUNING"
    if begun or prefix:
        cache = past_key_values if begun else self.get_prompt(n_rows)
        if labels is not None:
            arguments["labels"] = labels
        return self.base_model(
            input_ids=input_ids, position_ids=position_ids, past_key_values=cache, **arguments
        )
    embedded = self.get_input_embeddings()(input_ids)
    prompts = self.get_prompt(batch_size=n_rows).to(embedded.dtype)
    if position_ids is not None:
        before = torch.arange(n_virtual, device=position_ids.device).expand(n_rows, n_virtual)
        position_ids = torch.cat([before, position_ids], dim=1)
    if labels is not None:
        arguments["labels"] = torch.cat([labels.new_full((n_rows, n_virtual), -100), labels], dim=1)
    output = self.base_model(
        inputs_embeds=torch.cat([prompts, embedded], dim=1),
        position_ids=position_ids,
        past_key_values=past_key_values,
        **arguments,
    )
    if getattr(output, "logits", None) is not None and output.logits.shape[1] > input_ids.shape[1]:
        output.logits = output.logits[:, n_virtual:]
    return output
