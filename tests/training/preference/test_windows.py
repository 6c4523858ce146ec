"""Answers behind prompts longer than a model's sliding window are scored within it, whatever computes the attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.model.attention import register_document_attention
from finetune.training.branches import BranchCollator, Pack, model_inputs
from finetune.training.head import full_logits_nll

WINDOWED: dict[str, Any] = {
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
}


@pytest.fixture
def build(make_architecture: Any) -> Callable[..., Any]:
    """build(kind, attention, window=…): a model whose first layer sees a window, of Mistral both layers."""

    def made(kind: str, attention: str, window: int) -> Any:
        own = {name: value for name, value in WINDOWED.items() if kind != "Mistral" or name != "layer_types"}
        model = make_architecture(kind, **own, sliding_window=window)
        register_document_attention()
        model.set_attn_implementation(attention)
        return model

    return made


def pairs() -> list[AnsweredPrompt]:
    draw = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 259, (n,), generator=draw).tolist()  # type: ignore[no-any-return]

    answers = [tuple(Answer(ids, list(ids)) for ids in (tokens(6), tokens(9))) for _ in range(3)]
    return [AnsweredPrompt(str(index), tokens(30), both) for index, both in enumerate(answers)]


@pytest.mark.parametrize("attention", ["document", "sdpa", "eager"])
@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Gemma3Text", "Gemma2"])
def test_a_window_is_kept_in_the_row_of_a_pair(
    kind: str, attention: str, answer_logps: Any, build: Any
) -> None:
    """A mask of our own, given to every layer, would take the place of the windows."""
    if kind == "Gemma2" and attention != "eager":
        pytest.skip("its soft caps are known to eager alone")
    model, rows = build(kind, attention, window=8), pairs()
    expected = answer_logps(model, rows)
    batch = BranchCollator(False)([Pack(rows)])
    inputs = model_inputs(batch, attention, torch.float32)
    inputs |= {name: batch[name] for name in ("sources", "targets")}
    with torch.no_grad():
        nll = full_logits_nll(model, inputs)
    found = torch.stack([-part.sum() for part in nll.split(batch["answer_lengths"].tolist())])
    assert (found.view(-1, 2) - expected).abs().max() < 1e-4
    without = answer_logps(build(kind, attention, window=500), rows)
    assert (without - expected).abs().max() > 1e-3
