"""The canonical row, and the ledger that accounts for every row read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.digest import digest_json
from finetune.errors import UserError

Progress = Callable[[float], None]  # told the share that is done, from 0 to 1
Side = Literal["train", "validation", "test", "regressions"]
SIDES: tuple[Side, ...] = ("train", "validation", "test", "regressions")
# When two sides claim the same content, the side named first keeps it: evaluation wins over training.
SIDES_BY_PRECEDENCE: tuple[Side, ...] = ("regressions", "test", "validation", "train")


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation.

    `messages` holds {"role", "content"} dicts and, for tools, `tool_calls` exactly as given. Rows of one `group` fall
    on one side of the split. `source` says where the row came from. `tags` are free labels, e.g. the intent. `tools`
    are the definitions that the chat template shows to the model.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    group: str
    source: str
    tags: dict[str, str] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As stored in a split file; `tools` is there only when the row has some."""
        stored: dict[str, Any] = {
            "id": self.id,
            "messages": list(self.messages),
            "group": self.group,
            "source": self.source,
            "tags": self.tags,
        }
        return stored | ({"tools": list(self.tools)} if self.tools else {})

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Row:
        """The inverse of `to_dict`."""
        return cls(
            id=given["id"],
            messages=tuple(given["messages"]),
            group=given["group"],
            source=given["source"],
            tags=dict(given["tags"]),
            tools=tuple(given.get("tools", ())),
        )

    def content_digest(self) -> str:
        """Of what is learnt from the row: two rows with the same digest are exact duplicates."""
        return digest_json([self.messages, self.tools])

    @property
    def prompt(self) -> tuple[dict[str, Any], ...]:
        """Everything before the last assistant turn."""
        return self.messages[: self._last_assistant()]

    @property
    def answer(self) -> str:
        """The text of the last assistant turn."""
        return str(self.messages[self._last_assistant()].get("content") or "")

    def _last_assistant(self) -> int:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "assistant":
                return index
        raise UserError(f"row {self.id} has no assistant turn", fix="give every row an answer to learn from")


@dataclass
class Ledger:
    """read = kept + sum(dropped) + quarantined, asserted when the build closes.

    A row is *dropped* for a reason that is part of the plan (a duplicate, over a limit) and *quarantined* when it is
    faulty (bad JSON, no answer). Either way an entry says which row and why.
    """

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    quarantined: int = 0
    entries: list[dict[str, Any]] = field(default_factory=list)

    def drop(self, reason: str, **where: Any) -> None:
        """Count a row that is left out by plan; `where` holds source, line, byte, id or text."""
        self.dropped[reason] += 1
        self.entries.append({"reason": reason, "kind": "dropped", **where})

    def quarantine(self, reason: str, **where: Any) -> None:
        """Count a faulty row; `where` holds source, line, byte and the raw text."""
        self.quarantined += 1
        self.entries.append({"reason": reason, "kind": "quarantined", **where})

    def close(self, kept: int) -> None:
        """Fix the number of kept rows; a ledger that does not add up is a bug, never shown to a user as success."""
        self.kept = kept
        accounted = kept + sum(self.dropped.values()) + self.quarantined
        if self.read != accounted:
            raise AssertionError(
                f"row ledger: read {self.read} != kept {kept} + dropped {dict(self.dropped)} "
                f"+ quarantined {self.quarantined}"
            )

    def to_dict(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "kept": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
            "quarantined": self.quarantined,
        }
