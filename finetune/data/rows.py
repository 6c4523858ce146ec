"""The canonical row, and the account of rows that a source makes itself."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from finetune.digest import digest_json
from finetune.errors import UserError

Progress = Callable[[float], None]  # told the share that is done, from 0 to 1
Side = Literal["train", "validation", "test", "regressions"]
SIDES: tuple[Side, ...] = ("train", "validation", "test", "regressions")
# When two sides claim the same content, the side named first keeps it: evaluation wins over training.
SIDES_BY_PRECEDENCE: tuple[Side, ...] = ("regressions", "test", "validation", "train")


Turn = dict[str, Any]
Kind = Literal["chat", "preference", "kto", "text", "tokens", "stepwise"]
KINDS: tuple[Kind, ...] = ("chat", "preference", "kto", "text", "tokens", "stepwise")


@dataclass(
    slots=True
)  # never changed, and yet not frozen: making one, for each of millions, takes a third of the time
class Row:
    """One example, of one of six kinds:

    chat        `messages` is a conversation with at least one answer
    preference  `messages` is the prompt; `chosen` and `rejected` are the turns that answer it, well and less well
    kto         `messages` is a conversation with its answer, and `label` says whether that answer is wanted
    text        `text` is running text, with no turns
    tokens      `input_ids`, and `labels` of the same length: the id itself where it is a target, else -100
    stepwise    `messages` is the prompt; `steps` are {"text", "correct"} dicts, the steps of one solution

    Turns are {"role", "content"} dicts with, for tools, `tool_calls` exactly as given. Rows of one `group` fall on one
    side of the split. `source` says where the row came from. `tags` are free labels, e.g. the intent. `tools` are the
    definitions that the chat template shows to the model.
    """

    id: str
    messages: tuple[Turn, ...]
    group: str
    source: str
    tags: dict[str, str] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    kind: Kind = "chat"
    chosen: tuple[Turn, ...] = ()
    rejected: tuple[Turn, ...] = ()
    label: bool | None = None
    text: str = ""
    input_ids: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    steps: tuple[dict[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As stored in a split file; what a row of its kind does not have is left out."""
        stored: dict[str, Any] = {
            "id": self.id,
            "messages": list(self.messages),
            "group": self.group,
            "source": self.source,
            "tags": self.tags,
        }
        if self.tools:
            stored["tools"] = list(self.tools)
        if self.kind == "chat":
            return stored
        return stored | {"kind": self.kind} | self._own_fields()

    def _own_fields(self) -> dict[str, Any]:
        """What only rows of this kind have, besides the messages."""
        if self.kind == "preference":
            return {"chosen": list(self.chosen), "rejected": list(self.rejected)}
        if self.kind == "kto":
            return {"label": self.label}
        if self.kind == "text":
            return {"text": self.text}
        if self.kind == "tokens":
            return {"input_ids": list(self.input_ids), "labels": list(self.labels)}
        return {"steps": list(self.steps)} if self.kind == "stepwise" else {}

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
            kind=given.get("kind", "chat"),
            chosen=tuple(given.get("chosen", ())),
            rejected=tuple(given.get("rejected", ())),
            label=given.get("label"),
            text=given.get("text", ""),
            input_ids=tuple(given.get("input_ids", ())),
            labels=tuple(given.get("labels", ())),
            steps=tuple(given.get("steps", ())),
        )

    def content_digest(self) -> str:
        """Of what is learnt from the row: two rows with the same digest are exact duplicates."""
        learnt: list[Any] = [self.messages, self.tools]
        if self.kind != "chat":
            learnt += [self.kind, self._own_fields()]
        return digest_content(learnt)

    @property
    def prompt(self) -> tuple[Turn, ...]:
        """All that stands before the answer, which for text and tokens, where nothing is asked, is the whole row."""
        if self.kind in ("preference", "stepwise"):
            return self.messages
        if self.kind == "text":
            return ({"role": "text", "content": self.text},)
        if self.kind == "tokens":
            return ({"role": "tokens", "content": " ".join(map(str, self.input_ids))},)
        return self.messages[: self._last_assistant()]

    @property
    def answer(self) -> str:
        """The text of the last assistant turn; the chosen answer of a pair; the steps, joined by line breaks."""
        if self.kind == "stepwise":
            return "\n".join(str(step["text"]) for step in self.steps)
        if self.kind in ("text", "tokens"):
            return ""
        turns = self.chosen if self.kind == "preference" else self.messages[self._last_assistant() :]
        return next(
            (str(turn.get("content") or "") for turn in reversed(turns) if turn["role"] == "assistant"), ""
        )

    def _last_assistant(self) -> int:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "assistant":
                return index
        raise UserError(f"row {self.id} has no assistant turn", fix="give every row an answer to learn from")


def digest_content(value: Any) -> str:
    """SHA-256 hex of the JSON of `value` with sorted keys, eight times as fast as `digest_json`.

    Integers beyond 64 bits, which orjson refuses, take the slower way: which way is taken depends on the value alone.
    """
    try:
        return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()
    except TypeError:
        return digest_json(value)


@dataclass
class Ledger:
    """What a source that makes its own rows keeps account of: how many it made, and those it left out, with reasons.

    The build adds them to its own ledger: read = kept + sum(dropped) + quarantined, or the build fails.
    """

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    entries: list[dict[str, Any]] = field(default_factory=list)

    def drop(self, reason: str, **where: Any) -> None:
        """Count a row that is left out; `where` holds source, id or text."""
        self.dropped[reason] += 1
        self.entries.append({"reason": reason, "kind": "dropped", **where})
