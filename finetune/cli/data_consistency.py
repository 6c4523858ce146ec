"""`finetune data consistency BUILD|FILE`: do the answers keep one form, and do they contradict each other?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from finetune.cli.output import JsonFlag, emit, note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.data.curate.account import Account
    from finetune.data.curate.consistency import Mix
    from finetune.data.rows import Side

_MOST_PILES = 6


def consistency(
    source: Annotated[
        str, typer.Argument(metavar="BUILD|FILE", help="The folder of a build, a file of rows, or a spec.")
    ],
    split: Annotated[str, typer.Option(help="Which rows of a build: train, validation, test.")] = "train",
    by: Annotated[
        str | None, typer.Option(metavar="TAG", help="Compare forms within each value of this tag only.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides which rows are shown.")] = 17,
    builds: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where builds are kept (default: runs/data).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show both piles where answers have two forms, and list contradictions, boilerplate, refusals, empty answers."""
    from finetune.data.curate.account import account_for_answers
    from finetune.data.look import rows_to_look_at

    rows = list(rows_to_look_at(source, cast("Side", split), builds_root=builds, say=note))
    account = account_for_answers(rows, by=by, seed=seed)
    emit(account.to_dict(), "\n".join(_lines(account)), as_json=as_json)


def _lines(account: Account) -> Iterator[str]:
    yield f"{len(account.rows)} rows with an answer"
    for mix in account.mixes:
        if mix.warned or mix.within is None:
            yield from _mix_lines(mix, account)
    groups = account.contradictions
    yield f"\ncontradictions: {len(groups)} questions in {sum(len(one.rows) for one in groups)} rows have several answers"
    for one in groups[:3]:
        for rows in one.answers[:3]:
            yield f"    {len(rows)} × {account.answer(rows[0])!r} ({account.rows[rows[0]].id})"
        yield ""
    for repeated in account.repeated[:10]:
        yield f"repeated {repeated.kind} in {repeated.n_rows} rows: {repeated.text!r}"
    for name, found in (("refusals", account.refusals), ("empty answers", account.empty)):
        first = ", ".join(account.rows[row].id for row in found[:3])
        yield f"{name}: {len(found)} ({len(found) / len(account.rows):.1%})" + (
            f", first {first}" if first else ""
        )
    warned = account.warnings
    yield (
        f"\n{len(warned)} warning{'s' * (len(warned) != 1)}: a minority form from 5 % on makes a model mix forms; bring the "
        "answers into one form, part the tasks with --by TAG, or leave one pile out"
        if warned
        else "\nno warning: no minority form reaches 5 %"
    )


def _mix_lines(mix: Mix, account: Account) -> Iterator[str]:
    name = mix.aspect if mix.within is None else f"{mix.aspect} of {mix.within or 'rows without the tag'}"
    yield f"\n{name}: {'WARNING, ' if mix.warned else ''}{mix.minority_share:.1%} differ from the majority"
    for pile in mix.piles[:_MOST_PILES]:
        yield f"  {pile.n:>7} {pile.share:6.1%}  {pile.value}"
        if mix.warned:
            for row in pile.rows:
                yield f"           {account.rows[row].id}: {account.answer(row)}"
    if len(mix.piles) > _MOST_PILES:
        yield f"          and {len(mix.piles) - _MOST_PILES} more"
