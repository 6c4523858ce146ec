"""Whether a model gives two answers behind one shared prompt what it gives each behind its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from finetune.data.pair_tokens import AnsweredPrompt
from finetune.model.adapters import without_adapters
from finetune.model.documents import attends_to_everything
from finetune.training.branches import BranchCollator, Pack, model_inputs
from finetune.training.head import supports_target_head

_LONGEST_CHECK_TOKENS = 512
# Relative to the state's norm; an answer that sees another one, or wrong positions, is off by far more.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_PRECISION_TOLERANCE = 5e-2


@torch.no_grad()
def prompts_can_be_shared(model: Any, examples: Sequence[AnsweredPrompt]) -> bool:
    """Tried on the shortest example with several answers, laid out both ways; windows and soft caps rule it out before.

    Models whose layers count places in the row, or carry a state from token to token, fail the trial.
    """
    base = without_adapters(model)
    several = [example for example in examples if len(example.answers) > 1]
    if not several or not attends_to_everything(base.config):
        return False
    example = min(several, key=lambda candidate: candidate.n_tokens)
    if example.n_tokens > _LONGEST_CHECK_TOKENS:
        example = _shortened(example)
    was_training = model.training
    model.eval()
    try:
        together, apart = (_states(model, base, example, share) for share in (True, False))
    except (AttributeError, RuntimeError, TypeError, ValueError, KeyError):
        return False  # the model's layers do not take what tells them about branches
    finally:
        model.train(was_training)
    tolerance = _TOLERANCE.get(base.dtype, _HALF_PRECISION_TOLERANCE)
    return bool(((together - apart).norm(dim=1) <= tolerance * apart.norm(dim=1)).all())


def _shortened(example: AnsweredPrompt) -> AnsweredPrompt:
    """Its prompt cut from the left; whatever the text is, both layouts have to agree on it."""
    room = max(_LONGEST_CHECK_TOKENS - (example.n_tokens - len(example.prompt)), 8)
    return AnsweredPrompt(example.row_id, example.prompt[-room:], example.answers, example.wanted)


def _states(model: Any, base: Any, example: AnsweredPrompt, share: bool) -> torch.Tensor:
    """[M + A, D] hidden states from which everything about the answers is read: those that predict their tokens, one by one,
    and those at their last tokens. A neighbour that is seen too much may show in the first few only. Logits in place of
    hidden states where training reads those, for the model's own forward pass may leave something out.
    """
    device = next(model.parameters()).device
    laid_out = BranchCollator(share)([Pack([example])])
    batch = {name: value.to(device) for name, value in laid_out.items() if isinstance(value, torch.Tensor)}
    inputs = model_inputs(batch, base.config._attn_implementation, base.dtype)
    states: torch.Tensor
    if supports_target_head(base):
        states = base.base_model(**inputs, use_cache=False).last_hidden_state
    else:
        states = base(**inputs, use_cache=False).logits
    return states.flatten(0, 1)[torch.cat([batch["sources"], batch["last_places"]])].float()
