"""Answers for many prompts, greedy or sampled: fast on few cores, and the same for every batch size.

`generate` picks the decoder: the packed one (see `packed_decoder`) for models whose attention goes through the
transformers attention interface, after a short self-check against the model's own forward pass; else a
left-padded batch over the model's own cache (`padded_decoder`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.evaluation.packed_decoder import NewRow, PackedState, StepPlan, packed_forward, packed_session
from finetune.evaluation.padded_decoder import generate_padded
from finetune.evaluation.sampling import Picker, greedy
from finetune.evaluation.stopping import FinishReason, StopRule
from finetune.model.documents import attends_to_everything

# Prompt tokens that may enter in one step; bounds the activations of the step, not the length of a prompt.
_PROMPT_TOKENS_PER_STEP = 2048
_SELF_CHECK_TOKENS = 24
_SELF_CHECK_TOLERANCE = 1e-2  # relative to the largest logit; a wrong mask or position is off by far more


@dataclass(frozen=True)
class Completion:
    """One answer. `index` is the prompt's place in the input; `latency_seconds` runs from the prompt's entry into
    the batch to its last token, so it depends on the batch size. `output_tokens` counts the end token."""

    index: int
    text: str
    output_tokens: int
    finish_reason: FinishReason
    latency_seconds: float


@dataclass
class _Row:
    index: int
    tokens: list[int]
    own_length: int
    started: float


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rule: StopRule,
    *,
    batch_size: int,
    shared_prefix: int | None = None,
    decoder: str = "auto",
    pick: Picker = greedy,
) -> Iterator[Completion]:
    """Yield the completion of every prompt as soon as it ends, longest prompts first.

    prompts: token ids, none empty. shared_prefix: number of leading tokens that all prompts share (found when
    None; give it when only the rest of an interrupted set is generated, so that the arithmetic stays the same).
    decoder: `auto`, `packed` or `padded`. pick: chooses each next token; greedy, or a `Sampler` with one stream a prompt.
    In fp32 the answers do not depend on `batch_size` or the decoder, as long as no two logits tie within rounding; in
    bf16 rounding can flip near ties, which an A/A run measures.
    """
    if not prompts:
        return
    was_training = model.training
    model.eval()
    prefix = common_prefix(prompts) if shared_prefix is None else shared_prefix
    packed = decoder == "packed" or (decoder == "auto" and packed_decoding_works(model, prompts[0]))
    try:
        if packed:
            yield from _generate_packed(model, prompts, rule, batch_size, prefix, pick)
        else:
            yield from _generate_padded(model, prompts, rule, batch_size, pick)
    finally:
        model.train(was_training)


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Number of leading tokens shared by all prompts, leaving every prompt at least one token of its own."""
    if not prompts:
        return 0
    first, last = (
        min(prompts, key=list),
        max(prompts, key=list),
    )  # of all prompts, these two in sorted order differ the earliest
    limit = min(len(prompt) for prompt in prompts) - 1
    for index in range(limit):
        if first[index] != last[index]:
            return index
    return max(limit, 0)


