"""What `finetune plan` reads beside the recipe, without torch: the model's config.json, and how long the suites' answers may be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from finetune.evaluation.suite_schema import Suite
    from finetune.recipe.schema import Recipe
    from finetune.recipe.yaml_loader import Loaded

_BUILTIN_PREFIX = "builtin:"
_OF_THE_HARNESS = ("lm_eval:", "lm_eval-")
_TAKE = "take the config.json that the model was published with"


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Tokens of the longest answer that the evaluation may make, where the number comes from, and what was not read."""

    tokens: int
    basis: str
    notes: tuple[str, ...] = ()


def answer_tokens(loaded: Loaded[Recipe], given: int | None) -> AnswerTokens:
    """`--new-tokens` where it is given, else the largest `decoding.max_new_tokens` of the recipe's suites, as a run takes it.

    A suite that is not read here (an lm-eval task, whose answers the harness fixes; a file that is missing or has faults)
    counts with the default of the key, and `notes` say so.
    """
    if given is not None:
        return AnswerTokens(given, "--new-tokens")
    from finetune.evaluation.suite_sections import DecodingSection

    default: int = DecodingSection().max_new_tokens
    read, notes = [], []
    for name in loaded.value.eval.suites:
        suite, reason = _suite_without_items(loaded, name)
        if suite is None:
            notes.append(f"suite {name}: {reason}; answers of up to {default} tokens are taken")
            read.append((default, f"the default, for suite {name}"))
        else:
            read.append((suite.decoding.max_new_tokens, f"decoding.max_new_tokens of suite {suite.name}"))
    tokens, basis = max(read, key=lambda one: one[0])
    return AnswerTokens(tokens, basis, tuple(notes))


def _suite_without_items(loaded: Loaded[Recipe], name: str) -> tuple[Suite | None, str]:
    """The suite as its file says it, or None and why; its items are not looked at."""
    from finetune.evaluation.suite_schema import Suite
    from finetune.paths import find_declarative
    from finetune.recipe.yaml_loader import load_typed

    if name.startswith(_OF_THE_HARNESS):
        return None, "the task fixes its answers by itself"
    try:
        path = find_declarative("eval", name, relative_to=loaded.folder("eval.suites"))
        suite = load_typed(path, Suite).value
    except UserError as error:
        return None, f"cannot be read ({error.faults[0].what})"
    if suite.items.lm_eval is not None:
        return None, "the task fixes its answers by itself"
    return suite, ""


def config_of_recipe(loaded: Loaded[Recipe]) -> dict[str, Any]:
    """Of the model that is trained: that of `model.id`, with as many layers as a student that is cut from its teacher."""
    recipe = loaded.value
    config = config_of_model(
        recipe, loaded.folder("model.id"), loaded.where("model.id"), loaded.where("model.revision")
    )
    layers = recipe.distil.student.layers if recipe.distil is not None else None
    return config if layers is None else {**config, "num_hidden_layers": len(layers)}


def config_of_model(recipe: Recipe, relative_to: Path, where: str, revision_where: str) -> dict[str, Any]:
    """config.json of the recipe's model: from a table, a folder, or the hub's cache; no weights, no torch.

    A folder is found as a run finds it (beside the recipe, `relative_to`, or from the working folder) and needs nothing
    but config.json, so a model can be planned before it is downloaded. Raises UserError, at `where`; for a revision of a
    model that has none, at `revision_where`.
    """
    from finetune.model.source import read_config, refuse_idle_revision, resolve_model
    from finetune.pipeline.starts import model_folder
    from finetune.plan.builtin import BUILTIN_CONFIGS

    id = model_folder(recipe.model.id, relative_to, where)
    refuse_idle_revision(id, recipe.model.revision, revision_where)
    if id.startswith(_BUILTIN_PREFIX):
        name = id.removeprefix(_BUILTIN_PREFIX)
        if name not in BUILTIN_CONFIGS:
            raise UserError(
                f"no embedded model is called '{name}'",
                where=where,
                fix=did_you_mean(name, BUILTIN_CONFIGS),
            )
        return BUILTIN_CONFIGS[name]
    given = Path(id).expanduser()
    if given.exists() or id.startswith((".", "/", "~")):
        return _config_in(given, where)
    return read_config(resolve_model(id, recipe.model.revision, weights=False, where=where))


def _config_in(folder: Path, where: str) -> dict[str, Any]:
    """Raises UserError where config.json is missing, or is no JSON object."""
    from finetune.paths import read_json

    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder} holds no config.json",
            where=where,
            fix="name a model folder; config.json alone is enough for a plan",
        )
    config: Any = read_json(path, fix=_TAKE)
    if not isinstance(config, dict):
        raise UserError(f"{path} is no JSON object", where=where, fix=_TAKE)
    return config


def answers_lines(answers: AnswerTokens) -> Iterator[str]:
    """What the page says of the number."""
    yield f"    {answers.tokens} new tokens: {answers.basis}"
    yield from (f"    note: {one}" for one in answers.notes)
