"""A live teacher whose rows see each other in the student's packs is refused before the first step, and is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from finetune.distil.apart import refuse_teacher_state
from finetune.distil.student import cut_layers
from finetune.distil.trainer import LiveTeaching
from finetune.errors import UserError
from finetune.model.attention import register_document_attention

KINDS: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 4},  # carries a state from token to token
    "Bloom": {"n_layer": 2, "n_head": 4},  # distances over the whole row, and an attention of its own
    "Doge": {},  # adds a mask of its own to every layer
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "Gemma2": {},  # soft caps, which its own attention computes; and logits that are bent behind the head
}


@pytest.fixture
def build(make_architecture: Any) -> Callable[..., Any]:
    """build(kind, attention): a frozen teacher of an architecture."""

    def made(kind: str, attention: str = "document") -> Any:
        model = make_architecture(kind, **KINDS[kind])
        register_document_attention()
        model.set_attn_implementation(attention if model._supports_sdpa or kind == "GptOss" else "eager")
        return model.requires_grad_(False)

    return made


@pytest.fixture
def student(teacher: Any) -> Any:
    return cut_layers(copy.deepcopy(teacher), [0])


@pytest.mark.parametrize("kind", ["Mamba", "Bloom"])
def test_a_teacher_whose_packed_rows_see_each_other_is_refused(
    kind: str, train: Any, make_recipe: Any, student: Any, rows: Any, build: Any
) -> None:
    recipe = make_recipe({"train.max_steps": 1, "distil.targets": "live"})
    with pytest.raises(UserError, match="the teacher does not keep documents apart") as caught:
        train(recipe, student, LiveTeaching(build(kind), 259), rows)
    (fault,) = caught.value.faults
    assert fault.where == "distil.teacher"
    assert (
        fault.fix
        == "set train.packing: false, or distil.targets: cache, for which the teacher reads row by row"
    )


@pytest.mark.parametrize("kind", ["Doge", "GptOss"])
def test_a_teacher_with_more_than_the_attention_it_is_given(
    kind: str, train: Any, make_recipe: Any, student: Any, rows: Any, build: Any
) -> None:
    recipe = make_recipe({"train.max_steps": 1, "distil.targets": "live"})
    with pytest.raises(UserError, match="is not what the teacher computes") as caught:
        train(recipe, student, LiveTeaching(build(kind), 259), rows)
    assert caught.value.faults[0].where == "distil.teacher"


def test_a_teacher_that_keeps_them_apart_teaches(
    train: Any, make_recipe: Any, student: Any, rows: Any, build: Any
) -> None:
    recipe = make_recipe({"train.max_steps": 1, "distil.targets": "live"})
    result, _, _ = train(recipe, student, LiveTeaching(build("Gemma2"), 259), rows)
    assert result.steps == 1


def test_rows_that_are_not_packed_are_asked_of_any_teacher(
    train: Any, make_recipe: Any, student: Any, rows: Any, build: Any
) -> None:
    recipe = make_recipe({"train.max_steps": 1, "train.packing": False, "distil.targets": "live"})
    result, _, _ = train(recipe, student, LiveTeaching(build("Mamba", "sdpa"), 259), rows)
    assert result.steps == 1


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"distil.targets": "live"}, "or distil.targets: cache"),
        ({"distil.targets": "live", "distil.way": "on_policy"}, "set train.packing: false"),
        ({"distil.targets": "live", "train.packing": False}, None),
        ({"distil.targets": "cache"}, None),
        ({"distil.targets": "live", "distil.alignment": "text", "data.long_rows": "drop"}, None),
    ],
)
def test_a_teacher_with_states_is_refused_before_its_weights_are_loaded(
    changes: dict[str, Any], fix: str | None, make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache, and a teacher that reads the rows in tokens of its own, know no packs."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    recipe = make_recipe(changes)
    with torch.device("meta"):
        config = transformers.MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=1)
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    if fix is None:
        refuse_teacher_state(skeleton, recipe)
        return
    with pytest.raises(UserError, match="the teacher does not keep documents apart") as caught:
        refuse_teacher_state(skeleton, recipe)
    assert caught.value.faults[0].where == "distil.teacher"
    assert fix in caught.value.faults[0].fix
