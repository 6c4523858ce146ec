"""How likely a model finds given answers or texts: log-likelihoods that do not depend on the batch size.

Shapes: B requests of a batch · L longest of them · A scored tokens of the batch · V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.data.row_tokens import encode
from finetune.model.adapters import base_only

# Logits of a batch take 4 · V bytes a scored token: 512 tokens of a 150k vocabulary are 0.3 GB.
_TOKENS_PER_BATCH = 512


@dataclass(frozen=True)
class Request:
    """Tokens to score behind tokens that are given. `index` is the caller's; both parts hold at least one token.

    about: what they belong to, for messages.
    """

    index: int
    given: list[int]
    scored: list[int]
    about: str = ""


@dataclass(frozen=True)
class Likelihood:
    """Natural-log likelihood of all scored tokens together. `greedy`: each was the model's first choice.

    kl: sum over the scored tokens of KL(base || model) in nats; None when it was not asked for.
    """

    index: int
    log_likelihood: float
    tokens: int
    greedy: bool
    kl: float | None = None


def encode_continuation(prompt: str, answer: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of the answer behind it; the answer has at least one token unless it is empty text.

    Prompt and answer are tokenised as one text where the prompt's own tokens begin it, as in training. Where a merge
    spans the boundary ('hello wor' + 'ld'), the text is cut there instead: every token of the answer is scored, and
    none of the prompt.
    """
    given, whole = encode(prompt, tokenizer), encode(prompt + answer, tokenizer)
    if whole[: len(given)] == given and len(whole) > len(given):
        return given, whole[len(given) :]
    return given, encode(answer, tokenizer)


def log_likelihoods(
    model: Any,
    requests: Sequence[Request],
    *,
    tokens_per_batch: int = _TOKENS_PER_BATCH,
    kl_to_base: bool = False,
    base_model: Any = None,
) -> Iterator[Likelihood]:
    """Score every request, longest first, as many at once as `tokens_per_batch` padded tokens hold.

    Sums are per request, in fp64 over fp32 log-probabilities, so any mean over tokens is the same for every batch
    size. kl_to_base: also measure KL against `base_model`, or without one against the same model with its adapters off.
    """
    was_training = model.training
    model.eval()
    try:
        for batch in _batches(requests, tokens_per_batch):
            yield from _score(model, batch, kl_to_base, base_model)
    finally:
        model.train(was_training)


def token_weighted_nll(results: Sequence[Likelihood]) -> float:
    """Mean negative log-likelihood per token, in nats: total over total, never a mean of means."""
    return -math.fsum(one.log_likelihood for one in results) / sum(one.tokens for one in results)


def _batches(requests: Sequence[Request], tokens_per_batch: int) -> Iterator[list[Request]]:
    ordered = sorted(requests, key=lambda one: (-len(one.given) - len(one.scored), one.index))
    batch: list[Request] = []
    for request in ordered:
        longest = len((batch or [request])[0].given) + len((batch or [request])[0].scored)
        if batch and longest * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(request)
    if batch:
        yield batch


@torch.no_grad()
def _score(model: Any, batch: Sequence[Request], kl_to_base: bool, base_model: Any) -> list[Likelihood]:
    device = next(model.parameters()).device
    longest = max(len(one.given) + len(one.scored) for one in batch)
    tokens = torch.zeros(len(batch), longest, dtype=torch.long, device=device)
    mask = torch.zeros_like(tokens)
    predicts = torch.zeros(
        len(batch), longest, dtype=torch.bool, device=device
    )  # positions whose logits are scored
    for row, one in enumerate(batch):
        ids = one.given + one.scored
        tokens[row, : len(ids)] = torch.tensor(ids, device=device)
        mask[row, : len(ids)] = 1  # padded on the right: positions count from 0 in every row
        predicts[row, len(one.given) - 1 : len(ids) - 1] = True
    targets = torch.tensor([token for one in batch for token in one.scored], device=device)  # [A]
    logs = _log_probabilities(model, tokens, mask, predicts)
    chosen = logs.gather(1, targets[:, None])[:, 0].double()  # [A]
    first = logs.argmax(dim=1) == targets
    kl = None
    if kl_to_base:
        with nullcontext(base_model) if base_model is not None else base_only(model) as base:
            base_logs = _log_probabilities(base, tokens, mask, predicts)
        kl = (base_logs.exp() * (base_logs - logs)).sum(dim=1).double()
    results, start = [], 0
    for one in batch:
        own = slice(start, start + len(one.scored))
        start += len(one.scored)
        results.append(
            Likelihood(
                index=one.index,
                log_likelihood=float(chosen[own].sum()),
                tokens=len(one.scored),
                greedy=bool(first[own].all()),
                kl=None if kl is None else float(kl[own].sum()),
            )
        )
    return results


def _log_probabilities(model: Any, tokens: Tensor, mask: Tensor, predicts: Tensor) -> Tensor:
    """[A, V] fp32 log-probabilities at the positions of `predicts` [B, L], row by row."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    picks = "logits_to_keep" in inspect.signature(inner.forward).parameters
    options = {"logits_to_keep": predicts} if picks else {}
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False, **options).logits
    if logits.dim() == 3:
        logits = logits[predicts]
    return torch.log_softmax(logits.float(), dim=-1)
