"""The guide to training and the shipped recipes: every line and every file goes through resolving and the preflight."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from finetune.errors import UserError
from finetune.evaluation.suite import load_suite
from finetune.model.source import ModelSource
from finetune.paths import find_declarative, shipped_names, shipped_root
from finetune.pipeline.preflight import preflight
from finetune.plan.builtin import BUILTIN_CONFIGS
from finetune.plan.memory import forecast_training
from finetune.recipe.adapter_section import VIRTUAL_TOKENS, AdapterInit, AdapterKind
from finetune.recipe.preference_section import PREFERENCE_METHODS, LossName
from finetune.recipe.resolve import load_recipe, read_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.train_section import OptimizerName, Schedule

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
_BASE = re.compile(r"(?:with|From) `((?:sft|dpo|pretrain)/\w+)`")
NO_BIASES, NEEDS_CUDA, REFUSED = "Needs biases", "Needs CUDA", "Refused"


@dataclass(frozen=True)
class Line:
    """A row of a table: overrides for a shipped recipe, and what the row says of them."""

    base: str
    overrides: tuple[str, ...]
    text: str


def _lines() -> list[Line]:
    base, found = "", []
    for text in PAGE.read_text(encoding="utf-8").splitlines():
        if (named := _BASE.search(text)) is not None:
            base = named[1]
        if (given := re.match(r"\| `([^`]+=[^`]*)` \|", text)) is not None:
            found.append(Line(base, tuple(given[1].split()), text))
    return found


LINES = _lines()


@cache
def _loaded(line: Line) -> Any:
    return read_recipe(line.base, line.overrides)


def _recipe(line: Line) -> Recipe:
    recipe: Recipe = _loaded(line).value
    return recipe


@pytest.fixture
def make_source(tmp_path: Path, make_tiny_tokenizer: Any) -> Any:
    """make_source(biases): the embedded model's configuration at four layers, with a tokenizer and no weights."""

    def make(biases: bool) -> ModelSource:
        folder = tmp_path / f"config-{biases}"
        make_tiny_tokenizer().save_pretrained(folder)
        config = BUILTIN_CONFIGS["smollm2-135m-instruct"] | {
            "attention_bias": biases,
            "num_hidden_layers": 4,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return ModelSource("builtin", str(folder), None, "0" * 64)

    return make


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.overrides))
def test_every_line_of_the_page_is_a_recipe_that_could_start(
    line: Line, make_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = _recipe(line)
    source = make_source(NO_BIASES in line.text)
    if NO_BIASES in line.text:
        with pytest.raises(UserError, match="has no biases"):
            preflight(recipe, make_source(False))
    if NEEDS_CUDA in line.text:
        with pytest.raises(UserError, match=r"needs CUDA|no GPU"):
            preflight(recipe, source)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        # There is no such device to put the toy layer on, and its kernels cannot take the toy's steps.
        monkeypatch.setattr("finetune.training.optimizers.default_device", lambda: torch.device("cpu"))
        monkeypatch.setattr("finetune.training.optimizers._step_twice", lambda toy, optimizer: None)
    if REFUSED in line.text:
        with pytest.raises(UserError) as caught:
            preflight(recipe, source)
        assert {fault.where for fault in caught.value.faults} == {line.overrides[0].partition("=")[0]}
        return
    preflight(recipe, source)
    config = BUILTIN_CONFIGS["smollm2-135m-instruct"]
    assert forecast_training(recipe, config).total_bytes > 0


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.overrides))
def test_a_line_says_what_its_recipe_then_does(line: Line) -> None:
    recipe, loaded = _recipe(line), _loaded(line)
    for override in line.overrides:
        key = override.partition("=")[0]
        assert loaded.origins[key].source == "set" or any(k.startswith(f"{key}.") for k in loaded.origins)
    if "merges" in line.text or "Not merged" in line.text:
        assert ("Not merged" in line.text) == (recipe.adapter.kind in VIRTUAL_TOKENS)


