"""Reward models: the body of a language model with a head that gives one number for a whole text.

They are transformers' sequence classifiers with one label: `AutoModelForSequenceClassification` loads them, and the number
is read at the last token that is not the padding token, as transformers reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SCORE_HEAD = "score"
MISSING_SCORE = f"{SCORE_HEAD}.weight"


def is_reward_model(model: Any) -> bool:
    """Whether a model (perhaps under PEFT) scores texts instead of predicting tokens."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return hasattr(inner, SCORE_HEAD)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Without transformers' report of missing tensors, which load_model checks itself."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@torch.no_grad()
def start_score(model: Any, seed: int) -> None:
    """Fill a fresh head from a generator of its own, by the size that the model's other matrices start with.

    Not with zeros: then no gradient would reach the body in the first step.
    """
    weight = model.get_submodule(SCORE_HEAD).weight
    std = float(getattr(model.config.get_text_config(), "initializer_range", 0.02))
    drawn = torch.empty(weight.shape, dtype=torch.float32)
    drawn.normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
    weight.copy_(drawn)


def scored_place(ids: list[int], pad_id: int | None) -> int:
    """Place of the token at which transformers reads the score of a text: the last one that is not padding."""
    last = len(ids) - 1
    return next((place for place in range(last, -1, -1) if ids[place] != pad_id), last)
