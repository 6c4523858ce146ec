"""Models that do not keep packed rows apart are refused before the first step, and those that do are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.errors import UserError
from finetune.model.attention import register_document_attention
from finetune.training.apart import refuse_state
from finetune.training.preference import train_preference

KINDS: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 4},  # carries a state from token to token
    "Bloom": {"n_layer": 2, "n_head": 4},  # distances over the whole row, and an attention of its own
    "XGLM": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},  # counts places by the row
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},  # its masks are made without positions
    "Doge": {},  # adds a mask of its own to every layer
    "Llama": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
REFUSED = ["Mamba", "Bloom", "XGLM", "GptOss"]


@pytest.fixture
def build(make_architecture: Any) -> Callable[..., Any]:
    """build(kind, attention): a model of an architecture."""

    def made(kind: str, attention: str = "document") -> Any:
        model = make_architecture(kind, **KINDS.get(kind, {}))
        register_document_attention()
        model.set_attn_implementation(attention if model._supports_sdpa else "eager")
        return model

    return made


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_packed_rows_see_each_other_is_refused(
    kind: str, make_recipe: Any, train: Any, build: Any
) -> None:
    recipe = make_recipe(adapter__kind="none", train__max_steps=1)
    with pytest.raises(UserError, match="does not keep documents apart") as caught:
        train(recipe, model=lambda recipe: build(kind))
    assert caught.value.faults[0].fix == "set train.packing: false"


@pytest.mark.parametrize("kind", ["Mamba", "GptOss"])
def test_it_trains_where_rows_are_not_packed(kind: str, make_recipe: Any, train: Any, build: Any) -> None:
    recipe = make_recipe(adapter__kind="none", train__max_steps=1, train__packing=False)
    result, _, _ = train(recipe, model=lambda recipe: build(kind, "sdpa"))
    assert result.steps == 1


@pytest.mark.parametrize(("kind", "dtype"), [("OPT", "fp32"), ("Llama", "bf16"), ("Qwen3Moe", "bf16")])
def test_a_model_that_keeps_them_apart_trains_packed(
    kind: str, dtype: str, make_recipe: Any, train: Any, build: Any
) -> None:
    recipe = make_recipe(adapter__kind="none", model__dtype=dtype, train__max_steps=1)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    result, _, _ = train(recipe, model=lambda recipe: build(kind).to(types[dtype]))
    assert result.steps == 1


def test_an_attention_that_leaves_out_a_part_of_the_model_is_refused(
    make_recipe: Any, train: Any, build: Any
) -> None:
    recipe = make_recipe(adapter__kind="none", train__max_steps=1)
    with pytest.raises(UserError, match="is not what this model computes") as caught:
        train(recipe, model=lambda recipe: build("Doge"))
    assert caught.value.faults[0].where == "model.attention"
    assert caught.value.faults[0].fix == "set model.attention: sdpa"
    result, _, _ = train(recipe, name="own", model=lambda recipe: build("Doge", "sdpa"))
    assert result.steps == 1


@pytest.mark.parametrize("packing", [True, False])
def test_sinks_are_not_left_out(packing: bool, make_recipe: Any, train: Any, build: Any) -> None:
    """GPT-OSS attends by sinks as well, which no kernel of torch's knows."""
    model = build("GptOss")
    model.set_attn_implementation("document")
    recipe = make_recipe(adapter__kind="none", train__max_steps=1, train__packing=packing)
    with pytest.raises(UserError, match="is not what this model computes") as caught:
        train(recipe, model=lambda recipe: model)
    (fault,) = caught.value.faults
    assert fault.where == "model.attention"
    assert "`s_aux`: attention sinks" in fault.why
    assert fault.fix == "set model.attention: eager"


@pytest.mark.parametrize("kind", ["Mamba", "Bloom"])
def test_answers_that_would_see_each_other_are_not_compared(
    kind: str,
    make_recipe: Any,
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Any,
) -> None:
    """Whether rows are packed or not: both answers of a pair lie in one row."""
    monkeypatch.setattr("finetune.training.session.measure_peak_flops", lambda dtype, device: 1e12)
    recipe = make_recipe(adapter__kind="none", train__method="dpo", train__packing=False)
    with pytest.raises(UserError, match="does not keep documents apart") as caught:
        train_preference(
            recipe, build(kind), tiny_tokenizer, pairs(), [], run_folder=tmp_path, owner="o" * 64,
            references=tmp_path / "references", say=lambda line: None,
        )  # fmt: skip
    assert caught.value.faults[0].where == "train.method"


def pairs() -> list[AnsweredPrompt]:
    draw = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 259, (n,), generator=draw).tolist()  # type: ignore[no-any-return]

    answers = [tuple(Answer(ids, list(ids)) for ids in (tokens(6), tokens(9))) for _ in range(3)]
    return [AnsweredPrompt(str(index), tokens(12), both) for index, both in enumerate(answers)]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({}, "train.packing"),
        ({"train__method": "dpo", "train__packing": False}, "train.method"),
        ({"train__packing": False}, None),
    ],
)
def test_states_are_refused_before_weights_are_loaded(
    changes: dict[str, Any], where: str | None, make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with torch.device("meta"):
        config = transformers.MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=1)
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    if where is None:
        refuse_state(skeleton, make_recipe(**changes))
        return
    with pytest.raises(UserError, match="carry a state from token to token") as caught:
        refuse_state(skeleton, make_recipe(**changes))
    assert caught.value.faults[0].where == where