def test_every_choice_of_the_schema_has_a_line() -> None:
    recipes = [_recipe(line) for line in LINES]
    seen: dict[str, set[Any]] = {
        "adapter.kind": {recipe.adapter.kind for recipe in recipes},
        "adapter.init": {recipe.adapter.init for recipe in recipes},
        "train.optimizer": {recipe.train.optimizer for recipe in recipes},
        "train.schedule": {recipe.train.schedule for recipe in recipes},
        "train.method": {recipe.train.method for recipe in recipes},
        "train.preference.losses": {
            loss for recipe in recipes for loss in recipe.train.preference.losses_of(recipe.train.method)
        },
        "train.loss.kind": {recipe.train.loss.kind for recipe in recipes},
        "train.gradient_checkpointing": {str(recipe.train.gradient_checkpointing) for recipe in recipes},
        "model.quantize": {recipe.model.quantize for recipe in recipes},
        "model.dtype": {recipe.model.dtype for recipe in recipes},
        "model.attention": {recipe.model.attention for recipe in recipes},
    }
    wanted: dict[str, set[Any]] = {
        "adapter.kind": set(get_args(AdapterKind)),
        "adapter.init": set(get_args(AdapterInit)),
        "train.optimizer": set(get_args(OptimizerName)),
        "train.schedule": set(get_args(Schedule)),
        "train.method": {"sft", *PREFERENCE_METHODS},
        "train.preference.losses": set(get_args(LossName)),
        "train.loss.kind": {"nll", "dft"},
        "train.gradient_checkpointing": {"True", "False", "selective"},
        "model.quantize": {"none", "nf4", "fp4", "int8"},
        "model.dtype": {"bf16", "fp16", "fp32"},
        "model.attention": {"auto", "document", "sdpa", "eager"},
    }
    assert {key: wanted[key] - seen[key] for key in wanted if wanted[key] - seen[key]} == {}
    assert "**Shampoo**" in PAGE.read_text() and "**APOLLO**" in PAGE.read_text()


TRAINED = [name for name in shipped_names("recipes") if name.startswith(("sft/", "dpo/", "pretrain/"))]


@pytest.mark.parametrize("name", TRAINED)
def test_every_shipped_recipe_passes_the_preflight(name: str, make_source: Any) -> None:
    recipe = load_recipe(name)
    folder = shipped_root() / "recipes" / Path(name).parent
    assert find_declarative("data", recipe.data.spec, relative_to=folder).is_file()
    for suite in recipe.eval.suites:
        load_suite(suite, relative_to=folder)
    preflight(recipe, make_source(recipe.adapter.kind == "bitfit"))
    config = BUILTIN_CONFIGS["smollm2-135m-instruct"]
    assert forecast_training(recipe, config).total_bytes < 8e9  # each is meant for a small machine


def test_parts_that_need_files_of_their_own_have_one() -> None:
    recipes = [load_recipe(name) for name in TRAINED]
    assert {recipe.adapter.kind for recipe in recipes} == set(get_args(AdapterKind))
    assert {recipe.train.method for recipe in recipes} == {"sft", *PREFERENCE_METHODS}
    assert {recipe.adapter.init for recipe in recipes} >= {"pissa", "olora", "eva", "loftq"}
    assert {recipe.model.quantize for recipe in recipes} == {"none", "nf4", "fp4", "int8"}
    assert any(recipe.model.new_tokens for recipe in recipes)
    assert any(recipe.train.batch_ramp for recipe in recipes)
    assert any(recipe.train.early_stopping for recipe in recipes)


def test_the_pages_name_the_recipes_that_are_shipped() -> None:
    page = PAGE.read_text() + (PAGE.parents[1] / "recipes" / "README.md").read_text()
    for name in TRAINED:
        tail = name.rpartition("/")[2].removeprefix("home_intents")
        assert name in page or f"`{tail}`" in page, f"{name} is on no page"


def test_a_preference_chain_is_shipped() -> None:
    first, second = load_recipe("sft/home_intents_lora"), load_recipe("dpo/home_intents_dpo")
    assert second.adapter.start == f"runs/{first.name}"
    shape = ("kind", "rank", "alpha", "rslora")
    assert all(getattr(first.adapter, key) == getattr(second.adapter, key) for key in shape)
    assert second.eval.against == "start"
    samples = second.train.samples  # the KL to the base comes with them; few, for they cost training time
    assert samples is not None and isinstance(samples.prompts, int)
    assert samples.prompts * samples.max_new_tokens <= 128
