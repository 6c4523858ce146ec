"""The shapes that rows come in: which keys make one, and how each becomes the fields of a canonical row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from finetune.data.read.pairs import preference_fields
from finetune.data.read.record import RowError
from finetune.data.read.turns import (
    INSTRUCTING,
    MEDIA,
    TurnKeys,
    described,
    from_json_text,
    functions_of,
    refuse_media,
    require_answer,
    text_or_turns,
    tools_of,
    turns_of,
)
from finetune.data.rows import Turn
from finetune.data.spec_source import ROLES, SHAPE_KEYS, Shape

Given = Mapping[str, Any]
Fields = dict[str, Any]
IGNORED_LABEL = -100
# Spellings of true and false, and of an answer that is wanted and one that is not; case and "_", "-", " " do not count.
_TRUE_WORDS = """
    true t yes y on 1 1.0 +1 +1.0 + ✅ good desirable desired positive chosen accepted preferred like liked thumbsup up upvote right
    correct pass passed ok 👍
"""
_FALSE_WORDS = """
    false f no n off 0 0.0 -1 -1.0 - ❌ bad undesirable undesired negative rejected dispreferred dislike disliked thumbsdown down
    downvote wrong incorrect fail failed 👎
"""
_TRUE, _FALSE = frozenset(_TRUE_WORDS.split()), frozenset(_FALSE_WORDS.split())
_JOINTS = str.maketrans("", "", "_ ")


@dataclass(frozen=True, slots=True)
class ShapeRule:
    """`needs`: keys without which there is no row of this shape; `reads`: all keys that count; `make`: fields of Row."""

    needs: tuple[str, ...]
    reads: frozenset[str]
    make: Callable[[Given, TurnKeys], Fields]


def shape_of(given: Given) -> Shape:
    """The shape that the keys of a row have, by fixed precedence. Raises RowError when they make none."""
    keys = given.keys()
    for shape, needs in _AUTOMATIC:
        if keys >= needs:
            return shape
    for one, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if one in given:
            raise RowError(f"the row has '{one}' and no '{other}': a pair needs both")
    if "conversation" in given:
        return "sharegpt"
    raise RowError(
        "the row has neither 'messages' nor 'prompt' and 'completion', nor the keys of another shape "
        f"(its keys: {', '.join(map(str, sorted(given))) or 'none'}); source.columns can say what they mean"
    )


def shape_fields(given: Given, shape: Shape, keys: TurnKeys) -> Fields:
    """The fields of Row that a record has in the given shape. Raises RowError with what is missing or wrong."""
    rule = RULES[shape]
    refuse_media(given, "the row")
    for key in rule.needs:
        if key not in given:
            if shape == "sharegpt" and "conversation" in given:
                continue
            raise RowError(
                f"the row has no '{key}', which the shape {shape} needs "
                f"(its keys: {', '.join(map(str, sorted(given))) or 'none'})"
            )
    return rule.make(given, keys)


def truth_of(value: Any, key: str) -> bool:
    """A boolean in any usual spelling. Raises RowError for anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float, str)):
        word = str(value).strip().casefold().translate(_JOINTS)
        if len(word) > 2:
            word = word[0] + word[1:].replace("-", "")
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    shown = repr(value) if isinstance(value, (int, float, str)) else described(value)
    raise RowError(
        f"'{key}' is {shown}, not true or false; if it means something else, name the shape in source.shape"
    )


def _messages(given: Given, keys: TurnKeys) -> Fields:
    turns = turns_of(given["messages"], "messages", keys)
    require_answer(turns)
    return _chat(given, turns)


def plain_turns(given: Given) -> list[Turn] | None:
    """The turns of the commonest record, told quickly: `messages` of known roles and texts, and nothing beside
    them that counts. None for every other record, which is no verdict: the rules of its shape tell what it is.
    """
    listed = given.get("messages")
    if type(listed) is not list or not _BESIDE_MESSAGES.isdisjoint(given):
        return None
    turns: list[Turn] = []
    answered = False
    for turn in listed:
        if type(turn) is not dict or len(turn) != 2:
            return None
        role, content = turn.get("role"), turn.get("content")
        if type(content) is not str or role not in ROLES:
            return None
        if role == "assistant":
            if not content:
                return None
            answered = True
        turns.append({"role": role, "content": content})
    return turns if answered else None


