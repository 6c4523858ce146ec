"""The items of a suite and the rows that its few-shot arm may show, from a dataset build or a JSONL file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.data.build import build_dataset, default_builds_root
from finetune.data.rows import Row
from finetune.errors import Fault, UserError
from finetune.evaluation.items import Item, cluster_of, items_digest, items_from_rows, refuse_duplicates
from finetune.evaluation.suite import Suite
from finetune.paths import find_declarative, read_jsonl

_KEYS = frozenset({"id", "messages", "reference", "cluster", "tags", "source", "tools", "check"})
_REQUIRED = ("id", "messages", "reference")


@dataclass(frozen=True)
class SuiteData:
    """What a suite asks, in a fixed order. `few_shot_rows` are candidates for examples, not yet the examples."""

    suite: Suite
    items: tuple[Item, ...]
    few_shot_rows: tuple[Row, ...] = ()

    @property
    def digest(self) -> str:
        """Of the items alone; `suite.digest` covers the rest."""
        return items_digest(self.items)


def load_suite_data(
    suite: Suite,
    *,
    builds_root: Path | None = None,
    dataset_spec: Path | None = None,
    max_items: int | None = None,
) -> SuiteData:
    """Read a suite's items; a dataset is built under `builds_root`, or found there when it is complete.

    dataset_spec: where the few-shot rows of a suite with a JSONL file come from (the recipe's dataset). max_items: only
    the first ones, for a smoke run. Raises UserError for an empty suite and for every faulty line of a file at once.
    """
    root = builds_root or default_builds_root()
    spec = dataset_spec
    if suite.items_file is not None:
        items = read_items(suite.items_file, texts=suite.task == "text")
        items = [replace(item, cluster=cluster_of(item, suite.cluster)) for item in items]
    else:
        assert suite.items.spec is not None
        spec = find_declarative(
            "data", suite.items.spec, relative_to=suite.path.parent, where=f"{suite.path}: items.spec"
        )
        items = items_from_rows(build_dataset(spec, root).rows(suite.items.split), cluster_key=suite.cluster)
    if not items:
        raise UserError(
            "the suite has no items",
            where=str(suite.path),
            why=f"nothing is in {suite.items_file or f'split {suite.items.split} of {suite.items.spec}'}",
            fix="name another split or file under items:",
        )
    shown: list[Row] = []
    if suite.few_shot is not None and spec is not None:
        shown = build_dataset(spec, root).rows(suite.few_shot.split)
    return SuiteData(suite, tuple(items[:max_items]), tuple(shown))


def read_items(path: Path, *, texts: bool = False) -> list[Item]:
    """Items from JSONL: {"id", "messages", "reference"} and, optionally, "cluster", "tags", "source", "tools", "check".

    texts: the reference alone is the item, as in suites with `task: text`; there are no messages then.
    """
    items: list[Item] = []
    faults: list[Fault] = []
    for number, line in enumerate(read_jsonl(path), start=1):
        problem = _problem(line, texts)
        if problem:
            faults.append(Fault(problem, where=f"{path}: item number {number}"))
            continue
        items.append(
            Item(
                id=str(line["id"]),
                messages=tuple(line.get("messages", ())),
                reference=line["reference"],
                cluster=str(line.get("cluster", line["id"])),
                source=str(line.get("source", path.stem)),
                tags=dict(line.get("tags", {})),
                tools=tuple(line.get("tools", ())),
                check=line.get("check"),
            )
        )
    if faults:
        raise UserError(faults)
    refuse_duplicates([item.id for item in items], str(path))
    return items


def _problem(line: Any, texts: bool) -> str:
    """What is wrong with one line; empty when nothing is."""
    if not isinstance(line, dict):
        return "the line is not a JSON object"
    missing = [key for key in _REQUIRED if key not in line and not (texts and key == "messages")]
    unknown = sorted(set(line) - _KEYS)
    if missing:
        return f"no '{missing[0]}'"
    if unknown:
        return f"unknown key '{unknown[0]}'"
    if not isinstance(line["reference"], str):
        return "'reference' is not text"
    if texts:
        return "a text has no 'messages'" if "messages" in line else ""
    messages = line["messages"]
    if not isinstance(messages, list) or not messages or not all(_is_message(one) for one in messages):
        return "'messages' must be a list of {role, content}"
    return "'messages' must end before the answer" if messages[-1]["role"] == "assistant" else ""


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
