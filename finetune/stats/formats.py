"""Files of scores as they come: this product's records, plain JSONL, lm-eval samples, inspect logs.

Each reader turns a file into `RawItem`s and judges nothing but the file's shape; choosing a metric and refusing bad scores
is for `finetune.stats.records`.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from finetune.errors import UserError

# Numbers that describe an answer but do not judge it: never taken for the score when no metric is named.
_NOT_SCORES = frozenset(
    {
        "item", "id", "index", "idx", "repeat", "epoch", "sample", "seed", "cluster", "prompt_tokens", "output_tokens",
        "latency_seconds", "seconds", "n", "doc_id", "target", "label",
    }
)  # fmt: skip
_CLUSTER_HOLDERS = ("tags", "metadata", "doc")
_REPEAT_KEYS = ("repeat", "epoch", "sample")
_GZIP = b"\x1f\x8b"
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # inspect's correct, partial, incorrect, no answer


class RawItem(NamedTuple):
    """One scored answer. `repeat` tells repeated samples of an item apart; `fingerprint` is the item's content, if known.

    cluster: its label under the key that was asked for; where: file and line or sample, for messages.
    """

    item: str
    repeat: Any
    scores: Mapping[str, Any]
    cluster: str | None
    fingerprint: str | None
    where: str
    filter: str | None = None  # lm-eval's, of the scores that are named without it


def read_raw(path: Path, cluster_key: str) -> tuple[str, list[RawItem]]:
    """(format, items) of a file; format is 'records', 'lm-eval' or 'inspect'.

    `cluster_key` is looked up in each item itself, then in its tags, metadata or document. Raises UserError with the place of
    any damage.
    """
    data = _bytes_of(path)
    if path.suffix == ".eval" or zipfile.is_zipfile(path):
        return "inspect", list(_inspect_items(_inspect_archive(path), path, cluster_key))
    if path.name.removesuffix(".gz").endswith(".json"):
        whole = _parse(data, str(path))
        if isinstance(whole, dict) and isinstance(whole.get("samples"), list):
            return "inspect", list(_inspect_items(whole["samples"], path, cluster_key))
        if not isinstance(whole, list):
            raise UserError(
                "neither a list of items nor an inspect log with samples",
                where=str(path),
                fix="give JSON lines with 'item' and a score, an lm-eval samples file or an inspect log",
            )
        rows = _objects((f"{path} entry {number}", row) for number, row in enumerate(whole, start=1))
    else:
        rows = _objects(_lines(data, path))
    first = next(rows, None)
    if first is None:
        return "records", []
    rows = itertools.chain([first], rows)
    if "doc_id" in first[1] and "item" not in first[1]:
        return "lm-eval", _lm_eval_items(list(rows), cluster_key)
    return "records", [_record_item(where, row, cluster_key) for where, row in rows]


def _bytes_of(path: Path) -> bytes:
    """What the file holds, unpacked where it is gzip's, whatever its name."""
    try:
        if path.is_dir():
            raise UserError(
                f"{path} is a folder",
                fix="name a file in it; saved answers of a run lie in eval/<suite>/tuned.jsonl, or use finetune eval compare",
            )
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(_GZIP) else data
    except FileNotFoundError:
        raise UserError(f"no such file: {path}", fix="give two files of scores, one line an item") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"cannot unpack it: {error}", where=str(path), fix="copy or download the file again"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot read the file: {error.strerror}", where=str(path), fix="mend its path or permissions"
        ) from None


