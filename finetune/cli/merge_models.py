"""`finetune merge models`: several models into one, by a recipe of ours or a mergekit file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.output import JsonFlag, emit, note
from finetune.errors import UserError

if TYPE_CHECKING:
    from finetune.merge.models.merge import ModelMerge
    from finetune.recipe.merge_loader import LoadedMerge


class Dialect(StrEnum):
    """Whose definition of a method."""

    paper = "paper"
    mergekit = "mergekit"
    peft = "peft"


def models(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A merge recipe, a shipped name (merge/ties), or a mergekit file."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="New folder for the merged model.")] = None,
    base: Annotated[str | None, typer.Option(help="Instead of the recipe's base_model.")] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Instead of the recipe's models; once for each model.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a dotted key, e.g. parameters.density=0.3."
        ),
    ] = None,
    dialect: Annotated[Dialect | None, typer.Option(help="Instead of the recipe's dialect.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be read and written, and stop.")
    ] = False,
    diagnostics: Annotated[
        bool, typer.Option("--diagnostics", help="Measure angles, sign conflicts and losses of every tensor.")
    ] = False,
    shard_size: Annotated[str, typer.Option(help="Largest file of weights, e.g. 2GB.")] = "1GB",
    threads: Annotated[int | None, typer.Option(min=1, help="By default the cores, at most 8.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Merge models of one architecture into one, in the memory of a few chunks, and prove that it loads.

    A merge that was killed continues where it stopped when the same command is given again.
    """
    from finetune.cli.quiet import quiet_libraries
    from finetune.paths import find_declarative
    from finetune.recipe.merge_loader import load_merge

    given = [*(overrides or []), *([f"dialect={dialect.value}"] if dialect else [])]
    loaded = load_merge(find_declarative("merges", recipe), overrides=given, base=base, models=model or [])
    if dry_run:
        _dry_run(loaded, out or Path("merged"), threads, as_json)
        return
    if out is None:
        raise UserError("no folder for the merged model", where="--out", fix="name a new folder with --out")
    quiet_libraries()
    from finetune.cli.progress import begin
    from finetune.merge.models.merge import merge_models

    done = merge_models(
        loaded,
        out,
        n_workers=threads,
        shard_bytes=_shard_bytes(shard_size),
        diagnostics=diagnostics,
        progress=begin,
    )
    for remark in done.remarks:
        note(f"note: {remark}")
    emit({"out": str(out), **done.to_dict()}, _screen(out, done), as_json=as_json)


def _shard_bytes(text: str) -> int:
    from finetune.units import parse_bytes

    if (n_bytes := parse_bytes(text)) < 1:
        raise UserError(
            f"files of {text} hold nothing", where="--shard-size", fix="write it like 2GB or 500MB"
        )
    return n_bytes


def _dry_run(loaded: LoadedMerge, out: Path, threads: int | None, as_json: bool) -> None:
    import os

    from finetune.merge.models.prepare import costs, prepared
    from finetune.merge.place import refuse_used_folder

    refuse_used_folder(out)
    with prepared(loaded) as plan:
        found = costs(plan, out, threads or min(os.cpu_count() or 1, 8))
        payload = {
            "method": plan.method,
            "dialect": plan.dialect,
            "models": [model.id for model in plan.models],
            "remarks": plan.remarks,
            **found.to_dict(),
        }
        head = f"{plan.method}, dialect {plan.dialect}: " + ", ".join(model.id for model in plan.models)
        lines = [head, *found.lines(), *(f"note: {remark}" for remark in plan.remarks)]
    emit(payload, "\n".join(lines), as_json=as_json)


def _screen(out: Path, done: ModelMerge) -> str:
    """What was made, that it is whole, and that nobody has asked it anything yet."""
    from finetune.units import format_bytes, format_count

    names = [str(model["id"]) for model in done.models]
    whole = "every byte was read back, and it equals none of its models"
    if done.largest_logit is not None:
        whole = f"transformers loads it and it computes; {whole}"
    lines = [
        f"{len(names)} models merged by {done.method} (dialect {done.dialect}): {', '.join(names)}",
        f"The merged model is whole: {whole}.",
        f"  {format_count(done.n_parameters)} parameters in {done.n_tensors} tensors, {', '.join(done.dtypes)}, "
        f"{format_bytes(done.written_bytes)}.",
    ]
    if done.n_vocabulary is not None:
        lines.append(f"  {done.n_vocabulary} rows of the vocabulary, matched by token.")
    if done.shards_reused:
        lines.append(f"  {done.shards_reused} shards were there already, of an interrupted merge.")
    if done.diagnostics:
        lines += ["", f"{'diagnostics':<16} {'mean':>8} {'worst':>8}  tensor"]
        for name, row in done.diagnostics.items():
            lines.append(f"{name:<16} {row['mean']:>8.3f} {row['worst']:>8.3f}  {row['tensor']}")
        lines.append("")
    lines += [
        "Whether it answers well is not known yet. Ask it, beside a model it was made of:",
        f"  finetune eval model {out} --suite SUITE --against {names[-1]}",
        f"merged and proven in {done.seconds:.0f} s: {out}",
    ]
    return "\n".join(lines)
