"""The resolved recipe: every default written, stable, equal when read again; its digest; explaining and comparing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from finetune.paths import shipped_names
from finetune.recipe.explain import diff_recipes, explain
from finetune.recipe.resolve import RESULT_NEUTRAL, load_recipe, recipe_digest, resolved_yaml
from finetune.recipe.schema import Recipe
from finetune.recipe.suggest import dotted_keys
from finetune.recipe.train_section import TrainSection

from .conftest import VALID, Write


def changed(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    content = recipe.model_dump()
    for name, keys in sections.items():
        content[name] = {**content[name], **keys}
    return Recipe.model_validate(content)


def test_name_defaults_to_the_stem(write: Write) -> None:
    assert load_recipe(write(name="my-job.v2.yaml")).name == "my-job.v2"
    assert load_recipe(write(VALID + "name: other\n")).name == "other"


@pytest.mark.parametrize("name", shipped_names("recipes"))
def test_shipped_recipes_resolve_and_read_back(name: str, write: Write) -> None:
    recipe = load_recipe(name)
    again = load_recipe(write(resolved_yaml(recipe)))
    assert again == recipe
    assert resolved_yaml(again) == resolved_yaml(recipe)
    assert recipe_digest(again) == recipe_digest(recipe)


def test_every_key_is_written_in_schema_order(write: Write) -> None:
    from ruamel.yaml import YAML

    def keys(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in section.items():
            yield f"{prefix}{name}"
            yield from keys(value, f"{prefix}{name}.") if isinstance(value, dict) else ()

    absent = [  # sections that are absent by default
        "train.gradient_accumulation_steps=2",
        "train.batch_ramp.steps=1",
        "train.samples.every_steps=1",
        "train.method=distil",
        "distil.teacher.id=large",
        "distil.teacher.server.url=http://localhost:8000/v1",
        "distil.teacher.server.model=large",
    ]
    written = YAML(typ="safe", pure=True).load(resolved_yaml(load_recipe(write(), absent)))
    assert list(keys(written)) == list(dotted_keys(Recipe))


def test_a_profile_and_flags_are_not_applied_again(write: Write) -> None:
    path = write(VALID + "profiles: {smoke: {train.epochs: 1, seed: 5}, other: {seed: 6}}\n")
    recipe = load_recipe(path, ["profile=smoke", "train.epochs=4"])
    again = load_recipe(write(resolved_yaml(recipe), "resolved.yaml"))
    assert again == recipe
    assert (again.train.epochs, again.seed, again.profile) == (4.0, 5, "smoke")


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    rate=st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True),
    alpha=st.floats(min_value=1e-300, max_value=1e300),
    modules=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_any_values_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, text: str, rate: float, alpha: float, modules: list[str]
) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "job",
            "description": text,
            "model": {"id": text, "revision": text},
            "data": {"spec": text},
            "eval": {"suites": [text]},
            "train": {"learning_rate": rate},
            "adapter": {"alpha": alpha, "target_modules": modules or "all-linear"},
        }
    )
    path = tmp_path_factory.mktemp("resolved") / "recipe.yaml"
    path.write_bytes(resolved_yaml(recipe).encode())
    assert load_recipe(path) == recipe


def test_the_digest_ignores_spelling_order_comments_and_what_is_default(write: Write) -> None:
    plain = load_recipe(write())
    other = "# a remark\neval: {suites: [home_intents], against: 'few_shot'}\ndata: {spec: home_intents}\n"
    other += "model: {id: 'builtin:smollm2-135m-instruct'}\ntrain: {learning_rate: 2E-4, epochs: 2}\n"
    assert recipe_digest(load_recipe(write(other))) == recipe_digest(plain)


def test_the_digest_leaves_out_words_profiles_and_what_changes_no_number(write: Write) -> None:
    plain = recipe_digest(load_recipe(write()))
    neutral = ["description=x", "eval.batch_size=3", "train.keep_checkpoints=9", "train.report_to=[wandb]"]
    neutral += ["train.checkpoint_every_steps=3"]
    for override in neutral:
        assert override.partition("=")[0] in RESULT_NEUTRAL
        assert recipe_digest(load_recipe(write(), [override])) == plain, override
    profiled = write(VALID + "profiles: {smoke: {seed: 5}}\n")
    assert recipe_digest(load_recipe(profiled)) == plain
    assert recipe_digest(load_recipe(profiled, ["profile=smoke"])) == recipe_digest(
        load_recipe(write(), ["seed=5"])
    )


@pytest.mark.parametrize(
    "override",
    ["seed=18", "train.epochs=3", "model.revision=x", "eval.max_items=5", "eval.dtype=bf16", "name=other"],
)
def test_the_digest_notices_all_else(write: Write, override: str) -> None:
    assert recipe_digest(load_recipe(write(), [override])) != recipe_digest(load_recipe(write()))


def test_neutral_keys_exist() -> None:
    assert set(RESULT_NEUTRAL) <= set(dotted_keys(Recipe))


def test_explain_names_every_value_with_its_meaning(write: Write) -> None:
    rows = explain(write())
    known = list(dotted_keys(Recipe))
    not_there = (
        "train.batch_ramp",
        "train.samples",
        "distil",
    )  # null by default, so nothing below has a value
    absent = [key for key in known if key.startswith(tuple(f"{section}." for section in not_there))]
    sections = {key for key in known if any(other.startswith(f"{key}.") for other in known)}
    values = [key for key in known if key not in {*sections, *absent, "profiles"} or key in not_there]
    assert [row.key for row in rows] == values
    assert all(row.description for row in rows)
    name = next(row for row in rows if row.key == "name")
    assert (name.value, name.source) == ("job", "default")


def test_explain_of_a_bare_recipe_tells_defaults_from_given_values(write: Write) -> None:
    rows = {row.key: row for row in explain(load_recipe(write(), ["train.epochs=5"]))}
    assert rows["train.epochs"].source == "given"
    assert rows["train.learning_rate"].source == "default"
    assert rows["eval.baselines"].source == "default"
    assert rows["model.id"].source == "given"


def test_diff_lists_what_differs_and_whether_it_matters(write: Write) -> None:
    left, right = load_recipe(write()), load_recipe(write(), ["seed=1", "eval.batch_size=2"])
    assert [(row.key, row.left, row.right, row.changes_result) for row in diff_recipes(left, right)] == [
        ("seed", 17, 1, True),
        ("eval.batch_size", 32, 2, False),
    ]
    assert diff_recipes(left, left) == []


def test_not_finite_numbers_have_no_digest(write: Write) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        recipe_digest(changed(load_recipe(write()), adapter={"alpha": math.inf}))


def test_paths_below_the_recipe_are_not_touched(write: Write) -> None:
    Path("sub").mkdir()
    assert (
        load_recipe(write(VALID.replace("spec: home_intents", "spec: ./x.yaml"), "sub/a.yaml")).data.spec
        == "./x.yaml"
    )


def test_a_key_below_a_neutral_section_changes_no_result() -> None:
    tree = {"name": "x", "model": {"id": "x"}, "data": {"spec": "x"}, "eval": {"suites": ["x"]}}
    plain = Recipe.model_validate(tree)
    sampled = Recipe.model_validate({**tree, "train": {"samples": {"every_steps": 5}}})
    priced = Recipe.model_validate({**tree, "eval": {"suites": ["x"], "prices": {"per_hour": 2.0}}})
    assert recipe_digest(plain) == recipe_digest(sampled) == recipe_digest(priced)
    for other in (sampled, priced):
        differences = diff_recipes(plain, other)
        assert differences and not any(row.changes_result for row in differences)


LEAST: dict[str, Any] = {"name": "x", "model": {"id": "x"}, "data": {"spec": "x"}, "eval": {"suites": ["x"]}}


def test_a_key_of_a_later_version_leaves_the_digest_of_older_recipes_alone() -> None:
    class LaterTrain(TrainSection):
        later: int = 3

    class Later(Recipe):
        train: LaterTrain = Field(default_factory=LaterTrain)
        newer: LaterTrain = Field(default_factory=LaterTrain)

    plain = recipe_digest(Recipe.model_validate(LEAST))
    assert recipe_digest(Later.model_validate(LEAST)) == plain
    assert recipe_digest(Later.model_validate({**LEAST, "newer": {"later": 4}})) != plain


@pytest.mark.parametrize("change", [{"weight_decay": 0.5}, {"max_grad_norm": 2.0}, {"epochs": 3}])
def test_whatever_differs_from_its_default_changes_the_digest(change: dict[str, Any]) -> None:
    plain = recipe_digest(Recipe.model_validate(LEAST))
    assert recipe_digest(Recipe.model_validate({**LEAST, "train": change})) != plain