def _lines(data: bytes, path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _parse(line, where)


def _objects(rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in rows:
        if not isinstance(row, dict):
            raise UserError("not a JSON object", where=where, fix="write one object an item")
        yield where, row


def _label(row: Mapping[str, Any], key: str, where: str) -> str | None:
    """The item's cluster label: its own field, or one in its tags, metadata or document."""
    own = row.get(key)
    if isinstance(own, float) and not math.isfinite(own):  # how tables write that there is none
        return None
    if isinstance(own, (str, int, float)):
        return own if isinstance(own, str) else str(own)
    if own is not None:
        raise UserError(
            f"the cluster '{key}' is {own!r:.80}, not a label",
            where=where,
            fix="label it with text or a number",
        )
    for name in _CLUSTER_HOLDERS:
        holder = row.get(name)
        if isinstance(holder, dict) and isinstance(holder.get(key), (str, int, float)):
            return str(holder[key])
    return None


def _parse(data: bytes, where: str) -> Any:
    import orjson

    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(
                data
            )  # Python writes NaN, which strict JSON refuses; a NaN score is reported as such later
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"not valid JSON: {error}", where=where, fix="write one JSON object a line"
            ) from None


def _record_item(where: str, row: Mapping[str, Any], cluster_key: str) -> RawItem:
    item = row.get("item", row.get("id"))
    if item is None or isinstance(item, (dict, list)):
        raise UserError(
            "no 'item'",
            where=where,
            why=f"the line has: {', '.join(map(str, row))}",
            fix="name each item under 'item'",
        )
    scores = row.get("scores")
    if not isinstance(scores, dict):
        scores = {
            key: value
            for key, value in row.items()
            if key not in _NOT_SCORES and (value is None or isinstance(value, (bool, int, float)))
        }
        if not scores and "score" in row:
            # of another type: refused by its value, not as if it were not there
            scores = {"score": row["score"]}
    repeat = None
    for key in _REPEAT_KEYS:
        if key in row and isinstance(row[key], (int, str)):
            repeat = row[key]
            break
    return RawItem(str(item), repeat, scores, _label(row, cluster_key, where), None, where)


def _lm_eval_items(rows: list[tuple[str, dict[str, Any]]], cluster_key: str) -> list[RawItem]:
    """lm-eval writes one line per document and filter; the lines of a document become one item.

    A metric is named 'exact_match', or 'exact_match,strict-match' when several filters scored it.
    """
    filters = {str(row.get("filter", "none")) for _, row in rows}
    merged: dict[str, RawItem] = {}
    seen: dict[tuple[str, str], str] = {}
    for where, row in rows:
        if row.get("doc_id") is None:
            raise UserError(
                "no 'doc_id'", where=where, fix="give the samples file of one task as lm-eval wrote it"
            )
        item, filter_name = str(row["doc_id"]), str(row.get("filter", "none"))
        if (item, filter_name) in seen:
            raise UserError(
                f"doc_id {item} appears twice",
                where=f"{where} and {seen[item, filter_name]}",
                why="document numbers start again with every task",
                fix="compare the samples file of one task at a time",
            )
        seen[item, filter_name] = where
        names = row.get("metrics")
        if not isinstance(names, list):
            names = [
                key
                for key, value in row.items()
                if key not in _NOT_SCORES and isinstance(value, (bool, int, float))
            ]
        scores = {name if len(filters) == 1 else f"{name},{filter_name}": row.get(name) for name in names}
        before = merged.get(item)
        if before is not None:
            scores = {**before.scores, **scores}
        fingerprint = row.get("doc_hash") or None
        only = filter_name if len(filters) == 1 else None
        merged[item] = RawItem(item, None, scores, _label(row, cluster_key, where), fingerprint, where, only)
    return list(merged.values())


def _inspect_archive(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of an inspect `.eval` file, a zip with one JSON file per sample and epoch."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [
                name for name in archive.namelist() if name.startswith("samples/") and name.endswith(".json")
            ]
            for name in names:
                yield _parse(archive.read(name), f"{path} {name}")
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(
            f"cannot read the archive: {error}",
            where=str(path),
            fix=f"convert it first: inspect log convert {path.name} --to json --output-dir logs-json",
        ) from None


def _inspect_items(samples: Iterable[Any], path: Path, cluster_key: str) -> Iterator[RawItem]:
    for number, sample in enumerate(samples, start=1):
        where = f"{path} sample {number}"
        if not isinstance(sample, dict) or "id" not in sample:
            raise UserError("a sample without 'id'", where=where, fix="give a log as inspect wrote it")
        scores: dict[str, Any] = {}
        given = sample.get("scores") or {}
        if not isinstance(given, dict):
            raise UserError("'scores' is no mapping", where=where, fix="give a log as inspect wrote it")
        for scorer, score in given.items():
            value = score.get("value") if isinstance(score, dict) else score
            if isinstance(value, dict):
                scores |= {f"{scorer}/{part}": _grade(inner) for part, inner in value.items()}
            else:
                scores[scorer] = _grade(value)
        text = sample.get("input")
        fingerprint = None if text is None else json.dumps([text, sample.get("target")], sort_keys=True)
        label = _label(sample, cluster_key, where)
        yield RawItem(str(sample["id"]), sample.get("epoch", 1), scores, label, fingerprint, where)


def _grade(value: Any) -> Any:
    return _GRADES.get(value, value) if isinstance(value, str) else value
