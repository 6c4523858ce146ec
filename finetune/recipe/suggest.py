"""From a wrong key to the right one: sections mixed up, names of other tools, typing errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from finetune.recipe.annotations import accepted, fields_of

_CLOSE = 0.7


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema, sections included, in schema order."""
    for name, field in fields_of(model).items():
        yield f"{prefix}{name}"
        for section in accepted(field.annotation).models:
            yield from dotted_keys(section, f"{prefix}{name}.")


def suggest(key: str, section: str, siblings: list[str], known: list[str], renamed: Mapping[str, str]) -> str:
    """The sentence that tells what to write in place of the unknown `key` of `section` ('' is the top).

    `siblings` are the keys of that section, `known` all dotted keys, `renamed` names of other tools (`section.name` for a name
    in that section only) -> dotted key, or a sentence (with a space in it) where there is no such key.
    """
    plain = key.strip().lower().replace("-", "_")
    if plain in siblings:
        return f"did you mean '{plain}'?"
    for name in (f"{section}.{plain}", plain):
        if name in renamed:
            return _point_to(renamed[name], section, known)
    elsewhere = [dotted for dotted in known if dotted.rpartition(".")[2] == plain]
    if elsewhere:
        return _point_to(elsewhere[0], section, known)
    if key in known:  # a dotted key written where nested sections are meant
        return _point_to(key, section, known)
    best = _closest(plain, [*siblings, *renamed])
    if best in siblings:
        return f"did you mean '{best}'?"
    if best is not None and _ratio(plain, best) >= _CLOSE:
        return _point_to(renamed[best], section, known)
    leaf = _closest(plain, [dotted.rpartition(".")[2] for dotted in known])
    if leaf is not None and _ratio(plain, leaf) >= _CLOSE:
        return _point_to(
            next(dotted for dotted in known if dotted.rpartition(".")[2] == leaf), section, known
        )
    return f"keys known here: {', '.join(siblings)}"


def _point_to(target: str, section: str, known: list[str]) -> str:
    if target not in known:
        return target if " " in target else f"keys known here: {', '.join(_children(section, known))}"
    parent, _, leaf = target.rpartition(".")
    if parent == section:
        return f"did you mean '{leaf}'?"
    place = f"key '{leaf}' of section '{parent}'" if parent else "at the top of the file"
    return f"did you mean '{target}' ({place})?"


def _children(section: str, known: list[str]) -> list[str]:
    prefix = f"{section}." if section else ""
    tails = [dotted.removeprefix(prefix) for dotted in known if dotted.startswith(prefix)]
    return [tail for tail in tails if tail and "." not in tail]


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def _closest(word: str, names: list[str]) -> str | None:
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return matches[0] if matches else None
