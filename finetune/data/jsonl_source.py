"""The `jsonl` source: a user's own rows, read one by one; faulty ones are quarantined with file, line, byte and reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.data.jsonl import Line, LineError, parse_line, read_lines
from finetune.data.normalise import READ_KEYS, Messages, messages_of, tools_of
from finetune.data.rows import Ledger, Progress, Row
from finetune.data.spec import JsonlSource
from finetune.data.split import normalised_opening
from finetune.digest import canonical_json, digest_bytes, digest_json
from finetune.errors import Fault, UserError

_FAULTS_SHOWN = 5
_ROWS_BETWEEN_REPORTS = 1000


def source_paths(source: JsonlSource, spec_folder: Path) -> dict[str, Path]:
    """Name in the spec -> path, relative names taken from the folder of the spec."""
    return {name: spec_folder / Path(name).expanduser() for name in source.files}


def read_rows(
    source: JsonlSource,
    spec_folder: Path,
    ledger: Ledger,
    ignored_keys: Counter[str],
    on_progress: Progress,
) -> Iterator[Row]:
    """Every sound row of the files, in file order; `ignored_keys` counts the keys that were read past."""
    paths = source_paths(source, spec_folder)
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    total = sum(sizes.values()) or 1
    done = 0
    for name, path in paths.items():
        for line in read_lines(path):
            ledger.read += 1
            if isinstance(line, LineError):
                ledger.quarantine(str(line), source=name)
                continue
            try:
                row = _row(line, name, source, ignored_keys)
            except LineError as fault:
                ledger.quarantine(
                    str(fault),
                    source=name,
                    line=line.number,
                    byte=line.byte,
                    raw=line.raw.decode("utf-8", errors="backslashreplace"),
                )
                continue
            if line.number % _ROWS_BETWEEN_REPORTS == 0:
                on_progress(min(1.0, (done + min(line.byte, sizes[name])) / total))
            yield row
        done += sizes[name]
    on_progress(1.0)


def _row(line: Line, name: str, source: JsonlSource, ignored_keys: Counter[str]) -> Row:
    given = parse_line(line.raw)
    messages = messages_of(given)
    tools = tools_of(given)
    if source.system is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": source.system})
    used = READ_KEYS.union(source.tags, [source.group_by] if source.group_by else [])
    ignored_keys.update(key for key in given if key not in used)
    return Row(
        id=f"row-{digest_json([messages, tools])[:16]}",
        messages=tuple(messages),
        group=_group(given, messages, source.group_by),
        source=f"{name}:{line.number}",
        tags={key: _as_text(given[key]) for key in source.tags if given.get(key) is not None},
        tools=tools,
    )


def _group(given: dict[str, Any], messages: Messages, key: str | None) -> str:
    if key is None:
        return f"opening-{digest_bytes(normalised_opening(messages).encode())[:16]}"
    value = given.get(key)
    if value is None:
        raise LineError(f"the row has no '{key}', which source.group_by asks for")
    return f"{key}={_as_text(value)}"


def _as_text(value: Any) -> str:
    """A tag or group that is not text, as canonical JSON, so that it reads alike in every row."""
    return value if isinstance(value, str) else canonical_json(value)


def check_reject_rate(source: JsonlSource, ledger: Ledger, where: str) -> None:
    """Raise UserError, with the first faults, when too many rows are faulty or when there is no row at all."""
    if ledger.read == 0:
        raise UserError(
            f"the dataset is empty: no rows in {', '.join(source.files)}",
            where=where,
            fix="name files with one JSON object a line in source.files",
        )
    rate = ledger.quarantined / ledger.read
    if rate <= source.max_reject_rate and ledger.quarantined < ledger.read:
        return
    first = [entry for entry in ledger.entries if entry["kind"] == "quarantined"][:_FAULTS_SHOWN]
    shown = [
        Fault(
            str(entry["reason"]),
            f"{entry['source']}:{entry.get('line', '?')} (byte {entry.get('byte', '?')})",
        )
        for entry in first
    ]
    raise UserError(
        [
            Fault(
                f"{ledger.quarantined} of {ledger.read} rows are faulty ({rate:.1%}); at most {source.max_reject_rate:.1%} may be",
                where,
                f"the first {len(shown)} follow" if len(shown) < ledger.quarantined else "",
                _remedy(first),
            ),
            *shown,
        ]
    )


def _remedy(faults: list[dict[str, Any]]) -> str:
    if faults[0].get("line") == 1 and str(faults[0].get("raw")).strip() in ("[", "{"):
        return "the file looks like one JSON document over many lines; write one object a line"
    return "mend the rows, or raise source.max_reject_rate to leave them out"
