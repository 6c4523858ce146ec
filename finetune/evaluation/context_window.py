"""Items that do not fit the model's context are refused by name before the work, never cut in silence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.errors import Fault, UserError
from finetune.evaluation.items import Item
from finetune.evaluation.measure import choice_tokens
from finetune.evaluation.prompts import Arm, Prompt
from finetune.evaluation.suite import Suite

_FAULTS_SHOWN = 5


class TooLongError(UserError):
    """Items need more tokens than the model's context has."""


def refuse_too_long(
    suite: Suite,
    items: Sequence[Item],
    prompts: Sequence[Prompt],
    context_tokens: int | None,
    arm: Arm,
    tokenizer: Any,
) -> None:
    """An item whose prompt and longest answer do not fit into `context_tokens` is a TooLongError that names it.

    context_tokens: None where the model has no limit, or it is not known.
    """
    if context_tokens is None:
        return
    long = [
        (item, needed)
        for item, prompt in zip(items, prompts, strict=True)
        if (needed := tokens_needed(suite, item, prompt, tokenizer)) > context_tokens
    ]
    faults = [
        Fault(
            f"the item needs {needed} tokens; the context is {context_tokens}",
            where=f"suite {suite.name}, arm {arm}, item {item.id}",
            why=_why(suite),
            fix=_fix(suite, arm),
        )
        for item, needed in long[:_FAULTS_SHOWN]
    ]
    if len(long) > _FAULTS_SHOWN:
        faults.append(Fault(f"{len(long) - _FAULTS_SHOWN} more items are too long"))
    if faults:
        raise TooLongError(faults)


def tokens_needed(suite: Suite, item: Item, prompt: Prompt, tokenizer: Any) -> int:
    """Tokens of the prompt and the longest answer that it may get."""
    if suite.task == "lm_eval":
        from finetune.evaluation.harness import answers

        return answers.tokens_needed(answers.asking_only(tokenizer), item)
    if suite.task == "text":
        return len(prompt.ids)
    if suite.task == "choice":
        return max(
            len(given) + len(scored) for given, scored in choice_tokens(suite, item, prompt, tokenizer)
        )
    return len(prompt.ids) + suite.decoding.max_new_tokens


def _why(suite: Suite) -> str:
    if suite.task == "generate":
        return f"{suite.decoding.max_new_tokens} tokens are kept for the answer"
    if suite.task == "lm_eval":
        return "the task's prompt with its examples and the answer go into one context"
    return (
        "a text is measured as a whole" if suite.task == "text" else "prompt and choice are measured together"
    )


def _fix(suite: Suite, arm: Arm) -> str:
    if suite.task == "lm_eval":
        return "lower items.num_fewshot in a suite over this task, or take a task with shorter documents"
    remedies = ["show fewer examples"] if arm == "few_shot" else []
    remedies += ["lower decoding.max_new_tokens"] if suite.task == "generate" else []
    return ", ".join([*remedies, "shorten or remove the item"])
