"""Decoding of one left-padded batch over the model's own cache: right for every causal model, not the fastest.

Shapes: B rows still running · L longest prompt of the batch · V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from finetune.evaluation.sampling import Picker, greedy
from finetune.evaluation.stopping import FinishReason, StopRule


def generate_padded(
    model: Any, prompts: Sequence[Sequence[int]], rule: StopRule, pick: Picker = greedy
) -> Iterator[tuple[int, list[int], FinishReason, float]]:
    """Yield (place in `prompts`, generated tokens, finish reason, seconds since the start) as rows end.

    Rows are padded on the left with a masked token and positions count from each row's first real token. The rows
    that ended leave the batch, so late steps are cheap. No prefix is shared: padding behind it would lie inside the
    window of a model with sliding attention.
    """
    started = time.perf_counter()
    device = next(model.parameters()).device
    cache_name = _cache_argument(model)
    cache = None
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(list(prompt), device=device)
        mask[row, longest - len(prompt) :] = 1
    positions = mask.cumsum(dim=1).sub(1).clamp(min=0)
    places = list(range(len(prompts)))
    produced: list[list[int]] = [[] for _ in prompts]
    while places:
        arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": True, cache_name: cache}
        with torch.no_grad():
            output = model(input_ids=tokens, **_last_logits(model), **arguments)
        cache = getattr(output, cache_name)
        newest = pick(output.logits[:, -1], places)
        going = []
        for row, token in enumerate(newest):
            place = places[row]
            produced[place].append(token)
            reason = rule.finish_reason(produced[place])
            if reason is None:
                going.append(row)
            else:
                yield place, produced[place], reason, time.perf_counter() - started
        rows = torch.tensor(going, dtype=torch.long, device=device)
        if len(going) < len(places):
            places = [places[row] for row in going]
            cache.reorder_cache(rows)  # an index selection: keeps only the rows that go on
        tokens = torch.tensor([newest[row] for row in going], dtype=torch.long, device=device)[:, None]
        mask = torch.cat([mask[rows], torch.ones_like(tokens)], dim=1)
        positions = positions[rows, -1:] + 1


def _cache_argument(model: Any) -> str:
    names = inspect.signature(_inner(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _last_logits(model: Any) -> dict[str, int]:
    return (
        {"logits_to_keep": 1}
        if "logits_to_keep" in inspect.signature(_inner(model).forward).parameters
        else {}
    )


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model
