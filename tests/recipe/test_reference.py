"""The reference page and the JSON Schema are made from the schema of today."""

from __future__ import annotations

from pathlib import Path

from finetune.recipe.reference import recipe_json_schema, reference_markdown
from finetune.recipe.schema import Recipe
from finetune.recipe.suggest import dotted_keys

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipe_reference.md"


def test_the_committed_page_is_current() -> None:
    renew = "finetune recipe schema --markdown > docs/recipe_reference.md"
    assert PAGE.read_text(encoding="utf-8") == reference_markdown(), f"renew it: {renew}"


def test_every_key_has_a_line_with_a_meaning() -> None:
    lines = [line.split(" | ") for line in reference_markdown().splitlines() if line.startswith("| `")]
    described = {line[0].removeprefix("| ").strip("`"): line for line in lines}
    for key in dotted_keys(Recipe):
        assert described[key][-1].removesuffix(" |").strip(), key


def test_limits_defaults_and_choices_are_told() -> None:
    page = reference_markdown()
    assert "| `adapter.rank` | a whole number, ≥ 1 | `32` |" in page
    assert "| `data.max_train_rows` | a whole number or null, ≥ 1 | `null` |" in page
    assert "| `train.learning_rate` | a number, > 0, < 1 |" in page
    assert "| `name` | text, pattern" in page
    assert "| `model.id` | text | **required** |" in page


def test_the_json_schema_is_closed_and_needs_no_name() -> None:
    schema = recipe_json_schema()
    assert schema["additionalProperties"] is False
    assert schema["then"]["required"] == ["model", "data", "eval"]


def test_extends_is_described_beside_the_keys_of_a_recipe() -> None:
    assert "| `extends` | text or null | `null` | Recipe to start from:" in reference_markdown()
    schema = recipe_json_schema()
    assert schema["title"] == "Recipe"
    assert schema["properties"]["extends"]["description"].startswith("Recipe to start from")


def test_the_json_schema_requires_nothing_that_a_base_can_bring() -> None:
    schema = recipe_json_schema()
    assert "required" not in schema
    assert not [name for name, section in schema["$defs"].items() if "required" in section]
    assert schema["if"] == {"properties": {"extends": {"type": "null"}}}  # absent counts as null
    assert schema["then"]["properties"] == {
        "model": {"required": ["id"]},
        "data": {"required": ["spec"]},
        "train": {"properties": {"samples": {"required": ["every_steps"]}}},
        "distil": {
            "required": ["teacher"],
            "properties": {"teacher": {"properties": {"server": {"required": ["url", "model"]}}}},
        },
        "eval": {"required": ["suites"]},
    }
