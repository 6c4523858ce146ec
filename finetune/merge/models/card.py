"""README.md of a merged model: front matter that hubs read, the recipe, and the figures of the merge."""

from __future__ import annotations

import json

from finetune.merge.companions import HOW_TO_LOAD
from finetune.merge.models.plan import MergePlan
from finetune.recipe.merge_section import MergeRecipe


def merge_card(plan: MergePlan, facts: dict[str, str]) -> str:
    """Models that a hub could link to stand in the front matter; folders and embedded models have no page."""
    linked = [model.id.partition("@")[0] for model in plan.models if not _is_local(model.id)]
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if linked:
        front += ["base_model:", *(f"- {json.dumps(name)}" for name in linked)]
    front += ["tags:", "- merge", "---"]
    rows = [f"| {name} | {value} |" for name, value in facts.items()]
    lines = [
        *front,
        "",
        "# Merged model",
        "",
        f"{len(plan.models)} models merged by `{plan.method}` in the dialect `{plan.dialect}`: "
        + ", ".join(f"`{model.id}`" for model in plan.models)
        + ".",
        "",
        "| | |",
        "|---|---|",
        *rows,
        "",
        "```json",
        recipe_text(plan.recipe),
        "```",
        "",
        *HOW_TO_LOAD,
        "",
    ]
    return "\n".join(lines)


def recipe_text(recipe: MergeRecipe) -> str:
    """The recipe as it was carried out, in JSON (which is YAML too), without what it leaves out."""
    return json.dumps(
        _without_empty(recipe.model_dump(mode="json", by_alias=True)), indent=2, ensure_ascii=False
    )


def _without_empty(value: object) -> object:
    if isinstance(value, dict):
        kept = {key: _without_empty(entry) for key, entry in value.items()}
        return {key: entry for key, entry in kept.items() if entry not in (None, {}, "")}
    return [_without_empty(entry) for entry in value] if isinstance(value, list) else value


def _is_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or ":" in name or name.count("/") != 1
