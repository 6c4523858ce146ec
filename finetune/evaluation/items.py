"""Items: what a suite asks, and the reference that answers are scored against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.data.rows import Row
from finetune.digest import digest_json
from finetune.errors import UserError

Message = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One question. `messages` end before the answer; `cluster` names what items share, e.g. a template."""

    id: str
    messages: tuple[Message, ...]
    reference: str
    cluster: str
    source: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    tools: tuple[Any, ...] = ()
    check: dict[str, Any] | None = None  # what a checking scorer asks of this item's answer
    harness_question: Any = field(
        default=None, compare=False
    )  # of an lm-eval task: see `harness.questions.Question`

    @property
    def asked(self) -> str:
        """What is asked, for people and judges: the turns without the system's, named where there are several."""
        turns = [message for message in self.messages if message["role"] != "system"]
        if len(turns) == 1:
            return str(turns[0]["content"])
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)

    @property
    def content_hash(self) -> str:
        """Identity of what is asked: the messages without the system turn, whatever the id."""
        return digest_json([message for message in self.messages if message["role"] != "system"])


def item_from_row(row: Row, *, cluster_key: str | None = "group") -> Item:
    """A row as an item: everything before the last assistant turn is asked, that turn is the reference.

    Of a pair the two answers are the choices, in an order that says nothing of which is right. Of running text nothing is
    asked: the text is the reference. Raises UserError for a pair whose answers are more than one turn.

    cluster_key: `group`, the name of a tag, or None when items are independent (each is its own cluster).
    """
    item = Item(
        id=row.id,
        messages=() if row.kind == "text" else tuple(row.prompt),
        reference=row.text if row.kind == "text" else row.answer,
        cluster=row.group,
        source=row.source,
        tags=row.tags,
        tools=tuple(row.tools),
        check={"choices": _choices(row)} if row.kind == "preference" else None,
    )
    return replace(item, cluster=cluster_of(item, cluster_key))


def _choices(row: Row) -> list[str]:
    if len(row.chosen) != 1 or len(row.rejected) != 1:
        raise UserError(
            f"the answers of pair {row.id} are more than one turn",
            where=row.source,
            why="a choice is a text that follows the prompt",
            fix="leave such pairs out of the side that the suite asks",
        )
    texts = [str(turn["content"]) for turn in (*row.chosen, *row.rejected)]
    return sorted(texts, key=lambda text: digest_json([row.id, text]))


def items_from_rows(rows: Iterable[Row], *, cluster_key: str | None = "group") -> list[Item]:
    """Rows as items, in order. Raises UserError on two items of one id."""
    items = [item_from_row(row, cluster_key=cluster_key) for row in rows]
    refuse_duplicates([item.id for item in items], "the items of the suite")
    return items


def refuse_duplicates(ids: Sequence[str], where: str) -> None:
    """Two answers to one item cannot be paired: a user error that names the first repeated ids."""
    repeated = [item for item, count in Counter(ids).items() if count > 1]
    if repeated:
        raise UserError(
            f"{len(repeated)} item ids occur more than once, e.g. '{repeated[0]}'",
            where=where,
            why="answers are paired by item id",
            fix="give every item an id of its own",
        )


def items_digest(items: Sequence[Item]) -> str:
    """SHA-256 over ids, questions and references in order: equal digests ask the same thing."""
    return digest_json(
        [
            [
                item.id,
                list(item.messages),
                list(item.tools),
                item.reference,
                item.check,
                item.cluster,
                *([] if item.harness_question is None else item.harness_question.definition()),
            ]
            for item in items
        ]
    )


def cluster_of(item: Item, key: str | None) -> str:
    """What the item shares with others: its group, the value of a tag, or nothing (its own id) for None."""
    if key is None:
        return item.id
    if key == "group":
        return item.cluster
    if key not in item.tags:
        raise UserError(
            f"item {item.id} has no tag '{key}' to cluster by",
            where="the suite's `cluster`",
            why=f"its tags are {', '.join(item.tags) or 'none'}",
            fix="name `group` or a tag of every item",
        )
    return item.tags[key]
