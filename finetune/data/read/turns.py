"""From the turns of a user's file to canonical ones; every refusal says what is wrong with the row.

The verdict on a row depends on that row alone, never on its neighbours, its position or the size of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.data.read.json_line import parse_value
from finetune.data.read.record import RowError
from finetune.data.rows import Turn
from finetune.data.spec_source import ROLES
from finetune.digest import canonical_json

INSTRUCTING = ("system", "developer")
MOST_WEIGHT = 100
# Names that collections in the ShareGPT manner give to the speakers.
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "ai": "assistant",
    "prompter": "user",
    "observation": "tool",
    "ipython": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALLS = ("function_call", "tool_call")  # a ShareGPT turn whose text is a call, in JSON
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_EARLIER_ROLES = {"function": "tool"}  # what answers a `function_call`, the earlier spelling of `tool_calls`


@dataclass(frozen=True, slots=True)
class TurnKeys:
    """Where a turn says who speaks and what; `roles` are names of roles besides the canonical ones."""

    role: str | None = None
    content: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    sharegpt: bool = False


def turns_of(value: Any, key: str, keys: TurnKeys) -> list[Turn]:
    """The turns of a conversation, which may be a list or a JSON text of one.

    Keys of a turn other than role and content (name, tool_calls, reasoning_content, …) are kept exactly as given, for
    the chat template to use. Raises RowError with the reason when a turn cannot be learnt from.
    """
    if isinstance(value, str):
        value = from_json_text(value, key, "a list of messages")
    if not isinstance(value, list):
        raise RowError(f"'{key}' is {described(value)}, not a list of messages")
    if not value:
        raise RowError(f"'{key}' is empty")
    turns: list[Turn] = []
    for index, turn in enumerate(value):
        if type(turn) is dict and len(turn) == 2:
            role, content = turn.get("role"), turn.get("content")
            if type(content) is str and role in ROLES and (content or role != "assistant"):
                turns.append({"role": role, "content": content})
                continue
        turns.append(_turn(turn, f"{key}[{index}]", keys))
    return turns


def text_or_turns(value: Any, key: str, role: str, keys: TurnKeys) -> list[Turn]:
    """A text as one turn of `role`, or a list of messages."""
    if isinstance(value, list):
        return turns_of(value, key, keys)
    if not isinstance(value, str):
        raise RowError(f"'{key}' is {described(value)}, not text")
    if role == "assistant" and not value:
        raise RowError(f"'{key}' is empty, so there is nothing to learn")
    return [{"role": role, "content": value}]


def require_answer(turns: list[Turn]) -> None:
    """Raise RowError for a conversation in which the assistant says nothing."""
    for turn in turns:
        if turn["role"] == "assistant":
            return
    raise RowError("the row has no assistant turn, so there is nothing to learn")


def tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """The tool definitions of a row, exactly as given or from a JSON text of them; empty when it has none."""
    return tuple(_objects(value, "tools"))


def functions_of(value: Any) -> tuple[dict[str, Any], ...]:
    """The same where they are written as `functions`, without the object around each."""
    return tuple({"type": "function", "function": function} for function in _objects(value, "functions"))


def refuse_media(given: Mapping[str, Any], where: str) -> None:
    """Raise RowError for images, sounds and films beside the text: without them the text asks about nothing."""
    for key in MEDIA:
        if given.get(key):
            raise RowError(
                f"{where} holds '{key}', which a language model cannot see; to learn from its text alone, leave the key "
                "out, or name the others in source.columns"
            )


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    """A list of objects, or a JSON text of one; empty for nothing."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = from_json_text(value, key, "a list of objects")
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise RowError(f"'{key}' is not a list of objects")
    return value


def from_json_text(text: str, key: str, wanted: str) -> Any:
    """The value of a JSON text that stands where only a list can stand, as in a CSV file."""
    if text.lstrip()[:1] != "[":
        raise RowError(f"'{key}' is text, not {wanted}")
    try:
        return parse_value(text.encode("utf-8", errors="surrogatepass"))
    except RowError as fault:
        raise RowError(f"'{key}' is text, not {wanted}: {fault}") from None


