"""`finetune doctor RECIPE`: checks on a recipe, its machine, its rows and its model, before hours are spent on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.output import JsonFlag, emit, note
from finetune.cli.plan import RecipeByDefault
from finetune.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from finetune.doctor.finding import Finding
    from finetune.pipeline.doctor import Examination

app = typer.Typer(
    name="doctor",
    cls=RecipeByDefault,
    help="Check a recipe and all it stands on before the training is paid for: finetune doctor RECIPE --fix",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key: train.loss.kind=dft.", metavar="KEY=VALUE"),
]
RecipeArgument = Annotated[str, typer.Argument(help="Recipe: a path or a shipped name.")]


@app.command("recipe")
def doctor_recipe(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write safe remedies into the recipe's file, and show what changed.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check machine, recipe, rows, tokens, suites, memory and a few steps of training; all faults at once.

    Exit code 2 with faults, 13 when the only fault is that it does not fit, 0 with warnings alone.
    """
    from finetune.cli.quiet import quiet_libraries

    quiet_libraries()
    from finetune.pipeline.doctor import examine_recipe

    found = examine_recipe(recipe, overrides or [], fix=fix, say=note)
    emit(found.to_dict(), "\n".join(_lines(found)), as_json=as_json)
    if found.exit_code != ExitCode.DONE:
        raise typer.Exit(int(found.exit_code))


def _lines(found: Examination) -> Iterator[str]:
    for group in dict.fromkeys(finding.group for finding in found.findings):
        yield group
        yield from (
            f"  {line}" for one in found.findings if one.group == group for line in str(one).splitlines()
        )
    if found.patch:
        yield f"\nwritten into the recipe:\n{found.patch}"
    n = {
        status: sum(one.status == status for one in found.findings)
        for status in ("ok", "warning", "fault", "skipped")
    }
    yield (
        f"\n{n['fault']} faults, {n['warning']} warnings, {n['ok']} checks passed, {n['skipped']} left out "
        f"in {found.seconds:.0f} s"
    )


@app.command()
def invariants(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    rows: Annotated[int, typer.Option(min=2, max=64, help="Train rows to measure on.")] = 6,
    as_json: JsonFlag = False,
) -> None:
    """Measure that accumulation, packing, masking and validation are exact on this recipe's own model and rows.

    Loads the model in fp32. Exit code 1 when an invariant is broken.
    """
    from finetune.pipeline.doctor import check_recipe_invariants

    _measure(check_recipe_invariants(recipe, overrides or [], n_rows=rows, say=note), as_json=as_json)


@app.command()
def losses(as_json: JsonFlag = False) -> None:
    """Measure the distillation losses against given numbers, an fp64 reference and the known mistakes of others.

    Takes seconds and needs no model. Exit code 1 when one is broken.
    """
    from finetune.doctor.losses import check_losses

    _measure(check_losses(), as_json=as_json)


def _measure(checks: Iterable[Finding], *, as_json: bool) -> None:
    """Print findings that are measured one after the other; exit with code 1 when one is broken."""
    findings = []
    for finding in checks:
        note(f"measured: {finding.check}")
        findings.append(finding)
    faults = [finding for finding in findings if finding.status == "fault"]
    held = sum(finding.status == "ok" for finding in findings)
    verdict = f"{held} hold, {len(faults)} are broken, {len(findings) - held - len(faults)} do not apply here"
    payload = {"findings": [finding.to_dict() for finding in findings], "faults": len(faults)}
    emit(payload, "\n".join([*map(str, findings), verdict]), as_json=as_json)
    if faults:
        raise typer.Exit(ExitCode.INTERNAL_FAULT)
