"""`finetune data inspect | generate | build | show | check | consistency | lengths | review | card`: files, builds, tokens, proofs, forms."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from finetune.cli.data_card import card
from finetune.cli.data_consistency import consistency
from finetune.cli.data_generate import generate
from finetune.cli.data_inspect import inspect
from finetune.cli.data_lengths import lengths
from finetune.cli.data_review import review
from finetune.cli.data_schema import schema
from finetune.cli.output import JsonFlag, emit
from finetune.cli.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.text import Text

    from finetune.data.build import DatasetBuild
    from finetune.data.rows import Row, Side
    from finetune.data.stages.runner import Runner
    from finetune.data.tokenise import TokenisedRow, TrainOn

app = typer.Typer(
    name="data",
    help="Build datasets, look into them, check them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command()(inspect)
app.command()(generate)

_SPEC_HELP = "A dataset spec: a file, or a shipped name such as home_intents."
_BUILD_HELP = "The folder of a dataset build; a spec or a shipped name is built first."
BuildsOption = Annotated[
    Path | None,
    typer.Option("--builds", metavar="FOLDER", help="Where builds are kept (default: runs/data)."),
]


@app.command()
def build(
    spec: Annotated[str | None, typer.Argument(help=_SPEC_HELP)] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", help="Build the dataset of this recipe, without train rows that its suites ask."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="ADDRESS",
            help="Read on a Ray cluster: its address, `auto`, or `local` (extra [cluster]).",
        ),
    ] = None,
    builds: BuildsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Read, check and split the rows of a spec; the same inputs find the same build again."""
    from finetune.errors import UserError

    if (spec is None) == (recipe is None):
        raise UserError("give either a spec or --recipe", fix="finetune data build home_intents")
    note = ""
    if recipe is not None:
        made, note = _build_of_recipe(recipe, builds, cluster)
    else:
        assert spec is not None
        made = _build(spec, builds, cluster)
    described = _describe(made) + (f"\n  {note}" if note else "")
    emit({"folder": str(made.folder), **made.manifest}, described, as_json=as_json)


