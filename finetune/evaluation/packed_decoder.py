"""Decoding of many prompts at once without any padding: prompts and next tokens share one flat forward pass.

One step feeds `[1, T]` tokens: the newest token of every running row, then the whole prompts of the rows that have
just entered. Linear layers see T tokens; only attention knows which token belongs to which row. Keys and values of
the tokens that all prompts begin with (system prompt, few-shot examples) are computed once and never copied per row.
A finished row leaves its slot at once and the next prompt takes it.

Shapes: T tokens of a step · n running rows · H query heads · K key/value heads · G = H / K · D head size ·
P shared prefix tokens · C own tokens a slot can hold.

The exact softmax over [shared prefix | own tokens] splits into two score blocks that share one normalisation; the
idea is that of shared-prefix attention in Juravsky et al. 2024 (arXiv:2402.05099).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ATTENTION_NAME = "finetune_packed_decoding"
_ACTIVE: ContextVar[PackedState] = ContextVar("packed_decoding_state")


@dataclass(frozen=True)
class NewRow:
    """A prompt that enters in this step: `length` tokens from `start` of the flat input, into `slot`."""

    slot: int
    start: int
    length: int


@dataclass
class StepPlan:
    """What each token of the flat input belongs to: first one token of each running row, row i in slot i."""

    running_positions: Tensor  # [n] own position (prefix not counted) of each running row's newest token
    longest_own: int  # own tokens of the longest running row, the newest included
    new_rows: list[NewRow]


@dataclass
class PackedState:
    """Keys and values of one decoding session, and the plan of the step that is running."""

    prefix_tokens: int
    slots: int
    slot_tokens: int
    plan: StepPlan | None = None  # None: the prefix itself is being computed
    prefix: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # [K, P + C, D]; the tail is scratch
    own: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # [slots * K, C, D]
    _mask: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[1, H, T, D] queries, [1, K, T, D] keys and values -> [1, T, H, D], for the tokens of the plan."""
        if layer not in self.own:
            self._allocate(layer, key)
        if self.plan is None:
            return self._attend_prefix(layer, query, key, value, scaling)
        output = torch.empty_like(query)
        n = len(self.plan.running_positions)
        if n:
            output[0, :, :n] = self._attend_running(
                layer, query[0, :, :n], key[0, :, :n], value[0, :, :n], scaling
            )
        for row in self.plan.new_rows:
            span = slice(row.start, row.start + row.length)
            output[0, :, span] = self._attend_new(
                layer, row.slot, query[0, :, span], key[0, :, span], value[0, :, span], scaling
            )
        return output.transpose(1, 2)

    def _allocate(self, layer: int, key: Tensor) -> None:
        heads, size = key.shape[1], key.shape[3]
        prefix_shape = (heads, self.prefix_tokens + self.slot_tokens, size)
        own_shape = (self.slots * heads, self.slot_tokens, size)
        self.prefix[layer] = (key.new_zeros(prefix_shape), key.new_zeros(prefix_shape))
        self.own[layer] = (key.new_zeros(own_shape), key.new_zeros(own_shape))

    def _attend_prefix(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        for store, new in zip(self.prefix[layer], (key, value), strict=True):
            store[:, : self.prefix_tokens] = new[0]
        attended = _grouped_attention(query[0], key[0], value[0], None, scaling)
        return attended[None].transpose(1, 2)

    def _attend_new(
        self, layer: int, slot: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """A whole prompt: [H, L, D] -> [H, L, D], causal, behind the shared prefix."""
        heads, length = key.shape[0], key.shape[1]
        end = self.prefix_tokens + length
        rows = slice(slot * heads, (slot + 1) * heads)
        for store, shared, new in zip(self.own[layer], self.prefix[layer], (key, value), strict=True):
            store[rows, :length] = new
            shared[:, self.prefix_tokens : end] = new
        keys, values = self.prefix[layer]
        mask = self._prompt_mask(query.device)[:length, :end] if self.prefix_tokens else None
        return _grouped_attention(query, keys[:, :end], values[:, :end], mask, scaling)

    def _attend_running(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """One token a row: [H, n, D] -> [H, n, D]."""
        plan = self.plan
        assert plan is not None
        query_heads, n, size = query.shape
        heads, longest, prefix = key.shape[0], plan.longest_own, self.prefix_tokens
        group = query_heads // heads
        rows = torch.arange(n * heads, device=query.device).view(n, heads)
        stores = self.own[layer]
        for store, new in zip(stores, (key, value), strict=True):
            store[rows, plan.running_positions[:, None]] = new.transpose(0, 1)
        keys, values = (store[: n * heads, :longest] for store in stores)  # views: nothing is copied
        by_row = query.reshape(heads, group, n, size).permute(2, 0, 1, 3)  # [n, K, G, D]
        own_scores = torch.bmm(by_row.reshape(n * heads, group, size), keys.transpose(1, 2))
        own_scores = own_scores.view(n, heads, group, longest).float() * scaling
        future = torch.arange(longest, device=query.device) > plan.running_positions[:, None]  # [n, longest]
        own_scores.masked_fill_(future[:, None, None, :], float("-inf"))
        if prefix:
            shared_keys, shared_values = (store[:, :prefix] for store in self.prefix[layer])
            by_head = query.reshape(heads, group * n, size)
            shared_scores = torch.bmm(by_head, shared_keys.transpose(1, 2)).float() * scaling
            shared_scores = shared_scores.view(heads, group, n, prefix).permute(2, 0, 1, 3)
            own_scores = torch.cat([shared_scores, own_scores], dim=-1)
        weights = torch.softmax(own_scores, dim=-1).to(query.dtype)  # [n, K, G, P + longest]
        own_weights = weights[..., prefix:].reshape(n * heads, group, longest)
        attended = torch.bmm(own_weights, values).view(n, heads, group, size).permute(1, 2, 0, 3)
        if prefix:
            shared = weights[..., :prefix].permute(1, 2, 0, 3).reshape(heads, group * n, prefix)
            attended = attended + torch.bmm(shared, shared_values).view(heads, group, n, size)
        return attended.reshape(query_heads, n, size)

    def _prompt_mask(self, device: torch.device) -> Tensor:
        """[C, P + C]: own token i sees the whole prefix and own tokens up to itself."""
        if self._mask is None:
            own = torch.ones(self.slot_tokens, self.slot_tokens, dtype=torch.bool, device=device).tril()
            shared = torch.ones(self.slot_tokens, self.prefix_tokens, dtype=torch.bool, device=device)
            self._mask = torch.cat([shared, own], dim=1)
        return self._mask

    def move_slot(self, source: int, target: int) -> None:
        """Copy a row into another slot, so that the running rows stay the first ones."""
        for layer, stores in self.own.items():
            heads = self.prefix[layer][0].shape[0]
            for store in stores:
                store[target * heads : (target + 1) * heads] = store[source * heads : (source + 1) * heads]


def _grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """[H, L, D] against [K, S, D], causal when no mask is given; the G query heads of a group share one key head."""
    heads, group = key.shape[0], query.shape[0] // key.shape[0]
    attended = functional.scaled_dot_product_attention(
        query.reshape(heads, group, query.shape[1], -1),
        key[:, None].expand(-1, group, -1, -1),
        value[:, None].expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return attended.reshape(query.shape)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls while a packed session is active."""
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    return _ACTIVE.get().attend(int(module.layer_idx), query, key, value, float(scaling)), None


@contextmanager
def packed_session(model: Any, state: PackedState) -> Iterator[None]:
    """Route the attention of `model` (a PreTrainedModel, or one wrapped by PEFT) through `state`; restored on exit."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    before = inner.config._attn_implementation
    token = _ACTIVE.set(state)
    inner.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)
        _ACTIVE.reset(token)


@torch.no_grad()
def packed_forward(
    model: Any, tokens: Sequence[int], positions: Sequence[int], keep: Sequence[int], device: torch.device
) -> Tensor:
    """Logits [len(keep), vocabulary] of the flat positions `keep`."""
    output = model(
        input_ids=torch.tensor([list(tokens)], device=device),
        position_ids=torch.tensor([list(positions)], device=device),
        use_cache=False,
        logits_to_keep=torch.tensor(list(keep), device=device),
    )
    logits: Tensor = output.logits[0]
    return logits
