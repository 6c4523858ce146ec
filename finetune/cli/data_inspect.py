"""`finetune data inspect FILE…`: what format and shape rows have, why, and the spec to build them with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune.cli.output import JsonFlag, emit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from finetune.data.read.files import SourceFile
    from finetune.data.read.inspect import Inspection, Tally
    from finetune.data.rows import Row
    from finetune.data.spec_source import RowsSource

_SHOWN_CHARACTERS = 300
_QUANTILES = {"half": 0.5, "95 %": 0.95, "the longest": 1.0}


def inspect(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…", help="Files, folders or globs; or, with --revision, the id of a hub dataset."
        ),
    ],
    revision: Annotated[str | None, typer.Option(help="Commit or tag of a hub dataset.")] = None,
    name: Annotated[str | None, typer.Option(help="Configuration of a hub dataset.")] = None,
    split: Annotated[str, typer.Option(help="Split of a hub dataset.")] = "train",
    shape: Annotated[str, typer.Option(help="Judge the rows by this shape alone.")] = "auto",
    rows: Annotated[
        int | None, typer.Option(min=1, help="Look at the first rows of each file only (default: all).")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="SPEC", help="Write the spec here; it must not be there yet.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Read every row in each way that its keys suggest; say which makes the most rows, and print the spec for it."""
    from finetune.cli.progress import progress_bar
    from finetune.data.read.files import source_files
    from finetune.data.read.inspect import inspect_files
    from finetune.data.read.spec_text import dataset_name, spec_text
    from finetune.errors import UserError
    from finetune.paths import write_atomic

    if write is not None and write.exists():
        raise UserError(f"{write} is there already", where="--write", fix="name another file, or remove it")
    source = _source(files, revision, name, split, shape)
    found_files = source_files(source, Path())
    with progress_bar("reading rows") as on_progress:
        found = inspect_files(found_files, source, max_rows=rows, on_progress=on_progress)
    spec = spec_text(found, dataset_name(files), spec_folder=write.parent if write else Path())
    if write is not None:
        write_atomic(write, spec)
    lines = [
        *_lines(found),
        "",
        f"the spec, written to {write}:" if write else "a spec for it:",
        "",
        spec.rstrip(),
    ]
    emit(_payload(found, spec), "\n".join(lines), as_json=as_json)


def _source(files: list[str], revision: str | None, name: str | None, split: str, shape: str) -> RowsSource:
    """The section to begin with; paths are from the working folder."""
    from typing import get_args

    from finetune.data.spec_source import FilesSource, HubSource, Shape
    from finetune.errors import UserError, did_you_mean

    if shape not in get_args(Shape):
        raise UserError(
            f"there is no shape '{shape}'", where="--shape", fix=did_you_mean(shape, get_args(Shape))
        )
    stated: dict[str, Any] = {} if shape == "auto" else {"shape": shape}
    if revision is not None:
        if len(files) != 1:
            raise UserError(
                "--revision belongs to one hub dataset", fix="name one: owner/name --revision COMMIT"
            )
        return HubSource(kind="hub", id=files[0], revision=revision, name=name, split=split, **stated)
    return FilesSource(kind="files", files=files, **stated)


def _lines(found: Inspection) -> Iterator[str]:
    from finetune.units import format_bytes

    for file in found.files[:10]:
        nature = file.nature
        details = [nature.format, *filter(None, (nature.encoding, nature.compression))]
        if nature.delimiter:
            details.append(f"cells parted by {nature.delimiter!r}")
        yield f"{file.name}: {', '.join(details)}; {format_bytes(file.size_bytes)} ({nature.why})"
    if len(found.files) > 10:
        yield f"… and {len(found.files) - 10} files more"
    unreadable = f", {found.unreadable} of them not readable" if found.unreadable else ""
    yield f"rows read: {found.read}{unreadable}" + ("" if found.complete else " (the first of each file)")
    for fault in found.first_unreadable:
        yield f"    {fault.source}:{fault.line}: {fault.reason}"
    yield "what they may be:"
    for tally in found.readings:
        mark = "→" if tally is found.chosen else " "
        yield f"  {mark} {_reading(tally)}: {tally.rows} rows, {tally.rejected} faulty; {tally.guess.why}"
        for fault in tally.first_rejects:
            yield f"      {fault.source}:{fault.line}: {fault.reason}"
    yield from _facts(found.chosen)


def _reading(tally: Tally) -> str:
    section = tally.guess.section()
    shape = section.pop("shape", "auto")
    return f"{shape} {section}" if section else str(shape)


def _facts(tally: Tally) -> Iterator[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in tally.kinds.most_common())
    turns = ", ".join(f"{count} × {number}" for number, count in tally.turns.most_common(5))
    yield f"rows: {kinds}; turns: {turns}"
    for title, lengths in (("prompt", tally.prompt_lengths), ("answer", tally.answer_lengths)):
        spread = ", ".join(f"{part} {length}" for part, length in _quantiles(lengths).items())
        yield f"{title} in characters, at most: {spread}"
    if tally.ignored_keys:
        yield "keys read past: " + ", ".join(f"{key} ({n})" for key, n in tally.ignored_keys.most_common(20))
    yield "for example:"
    for row in tally.samples[:2]:
        yield f"  {row.source}"
        yield from (f"    {who}: {_short(text)}" for who, text in _parts(row))


def _quantiles(lengths: Sequence[int]) -> dict[str, int]:
    ordered = sorted(lengths)
    return {name: ordered[round(share * (len(ordered) - 1))] for name, share in _QUANTILES.items()}


def _parts(row: Row) -> Iterator[tuple[str, str]]:
    """Who says what in a row, in order."""
    for prefix, turns in (("", row.messages), ("chosen ", row.chosen), ("rejected ", row.rejected)):
        for turn in turns:
            yield f"{prefix}{turn['role']}", str(turn.get("content") or turn.get("tool_calls"))
    if row.label is not None:
        yield "label", str(row.label).lower()
    for step in row.steps:
        yield "right step" if step["correct"] else "wrong step", str(step["text"])
    if row.text:
        yield "text", row.text
    if row.input_ids:
        yield "input_ids", " ".join(map(str, row.input_ids))


def _short(text: str) -> str:
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return shown.replace("\n", "⏎")


def _payload(found: Inspection, spec: str) -> dict[str, Any]:
    return {
        "files": [_file(file) for file in found.files],
        "read": found.read,
        "unreadable": found.unreadable,
        "complete": found.complete,
        "readings": [
            {
                **tally.guess.section(),
                "why": tally.guess.why,
                "rows": tally.rows,
                "rejected": tally.rejected,
                "kinds": dict(tally.kinds),
                "first_rejects": [fault.to_dict() for fault in tally.first_rejects],
            }
            for tally in found.readings
        ],
        "first_unreadable": [fault.to_dict() for fault in found.first_unreadable],
        "prompt_characters": _quantiles(found.chosen.prompt_lengths),
        "answer_characters": _quantiles(found.chosen.answer_lengths),
        "ignored_keys": dict(found.chosen.ignored_keys),
        "samples": [row.to_dict() for row in found.chosen.samples],
        "spec": spec,
    }


def _file(file: SourceFile) -> dict[str, Any]:
    nature = file.nature
    return {
        "name": file.name,
        "size_bytes": file.size_bytes,
        "format": nature.format,
        "compression": nature.compression,
        "encoding": nature.encoding,
        "delimiter": nature.delimiter,
        "why": nature.why,
    }
