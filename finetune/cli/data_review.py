"""`finetune data review BUILD|FILE`: read rows by hand and mark them; the next build applies the marks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from finetune.cli.output import JsonFlag, emit, note

if TYPE_CHECKING:
    from finetune.data.marks import MarkFile
    from finetune.data.rows import Side
    from finetune.report.review.rows import ReadRow


def review(
    source: Annotated[
        str, typer.Argument(metavar="BUILD|FILE", help="The folder of a build, a file of rows, or a spec.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Show the rows by the tokens of this model; none: turn by turn.")
    ] = None,
    split: Annotated[str, typer.Option(help="Which rows of a build: train, validation, test.")] = "train",
    rows: Annotated[int, typer.Option(min=1, help="How many rows are drawn at random.")] = 100,
    flagged: Annotated[int, typer.Option(min=0, help="How many flagged rows are added.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Decides the draw.")] = 17,
    marks: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where marks are kept (default: marks.jsonl here).")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page as one file instead of serving it.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    builds: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where builds are kept (default: runs/data).")
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Only say what was read so far.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Serve a page with rows drawn at random and flagged ones: what is learnt is coloured, keep, drop or fix is saved."""
    from finetune.data.marks import MarkFile
    from finetune.report.review.row_page import RowPage, write_row_page
    from finetune.report.review.rows import summarise_marks

    read = _rows_to_read(source, cast("Side", split), model, rows, flagged, seed, builds)
    kept = MarkFile(marks or Path("marks.jsonl"))
    title = f"{Path(source).name}, {split}"
    if html is not None:
        write_row_page(html, read, kept, title)
        note(f"wrote {html}; put the marks it downloads where the spec's `marks` key looks for them")
    elif not summary:
        server = RowPage(read, kept, title, port=port)
        note(f"open {server.url}\n{len(read)} rows; keys 1 to 3 decide; end with Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            note("")
        finally:
            server.server_close()
    found = summarise_marks(read, kept.read()) | {"marks": str(kept.path)}
    emit(found, _describe(found, kept), as_json=as_json)


def _rows_to_read(
    source: str, split: Side, model: str | None, n: int, flagged: int, seed: int, builds: Path | None
) -> list[ReadRow]:
    from finetune.data.curate.flags import flag_rows
    from finetune.data.look import rows_to_look_at
    from finetune.errors import UserError
    from finetune.report.review.rows import draw_rows, prepare_rows

    found = list(rows_to_look_at(source, split, builds_root=builds, say=note))
    if not found:
        raise UserError(f"{source} has no rows in {split}", fix="choose another --split")
    tokenizer: Any = None
    if model is not None:
        from finetune.cli.quiet import quiet_libraries

        quiet_libraries()
        from finetune.model.load import load_tokenizer
        from finetune.model.source import resolve_model

        tokenizer = load_tokenizer(resolve_model(model, weights=False, where="--model"))
    flags = flag_rows(found)
    chosen = draw_rows(found, flags, n=n, n_flagged=flagged, seed=seed)
    return prepare_rows(found, flags, chosen, tokenizer)


def _describe(found: dict[str, Any], marks: MarkFile) -> str:
    lines = [
        f"{found['read']} of {found['planned']} rows read: keep {found['keep']}, drop {found['drop']}, fix {found['fix']}"
    ]
    if found["drawn_read"]:
        lines.append(
            f"of {found['drawn_read']} drawn at random {found['drawn_faulty']} are to be dropped or fixed: between "
            f"{found['faulty_low']:.1%} and {found['faulty_high']:.1%} of all rows (95 %)"
        )
    if found["read"]:
        lines.append(
            f"marks are in {marks.path}; name that file as `marks` in the spec, and the next build applies them"
        )
    return "\n".join(lines)
