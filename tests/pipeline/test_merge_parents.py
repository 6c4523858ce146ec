"""Who can be a parent of a search over merges: an adapter's folder, a model's folder, and never one of another base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import UserError
from finetune.model.source import resolve_model
from finetune.pipeline.merge_parents import Parent, base_voice, find_parents
from finetune.recipe.merge_search_section import ParentSection


@pytest.fixture
def adapter(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """A LoRA of the tiny model as PEFT saves it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(tiny_model_folder))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def find(tiny_model_folder: Path) -> Callable[..., list[Parent]]:
    def found(*models: Path, base: Path = tiny_model_folder) -> list[Parent]:
        sections = [ParentSection(name=f"m{n}", model=str(path)) for n, path in enumerate(models)]
        return find_parents(sections, resolve_model(str(base)), base, "tuned", "fp32", say=lambda line: None)

    return found


def test_an_adapter_is_made_whole_once_and_a_model_is_taken_as_it_is(
    find: Callable[..., list[Parent]], adapter: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    tuned, plain = find(adapter, tiny_model_folder)
    said: list[str] = []
    whole = tuned.whole(tmp_path / "parents", said.append)
    assert whole == tuned.whole(tmp_path / "parents", said.append) and len(said) == 1
    assert plain.whole(tmp_path / "parents", said.append) == str(tiny_model_folder) and len(said) == 1
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        logits: list[Any] = [
            model(ids).logits
            for model in (tuned.voice.load(), AutoModelForCausalLM.from_pretrained(whole), plain.voice.load())
        ]
    assert torch.allclose(logits[0], logits[1], atol=1e-4)
    assert not torch.allclose(logits[0], logits[2], atol=1e-2)
    assert tuned.voice.key != plain.voice.key
    assert plain.voice.key == base_voice(resolve_model(str(tiny_model_folder)), "fp32").key


def test_an_adapter_of_another_base_is_refused(
    find: Callable[..., list[Parent]],
    adapter: Path,
    make_tiny_model: Callable[..., Any],
    make_tiny_tokenizer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    make_tiny_model(seed=3).save_pretrained(tmp_path / "other")
    make_tiny_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="is not the base this adapter was trained on"):
        find(adapter, base=tmp_path / "other")


def test_a_model_that_is_not_there_is_told_with_the_parent(find: Callable[..., list[Parent]]) -> None:
    with pytest.raises(UserError, match="absent") as caught:
        find(Path("models/absent"))
    assert "parents, m0" in str(caught.value)
