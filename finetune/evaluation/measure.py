"""Items that are answered by likelihood, not by writing: a choice among given answers, or a text as a whole.

What was measured becomes the `output` of a record, as one JSON object, so that it is saved, continued, scored and
scored again like any written answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from finetune.errors import Fault, UserError
from finetune.evaluation.generate import Completion
from finetune.evaluation.items import Item
from finetune.evaluation.likelihood import Likelihood, Request, encode_continuation
from finetune.evaluation.prompts import Prompt
from finetune.evaluation.raw_prompts import answer_behind
from finetune.evaluation.suite import Suite

Likelihoods = Callable[
    [Sequence[Request]], Iterable[Likelihood]
]  # a model, or a server that gives likelihoods


def check_choices(suite: str, items: Sequence[Item]) -> None:
    """Refuse, all at once and before the run, items without two different answers or whose reference is none of them."""
    faults = [
        Fault(problem, where=f"suite {suite}, item {item.id}")
        for item in items
        if (problem := _problem(item))
    ]
    if faults:
        raise UserError(faults)


def choices_of(item: Item) -> list[str]:
    return list((item.check or {}).get("choices", []))


def _problem(item: Item) -> str:
    choices = (item.check or {}).get("choices", [])
    if not isinstance(choices, list):
        return "check.choices must be a list of texts"
    if not all(isinstance(one, str) and one for one in choices):
        return "every choice must be text that is not empty"
    if len(set(choices)) < 2 or len(set(choices)) != len(choices):
        return "check.choices must hold at least two different answers"
    return "" if item.reference in choices else "the reference is none of check.choices"


def measure_choices(
    likelihoods: Likelihoods, tokenizer: Any, prompts: Sequence[Prompt], items: Sequence[Item], suite: Suite
) -> Iterator[Completion]:
    """Log-likelihood of every choice of every item behind its prompt, as an item's choices are complete."""
    requests: list[Request] = []
    places: list[tuple[int, int]] = []  # request -> (item, choice)
    for place, (prompt, item) in enumerate(zip(prompts, items, strict=True)):
        for number, (given, scored) in enumerate(choice_tokens(suite, item, prompt, tokenizer)):
            requests.append(Request(len(requests), given, scored, f"item {item.id}"))
            places.append((place, number))
    found: list[dict[int, Likelihood]] = [{} for _ in items]
    started = time.perf_counter()
    for result in likelihoods(requests):
        place, number = places[result.index]
        found[place][number] = result
        choices = choices_of(items[place])
        if len(found[place]) == len(choices):
            ordered = [found[place][index] for index in range(len(choices))]
            yield _choice_completion(place, choices, ordered, time.perf_counter() - started)


def choice_tokens(
    suite: Suite, item: Item, prompt: Prompt, tokenizer: Any
) -> list[tuple[list[int], list[int]]]:
    """Of every choice of an item: the ids that are given, and those of the choice behind them."""
    found = []
    for choice in choices_of(item):
        text = answer_behind(prompt.text, choice, suite.raw) if suite.prompt_format == "raw" else choice
        given, scored = encode_continuation(prompt.text, text, tokenizer)
        found.append((prompt.ids[: prompt.lead] + given, scored))
    return found


def _choice_completion(place: int, choices: list[str], found: list[Likelihood], seconds: float) -> Completion:
    measured = {
        "choices": choices,
        "log_likelihoods": [one.log_likelihood for one in found],
        "tokens": [one.tokens for one in found],
        "bytes": [len(choice.encode()) for choice in choices],
    }
    return Completion(place, _text(measured), sum(one.tokens for one in found), "stop", seconds)


def measure_texts(
    likelihoods: Likelihoods,
    prompts: Sequence[Prompt],
    items: Sequence[Item],
    *,
    every_prompt: Sequence[Prompt],
    measures_kl: bool,
) -> Iterator[Completion]:
    """Log-likelihood of whole texts (all tokens but the first, which is given).

    `mean_tokens` and `mean_bytes` over every text of the suite go with each measurement: a text's total over them is
    its share of the token-weighted mean, so that the plain mean over items is exactly total over total.
    measures_kl: KL(base || model) too, which is 0 where `likelihoods` gives none: the untuned model is its own base.
    """
    mean_tokens = sum(len(prompt.ids) - 1 for prompt in every_prompt) / len(every_prompt)
    mean_bytes = sum(len(prompt.text.encode()) for prompt in every_prompt) / len(every_prompt)
    requests = [
        Request(place, prompt.ids[:1], prompt.ids[1:], f"item {item.id}")
        for place, (prompt, item) in enumerate(zip(prompts, items, strict=True))
    ]
    started = time.perf_counter()
    for result in likelihoods(requests):
        measured = {
            "log_likelihood": result.log_likelihood,
            "tokens": result.tokens,
            "bytes": len(prompts[result.index].text.encode()),
            "mean_tokens": mean_tokens,
            "mean_bytes": mean_bytes,
            **({"kl": result.kl or 0.0} if measures_kl else {}),
        }
        yield Completion(result.index, _text(measured), result.tokens, "stop", time.perf_counter() - started)


def _text(measured: dict[str, Any]) -> str:
    return json.dumps(measured, ensure_ascii=False, allow_nan=False)
