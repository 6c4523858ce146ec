"""Vocabularies: the same, of other sizes, in another order, joined; rows follow the token's text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import UserError
from finetune.merge.models.merge import merge_models
from finetune.merge.models.vocabulary import tokens_of
from finetune.merge.shards import open_model
from finetune.recipe.merge_loader import LoadedMerge

Save = Callable[..., Path]
Recipe = Callable[..., LoadedMerge]
Make = Callable[..., Any]
NAME = "model.embed_tokens.weight"
WORDS = [f"w{i}" for i in range(12)]


def merged(recipe: Recipe, out: Path, *models: Path, **keys: Any) -> dict[str, torch.Tensor]:
    given = {"merge": 1, "merge_method": "linear", "models": [{"model": model} for model in models], **keys}
    merge_models(recipe(**given), out, load=False, n_workers=1)
    return read(out)


def read(folder: Path) -> dict[str, torch.Tensor]:
    with open_model(folder) as files:
        return {name: files.read(name) for name in files.entries}


def test_other_sizes_are_refused_with_both_shapes(
    save: Save, tensors: Make, recipe: Recipe, tmp_path: Path
) -> None:
    one, two = save("one", 1), save("two", tensors(2, rows=14), vocab_size=14)
    with pytest.raises(UserError, match=r"embed_tokens\.weight \[12, 8\] and \[14, 8\]") as caught:
        merged(recipe, tmp_path / "out", one, two)
    assert "tokenizer: {source: union}" in str(caught.value)


def test_ids_in_another_order_are_refused_with_the_first_of_them(
    save: Save, tokenizer: Make, recipe: Recipe, tmp_path: Path
) -> None:
    swapped = [*WORDS[:4], WORDS[5], WORDS[4], *WORDS[6:]]
    one, two = save("one", 1), save("two", 2, tokenizer(swapped))
    with pytest.raises(UserError, match=r"2 ids stand for other tokens, the first is 4 \('w4' and 'w5'\)"):
        merged(recipe, tmp_path / "out", one, two)
    found = merged(recipe, tmp_path / "aligned", one, two, tokenizer={"source": "base"})
    a, b = read(one), read(two)
    order = [0, 1, 2, 3, 5, 4, *range(6, 12)]
    for name in (NAME, "lm_head.weight"):
        assert torch.allclose(found[name], (a[name] + b[name][order]) / 2, atol=1e-6)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.allclose(found[name], (a[name] + b[name]) / 2, atol=1e-6)


def test_a_union_holds_every_token_and_a_lacking_model_takes_the_row_of_the_other(
    save: Save, tensors: Make, tokenizer: Make, recipe: Recipe, tmp_path: Path
) -> None:
    one = save("one", tensors(1, rows=13), tokenizer(WORDS, ["<a>"]), vocab_size=13)
    two = save("two", tensors(2, rows=14), tokenizer([*WORDS[:11], "new"], ["<b>", "<a>"]), vocab_size=14)
    found = merged(recipe, tmp_path / "out", one, two, tokenizer_source="union")
    tokens = tokens_of(json.loads((tmp_path / "out" / "tokenizer.json").read_text()))
    assert tokens == {**{word: i for i, word in enumerate(WORDS)}, "<a>": 12, "new": 13, "<b>": 14}
    a, b = read(one)[NAME], read(two)[NAME]
    table = found[NAME]
    assert table.shape == (15, 8)
    assert torch.allclose(table[3], (a[3] + b[3]) / 2, atol=1e-6)
    assert torch.allclose(table[12], (a[12] + b[13]) / 2, atol=1e-6)  # <a> has other ids
    assert torch.allclose(table[11], a[11], atol=1e-6)  # w11 is known to the first alone
    assert torch.allclose(table[13], b[11], atol=1e-6)
    assert torch.allclose(table[14], b[12], atol=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 15


def test_the_union_tokenizer_is_loaded_by_the_library(
    save: Save, tensors: Make, tokenizer: Make, recipe: Recipe, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    one = save("one", 1)
    two = save("two", tensors(2, rows=13), tokenizer(WORDS, ["<b>"]), vocab_size=13)
    merged(recipe, tmp_path / "out", one, two, tokenizer_source="union")
    loaded = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert loaded.encode("w3 <b> w4").ids == [3, 12, 4]


def test_a_union_of_bpe_takes_over_the_merges_that_lead_to_new_tokens() -> None:
    from finetune.merge.models.union import _add_merges

    mine = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "abb": 3}, "merges": [["a", "b"]]}
    theirs = {"type": "BPE", "vocab": {}, "merges": [["a", "b"], ["ab", "b"], ["b", "c"]]}
    _add_merges(mine, theirs)
    assert mine["merges"] == [["a", "b"], ["ab", "b"]]


def test_padded_rows_stay_and_mergekits_dialect_drops_them(
    save: Save, tensors: Make, tokenizer: Make, recipe: Recipe, tmp_path: Path
) -> None:
    words = tokenizer(WORDS[:10])
    one = save("one", tensors(1, rows=16), words, vocab_size=16)
    two = save("two", tensors(2, rows=12), words, vocab_size=12)
    found = merged(recipe, tmp_path / "out", one, two, tokenizer={"source": "base"})[NAME]
    a, b = read(one)[NAME], read(two)[NAME]
    assert torch.allclose(found[:12], (a[:12] + b) / 2, atol=1e-6)
    assert torch.allclose(found[12:], a[12:], atol=1e-6)
    keys: dict[str, Any] = {"tokenizer": {"source": "base"}, "dialect": "mergekit"}
    assert merged(recipe, tmp_path / "kit", one, two, **keys)[NAME].shape == (10, 8)
    keys["tokenizer"] = {"source": "base", "pad_to_multiple_of": 8}
    padded = merged(recipe, tmp_path / "padded", one, two, **keys)[NAME]
    assert padded.shape == (16, 8)
    mean = (a[:10].mean(0) + b[:10].mean(0)) / 2
    assert torch.allclose(padded[14], mean, atol=1e-6)


def test_the_tokenizer_of_one_model_brings_its_special_ids(
    save: Save, tokenizer: Make, recipe: Recipe, tmp_path: Path
) -> None:
    one = save("one", 1)
    two = save("two", 2, tokenizer(WORDS[::-1]), eos_token_id=7)
    found = merged(recipe, tmp_path / "out", one, two, tokenizer={"source": str(two)})
    assert torch.allclose(found[NAME], (read(one)[NAME].flip(0) + read(two)[NAME]) / 2, atol=1e-6)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["eos_token_id"] == 7
    assert tokens_of(json.loads((tmp_path / "out" / "tokenizer.json").read_text()))["w11"] == 0


def test_a_source_that_is_no_model_is_refused(save: Save, recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no model of this merge"):
        merged(recipe, tmp_path / "out", save("one", 1), save("two", 2), tokenizer_source="elsewhere")
