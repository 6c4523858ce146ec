"""The verifier of generated answers: hassil for smart-home commands, a function, a command, or a model that judges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.data.curate.command import CommandVerifier
from finetune.data.curate.functions import function_digest
from finetune.data.curate.judge import JudgeVerifier
from finetune.data.curate.verifiers import RowDict, Verdict, Verifier, load_verifier
from finetune.data.generated.select import FORMAT
from finetune.data.spec import DatasetSpec
from finetune.data.spec_generated import (
    AnswerVerifier,
    FunctionVerifier,
    HassilVerifier,
    JudgeVerifierSection,
)
from finetune.data.spec_source import HomeIntentsSource
from finetune.digest import digest_bytes, digest_json, each_key_once
from finetune.errors import UserError


@contextmanager
def open_verifier(
    section: AnswerVerifier, *, prompts: DatasetSpec, folder: Path, where: str = ""
) -> Iterator[Verifier]:
    """A function from a row, whose last turn is the answer, to its verdict. `prompts` is the spec of the prompts' dataset.

    `folder`: of the spec, where files and commands are looked for. Raises UserError when the verifier is not there, or
    when hassil is to judge prompts that are not made of its templates.
    """
    if isinstance(section, HassilVerifier):
        yield hassil_verifier(_home_source(prompts, where))
    elif isinstance(section, FunctionVerifier):
        yield load_verifier(section.function, folder=folder, threshold=section.threshold, where=where)
    elif isinstance(section, JudgeVerifierSection):
        yield JudgeVerifier(
            section, threshold=section.threshold, seconds_per_row=section.seconds_per_row, where=where
        )
    else:
        with CommandVerifier(
            section.command,
            folder=folder,
            threshold=section.threshold,
            seconds_per_row=section.seconds_per_row,
            where=where,
        ) as command:
            yield command


def verifier_digest(section: AnswerVerifier, *, prompts: DatasetSpec, folder: Path) -> str:
    """Of everything that decides verdicts and can be known: settings, code of a file, versions of packages."""
    known: dict[str, Any] = {"settings": section.model_dump(mode="json")}
    if isinstance(section, HassilVerifier):
        from finetune.data import home_intents

        known |= {
            "packages": home_intents.source_versions(),
            "home": _home_source(prompts, "").model_dump(mode="json"),
            "code": [
                digest_bytes(Path(str(file)).read_bytes()) for file in (__file__, home_intents.__file__)
            ],
        }
    elif isinstance(section, FunctionVerifier):
        known["code"] = function_digest(section.function, folder=folder)
    elif not isinstance(section, JudgeVerifierSection):  # of a judge nothing is known but its settings
        words = section.command.split() if isinstance(section.command, str) else section.command
        files = [folder / word for word in words]
        known["code"] = [digest_bytes(file.read_bytes()) for file in files if file.is_file()]
    return digest_json(known)


def _home_source(prompts: DatasetSpec, where: str) -> HomeIntentsSource:
    for source in prompts.sources:
        if isinstance(source, HomeIntentsSource):
            return source
    raise UserError(
        f"hassil cannot judge answers to the prompts of {prompts.name}",
        where=where,
        why="they are not sampled from its sentence templates (kind: home_intents)",
        fix="use a verifier of kind function, command or judge",
    )


def hassil_verifier(source: HomeIntentsSource) -> Verifier:
    """Passes an answer whose JSON names the intent, and exactly the slots with their values, that hassil hears."""
    from finetune.data.home_intents import load_home

    home = load_home(source)

    def verify(row: RowDict) -> Verdict:
        messages = row["messages"]
        said = next(str(turn["content"]) for turn in reversed(messages[:-1]) if turn["role"] == "user")
        try:
            answer = _strict_object(str(messages[-1]["content"]))
        except ValueError as error:
            return Verdict(False, f"{FORMAT}: {error}")
        heard = home.recognise(said)
        if heard is None:
            return Verdict(False, "hassil hears no intent in the prompt")
        intent, slots = heard
        if answer.get("intent") != intent:
            return Verdict(False, f"another intent than {intent}")
        given = {name: value for name, value in answer.items() if name != "intent"}
        return Verdict(True) if _same(given, slots) else Verdict(False, f"other slots than {intent} has here")

    return verify


def _strict_object(text: str) -> dict[str, Any]:
    """A JSON object with each key once and no NaN. Raises ValueError with what it is instead."""

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        found = json.loads(text, object_pairs_hook=each_key_once, parse_constant=no_constant)
    except json.JSONDecodeError:
        raise ValueError("the answer is no JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("intent"), str):
        raise ValueError("the answer is no object with an intent")
    return found


def _same(left: Any, right: Any) -> bool:
    """Equal as JSON: 30 is 30.0, but true is not 1."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)
