"""A small suite over byte-level tiny models, whose answers vary from prompt to prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.evaluation.items import Item
from finetune.evaluation.suite import Suite, load_suite

SUITE = """\
suite: 1
name: tiny
items: {jsonl: items.jsonl}
zero_shot: {system: Answer with JSON.}
few_shot: {k: 2, seed: 3, spread_by: intent}
decoding: {max_new_tokens: 12}
scorers: [exact_match, valid_json, intent_accuracy, slot_f1]
primary_metric: exact_match
margin: 0.02
"""


@pytest.fixture
def lively_model(tiny_model: Any) -> Any:
    """The tiny Llama with weights large enough that greedy text changes with the prompt and from step to step."""
    import torch

    generator = torch.Generator().manual_seed(5)
    tiny_model.lm_head.weight = torch.nn.Parameter(torch.empty_like(tiny_model.lm_head.weight))  # untied
    with torch.no_grad():
        for name, parameter in tiny_model.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.35 * torch.randn(parameter.shape, generator=generator))
    return tiny_model


@pytest.fixture
def items() -> list[Item]:
    return [
        Item(
            id=f"item-{index}",
            messages=({"role": "user", "content": f"command {'x' * (7 * index % 23)} {index}"},),
            reference=f'{{"intent":"I{index % 3}","slot":{index}}}',
            cluster=f"template-{index // 2}",
            tags={"intent": f"I{index % 3}"},
        )
        for index in range(10)
    ]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "items.jsonl").write_text(
        '{"id":"a","messages":[{"role":"user","content":"q"}],"reference":"{}"}\n'
    )
    (folder / "tiny.yaml").write_text(SUITE)
    return load_suite(folder / "tiny.yaml")
