"""Answers of a model to the questions of a task, and the task's own scores of them, document by document."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from finetune.evaluation.generate import Completion
from finetune.evaluation.harness.definition import aggregation_name
from finetune.evaluation.harness.model import HarnessModel, decoding_of
from finetune.evaluation.harness.questions import Question
from finetune.evaluation.items import Item
from finetune.evaluation.raw_prompts import Prompt, encode_raw

# Documents that are asked together: what an interrupted run has to repeat at most.
_DOCUMENTS_AT_ONCE = 128
_WEIGHTED = ("weighted_perplexity", "bits_per_byte")


def asking_only(tokenizer: Any) -> HarnessModel:
    """A model that can say what would be asked, token by token, and answer nothing."""
    return HarnessModel(tokenizer, lambda requests: [], lambda prompts, decoding, names: [], None)


def task_prompt(model: HarnessModel, item: Item) -> Prompt:
    """The first thing that the task asks about a document; a text that is scored as a whole has no prompt."""
    question: Question = item.harness_question
    if question.kind == "loglikelihood_rolling":
        return Prompt("", [model.prefix_token_id], lead=1)
    text = model.written_out(question.instances[0].args[0])
    ids, lead = encode_raw(text, model.tokenizer)
    return Prompt(text, ids, lead) if ids else Prompt(text, [model.prefix_token_id], lead=1)


def tokens_needed(model: HarnessModel, item: Item) -> int:
    """Tokens of the longest request; a text that is scored as a whole goes through the context in windows."""
    question: Question = item.harness_question
    if question.kind == "loglikelihood_rolling":
        return 0
    if question.kind == "loglikelihood":
        pairs = [model.pair_tokens(*one.args) for one in question.instances]
        return max(len(given) + len(scored) for given, scored in pairs)
    return max(
        len(model.tok_encode(model.written_out(one.args[0]))) + decoding_of(one.args[1]).max_new_tokens
        for one in question.instances
    )


def answer_questions(model: HarnessModel, items: Sequence[Item]) -> Iterator[Completion]:
    """The responses to every item's requests, as they come; `Completion.index` is a place in `items`.

    A single written answer is the text itself; everything else is a JSON object with the `responses` in order.
    """
    for first in range(0, len(items), _DOCUMENTS_AT_ONCE):
        chunk = items[first : first + _DOCUMENTS_AT_ONCE]
        started = time.perf_counter()
        found: dict[int, list[tuple[Any, int, str]]] = {place: [] for place in range(len(chunk))}
        for kind in dict.fromkeys(item.harness_question.kind for item in chunk):
            asked = [
                (place, one)
                for place, item in enumerate(chunk)
                if item.harness_question.kind == kind
                for one in item.harness_question.instances
                for _ in range(one.repeats)
            ]
            responses = getattr(model, kind)([one for _, one in asked])
            for (place, _), response, (tokens, reason) in zip(asked, responses, model.spent, strict=True):
                found[place].append((response, tokens, reason))
        seconds = (time.perf_counter() - started) / len(chunk)
        for place, item in enumerate(chunk):
            yield _completion(first + place, item.harness_question, found[place], seconds)


def _completion(
    place: int, question: Question, found: Sequence[tuple[Any, int, str]], seconds: float
) -> Completion:
    responses = [response for response, _, _ in found]
    output = str(responses[0]) if question.is_written else _written(question, responses)
    cut = any(reason == "length" for _, _, reason in found)
    return Completion(
        place, output, sum(tokens for _, tokens, _ in found), "length" if cut else "stop", seconds
    )


def _written(question: Question, responses: Sequence[Any]) -> str:
    saved: dict[str, Any] = {"responses": responses}
    if question.kind == "loglikelihood":
        saved = {"continuations": [one.args[1] for one in question.instances], **saved}
    return json.dumps(saved, ensure_ascii=False, allow_nan=False)


def task_scores(items: Sequence[Item], outputs: Sequence[str]) -> list[dict[str, float]]:
    """The task's own metrics for every document, 'metric,filter' -> number, from saved outputs.

    A metric that is no number a document is left out. A perplexity is given as its logarithm under `log_<metric>`, and
    weighted figures (by words or bytes) as the document's share, so that the mean over documents is the figure of the
    whole set.
    """
    for item, output in zip(items, outputs, strict=True):
        _restore(item.harness_question, output)
    raw: list[dict[tuple[str, str], tuple[Any, str | None]]] = [{} for _ in items]
    by_task: dict[int, list[int]] = {}
    for place, item in enumerate(items):
        by_task.setdefault(id(item.harness_question.task), []).append(place)
    for places in by_task.values():
        _apply_task([items[place].harness_question for place in places], [raw[place] for place in places])
    weights: dict[tuple[str, str], float] = {}
    for key in {key for one in raw for key in one}:
        pairs = [one[key][0] for one in raw if key in one and one[key][1] in _WEIGHTED]
        if pairs:
            weights[key] = math.fsum(float(pair[1]) for pair in pairs) / len(pairs)
    return [_numbers(one, weights) for one in raw]


def _restore(question: Question, output: str) -> None:
    """Put saved responses back where the task looks for them."""
    responses = [output] if question.is_written else json.loads(output)["responses"]
    left = iter(responses)
    for one in question.instances:
        own = [next(left) for _ in range(one.repeats)]
        one.resps = [tuple(response) if isinstance(response, list) else response for response in own]
        one.filtered_resps = {}


def _apply_task(
    questions: Sequence[Question], raw: Sequence[dict[tuple[str, str], tuple[Any, str | None]]]
) -> None:
    """Filters over all documents of one task, then its metrics document by document."""
    task = questions[0].task
    instances = [one for question in questions for one in question.instances]
    for ensemble in task._filters:
        ensemble.apply(instances)
    for name in dict.fromkeys(instances[0].filtered_resps):
        for question, found in zip(questions, raw, strict=True):
            metrics = task.process_results(
                question.doc, [one.filtered_resps[name] for one in question.instances]
            )
            for metric, value in metrics.items():
                found[metric, name] = (value, aggregation_name(task.aggregation().get(metric)))


def _numbers(
    raw: dict[tuple[str, str], tuple[Any, str | None]], weights: dict[tuple[str, str], float]
) -> dict[str, float]:
    scores: dict[str, float] = {}
    for (metric, name), (value, aggregation) in raw.items():
        if aggregation == "weighted_perplexity":
            scores[f"log_{metric},{name}"] = -float(value[0]) / weights[metric, name]
        elif aggregation == "bits_per_byte":
            scores[f"{metric},{name}"] = -float(value[0]) / math.log(2) / weights[metric, name]
        elif aggregation == "perplexity":
            scores[f"log_{metric},{name}"] = -float(value)
        elif _is_number(value):
            scores[f"{metric},{name}"] = float(value)
    return scores


def _is_number(value: Any) -> bool:
    """Numbers of Python and numpy, booleans among them; no text, no pair, no list."""
    return hasattr(value, "__float__") and not isinstance(value, str) and getattr(value, "ndim", 0) == 0
