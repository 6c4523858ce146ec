"""The regressions file: items that a run got right are pinned, and later runs must keep them right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.evaluation.items import Item
from finetune.evaluation.records import Record
from finetune.evaluation.repeats import per_item
from finetune.evaluation.suite import Suite
from finetune.evaluation.suite_data import read_items
from finetune.paths import write_atomic, write_jsonl


@dataclass(frozen=True)
class Pinned:
    """What `pin_items` did."""

    path: Path
    added: int
    total: int
    suite_path: Path


def pin_items(
    suite: Suite, items: Sequence[Item], records: Sequence[Record], *, folder: Path, limit: int | None = None
) -> Pinned:
    """Add the items whose primary score is 1, in each of their answers, to `<folder>/<suite>.jsonl`, and write a suite over them beside it.

    Items that are pinned already stay as they are (never unpinned here: that is an edit for a person). limit: add at
    most so many. Raises UserError when nothing is right, and for suites whose items have no right answer of their own.
    """
    if suite.task not in ("generate", "choice"):
        raise UserError(
            f"suites with task: {suite.task} have no items that could be pinned",
            where=suite.name,
            fix="evaluate such a suite as a whole: its role can be regression or forgetting",
        )
    by_id = {item.id: item for item in items}
    right = [
        record["item"] for record in per_item(records) if record["scores"].get(suite.primary_metric) == 1.0
    ]
    if not right:
        raise UserError(
            f"no item has {suite.primary_metric} = 1, so there is nothing to pin",
            where=suite.name,
            fix="pin a run that gets some items right, or another suite of this run with --suite",
        )
    unknown = [item for item in right if item not in by_id]
    if unknown:
        raise UserError(
            f"{len(unknown)} answered items are no items of suite {suite.name} any more, e.g. '{unknown[0]}'",
            fix="evaluate the run again on the suite as it is now",
        )
    path = folder / f"{suite.name}.jsonl"
    pinned = read_items(path) if path.is_file() else []
    known = {item.id for item in pinned}
    added = [by_id[item] for item in right if item not in known][:limit]
    write_jsonl(path, [_line(item) for item in [*pinned, *added]])
    suite_path = folder / f"{suite.name}.yaml"
    if not suite_path.is_file():
        write_atomic(suite_path, _suite_text(suite, path.name))
    return Pinned(path, len(added), len(pinned) + len(added), suite_path)


def pin_suites(
    jobs: Sequence[tuple[Suite, Sequence[Item], Sequence[Record]]], *, folder: Path, limit: int | None = None
) -> tuple[list[Pinned], list[UserError]]:
    """`pin_items` for every suite of a run, and why a suite was left out. Raises UserError when all of them were."""
    pinned, left_out = [], []
    for suite, items, records in jobs:
        try:
            pinned.append(pin_items(suite, items, records, folder=folder, limit=limit))
        except UserError as error:
            left_out.append(error)
    if not pinned:
        raise UserError([fault for error in left_out for fault in error.faults])
    return pinned, left_out


def _line(item: Item) -> dict[str, Any]:
    line: dict[str, Any] = {
        "id": item.id,
        "messages": list(item.messages),
        "reference": item.reference,
        "cluster": item.cluster,
        "source": item.source,
        "tags": item.tags,
    }
    optional = {"tools": list(item.tools), "check": item.check}
    return line | {key: value for key, value in optional.items() if value}


def _suite_text(suite: Suite, items: str) -> str:
    from io import StringIO

    from ruamel.yaml import YAML

    text = StringIO()
    YAML().dump(
        {
            "suite": 1,
            "name": f"{suite.name}_pinned",
            "description": f"Items of {suite.name} that a run got right; later runs must keep them right.",
            "role": "regression",
            "task": suite.task,
            "items": {"jsonl": items},
            "prompt_format": suite.prompt_format,
            "raw": suite.raw.model_dump(mode="json"),
            "zero_shot": suite.zero_shot.model_dump(mode="json"),
            "decoding": suite.decoding.model_dump(mode="json"),
            "scorers": [one.model_dump(mode="json") for one in suite.scoring],
            "primary_metric": suite.primary_metric,
            "cluster": suite.cluster,
            "margin": suite.margin,
            "confidence": suite.confidence,
        },
        text,
    )
    return text.getvalue()
