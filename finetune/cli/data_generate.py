"""`finetune data generate SPEC`: a model answers train prompts, a verifier sorts the answers, and they become rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune.cli.output import JsonFlag, emit, note
from finetune.cli.servers import ServerKeyOption, ServerOption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.pipeline.generate import Generated

_GROUPS_SHOWN = 8


def generate(
    spec: Annotated[
        str, typer.Argument(help="A dataset spec with a source of kind generated: a file or a shipped name.")
    ],
    batch_size: Annotated[
        int, typer.Option(min=1, help="Answers decoded, or requests sent, together; changes no answer.")
    ] = 32,
    server: ServerOption = None,
    served_as: Annotated[
        str, typer.Option("--served-as", help="With --server: its name of the model.")
    ] = "tuned",
    server_key: ServerKeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make the rows that a dataset spec says are generated; what a killed run has answered is not asked again."""
    from finetune.cli.quiet import quiet_libraries
    from finetune.evaluation.server import ServerModel

    quiet_libraries()
    from finetune.pipeline.generate import generate_rows

    behind = ServerModel(server, served_as, key_variable=server_key) if server is not None else None
    made = generate_rows(spec, say=note, batch_size=batch_size, server=behind)
    found = [{"folder": str(one.folder), "fresh": one.fresh, **one.manifest} for one in made]
    emit({"sources": found}, "\n".join(line for one in made for line in _lines(one)), as_json=as_json)


def _lines(made: Generated) -> Iterator[str]:
    found = made.manifest
    yield (
        f"{found['prompts']['count']} prompts of {found['prompts']['dataset']}, {found['answers']} answers: "
        f"{found['pass_rate']:.1%} passed, {found['format_failures'] / found['answers']:.1%} failed in form"
    )
    yield f"  {'answers that pass':<20} {'prompts':>8} {'pass':>6} {'kept':>6} {'rows':>6}"
    for name, counts in found["difficulty"].items():
        rate = f"{counts.get('passed', 0) / counts['answers']:.0%}" if counts.get("answers") else "—"
        yield (
            f"  {_WORDS[name]:<20} {counts['prompts']:>8} {rate:>6} {counts.get('kept', 0):>6} "
            f"{counts.get('rows', 0):>6}"
        )
    for tag, values in found["pass_rate_by"].items():
        worst = list(values.items())[:_GROUPS_SHOWN]
        yield f"  lowest pass rate by {tag}: " + ", ".join(f"{name} {_rate(cell)}" for name, cell in worst)
    for reason, count in list(found["reasons"].items())[:_GROUPS_SHOWN]:
        yield f"  failed {count:>5} times: {reason}"
    state = "written to" if made.fresh else "complete already, in"
    yield f"{found['rows']} rows {state} {made.folder}"


_WORDS = {
    "never": "none",
    "hard": "up to a third",
    "medium": "up to two thirds",
    "easy": "more",
    "always": "all",
}


def _rate(cell: dict[str, Any]) -> str:
    return f"{cell['pass_rate']:.0%} of {int(cell['answers'])}"