@app.command()
def show(
    source: Annotated[str, typer.Argument(metavar="BUILD", help=_BUILD_HELP)],
    model: Annotated[
        str, typer.Option("--model", help="The model whose tokenizer and chat template are used.")
    ],
    row: Annotated[int, typer.Option("--row", help="Number of the row in its split, from 0.")] = 0,
    split: Annotated[str, typer.Option("--split", help="train, validation, test or regressions.")] = "train",
    train_on: Annotated[
        str, typer.Option("--train-on", help="Answers that carry loss: all or last.")
    ] = "all",
    builds: BuildsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the tokens of one row, targets in colour, and the text of every trained span."""
    from finetune.cli.quiet import quiet_libraries
    from finetune.data.tokenise import tokenise_row
    from finetune.errors import UserError

    quiet_libraries()
    from finetune.model.load import load_tokenizer
    from finetune.model.source import resolve_model

    if train_on not in ("all", "last"):
        raise UserError(f"--train-on is '{train_on}'", fix="use all or last")
    rows = _open_or_build(source, builds).rows(cast("Side", split))
    if not 0 <= row < len(rows):
        raise UserError(
            f"there is no row {row} in {split}, which has {len(rows)}", fix=f"--row 0 to {len(rows) - 1}"
        )
    tokenizer = load_tokenizer(resolve_model(model, weights=False, where="--model"))
    tokenised = tokenise_row(rows[row], tokenizer, train_on=cast("TrainOn", train_on))
    if as_json:
        emit(_token_table(rows[row], tokenised, tokenizer), "", as_json=True)
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for line in _coloured(rows[row], tokenised, tokenizer):
        console.print(line)


@app.command()
def check(
    source: Annotated[str, typer.Argument(metavar="BUILD", help=_BUILD_HELP)],
    builds: BuildsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Prove from the files that nothing is on two sides, that they are those of the manifest, and that the ledger adds up.

    Exit 2, with the pairs of rows, when a prompt, a group or nearly the same question is on two sides.
    """
    from finetune.data.check import check_build
    from finetune.errors import ExitCode, UserError

    found = _open_or_build(source, builds)
    with progress_bar("checking rows") as on_progress:
        result = check_build(found, on_progress)
    if not result.passed and not as_json:
        raise UserError(result.faults())
    emit(result.to_dict(), result.describe(), as_json=as_json)
    if not result.passed:
        raise typer.Exit(ExitCode.USER_ERROR)


for _command in (consistency, lengths, review, card, schema):
    app.command()(_command)


def _build(spec: str, builds: Path | None, cluster: str | None = None) -> DatasetBuild:
    from finetune.data.build import build_dataset, default_builds_root
    from finetune.paths import find_declarative

    with _runner(cluster) as runner, progress_bar("building") as on_progress:
        return build_dataset(
            find_declarative("data", spec),
            builds or default_builds_root(),
            on_progress=on_progress,
            runner=runner,
        )


def _build_of_recipe(recipe: str, builds: Path | None, cluster: str | None) -> tuple[DatasetBuild, str]:
    from finetune.data.build import default_builds_root
    from finetune.pipeline.decontaminate import build_of_recipe, contaminated_line

    with _runner(cluster) as runner, progress_bar("building") as on_progress:
        made, report = build_of_recipe(
            recipe, builds or default_builds_root(), on_progress=on_progress, runner=runner
        )
    return made, contaminated_line(report)


def _runner(cluster: str | None) -> AbstractContextManager[Runner | None]:
    """Where the input is read: a Ray cluster, or None for this machine."""
    if cluster is None:
        return nullcontext()
    from finetune.data.stages.ray_runner import RayRunner

    return RayRunner(cluster)


def _open_or_build(source: str, builds: Path | None) -> DatasetBuild:
    from finetune.data.build import open_build

    return open_build(Path(source)) if Path(source).is_dir() else _build(source, builds)


def _describe(made: DatasetBuild) -> str:
    manifest = made.manifest
    ledger = manifest["ledger"]
    dropped = "".join(f"\n    {reason}: {n}" for reason, n in ledger["dropped"].items())
    sides = ", ".join(f"{side} {entry['rows']}" for side, entry in manifest["splits"].items())
    leaks = ", ".join(f"{kind} {n}" for kind, n in manifest["leaks"].items())
    ignored = ", ".join(f"{key} ({n})" for key, n in manifest["source"]["ignored_keys"].items())
    return (
        f"{made.folder}\n"
        f"  rows read {ledger['read']} = kept {ledger['kept']} + dropped {sum(ledger['dropped'].values())} "
        f"+ quarantined {ledger['quarantined']}{dropped}\n"
        f"  {sides}\n"
        f"  leaks between sides: {leaks}"
        + (f"\n  keys read past: {ignored}" if ignored else "")
        + "".join(f"\n  look at this: {line}" for line in manifest.get("warnings", ()))
    )


def _spans(tokenised: TokenisedRow, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(tokenised.input_ids[first:last]) for first, last in tokenised.spans()]


def _token_table(row: Row, tokenised: TokenisedRow, tokenizer: Any) -> dict[str, Any]:
    """`weight` of a token is there only where an answer of the row has a weight of its own."""
    tokens: list[dict[str, Any]] = [
        {"id": token, "text": tokenizer.decode([token]), "target": label == token}
        for token, label in zip(tokenised.input_ids, tokenised.labels, strict=True)
    ]
    for token, weight in zip(tokens, tokenised.weights or (), strict=False):
        token["weight"] = weight
    return {
        "row": row.id,
        "tokens": tokens,
        "spans": _spans(tokenised, tokenizer),
        "n_targets": tokenised.n_targets,
    }


def _pieces(tokenised: TokenisedRow, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """Each token's text and whether it is a target; tokens that make up one character only together are one piece."""
    held: list[int] = []
    for index, token in enumerate(tokenised.input_ids):
        held.append(token)
        is_target = tokenised.labels[index] == token
        text = tokenizer.decode(held)
        goes_on = index + 1 < len(tokenised.labels) and is_target == (
            tokenised.labels[index + 1] == tokenised.input_ids[index + 1]
        )
        if not (text.endswith("\ufffd") and goes_on and len(held) < 4):
            yield text, is_target
            held = []


def _coloured(row: Row, tokenised: TokenisedRow, tokenizer: Any) -> Iterator[Text]:
    """Text from rows and models is appended as it is, never read as markup."""
    from rich.text import Text

    yield Text(
        f"row {row.id} ({row.source}): {len(tokenised.input_ids)} tokens, {tokenised.n_targets} targets"
    )
    line = Text()
    for text, is_target in _pieces(tokenised, tokenizer):
        line.append(text.replace("\n", "⏎\n") or "∅", style="bold black on green" if is_target else "dim")
        line.append("" if text.endswith("\n") else "|", style="dim")
    yield line
    for number, (span, (first, _)) in enumerate(
        zip(_spans(tokenised, tokenizer), tokenised.spans(), strict=True)
    ):
        weight = f" (weight {tokenised.weights[first]:g})" if tokenised.weights else ""
        yield Text(f"trained span {number}{weight}: {span!r}")
