"""What the keys of records may mean: candidates for the source section of a spec, from the names and values of a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from finetune.data.read.shapes import RULES, SHAPES_BY_PRECEDENCE
from finetune.data.read.turns import CALLS, SHAREGPT_ROLES
from finetune.data.spec_source import ROLES, Shape

Sample = Sequence[dict[str, Any]]
_MOST = 0.9  # of the sample that must have a key, or a kind of value, for it to count
# Names of columns that ask and answer, where they are not 'prompt' and 'completion'.
_ASKS = (
    "prompt",
    "question",
    "query",
    "instruction",
    "input",
    "source",
    "user",
    "problem",
    "request",
    "utterance",
)
_ANSWERS = (
    *(
        "completion",
        "answer",
        "response",
        "output",
        "target",
        "assistant",
        "solution",
        "reply",
        "summary",
        "label",
    ),
    *("expected_output", "ideal", "generation", "gold"),
)
_CONTEXTS = ("context", "passage", "document", "article")
_TEXTS = ("content", "body", "document", "article", "passage", "sentence", "raw_content", "markdown", "code")
# Columns of a short answer about a column 'text': a table of examples for a classifier.
_LABELS = ("label", "category", "intent", "class", "sentiment", "emotion")
_LABEL_CHARACTERS = 100
_CHOSEN = (
    "chosen",
    "response_chosen",
    "chosen_response",
    "answer_chosen",
    "preferred",
    "accepted",
    "better",
    "win",
)
_REJECTED = (
    *(
        "rejected",
        "response_rejected",
        "rejected_response",
        "answer_rejected",
        "dispreferred",
        "worse",
        "lose",
    ),
)
_SPEAKERS = {
    "user": ("user", "human", "customer", "client", "prompter", "question", "student", "patient", "caller"),
    "assistant": (
        "assistant",
        "gpt",
        "bot",
        "agent",
        "model",
        "ai",
        "answer",
        "support",
        "advisor",
        "doctor",
        "tutor",
    ),
    "system": ("system", "instruction"),
    "tool": ("tool", "function", "observation"),
}
_ROLE_KEYS = ("role", "from", "speaker", "author", "sender", "user", "who", "type", "name")
_CONTENT_KEYS = ("content", "value", "text", "message", "utterance", "body")


@dataclass(frozen=True, slots=True)
class Guess:
    """One reading of the records, as keys of the source section. `why` says what speaks for it."""

    shape: Shape
    why: str
    columns: dict[str, str] = field(default_factory=dict)
    json_columns: tuple[str, ...] = ()
    role_key: str | None = None
    content_key: str | None = None
    roles: dict[str, str] = field(default_factory=dict)

    def section(self) -> dict[str, Any]:
        """The keys of the source section that differ from their defaults."""
        stated = {
            "shape": self.shape,
            "columns": self.columns,
            "json_columns": list(self.json_columns),
            "role_key": self.role_key,
            "content_key": self.content_key,
            "roles": self.roles,
        }
        return {key: value for key, value in stated.items() if value}


def guesses(sample: Sample) -> list[Guess]:
    """Candidates, the likelier ones first: shapes whose keys are there, then columns of other names that fit a shape."""
    if not sample:
        return []
    as_json = _json_columns(sample)
    found = [
        Guess(
            shape,
            _why(shape, sample),
            json_columns=_of_shape(shape, as_json),
            roles=_odd_roles(shape, sample),
        )
        for shape in SHAPES_BY_PRECEDENCE
        if any(all(key in record for key in _needs(shape)) for record in sample)
    ]
    if not any(_share_with(sample, _needs(guess.shape)) >= _MOST for guess in found):
        found += _renamed(sample, as_json)
    elif all(guess.shape == "text" for guess in found):
        found = [*_labelled(sample), *found]
    return found


def _needs(shape: Shape) -> tuple[str, ...]:
    return ("prompt", "completion", "label") if shape == "kto" else RULES[shape].needs


def _why(shape: Shape, sample: Sample) -> str:
    needs = _needs(shape)
    return f"{_share_with(sample, needs):.0%} of the rows looked at have {_listed(needs)}"


def _renamed(sample: Sample, as_json: Sequence[str]) -> Iterator[Guess]:
    """Columns of other names, taken for those of a shape by what they are called and hold."""
    names = [name for name in _keys(sample) if _share_with(sample, (name,)) >= _MOST]
    texts = [name for name in names if _holds(sample, name, str) and name not in as_json]
    beside = {key: key for key in ("system", "tools") if any(record.get(key) for record in sample)}
    for name in names:
        turns = _turn_guess(sample, name, beside)
        if turns is not None:
            yield turns
    chosen, rejected = _named(names, _CHOSEN), _named(names, _REJECTED)
    asks = _named(texts, _ASKS)
    if chosen and rejected:
        columns = {"prompt": asks} if asks else {}
        columns |= {"chosen": chosen, "rejected": rejected} | beside
        used = tuple(name for name in as_json if name in columns.values())
        yield Guess("preference", f"{_listed((chosen, rejected))} are called like a pair", columns, used)
    answers = _named([name for name in texts if name != asks], _ANSWERS)
    if asks and answers:
        context = _named([name for name in texts if name not in (asks, answers)], _CONTEXTS)
        asked = f"{{{context}}}\n\n{{{asks}}}" if context else asks
        why = f"{_listed((asks, answers))} are called like a question and its answer"
        yield Guess("prompt_completion", why, {"prompt": asked, "completion": answers} | beside)
    alone = _named(texts, _TEXTS) or (texts[0] if len(names) == len(texts) == 1 else None)
    if alone:
        yield Guess("text", f"'{alone}' holds text", {"text": alone})


def _labelled(sample: Sample) -> Iterator[Guess]:
    """A text and the name of its class, which is an answer to it rather than something to read past."""
    names = [
        name
        for name in _keys(sample)
        if _holds(sample, name, str)
        and all(len(str(record.get(name, ""))) <= _LABEL_CHARACTERS for record in sample)
    ]
    label = _named(names, _LABELS)
    if label is not None:
        why = f"'{label}' is called like the class of 'text'"
        yield Guess("prompt_completion", why, {"prompt": "text", "completion": label})


def _turn_guess(sample: Sample, name: str, beside: dict[str, str]) -> Guess | None:
    """A column of lists of turns, with the keys and the names that say who speaks."""
    lists = [value for record in sample if isinstance(value := _plain(record.get(name)), list) and value]
    turns = [turn for value in lists for turn in value if isinstance(turn, dict)]
    if len(lists) < _MOST * len(sample) or not turns or len(turns) < sum(map(len, lists)):
        return None
    keys = [
        key
        for key, count in Counter(key for turn in turns for key in turn).items()
        if count >= _MOST * len(turns)
    ]
    role_key, content_key = _named(keys, _ROLE_KEYS), _named(keys, _CONTENT_KEYS)
    if role_key is None or content_key is None or role_key == content_key:
        return None
    roles = _meant_by({str(turn.get(role_key)) for turn in turns}, aliases=SHAREGPT_ROLES)
    if None in roles.values():
        return None
    # The shape with aliases reads every usual name of keys and roles; only what is unusual is stated.
    return Guess(
        "sharegpt",
        f"'{name}' holds lists of turns with '{role_key}' and '{content_key}'",
        {} if name == "conversations" else {"conversations": name} | beside,
        (),
        None if role_key in ("role", "from") else role_key,
        None if content_key in ("content", "value") else content_key,
        {speaker: role for speaker, role in sorted(roles.items()) if role},
    )


def _odd_roles(shape: Shape, sample: Sample) -> dict[str, str]:
    """What unusual names of speakers may mean, where the turns themselves are as the shape has them."""
    key, role_key = {"messages": ("messages", "role"), "sharegpt": ("conversations", "from")}.get(
        shape, ("", "")
    )
    lists = [value for record in sample if isinstance(value := _plain(record.get(key)), list)]
    speakers = {
        turn[role_key]
        for value in lists
        for turn in value
        if isinstance(turn, dict) and isinstance(turn.get(role_key), str)
    }
    meant = _meant_by(speakers, aliases=SHAREGPT_ROLES if shape == "sharegpt" else {})
    return {speaker: role for speaker, role in sorted(meant.items()) if role}


def _meant_by(speakers: set[str], *, aliases: dict[str, str]) -> dict[str, str | None]:
    """Speaker -> role, of those whose names are not known by themselves; None where nothing is known of a name."""
    found: dict[str, str | None] = {}
    for speaker in speakers:
        word = speaker.strip().casefold()
        if aliases.get(word, word) not in (*ROLES, *CALLS):
            found[speaker] = next((role for role, words in _SPEAKERS.items() if word in words), None)
    return found


def _json_columns(sample: Sample) -> list[str]:
    """Columns of text that is, in nearly every row, a JSON list of objects."""
    found = []
    for name in _keys(sample):
        texts = [value for record in sample if isinstance(value := record.get(name), str) and value]
        listed = sum(isinstance(_plain(text), list) and text.lstrip().startswith("[{") for text in texts)
        if texts and listed >= _MOST * len(texts):
            found.append(name)
    return found


def _plain(value: Any) -> Any:
    """The list in a JSON text; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            return orjson.loads(value)
        except ValueError:
            return value
    return value


def _of_shape(shape: Shape, as_json: Sequence[str]) -> tuple[str, ...]:
    """Those of the JSON columns that the shape would otherwise take for text."""
    either = ("prompt", "completion", "chosen", "rejected", "output")
    return tuple(name for name in as_json if name in either and name in RULES[shape].reads)


def _keys(sample: Sample) -> list[str]:
    return list(dict.fromkeys(key for record in sample for key in record))


def _share_with(sample: Sample, keys: Sequence[str]) -> float:
    return sum(all(key in record for key in keys) for record in sample) / len(sample)


def _holds(sample: Sample, name: str, kind: type) -> bool:
    values = [record.get(name) for record in sample]
    return sum(isinstance(value, kind) and bool(value) for value in values) >= _MOST * len(values)


def _named(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """The first name that is one of the wanted words, in their order, whatever its case."""
    by_word = {name.casefold().replace("-", "_").replace(" ", "_"): name for name in reversed(names)}
    return next((by_word[word] for word in wanted if word in by_word), None)


def _listed(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