def _sharegpt(given: Given, keys: TurnKeys) -> Fields:
    key = "conversations" if "conversations" in given else "conversation"
    turns = turns_of(given[key], key, TurnKeys(keys.role, keys.content, keys.roles, sharegpt=True))
    require_answer(turns)
    return _chat(given, turns)


def _alpaca(given: Given, keys: TurnKeys) -> Fields:
    turns: list[Turn] = []
    for index, pair in enumerate(_list_of(given.get("history"), "history")):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"history[{index}] is {described(pair)}, not a question and its answer")
        turns += text_or_turns(pair[0], f"history[{index}][0]", "user", keys)
        turns += text_or_turns(pair[1], f"history[{index}][1]", "assistant", keys)
    instruction = _text(given, "instruction")
    extra = given.get("input")
    if extra is not None and not isinstance(extra, str):
        raise RowError(f"'input' is {described(extra)}, not text")
    asked = "\n\n".join(part for part in (instruction, extra) if part)
    if not asked:
        raise RowError("'instruction' is empty, so nothing is asked")
    turns.append({"role": "user", "content": asked})
    turns += text_or_turns(given["output"], "output", "assistant", keys)
    return _chat(given, turns)


def _prompt_completion(given: Given, keys: TurnKeys) -> Fields:
    turns = text_or_turns(given["prompt"], "prompt", "user", keys)
    turns += text_or_turns(given["completion"], "completion", "assistant", keys)
    require_answer(turns)
    return _chat(given, turns)


def _kto(given: Given, keys: TurnKeys) -> Fields:
    label = truth_of(given["label"], "label")
    if "completion" in given or "messages" not in given:
        missing = [key for key in ("prompt", "completion") if key not in given]
        if missing:
            raise RowError(f"the row has no '{missing[0]}', which the shape kto needs besides 'label'")
        return {**_prompt_completion(given, keys), "kind": "kto", "label": label}
    return {**_messages(given, keys), "kind": "kto", "label": label}


def _preference(given: Given, keys: TurnKeys) -> Fields:
    fields = preference_fields(given, keys)
    return {**_chat(given, fields.pop("messages")), **fields, "kind": "preference"}


def _stepwise(given: Given, keys: TurnKeys) -> Fields:
    prompt = text_or_turns(given["prompt"], "prompt", "user", keys)
    texts = _list_of(given["completions"], "completions")
    labels = _list_of(given["labels"], "labels")
    if not texts:
        raise RowError("'completions' is empty: there is no step")
    if len(texts) != len(labels):
        raise RowError(f"there are {len(texts)} steps in 'completions' and {len(labels)} in 'labels'")
    steps = []
    for index, (text, label) in enumerate(zip(texts, labels, strict=True)):
        if not isinstance(text, str):
            raise RowError(f"completions[{index}] is {described(text)}, not text")
        steps.append({"text": text, "correct": truth_of(label, f"labels[{index}]")})
    return {**_chat(given, prompt), "kind": "stepwise", "steps": tuple(steps)}


def _running_text(given: Given, keys: TurnKeys) -> Fields:
    text = _text(given, "text")
    if not text.strip():
        raise RowError("'text' is empty, so there is nothing to learn")
    return {"kind": "text", "text": text}


def _tokens(given: Given, keys: TurnKeys) -> Fields:
    ids = _integers(given["input_ids"], "input_ids")
    if not ids:
        raise RowError("'input_ids' is empty, so there is nothing to learn")
    if min(ids) < 0:
        raise RowError(f"'input_ids' holds {min(ids)}; a token id is 0 or more")
    labels = ids if given.get("labels") is None else _integers(given["labels"], "labels")
    mask = (
        [1] * len(ids) if given.get("attention_mask") is None else _integers(given["attention_mask"], "mask")
    )
    if not len(ids) == len(labels) == len(mask):
        raise RowError(
            f"'input_ids' has {len(ids)} tokens, 'labels' {len(labels)}, 'attention_mask' {len(mask)}"
        )
    shown = [index for index, seen in enumerate(mask) if seen]
    if not shown or len(shown) != shown[-1] - shown[0] + 1:
        raise RowError("'attention_mask' hides tokens between others, or all of them")
    ids, labels = ids[shown[0] : shown[-1] + 1], labels[shown[0] : shown[-1] + 1]
    for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, IGNORED_LABEL):
            raise RowError(
                f"labels[{index}] is {label}, neither {IGNORED_LABEL} nor {token}, the token at its place; labels are not shifted"
            )
    if all(label == IGNORED_LABEL for label in labels):
        raise RowError(f"every label is {IGNORED_LABEL}, so there is nothing to learn")
    return {"kind": "tokens", "input_ids": tuple(ids), "labels": tuple(labels)}


