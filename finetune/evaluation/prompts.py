"""What each arm is shown: the item as the tuned model was trained to see it, or told and shown for the untuned one."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any, Literal

from finetune.data.row_tokens import encode
from finetune.data.rows import Row
from finetune.data.tokenise import prompt_ids
from finetune.errors import UserError
from finetune.evaluation.items import Item, Message, item_from_row
from finetune.evaluation.raw_prompts import Prompt, encode_raw, raw_text
from finetune.evaluation.suite import FewShotSection, Suite

__all__ = ["ARMS", "Arm", "Prompt", "arm_messages", "build_prompts", "few_shot_examples", "system_of"]
# `start`: the model that training starts from, asked as the tuned one is: what a later stage of a chain is compared with.
# `teacher`: the model that a student learns from, asked in the same way.
Arm = Literal["zero_shot", "few_shot", "start", "teacher", "tuned"]
ARMS: tuple[Arm, ...] = ("zero_shot", "few_shot", "start", "teacher", "tuned")
_AS_TRAINED: tuple[Arm, ...] = ("start", "teacher", "tuned")
_FAULTS_SHOWN = 5


def build_prompts(
    suite: Suite,
    items: Sequence[Item],
    tokenizer: Any,
    *,
    arm: Arm,
    few_shot: Sequence[Row] | None = None,
) -> list[Prompt]:
    """One prompt per item, through the same template and tokenizer calls as a training row.

    few_shot: rows that the few-shot arm may draw examples from. In a suite of texts the prompt is the text itself, and
    with `prompt_format: raw` the item's text without a template.
    """
    if suite.task == "lm_eval":
        from finetune.evaluation.harness.answers import asking_only, task_prompt

        return [task_prompt(asking_only(tokenizer), item) for item in items]
    if suite.task == "text":
        return [_text_prompt(item, tokenizer) for item in items]
    shown = few_shot_examples(suite.few_shot, few_shot or [], items) if arm == "few_shot" else []
    if suite.prompt_format == "raw":
        return [_raw_prompt(suite, item, tokenizer, arm, shown) for item in items]
    prompts = []
    for item in items:
        ids, text = prompt_ids(arm_messages(suite, item, arm, shown), tokenizer, tools=item.tools)
        prompts.append(Prompt(text, list(ids)))
    return prompts


def _raw_prompt(suite: Suite, item: Item, tokenizer: Any, arm: Arm, shown: Sequence[Item]) -> Prompt:
    text = raw_text(item, suite.raw, system=system_of(suite, arm), shown=shown)
    ids, lead = encode_raw(text, tokenizer)
    if not ids:
        raise UserError("the prompt is empty", where=f"item {item.id}", fix="give the item a prompt")
    return Prompt(text, ids, lead)


def _text_prompt(item: Item, tokenizer: Any) -> Prompt:
    """A whole text behind one given token: the tokenizer's BOS, or its EOS where there is none."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = encode(item.reference, tokenizer)
    if not ids:
        raise UserError("the text is empty", where=f"item {item.id}", fix="remove the item")
    return Prompt(item.reference, [int(start), *ids], lead=1)


def arm_messages(suite: Suite, item: Item, arm: Arm, shown: Sequence[Item] = ()) -> list[Message]:
    """The conversation that an arm is given for an item, without the answer.

    The tuned arm, and the one it starts from, get the item as it is. The untuned arms get the suite's system message in place of the item's own,
    and the few-shot arm the examples as earlier turns.
    """
    if arm in _AS_TRAINED:
        return list(item.messages)
    system = system_of(suite, arm)
    own = [message for message in item.messages if message["role"] != "system"]
    if system is not None:
        head: list[Message] = [{"role": "system", "content": system}]
    else:
        head = [message for message in item.messages if message["role"] == "system"]
    turns: list[Message] = []
    for example in shown:
        turns += [message for message in example.messages if message["role"] != "system"]
        turns.append({"role": "assistant", "content": example.reference})
    return head + turns + own


def system_of(suite: Suite, arm: Arm) -> str | None:
    """What the suite tells an untuned arm; nothing to one that was trained on the items as they are."""
    if arm == "few_shot" and suite.few_shot is not None and suite.few_shot.system is not None:
        return suite.few_shot.system
    return None if arm in _AS_TRAINED else suite.zero_shot.system


def few_shot_examples(
    section: FewShotSection | None, rows: Sequence[Row], items: Sequence[Item]
) -> list[Item]:
    """The k examples of the few-shot arm, the same for every item, never an item itself (by content).

    Drawn with the suite's seed, one per group at most while groups last; with `spread_by`, the values of that tag
    take turns, so that k examples show k different ones. Raises UserError when there are fewer than k candidates.
    """
    if section is None:
        raise UserError(
            "the suite has no few_shot section", fix="add `few_shot:` to the suite, or leave the arm out"
        )
    asked = {item.content_hash for item in items}
    by_content = {item.content_hash: item for item in map(item_from_row, rows)}
    candidates = [
        by_content[key] for key in sorted(by_content) if key not in asked
    ]  # whatever the file's order
    if len(candidates) < section.k:
        raise UserError(
            f"{section.k} few-shot examples are asked for, {len(candidates)} rows can be shown",
            why=f"rows of {section.jsonl or f'the {section.split} split'}, without those that are asked themselves",
            fix="lower few_shot.k or give more rows",
        )
    generator = random.Random(section.seed)
    generator.shuffle(candidates)
    chosen: list[Item] = []
    while len(chosen) < section.k:
        left = [item for item in candidates if item not in chosen]
        chosen += _one_of_each(left, section.spread_by, {item.cluster for item in chosen})[
            : section.k - len(chosen)
        ]
    return chosen


def _one_of_each(candidates: Sequence[Item], tag: str | None, used_groups: Collection[str]) -> list[Item]:
    """The first candidate of each value of `tag` (of each group without a tag), unused groups preferred."""
    first: dict[str, Item] = {}
    for item in sorted(candidates, key=lambda item: item.cluster in used_groups):
        value = item.cluster if tag is None else item.tags.get(tag)
        if value is None:
            raise UserError(
                f"row {item.id} has no tag '{tag}'", where="few_shot.spread_by", fix="name a tag of every row"
            )
        first.setdefault(value, item)
    return list(first.values())