def packed_decoding_works(model: Any, prompt: Sequence[int]) -> bool:
    """Whether the packed decoder gives this model's own logits: its preconditions, then a check on a few tokens."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    config = inner.config.get_text_config() if hasattr(inner.config, "get_text_config") else inner.config
    rope = getattr(config, "rope_parameters", None) or {}
    if not getattr(inner, "_supports_attention_backend", False) or not attends_to_everything(config):
        return False
    if rope.get("rope_type") in ("dynamic", "longrope"):  # frequencies depend on the length seen so far
        return False
    tokens = [int(token) for token in prompt[:_SELF_CHECK_TOKENS]]
    if len(tokens) < 3:
        tokens = (tokens * 3)[:3]
    was_training = model.training
    model.eval()
    try:
        return _self_check(model, tokens)
    except (RuntimeError, TypeError, KeyError, AttributeError):
        return False  # an unusual signature or cache: the padded decoder needs neither
    finally:
        model.train(was_training)


@torch.no_grad()
def _self_check(model: Any, tokens: list[int]) -> bool:
    device = next(model.parameters()).device
    expected = model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0, -1].float()
    prefix = max(1, len(tokens) // 3)
    state = PackedState(prefix, slots=1, slot_tokens=len(tokens))
    with packed_session(model, state):
        packed_forward(model, tokens[:prefix], range(prefix), [prefix - 1], device)
        own = tokens[prefix:-1]
        state.plan = _plan([], [NewRow(0, 0, len(own))], device)
        packed_forward(model, own, range(prefix, prefix + len(own)), [len(own) - 1], device)
        state.plan = _plan([len(own)], [], device)
        found = packed_forward(model, tokens[-1:], [len(tokens) - 1], [0], device)[0].float()
    return bool((found - expected).abs().max() <= _tolerance(model) * expected.abs().max())


def _tolerance(model: Any) -> float:
    return (
        _SELF_CHECK_TOLERANCE
        if next(model.parameters()).dtype == torch.float32
        else 10 * _SELF_CHECK_TOLERANCE
    )


def _plan(positions: list[int], new_rows: list[NewRow], device: torch.device) -> StepPlan:
    return StepPlan(
        running_positions=torch.tensor(positions, dtype=torch.long, device=device),
        longest_own=max(positions, default=0) + 1,
        new_rows=new_rows,
    )


def _generate_packed(
    model: Any, prompts: Sequence[Sequence[int]], rule: StopRule, batch_size: int, prefix: int, pick: Picker
) -> Iterator[Completion]:
    device = next(model.parameters()).device
    waiting = deque(sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index)))
    longest = max(len(prompt) for prompt in prompts) - prefix
    slots = min(batch_size, len(prompts))
    state = PackedState(prefix, slots=slots, slot_tokens=longest + rule.max_new_tokens)
    running: list[_Row] = []  # row i lives in slot i
    if prefix:
        with packed_session(model, state):
            packed_forward(model, prompts[0][:prefix], range(prefix), [prefix - 1], device)
    while waiting or running:
        entering = _enter(waiting, prompts, prefix, slots - len(running))
        with packed_session(model, state):
            logits = _step(model, state, running, entering, prompts, prefix, device)
        running.extend(entering)
        newest = pick(logits, [row.index for row in running])
        ended: list[tuple[_Row, FinishReason]] = []
        for slot, token in reversed(list(enumerate(newest))):
            row = running[slot]
            row.tokens.append(token)
            reason = rule.finish_reason(row.tokens)
            if reason is not None:
                ended.append((row, reason))
                _leave(state, running, slot)
        for row, reason in reversed(ended):
            yield Completion(
                row.index,
                rule.text(row.tokens),
                len(row.tokens),
                reason,
                time.perf_counter() - row.started,
            )


def _enter(waiting: deque[int], prompts: Sequence[Sequence[int]], prefix: int, free_slots: int) -> list[_Row]:
    """Take prompts while there are slots and the step's share of prompt tokens lasts; at least one when possible."""
    entering: list[_Row] = []
    budget = _PROMPT_TOKENS_PER_STEP
    while waiting and len(entering) < free_slots:
        own = len(prompts[waiting[0]]) - prefix
        if entering and own > budget:
            break
        budget -= own
        entering.append(_Row(waiting.popleft(), [], own, time.perf_counter()))
    return entering


def _step(
    model: Any,
    state: PackedState,
    running: list[_Row],
    entering: list[_Row],
    prompts: Sequence[Sequence[int]],
    prefix: int,
    device: torch.device,
) -> Tensor:
    """One forward pass; [rows, V] logits behind every running row, then behind every entering row."""
    own_positions = [row.own_length + len(row.tokens) - 1 for row in running]
    tokens = [row.tokens[-1] for row in running]
    positions = [prefix + position for position in own_positions]
    keep = list(range(len(running)))
    new_rows = []
    for slot, row in enumerate(entering, start=len(running)):
        own = prompts[row.index][prefix:]
        new_rows.append(NewRow(slot, len(tokens), len(own)))
        tokens.extend(own)
        positions.extend(range(prefix, prefix + len(own)))
        keep.append(len(tokens) - 1)
    state.plan = _plan(own_positions, new_rows, device)
    return packed_forward(model, tokens, positions, keep, device)


def _leave(state: PackedState, running: list[_Row], slot: int) -> None:
    """Free a slot: the last running row moves into it."""
    last = len(running) - 1
    if slot != last:
        state.move_slot(last, slot)
        running[slot] = running[last]
    running.pop()


def _generate_padded(
    model: Any, prompts: Sequence[Sequence[int]], rule: StopRule, batch_size: int, pick: Picker
) -> Iterator[Completion]:
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]

        def pick_of_batch(logits: Tensor, places: Sequence[int], batch: list[int] = batch) -> list[int]:
            return pick(logits, [batch[place] for place in places])

        rows = generate_padded(model, [prompts[index] for index in batch], rule, pick_of_batch)
        for place, tokens, reason, seconds in rows:
            yield Completion(batch[place], rule.text(tokens), len(tokens), reason, seconds)
