"""The items of a suite and the rows that its few-shot arm may show: of a dataset build, a JSONL file, or the hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.data.rows import Row, Side
from finetune.errors import Fault, UserError
from finetune.evaluation.item_line import item_of_line, problem_of, unwritable
from finetune.evaluation.item_source import ItemsSection
from finetune.evaluation.item_template import ColumnError, item_from_record
from finetune.evaluation.items import Item, cluster_of, items_digest, items_from_rows, refuse_duplicates
from finetune.evaluation.suite import Suite
from finetune.paths import find_declarative, read_jsonl

_FAULTS_SHOWN = 5  # of items made of columns: there one fault is usually that of all
_LINES_SHOWN = 50
NO_MARGIN = "a likelihood is not confined to a range, so one unit gives no margin of error"


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
    spec = _spec_of(suite, dataset_spec)
    if suite.items.spec is not None:
        assert spec is not None
        items = items_from_rows(_built(spec, suite.items.split, builds_root), cluster_key=suite.cluster)
    else:
        own = _own_items(suite, max_items)
        items = [replace(item, cluster=cluster_of(item, suite.cluster)) for item in own]
    if not items:
        raise UserError(
            "the suite has no items",
            where=str(suite.path),
            why=f"nothing is in {suite.items_file or f'split {suite.items.split} of {suite.items.spec or suite.items.hub}'}",
            fix="name another split or file under items:",
        )
    return SuiteData(suite, tuple(items[:max_items]), tuple(_shown_rows(suite, spec, builds_root)))


def check_units(suite: Suite, items: Sequence[Item], *, max_items: int | None = None) -> None:
    """Raise UserError for a likelihood of texts that would have no margin of error. max_items: what cut the items."""
    if suite.task != "text" or len({item.cluster for item in items}) >= 2:
        return
    cut = max_items is not None and len(items) == max_items
    raise UserError(
        "the texts of the suite share one cluster" if len(items) > 1 else "the suite has one text",
        where=f"suite {suite.name}",
        why=NO_MARGIN,
        fix="raise eval.max_items, or leave it out"
        if cut
        else "add texts, or set cluster: null if they are independent",
    )


def shows_rows_of(suite: Suite, dataset_spec: Path) -> bool:
    """Whether the suite's few-shot rows are rows of this dataset, the recipe's."""
    shown = suite.few_shot
    if shown is None or shown.jsonl is not None or suite.items.hub is not None:
        return False
    spec = _spec_of(suite, dataset_spec)
    return spec is not None and spec.resolve() == dataset_spec.resolve()


def _spec_of(suite: Suite, dataset_spec: Path | None) -> Path | None:
    """The dataset spec that the suite names, or else the recipe's."""
    if suite.items.spec is None:
        return dataset_spec
    return find_declarative(
        "data", suite.items.spec, relative_to=suite.path.parent, where=f"{suite.path}: items.spec"
    )


def _own_items(suite: Suite, max_items: int | None) -> list[Item]:
    """Items of a file beside the suite, of the hub, or of an lm-eval task."""
    if suite.items.lm_eval is not None:
        from finetune.evaluation.harness.questions import task_items
        from finetune.evaluation.harness.suite import definition_of

        chat = suite.prompt_format == "chat"
        return task_items(definition_of(suite), suite.items, chat=chat, max_items=max_items)
    texts = suite.task == "text"
    if suite.items.hub is not None:
        return _hub_items(suite, suite.items.split)
    assert suite.items_file is not None
    return read_items(suite.items_file, texts=texts, section=suite.items)


def _hub_items(suite: Suite, split: str) -> list[Item]:
    from finetune.evaluation.hub_records import hub_records

    section = suite.items
    records = hub_records(section, split, where=str(suite.path), folder=suite.path.parent)
    name = f"{section.hub}@{section.revision}"
    return items_from_records(records, section, source=name, texts=suite.task == "text")


def _shown_rows(suite: Suite, spec: Path | None, builds_root: Path | None) -> list[Row]:
    """Candidates for the few-shot arm."""
    shown = suite.few_shot
    if shown is None:
        return []
    if shown.jsonl is not None:
        return [_row(item) for item in read_items(suite.path.parent / shown.jsonl, section=suite.items)]
    if suite.items.hub is not None:
        return [_row(item) for item in _hub_items(suite, shown.split)]
    return _built(spec, shown.split, builds_root) if spec is not None else []


def _built(spec: Path, split: str, builds_root: Path | None) -> list[Row]:
    from finetune.data.build import build_dataset, default_builds_root

    return build_dataset(spec, builds_root or default_builds_root()).rows(_side(split))


def _row(item: Item) -> Row:
    """An item with its answer, as a row that can be shown."""
    answer = {"role": "assistant", "content": item.reference}
    return Row(
        id=item.id,
        messages=(*item.messages, answer),
        group=item.cluster,
        source=item.source,
        tags=item.tags,
        tools=item.tools,
    )


def _side(split: str) -> Side:
    for side in ("train", "validation", "test", "regressions"):
        if split == side:
            return side
    raise AssertionError(f"the schema lets no split '{split}' of a dataset build through")


def read_items(path: Path, *, texts: bool = False, section: ItemsSection | None = None) -> list[Item]:
    """Items from JSONL: {"id", "messages" or "prompt", "reference"} and, optionally, "cluster", "tags", "source", "tools",
    "check"; or, where the suite's `items` section has templates, any columns.

    texts: the reference alone is the item, as in suites with `task: text`; there are no messages then.
    """
    lines = read_jsonl(path)
    if section is not None and section.made_of_columns:
        return items_from_records(lines, section, source=path.stem, texts=texts, where=str(path))
    items: list[Item] = []
    faults: list[Fault] = []
    for number, line in enumerate(lines, start=1):
        problem = problem_of(line, texts=texts)
        if problem:
            faults.append(Fault(problem, where=f"{path}: item number {number}"))
        else:
            items.append(item_of_line(line, source=path.stem))
    _refuse(faults, _LINES_SHOWN)
    refuse_duplicates([item.id for item in items], str(path))
    return items


def items_from_records(
    records: Iterable[Any],
    section: ItemsSection,
    *,
    source: str,
    texts: bool = False,
    where: str = "",
) -> list[Item]:
    """One item a record, by the templates of `section`. Raises UserError naming the first records that lack a field."""
    items: list[Item] = []
    faults: list[Fault] = []
    for number, record in enumerate(records):
        place = f"{where or source}: record number {number + 1}"
        if not isinstance(record, Mapping):
            faults.append(Fault("the line is not a JSON object", place))
            continue
        try:
            item = item_from_record(record, section, number=number, source=source, texts=texts)
            problem = unwritable(
                [item.id, list(item.messages), item.reference, item.cluster, item.tags, item.check]
            )
            if problem:
                raise ColumnError(problem)
            items.append(item)
        except ColumnError as fault:
            faults.append(Fault(str(fault), place, fix="correct the suite's items section"))
    _refuse(faults)
    refuse_duplicates([item.id for item in items], where or source)
    return items


def _refuse(faults: list[Fault], shown: int = _FAULTS_SHOWN) -> None:
    """Raise UserError for the first faults, with the number of the others."""
    if len(faults) > shown:
        faults = [*faults[:shown], Fault(f"{len(faults) - shown} more records make no item")]
    if faults:
        raise UserError(faults)
