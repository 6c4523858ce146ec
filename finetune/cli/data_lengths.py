"""`finetune data lengths BUILD|FILE --model M`: how many rows a limit on tokens would cut, before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from finetune.cli.output import JsonFlag, emit, note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.data.lengths import Lengths
    from finetune.data.rows import Side
    from finetune.data.tokenise import TrainOn


def lengths(
    source: Annotated[
        str, typer.Argument(metavar="BUILD|FILE", help="The folder of a build, a file of rows, or a spec.")
    ],
    model: Annotated[str, typer.Option(help="The model whose tokenizer and chat template are used.")],
    split: Annotated[str, typer.Option(help="Which rows of a build: train, validation, test.")] = "train",
    train_on: Annotated[str, typer.Option(help="Answers that carry loss: all or last.")] = "all",
    limit: Annotated[
        list[int] | None, typer.Option(min=1, help="Limits in tokens (default: 512 to 8192). Repeatable.")
    ] = None,
    builds: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where builds are kept (default: runs/data).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tokenise all rows as training would; say what each limit cuts, and which rows lose their end or every target."""
    from finetune.cli.quiet import quiet_libraries
    from finetune.data.lengths import LIMITS, measure_lengths
    from finetune.data.look import rows_to_look_at
    from finetune.errors import UserError

    quiet_libraries()
    from finetune.model.load import load_tokenizer
    from finetune.model.source import resolve_model

    if train_on not in ("all", "last"):
        raise UserError(f"--train-on is '{train_on}'", fix="use all or last")
    tokenizer = load_tokenizer(resolve_model(model, weights=False, where="--model"))
    rows = rows_to_look_at(source, cast("Side", split), builds_root=builds, say=note)
    found = measure_lengths(
        rows, tokenizer, train_on=cast("TrainOn", train_on), limits=sorted(set(limit)) if limit else LIMITS
    )
    emit(found.to_dict(), "\n".join(_lines(found)), as_json=as_json)


def _lines(found: Lengths) -> Iterator[str]:
    half, most, nearly_all, longest = found.quantiles.values()
    yield (
        f"{found.rows} rows, {found.tokens} tokens, {found.targets} of them targets; half have at most {half} tokens, "
        f"90 % {most}, 99 % {nearly_all}, the longest {longest}"
    )
    yield f"{'max_tokens':>10} {'rows cut':>10} {'lose their end':>15} {'lose all targets':>17} {'targets kept':>13}"
    for at in found.limits:
        yield f"{at.max_tokens:>10} {at.cut:>10} {at.lose_end:>15} {at.lose_all_targets:>17} {at.targets_kept:>13.1%}"
    yield "longest: " + ", ".join(f"{row} ({tokens})" for row, tokens in found.longest)
    if found.without_targets:
        yield f"{found.without_targets} rows have no trained answer at any length"
    if found.with_control_tokens:
        yield (
            f"{found.with_control_tokens} rows hold a control token (BOS, EOS, the end of a turn, …) in their text, which "
            f"ends or begins a turn there: {', '.join(found.first_with_control_tokens)}"
        )
    if found.failed:
        yield f"{found.failed} rows cannot be rendered; first: {found.reasons[0]}"
