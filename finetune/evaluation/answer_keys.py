"""What decides an answer, as a digest: an answer is used again exactly where its key is the one that is wanted.

The key covers weights, adapter and compute type (the caller's digest of them), tokenizer, chat template, decoding, the
item's prompt as token ids, and the repeat. Scorers, references and tags have no part in what is answered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.digest import digest_bytes, digest_json
from finetune.evaluation.items import Item
from finetune.evaluation.prompts import Prompt
from finetune.evaluation.suite import Suite


@dataclass(frozen=True)
class Ask:
    """One answer that is wanted: to the item at `place` in the suite, for the `repeat`-th time."""

    place: int
    repeat: int
    key: str


def wanted_answers(
    suite: Suite,
    items: Sequence[Item],
    prompts: Sequence[Prompt],
    tokenizer: Any,
    *,
    arm: str,
    model_key: str,
) -> list[Ask]:
    """Every answer of an arm, item by item and within an item repeat by repeat."""
    frame: dict[str, Any] = {
        "model": model_key,
        "arm": arm,
        "task": suite.task,
        "tokenizer": tokenizer_digest(tokenizer),
        "template": digest_json(tokenizer.chat_template),
    }
    if suite.task == "generate":
        frame["decoding"] = suite.decoding.of_one_answer()
    elif suite.task == "text":  # a text's measurement holds means over all texts
        frame |= {"kl": suite.measures_kl, "texts": digest_json([prompt.ids for prompt in prompts])}
    common = digest_json(frame)
    return [
        Ask(place, repeat, _key(common, suite, item, prompt, repeat))
        for place, (item, prompt) in enumerate(zip(items, prompts, strict=True))
        for repeat in range(suite.decoding.repeats)
    ]


def _key(common: str, suite: Suite, item: Item, prompt: Prompt, repeat: int) -> str:
    choices = (item.check or {}).get("choices") if suite.task == "choice" else None
    if item.harness_question is not None:
        choices = item.harness_question.definition()
    return digest_json([common, item.id, prompt.ids, choices, repeat])


def arm_key(asks: Sequence[Ask]) -> str:
    """One digest over all answers of an arm."""
    return digest_json([ask.key for ask in asks])


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of everything that turns text into ids and back; padding and truncation, which are set per call, aside."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return digest_json([tokenizer.get_vocab(), {**tokenizer.special_tokens_map}])
    definition = json.loads(backend.to_str())
    definition |= {"padding": None, "truncation": None}
    return digest_bytes(json.dumps([definition, tokenizer.eos_token, tokenizer.bos_token]).encode())
