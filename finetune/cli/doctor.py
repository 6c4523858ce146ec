"""finetune doctor: checks on a recipe, its model and its rows, before hours are spent on them."""

from __future__ import annotations

from typing import Annotated

import typer

from finetune.cli.output import JsonFlag, emit, note
from finetune.errors import ExitCode

app = typer.Typer(
    name="doctor",
    help="Check what a run will stand on: finetune doctor invariants RECIPE",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def group() -> None:
    """Check what a run will stand on: finetune doctor invariants RECIPE"""


@app.command()
def invariants(
    recipe: Annotated[str, typer.Argument(help="Recipe: a path or a shipped name.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key: train.loss.kind=dft.", metavar="KEY=VALUE"),
    ] = None,
    rows: Annotated[int, typer.Option(min=2, max=64, help="Train rows to measure on.")] = 6,
    as_json: JsonFlag = False,
) -> None:
    """Measure that accumulation, packing, masking and validation are exact on this recipe's own model and rows.

    Loads the model in fp32. Exit code 1 when an invariant is broken.
    """
    from finetune.pipeline.doctor import check_recipe_invariants

    findings = []
    for finding in check_recipe_invariants(recipe, overrides or [], n_rows=rows, say=note):
        note(f"measured: {finding.check}")
        findings.append(finding)
    faults = [finding for finding in findings if finding.status == "fault"]
    held = sum(finding.status == "ok" for finding in findings)
    verdict = f"{held} hold, {len(faults)} are broken, {len(findings) - held - len(faults)} do not apply here"
    payload = {"findings": [finding.to_dict() for finding in findings], "faults": len(faults)}
    emit(payload, "\n".join([*map(str, findings), verdict]), as_json=as_json)
    if faults:
        raise typer.Exit(ExitCode.INTERNAL_FAULT)
