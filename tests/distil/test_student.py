"""A student cut from its teacher computes what the teacher would without the other layers, also after a round trip."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.distil.student import cut_layers
from finetune.errors import UserError


def test_a_cut_student_is_the_teacher_without_the_other_layers(teacher: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[1, 40, 50, 60, 70]])
    student = cut_layers(copy.deepcopy(teacher), [0, 3])
    hidden = teacher.model.embed_tokens(ids)
    rotary = teacher.model.rotary_emb(hidden, torch.arange(5)[None])
    for number in (0, 3):
        hidden = teacher.model.layers[number](hidden, position_embeddings=rotary)
    expected = teacher.lm_head(teacher.model.norm(hidden))
    with torch.no_grad():
        torch.testing.assert_close(student(input_ids=ids).logits, expected)

    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.num_hidden_layers == 2
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, student(input_ids=ids).logits)
        told = again.generate(ids, max_new_tokens=4, do_sample=False)  # the cache finds every layer
        assert torch.equal(told, student.generate(ids, max_new_tokens=4, do_sample=False))


def test_lists_of_the_configuration_that_name_every_layer_are_cut_too(teacher: Any) -> None:
    teacher.config.layer_types = [
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]
    student = cut_layers(teacher, [1, 3])
    assert student.config.layer_types == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [([0, 4], "the teacher has no layer 4; it has 4"), ([0, 1, 2, 3], "the same model")],
)
def test_layers_that_make_no_student_are_refused(teacher: Any, layers: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cut_layers(teacher, layers)
