"""`finetune recipe validate | show | schema | diff`: check and explain recipes before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune.cli.output import JsonFlag, emit

if TYPE_CHECKING:
    from finetune.errors import Fault
    from finetune.recipe.explain import Difference, Explained
    from finetune.recipe.schema import Recipe
    from finetune.recipe.yaml_loader import Loaded

app = typer.Typer(
    name="recipe", help="Check, explain and compare recipes.", no_args_is_help=True, rich_markup_mode=None
)

_PATH_HELP = "A recipe file, a shipped name such as sft/home_intents_lora, or a run folder."
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key; profile=NAME too."),
]


@app.command()
def validate(
    recipes: Annotated[
        list[str] | None, typer.Argument(help=f"{_PATH_HELP} Without any: all shipped recipes.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Check recipes, of merges too, and the files they name, without starting anything. Prints every fault at once."""
    from finetune.cli.recipe_merges import kind_of, shipped_merges, valid_merge
    from finetune.errors import UserError
    from finetune.paths import shipped_names
    from finetune.recipe.resolve import recipe_digest

    faults: list[Fault] = []
    valid: list[dict[str, Any]] = []
    for name in recipes or [*shipped_names("recipes"), *shipped_merges()]:
        try:
            if (kind := kind_of(name)) != "recipes":
                valid.append(valid_merge(name, kind, overrides or ()))
                continue
            loaded = _read(name, overrides)
        except UserError as error:
            faults += error.faults
            continue
        found = _faults_of_named_files(loaded)
        faults += found
        if not found:
            recipe = loaded.value
            valid.append({"recipe": name, "name": recipe.name, "digest": recipe_digest(recipe)})
    if faults:
        raise UserError(list(dict.fromkeys(faults)))
    lines = [f"valid: {row['recipe']} ({_known_by(row)})" for row in valid]
    emit({"valid": valid}, "\n".join(lines), as_json=as_json)


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(help=_PATH_HELP)],
    overrides: SetOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Print every value in force, and where it comes from: the file and line, a profile, a --set, or a default."""
    from finetune.recipe.explain import explain
    from finetune.recipe.resolve import profiles_of, recipe_digest

    loaded = _read(recipe, overrides)
    rows = explain(loaded)
    profiles = profiles_of(loaded.path)
    payload = {
        "path": str(loaded.path),
        "digest": recipe_digest(loaded.value),
        "profiles": profiles,
        "values": [row.to_dict() for row in rows],
    }
    human = _table(rows) + f"\n\ndigest    {payload['digest']}\nprofiles  {', '.join(profiles) or 'none'}"
    emit(payload, human, as_json=as_json)


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page instead.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the JSON Schema of a recipe (for editors), or the reference page with --markdown."""
    from finetune.recipe.reference import recipe_json_schema, reference_markdown

    if markdown and not as_json:
        print(reference_markdown(), end="")
        return
    print(json.dumps(recipe_json_schema(), indent=2, ensure_ascii=False))


@app.command()
def diff(
    left: Annotated[str, typer.Argument(help=_PATH_HELP)],
    right: Annotated[
        str | None, typer.Argument(help="The other one; without it, LEFT with the --set overrides.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key of the second recipe."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the keys in which two resolved recipes differ, and whether the difference can change the result."""
    from finetune.recipe.explain import diff_recipes
    from finetune.recipe.resolve import recipe_digest

    first, second = _read(left, None).value, _read(right or left, overrides).value
    differences = diff_recipes(first, second)
    same = recipe_digest(first) == recipe_digest(second)
    payload = {"same_result": same, "differences": [difference.to_dict() for difference in differences]}
    emit(payload, _difference_lines(differences, same=same), as_json=as_json)


def _read(name: str, overrides: list[str] | None) -> Loaded[Recipe]:
    """A recipe by path or shipped name, or the resolved one of a run folder."""
    from finetune.recipe.resolve import read_recipe

    resolved = Path(name) / "recipe.resolved.yaml"
    return read_recipe(resolved if resolved.is_file() else name, overrides or ())


def _faults_of_named_files(loaded: Loaded[Recipe]) -> list[Fault]:
    """Faults of the dataset spec and the suites that a recipe names: absent, or wrong in themselves."""
    from finetune.data.spec import DatasetSpec
    from finetune.errors import UserError
    from finetune.evaluation.suite import load_suite
    from finetune.paths import find_declarative
    from finetune.recipe.yaml_loader import load_typed

    faults: list[Fault] = []
    try:
        where = loaded.where("data.spec")
        spec = find_declarative(
            "data", loaded.value.data.spec, relative_to=loaded.folder("data.spec"), where=where
        )
        load_typed(spec, DatasetSpec)
    except UserError as error:
        faults += error.faults
    beside, where = loaded.folder("eval.suites"), loaded.where("eval.suites")
    for suite in loaded.value.eval.suites:
        try:
            load_suite(suite, relative_to=beside, where=where)
        except UserError as error:
            faults += error.faults
    return faults


def _known_by(row: dict[str, Any]) -> str:
    """'name home_intents_lora, digest de4e1cb7', or what a merge does."""
    told = row["does"] if "does" in row else f"name {row['name']}, digest {row['digest'][:8]}"
    return str(told)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _table(rows: list[Explained]) -> str:
    cells = [(row.key, _shown(row.value), row.origin) for row in rows]
    widths = [max(len(cell[column]) for cell in cells) for column in range(2)]
    widths[1] = min(widths[1], 40)
    return "\n".join(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for key, value, origin in cells)


def _difference_lines(differences: list[Difference], *, same: bool) -> str:
    lines = [
        f"{row.key}: {_shown(row.left)} -> {_shown(row.right)}"
        + ("" if row.changes_result else "  (changes no result)")
        for row in differences
    ]
    lines.append("the digests are equal: the results are the same" if same else "the digests differ")
    return "\n".join(lines)
