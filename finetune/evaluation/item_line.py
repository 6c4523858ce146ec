"""A line of an items file: what it may hold, and the item that it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.digest import canonical_json
from finetune.errors import did_you_mean
from finetune.evaluation.items import Item

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = frozenset({"id", "messages", "prompt", "reference", "cluster", "tags", "source", "tools", "check"})
_REQUIRED = ("id", "reference")


def item_of_line(line: Mapping[str, Any], *, source: str) -> Item:
    """The item that a line without a `problem_of` is. source: where items come from that do not say."""
    asked = [{"role": "user", "content": line["prompt"]}] if "prompt" in line else line.get("messages", ())
    return Item(
        id=str(line["id"]),
        messages=tuple(asked),
        reference=line["reference"],
        cluster=str(line.get("cluster", line["id"])),
        source=str(line.get("source", source)),
        tags={tag: str(value) for tag, value in line.get("tags", {}).items()},
        tools=tuple(line.get("tools", ())),
        check=line.get("check"),
    )


def problem_of(line: Any, *, texts: bool) -> str:
    """What is wrong with one line; empty when nothing is. texts: the reference alone is the item."""
    if not isinstance(line, dict):
        return "the line is not a JSON object"
    missing = [key for key in _REQUIRED if key not in line]
    unknown = sorted(set(line) - _KEYS)
    if missing:
        return f"no '{missing[0]}'"
    if unknown:
        return f"unknown key '{unknown[0]}'"
    return unwritable(line) or _wrong_kind(line) or _asked_problem(line, texts)


def unwritable(value: Any) -> str:
    """Why a value cannot be saved, hashed or tokenised; empty when it can."""
    try:
        canonical_json(value).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        return f"half of a surrogate pair (\\u{ord(half):04x}) is no character; write the whole one"
    except ValueError:
        return "NaN and Infinity are not JSON"
    return ""


def _wrong_kind(line: Mapping[str, Any]) -> str:
    if not _is_name(line["id"]):
        return f"'id' is {line['id']!r:.40}, not a name: give text or a whole number"
    if not isinstance(line["reference"], str):
        return "'reference' is not text"
    for key in ("cluster", "source"):
        if key in line and not _is_name(line[key]):
            return f"'{key}' is {line[key]!r:.40}: give text or a whole number, or leave it out"
    tags = line.get("tags", {})
    if not isinstance(tags, dict) or not all(isinstance(value, (str, int, float)) for value in tags.values()):
        return "'tags' must be a mapping of names to texts"
    tools = line.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return "'tools' must be a list of JSON schemas"
    if not isinstance(line.get("check"), (dict, type(None))):
        return "'check' must be a mapping"
    return ""


def _is_name(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else type(value) is int


def _asked_problem(line: Mapping[str, Any], texts: bool) -> str:
    asked = [key for key in ("messages", "prompt") if key in line]
    if texts:
        return f"a text has no '{asked[0]}'" if asked else ""
    if len(asked) != 1:
        return "give either 'messages' or 'prompt'" if asked else "no 'messages'"
    if "prompt" in line:
        return "" if isinstance(line["prompt"], str) and line["prompt"] else "'prompt' is not text"
    messages = line["messages"]
    if not isinstance(messages, list) or not messages or not all(_is_message(one) for one in messages):
        return "'messages' must be a list of {role, content}"
    strange = [one["role"] for one in messages if one["role"] not in ROLES]
    if strange:
        return f"unknown role '{strange[0]}'; {did_you_mean(strange[0], ROLES)}"
    if messages[-1]["role"] == "assistant":
        return "'messages' must end before the answer"
    return (
        ""
        if any(one["role"] == "user" for one in messages)
        else "'messages' asks nothing: no turn of the user"
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
