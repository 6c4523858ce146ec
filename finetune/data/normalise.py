"""From a JSON object of a user's file to the canonical messages; every refusal says what is wrong with the row.

The verdict on a row depends on that row alone, never on its neighbours, its position or the size of the file.
"""

from __future__ import annotations

from typing import Any

from finetune.data.jsonl import LineError

ROLES = ("system", "developer", "user", "assistant", "tool")
Messages = list[dict[str, Any]]
# Top-level keys that are read; all others are ignored, in every row alike, unless the spec names them.
READ_KEYS = frozenset({"messages", "prompt", "completion", "tools"})


def messages_of(row: dict[str, Any]) -> Messages:
    """The conversation of a row: `messages`, or `prompt` and `completion` as text or as lists of messages.

    Keys of a message other than role and content (name, tool_calls, reasoning_content, …) are kept exactly as given,
    for the chat template to use. Raises LineError with the reason when the row cannot be learnt from.
    """
    if "messages" in row:
        turns = _turns(row["messages"], "messages")
    elif "prompt" in row and "completion" in row:
        turns = _as_turns(row, "prompt", "user") + _as_turns(row, "completion", "assistant")
    else:
        raise LineError(
            "the row has neither 'messages' nor 'prompt' and 'completion' "
            f"(its keys: {', '.join(sorted(row)) or 'none'})"
        )
    if not any(turn["role"] == "assistant" for turn in turns):
        raise LineError("the row has no assistant turn, so there is nothing to learn")
    return turns


def tools_of(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tool definitions of a row, exactly as given; empty when it has none."""
    tools = row.get("tools")
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise LineError("'tools' is not a list of objects")
    return tuple(tools)


def _as_turns(row: dict[str, Any], key: str, role: str) -> Messages:
    value = row[key]
    if isinstance(value, list):
        return _turns(value, key)
    if not isinstance(value, str):
        raise LineError(f"'{key}' is {_described(value)}, not text")
    if role == "assistant" and not value:
        raise LineError(f"'{key}' is empty, so there is nothing to learn")
    return [{"role": role, "content": value}]


def _turns(value: Any, key: str) -> Messages:
    if not isinstance(value, list):
        raise LineError(f"'{key}' is {_described(value)}, not a list of messages")
    if not value:
        raise LineError(f"'{key}' is empty")
    return [_turn(turn, f"{key}[{index}]") for index, turn in enumerate(value)]


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise LineError(f"{where} is {_described(turn)}, not an object with 'role' and 'content'")
    role = turn.get("role")
    if role not in ROLES:
        raise LineError(f"{where}: the role is {role!r}, not one of {', '.join(ROLES)}")
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise LineError(f"{where}: 'weight' is {weight!r}; a turn is trained (1) or not (0)")
    content = _content(turn, where)
    kept = {key: value for key, value in turn.items() if key not in ("role", "content")}
    return {"role": role, "content": content, **kept} if content is not None else {"role": role, **kept}


def _content(turn: dict[str, Any], where: str) -> str | None:
    content = turn.get("content")
    calls = turn.get("tool_calls")
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if content is None and calls:
        return None
    if not isinstance(content, str):
        raise LineError(f"{where}: 'content' is {_described(content)}, not text")
    if turn["role"] == "assistant" and not content and not calls:
        raise LineError(f"{where}: the answer is empty, so there is nothing to learn")
    return content


def _part(part: Any, where: str) -> str:
    """The text of one part of a content list; parts other than text cannot be learnt by a language model."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else _described(part)
    raise LineError(f"{where}: a content part is {kind!r}, not text")


def _described(value: Any) -> str:
    if value is None:
        return "null or missing"
    names: dict[type, str] = {list: "a list", dict: "an object", str: "text", bool: "true or false"}
    return names.get(type(value), "a number")
