"""Answers behind prompts longer than a model's sliding window are scored within it, whatever computes the attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.model.attention import register_document_attention
from finetune.training.branches import BranchCollator, Pack, model_inputs
from finetune.training.head import full_logits_nll

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "pad_token_id": 2,
}


def build(kind: str, attention: str, window: int) -> Any:
    torch.manual_seed(0)
    own = {name: value for name, value in SIZES.items() if kind != "Mistral" or name != "layer_types"}
    config = getattr(transformers, f"{kind}Config")(**own, sliding_window=window)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    register_document_attention()
    model.set_attn_implementation(attention)
    return model


def pairs() -> list[AnsweredPrompt]:
    draw = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 259, (n,), generator=draw).tolist()  # type: ignore[no-any-return]

    answers = [tuple(Answer(ids, list(ids)) for ids in (tokens(6), tokens(9))) for _ in range(3)]
    return [AnsweredPrompt(str(index), tokens(30), both) for index, both in enumerate(answers)]


@pytest.mark.parametrize("attention", ["document", "sdpa", "eager"])
@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Gemma3Text", "Gemma2"])
def test_a_window_is_kept_in_the_row_of_a_pair(kind: str, attention: str, answer_logps: Any) -> None:
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
