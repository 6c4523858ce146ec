"""finetune doctor: checks on a recipe, its model and its rows, before hours are spent on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.output import JsonFlag, emit, note
from finetune.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from finetune.doctor.finding import Finding

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