def as_text(value: Any) -> str:
    """A tag, a group or a part of a template that is not text, as canonical JSON, so that it reads alike in every row."""
    try:
        return value if isinstance(value, str) else canonical_json(value)
    except (TypeError, ValueError):
        return str(value)


def described(value: Any) -> str:
    """What a value is, for a reason."""
    if value is None:
        return "null or missing"
    names: dict[type, str] = {
        list: "a list",
        dict: "an object",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def _turn(turn: Any, where: str, keys: TurnKeys) -> Turn:
    if not isinstance(turn, dict):
        raise RowError(f"{where} is {described(turn)}, not an object with 'role' and 'content'")
    role_key = keys.role or ("from" if "role" not in turn and "from" in turn else "role")
    content_key = keys.content or ("value" if "content" not in turn and "value" in turn else "content")
    role = _role(turn.get(role_key), where, keys, sharegpt=keys.sharegpt or role_key == "from")
    kept = {key: value for key, value in turn.items() if key not in (role_key, content_key)}
    refuse_media(kept, where)
    _read_calls(kept, where)
    _check_weight(kept, where)
    if role in CALLS:
        return {"role": "assistant", **kept, "tool_calls": _call(turn.get(content_key), where)}
    content = _content(turn.get(content_key), role, kept, where)
    return {"role": role, **kept} if content is None else {"role": role, "content": content, **kept}


def _role(given: Any, where: str, keys: TurnKeys, *, sharegpt: bool) -> str:
    if isinstance(given, str):
        role = keys.roles.get(given) or given.strip().casefold()
        if sharegpt:
            role = SHAREGPT_ROLES.get(role, role)
        role = _EARLIER_ROLES.get(role, role)
        if role in ROLES or (sharegpt and role in CALLS):
            return role
    raise RowError(
        f"{where}: the role is {given!r}, not one of {', '.join(ROLES)}; source.roles can say which one it means"
    )


def _read_calls(kept: Turn, where: str) -> None:
    """Tool calls as a list of objects, which is what templates read, where they are a JSON text or spelt as they once were."""
    if kept.get("function_call") and not kept.get("tool_calls"):
        kept["tool_calls"] = _call(kept.pop("function_call"), where)
    calls = kept.get("tool_calls")
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        return  # as given
    if calls is not None:
        try:
            kept["tool_calls"] = _objects(calls, "tool_calls")
        except RowError as fault:
            raise RowError(f"{where}: {fault}") from None


def _check_weight(kept: Turn, where: str) -> None:
    weight = kept.get("weight")
    if weight is not None and not (isinstance(weight, (int, float)) and 0 <= weight <= MOST_WEIGHT):
        raise RowError(
            f"{where}: 'weight' is {weight!r}; a turn weighs from 0 (not trained) to {MOST_WEIGHT}"
        )
    if kept.get("train") is not None and not isinstance(kept["train"], bool):
        raise RowError(f"{where}: 'train' is {kept['train']!r}; a turn is trained (true) or not (false)")


def _content(content: Any, role: str, kept: Turn, where: str) -> str | None:
    calls = kept.get("tool_calls")
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if content is None and calls:
        return None
    if not isinstance(content, str):
        raise RowError(f"{where}: 'content' is {described(content)}, not text")
    if role == "assistant" and not content and not calls:
        raise RowError(f"{where}: the answer is empty, so there is nothing to learn")
    return content


def _part(part: Any, where: str) -> str:
    """The text of one part of a content list; parts other than text cannot be learnt by a language model."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else described(part)
    raise RowError(f"{where}: a content part is {kind!r}, not text")


def _call(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls in the text of a ShareGPT `function_call` turn, arguments as they were given."""
    try:
        parsed = parse_value(value.encode()) if isinstance(value, str) else value
    except (RowError, UnicodeEncodeError) as fault:
        raise RowError(f"{where}: the function call is no JSON: {fault}") from None
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RowError(f"{where}: a function call is no object with 'name' and 'arguments'")
    return [{"type": "function", "function": call} for call in calls]