def _chat(given: Given, turns: list[Turn]) -> Fields:
    """The turns, after the system text that some shapes hold beside them, and the tools."""
    system = given.get("system")
    if system:
        if not isinstance(system, str):
            raise RowError(f"'system' is {described(system)}, not text")
        if turns[0]["role"] not in INSTRUCTING:
            turns.insert(0, {"role": "system", "content": system})
        elif turns[0].get("content") != system:
            raise RowError("the row has a 'system' text and begins with another system turn")
    tools = tools_of(given.get("tools")) or functions_of(given.get("functions"))
    return {"messages": turns, "tools": tools} if tools else {"messages": turns}


def _text(given: Given, key: str) -> str:
    value = given[key]
    if not isinstance(value, str):
        raise RowError(f"'{key}' is {described(value)}, not text")
    return value


def _list_of(value: Any, key: str) -> list[Any]:
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = from_json_text(value, key, "a list")
    if not isinstance(value, list):
        raise RowError(f"'{key}' is {described(value)}, not a list")
    return value


def _integers(value: Any, key: str) -> list[int]:
    listed = _list_of(value, key)
    for index, item in enumerate(listed):
        if type(item) is not int:
            raise RowError(f"{key}[{index}] is {item!r}, not a whole number")
    return listed


_BESIDE = frozenset({"tools", "functions", "system"})
# Keys that, beside messages, make a record more or something else than a plain conversation.
_BESIDE_MESSAGES = _BESIDE | {"input_ids", "chosen", "rejected", "completions", *MEDIA}
_PROMPT = ("prompt", "completion")
RULES: dict[Shape, ShapeRule] = {
    "messages": ShapeRule(("messages",), _BESIDE | {"messages"}, _messages),
    "sharegpt": ShapeRule(("conversations",), _BESIDE | {"conversations", "conversation"}, _sharegpt),
    "alpaca": ShapeRule(
        ("instruction", "output"), _BESIDE | {"instruction", "input", "output", "history"}, _alpaca
    ),
    "prompt_completion": ShapeRule(_PROMPT, _BESIDE.union(_PROMPT), _prompt_completion),
    "preference": ShapeRule(("chosen", "rejected"), _BESIDE | {"prompt", "chosen", "rejected"}, _preference),
    "kto": ShapeRule(("label",), _BESIDE.union(_PROMPT, {"messages", "label"}), _kto),
    "stepwise": ShapeRule(
        ("prompt", "completions", "labels"), _BESIDE | {"prompt", "completions", "labels"}, _stepwise
    ),
    "text": ShapeRule(("text",), frozenset({"text"}), _running_text),
    "tokens": ShapeRule(("input_ids",), frozenset({"input_ids", "labels", "attention_mask"}), _tokens),
}
assert {"auto", *RULES} == set(get_args(Shape))
assert frozenset().union(*(rule.reads for rule in RULES.values())) == SHAPE_KEYS
# What the keys of a row mean when the spec does not say: the first of these whose keys it has.
_AUTOMATIC: tuple[tuple[Shape, frozenset[str]], ...] = (
    ("tokens", frozenset({"input_ids"})),
    ("preference", frozenset({"chosen", "rejected"})),
    ("stepwise", frozenset({"prompt", "completions", "labels"})),
    ("messages", frozenset({"messages"})),
    ("kto", frozenset({*_PROMPT, "label"})),
    ("sharegpt", frozenset({"conversations"})),
    ("alpaca", frozenset({"instruction", "output"})),
    ("prompt_completion", frozenset(_PROMPT)),
    ("text", frozenset({"text"})),
)
SHAPES_BY_PRECEDENCE: tuple[Shape, ...] = tuple(shape for shape, _ in _AUTOMATIC)
