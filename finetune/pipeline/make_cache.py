"""`finetune distil cache`: the teacher cache of a recipe, made by itself, over the very rows that a run of it trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from finetune.data.build import build_dataset, default_builds_root
from finetune.data.decontaminate import decontaminate
from finetune.distil.cache.server import Server, ServerSaying
from finetune.errors import UserError
from finetune.pipeline.alignment import aligned_rows, check_teacher
from finetune.pipeline.before import tokenizer_before
from finetune.pipeline.decontaminate import suite_questions
from finetune.pipeline.generate import ensure_generated
from finetune.pipeline.inputs import gather_inputs
from finetune.pipeline.methods import plain_rows, tokenise_side
from finetune.pipeline.teacher_cache import RecipeCache, cache_facts, low_coverage

Say = Callable[[str], None]


def fill_recipe_cache(
    path: str, overrides: Sequence[str] = (), *, server: Server | None = None, say: Say
) -> dict[str, Any]:
    """Fill the cache that `distil.targets: cache` of a recipe reads, or go on with it; returns `cache_facts`.

    server: serves the recipe's teacher, and says its log-probabilities in its place; it is taken at its word. Raises
    UserError as a run of the recipe does, and for a recipe whose teacher is not cached.
    """
    inputs = gather_inputs(path, overrides, say=say)
    recipe = inputs.recipe
    if recipe.distil is None or recipe.distil.targets != "cache":
        raise UserError(
            "this recipe reads no teacher cache",
            where="distil.targets" if recipe.distil is not None else "distil",
            fix="set distil.targets: cache (--set distil.targets=cache)"
            if recipe.distil is not None
            else "name a recipe with train.method: distil",
        )
    check_teacher(inputs)
    ensure_generated(inputs.spec_path, say=say, server=inputs.teacher.server if inputs.teacher else None)
    build = build_dataset(inputs.spec_path, default_builds_root())
    suites = [inputs.data_of(suite) for suite in inputs.suites]
    build, _ = decontaminate(build, suite_questions(suites, inputs.spec_path))
    tokenizer = tokenizer_before(inputs)
    source_rows = build.rows("train")[: recipe.data.max_train_rows]
    rows = plain_rows(tokenise_side(recipe, source_rows, tokenizer))
    aligned = aligned_rows(inputs, tokenizer, rows, lambda: source_rows)
    cache = RecipeCache.of(inputs, tokenizer, rows, aligned)
    say(f"teacher cache: {cache.folder}, {cache.coding.formula()} a target token")
    manifest = cache.fill(say, ServerSaying(server) if server is not None else None)
    if (told := low_coverage(manifest)) is not None:
        say(told)
    return cache_facts(cache, manifest)
