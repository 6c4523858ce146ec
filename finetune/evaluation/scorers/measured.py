"""Scorers of measured likelihoods: the `output` is the JSON object that `measure` wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any


def choice_accuracy(output: str, reference: str) -> float:
    """1.0 when the reference is the likeliest choice, all its tokens together. Of equal ones the first counts."""
    return _chosen(output, reference, lambda measured, index: 1.0)


def choice_accuracy_per_token(output: str, reference: str) -> float:
    """1.0 when the reference has the highest log-likelihood per token, so that long answers are not at a loss."""
    return _chosen(output, reference, lambda measured, index: float(measured["tokens"][index]))


def choice_accuracy_per_byte(output: str, reference: str) -> float:
    """1.0 when the reference has the highest log-likelihood per byte: as per token, whatever the tokenizer."""
    return _chosen(output, reference, lambda measured, index: float(measured["bytes"][index]))


def nll_per_token(output: str, reference: str) -> float:
    """Negative log-likelihood in nats, as this text's share of the token-weighted mean: the mean over the items is total
    over total. Only arms with one tokenizer can be compared by it."""
    measured = json.loads(output)
    return -float(measured["log_likelihood"]) / float(measured["mean_tokens"])


def bits_per_byte(output: str, reference: str) -> float:
    """Negative log-likelihood in bits, as this text's share of the mean per byte; fair between tokenizers."""
    measured = json.loads(output)
    return -float(measured["log_likelihood"]) / math.log(2) / float(measured["mean_bytes"])


def kl_per_token(output: str, reference: str) -> float:
    """KL(base || model) in nats, as this text's share of the token-weighted mean; 0 for the base itself."""
    measured = json.loads(output)
    return float(measured["kl"]) / float(measured["mean_tokens"])


def _chosen(output: str, reference: str, length: Callable[[dict[str, Any], int], float]) -> float:
    measured = json.loads(output)
    values = [value / length(measured, index) for index, value in enumerate(measured["log_likelihoods"])]
    return float(measured["choices"][values.index(max(values))] == reference)
