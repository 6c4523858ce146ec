"""Answers to fixed prompts that were written while the training ran, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from finetune.report.numbers import finite, significant, whole
from finetune.report.read import Record, RunFiles, as_text
from finetune.report.untrusted import untrusted

_MOST_STEPS = 12
_CLIP_CHARACTERS = 600


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """What was answered after a step; `kl` is the distance from the base there, in nats a token."""

    step: int
    output: Markup
    kl: str | None


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """A prompt and its answers in the order of the steps; of many, evenly spaced ones with the first and the last."""

    name: str
    prompt: Markup
    reference: Markup | None
    answers: tuple[SampledAnswer, ...]


def read_samples(run: RunFiles) -> tuple[SampledPrompt, ...]:
    """From the `sample` events; each prompt by its name. Of a step that was written twice the last one counts."""
    found: dict[str, dict[int, Record]] = {}
    for event in run.events:
        step, name = whole(event.get("step")), as_text(event.get("name"))
        if event.get("event") == "sample" and step is not None and name is not None:
            found.setdefault(name, {})[step] = event
    return tuple(_prompt(name, by_step) for name, by_step in found.items())


def _prompt(name: str, by_step: dict[int, Record]) -> SampledPrompt:
    steps = sorted(by_step)
    if len(steps) > _MOST_STEPS:
        last = len(steps) - 1
        steps = [steps[round(place * last / (_MOST_STEPS - 1))] for place in range(_MOST_STEPS)]
    first = by_step[steps[0]]
    reference = as_text(first.get("reference"))
    return SampledPrompt(
        name,
        untrusted(as_text(first.get("prompt")) or "", _CLIP_CHARACTERS),
        untrusted(reference, _CLIP_CHARACTERS) if reference else None,
        tuple(_answer(step, by_step[step]) for step in steps),
    )


def _answer(step: int, event: Record) -> SampledAnswer:
    kl = significant(finite(event.get("kl_to_base")))
    return SampledAnswer(step, untrusted(as_text(event.get("output")) or "", _CLIP_CHARACTERS), kl)
