"""Tokenizer, chat template and generation configuration of the merged model, and tokenizers that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.merge.adapter import merge_adapter
from finetune.merge.companions import model_card
from finetune.model.source import resolve_model

OTHER_TEMPLATE = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"


def merge(pair: Any, out: Path) -> None:
    merge_adapter(resolve_model(str(pair.base)), pair.adapter, out)


def template_of(folder: Path) -> str:
    from transformers import AutoTokenizer

    template: str = AutoTokenizer.from_pretrained(folder).chat_template
    return template


def test_tokenizer_template_and_generation_configuration_of_the_base_are_kept(
    tmp_path: Path, make_pair: Any
) -> None:
    pair = make_pair()
    (pair.base / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "eos_token_id": [2]}))
    (pair.base / "LICENSE").write_text("Apache-2.0")
    merge(pair, tmp_path / "out")
    for name in ("tokenizer.json", "generation_config.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (pair.base / name).read_bytes()
    assert template_of(tmp_path / "out") == template_of(pair.base)


def test_the_template_saved_with_the_adapter_wins(
    tmp_path: Path, make_pair: Any, make_tiny_tokenizer: Callable[..., Any]
) -> None:
    pair = make_pair()
    make_tiny_tokenizer(OTHER_TEMPLATE).save_pretrained(pair.adapter)
    merge(pair, tmp_path / "out")
    assert template_of(tmp_path / "out") == OTHER_TEMPLATE


@pytest.mark.parametrize("inline", [False, True])
def test_a_tokenizer_without_template_leaves_the_base_its_own(
    inline: bool, tmp_path: Path, make_pair: Any, make_tiny_tokenizer: Callable[..., Any]
) -> None:
    pair = make_pair()
    expected = template_of(pair.base)
    if inline:
        config = json.loads((pair.base / "tokenizer_config.json").read_bytes())
        (pair.base / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": expected}))
        (pair.base / "chat_template.jinja").unlink()
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(pair.adapter)
    merge(pair, tmp_path / "out")
    assert template_of(tmp_path / "out") == expected


def swap_two_ids(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_bytes())
    vocabulary = content["model"]["vocab"]
    first, second = (
        next(token for token, index in vocabulary.items() if index == wanted) for wanted in (40, 90)
    )
    vocabulary[first], vocabulary[second] = 90, 40
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_two_tokenizers_of_one_size_with_two_ids_swapped(
    tmp_path: Path, make_pair: Any, make_tiny_tokenizer: Callable[..., Any]
) -> None:
    pair = make_pair()
    make_tiny_tokenizer().save_pretrained(pair.adapter)
    swap_two_ids(pair.adapter)
    with pytest.raises(UserError, match=r"2 ids stand for other tokens, the first is 40"):
        merge(pair, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def add_tokens(tokenizer: Any, n: int = 4) -> Any:
    tokenizer.add_tokens([f"<extra{number}>" for number in range(n)])
    return tokenizer


def test_new_tokens_whose_rows_were_not_saved(
    tmp_path: Path, make_pair: Any, make_tiny_tokenizer: Callable[..., Any]
) -> None:
    pair = make_pair()
    add_tokens(make_tiny_tokenizer()).save_pretrained(pair.adapter)
    with pytest.raises(
        UserError, match=r"4 tokens .* have no embedding row, the first is 259 \('<extra0>'\)"
    ) as caught:
        merge(pair, tmp_path / "out")
    assert "resize the base to 263" in str(caught.value)


def test_new_tokens_whose_rows_came_along(
    tmp_path: Path, make_pair: Any, make_tiny_tokenizer: Callable[..., Any]
) -> None:
    from transformers import AutoTokenizer

    pair = make_pair(resize=263)
    add_tokens(make_tiny_tokenizer()).save_pretrained(pair.adapter)
    merge(pair, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("<extra3>") == 262


def test_the_head_saved_without_the_resized_embedding(tmp_path: Path, make_pair: Any) -> None:
    from safetensors.torch import load_file, save_file

    pair = make_pair(tie=False, resize=263)
    weights = pair.adapter / "adapter_model.safetensors"
    tensors = {name: value for name, value in load_file(weights).items() if "embed_tokens" not in name}
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"embed_tokens\.weight': 259, 'lm_head\.weight': 263"):
        merge(pair, tmp_path / "out")


def test_the_card_names_a_base_only_when_a_hub_could_link_to_it() -> None:
    facts = {"Mean KL": "1e-7"}
    assert 'base_model: "owner/name"' in model_card(base_id="owner/name", facts=facts)
    for local in ("/models/mine", "./mine", "builtin:smollm2-135m-instruct"):
        assert "base_model" not in model_card(base_id=local, facts=facts)
