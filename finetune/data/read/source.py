"""A source's rows, read one by one; a faulty one is a Reject with file, line, byte, reason and raw text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from finetune.data.read.files import SourceFile
from finetune.data.read.json_lines import read_json_lines
from finetune.data.read.lines import Range, split_lines
from finetune.data.read.record import Record, Reject, RowError, reject
from finetune.data.read.row_maker import RowMaker
from finetune.data.rows import Row
from finetune.data.spec_source import RowsSource
from finetune.errors import Fault, UserError

_USE_OF = dict.fromkeys(("chat", "text", "tokens"), "supervised")


def iter_rows(
    file: SourceFile,
    source: RowsSource,
    *,
    within: Range | None = None,
    ignored_keys: Counter[str] | None = None,
) -> Iterator[Row | Reject]:
    """Every row of a file, or of a range of it, in file order and constant memory: a Row or the Reason there is none.

    `ignored_keys` counts the keys that were read past. Rows of all ranges of `split_ranges` are the rows of the file.
    """
    make = RowMaker(source, file.name, Counter() if ignored_keys is None else ignored_keys)
    for found in iter_records(file, source, within):
        if isinstance(found, Reject):
            yield found
            continue
        try:
            row = make(found)
        except RowError as fault:
            yield reject(file.name, found.line, found.byte, fault, found.raw)
            continue
        yield row


def iter_records(
    file: SourceFile, source: RowsSource, within: Range | None = None
) -> Iterator[Record | Reject]:
    """The rows of a file as its format has them, before their shape is looked at."""
    # Each reader is imported when a file needs it: pyarrow alone takes half of the start of the command.
    if file.format == "jsonl":
        return read_json_lines(file, within)
    if file.format == "json":
        from finetune.data.read.json_document import read_json_document

        return read_json_document(file)
    if file.format in ("csv", "tsv"):
        from finetune.data.read.delimited import read_delimited

        return read_delimited(file, quoted=source.quoted)
    if file.format == "text":
        from finetune.data.read.plain_text import read_text

        return read_text(file, source.text_unit)
    from finetune.data.read import tables

    return tables.read_parquet(file, within) if file.format == "parquet" else tables.read_arrow(file)


def split_ranges(file: SourceFile, n_bytes: int) -> list[Range | None]:
    """Parts of a file of about `n_bytes` that can be read by themselves, in order; [None] is the file as a whole.

    JSON lines in plain UTF-8 are divided at line ends, Parquet between its row groups; all other files are one part.
    """
    nature = file.nature
    if nature.format == "jsonl" and nature.encoding == "utf-8" and not nature.compression:
        return list(split_lines(file, n_bytes))
    if nature.format == "parquet":
        from finetune.data.read.tables import split_parquet

        return list(split_parquet(file, n_bytes))
    return [None]


def check_reject_rate(
    source: RowsSource, read: int, quarantined: int, first: list[Reject], names: list[str], where: str
) -> None:
    """Raise UserError, with the `first` rejects, when too many rows are faulty or when there is no row at all."""
    if read == 0:
        raise UserError(
            f"the dataset is empty: no rows in {', '.join(names)}",
            where=where,
            fix="name files that hold rows in source.files; finetune data inspect FILE says what is in one",
        )
    rate = quarantined / read
    if rate <= source.max_reject_rate and quarantined < read:
        return
    shown = [
        Fault(
            entry.reason,
            f"{entry.source}:{entry.line}" + ("" if entry.byte is None else f" (byte {entry.byte})"),
        )
        for entry in first
    ]
    told = (
        f"{quarantined} of {read} rows are faulty ({rate:.1%}); at most {source.max_reject_rate:.1%} may be"
    )
    raise UserError(
        [
            Fault(
                told
                if quarantined < read
                else f"{quarantined} of {read} rows are faulty: no sound row is left",
                where,
                f"the first {len(shown)} follow" if len(shown) < quarantined else "",
                _remedy(first),
            ),
            *shown,
        ]
    )


def check_one_use(kinds: Mapping[str, int], where: str) -> None:
    """Raise UserError when rows of `kinds` (kind -> rows) cannot be learnt by one method, such as answers and pairs.

    With `shape: auto` each row is judged by its own keys: a pair that lacks its rejected answer may pass for something
    else. Which kind was meant is for the user to say.
    """
    uses = {_USE_OF.get(kind, kind) for kind, n_rows in kinds.items() if n_rows}
    if len(uses) > 1:
        counts = ", ".join(
            f"{n_rows} {kind}" for kind, n_rows in sorted(kinds.items(), key=lambda item: -item[1])
        )
        raise UserError(
            f"the rows are of kinds that are not learnt together: {counts}",
            where=where,
            why="no training method uses them all",
            fix="state source.shape, so that rows of another shape are rejected with their place; "
            "finetune data inspect FILE says which rows they are",
        )


def _remedy(first: list[Reject]) -> str:
    if first and first[0].line == 1 and first[0].raw.strip() in ("[", "{"):
        return "the file looks like one JSON document over many lines; set source.format: json"
    return (
        "mend the rows, or raise source.max_reject_rate to leave them out; "
        "finetune data inspect FILE says what shape the rows have"
    )
