"""Run one arm of a suite: generate, save as it goes, score, summarise. The same for the untuned and the tuned model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.data.rows import Row
from finetune.data.tokenise import generation_stop_ids
from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.evaluation.generate import Completion, common_prefix, generate
from finetune.evaluation.items import Item, items_digest, refuse_duplicates
from finetune.evaluation.prompts import Arm, Prompt, build_prompts
from finetune.evaluation.records import (
    ArmSummary,
    PartialRecords,
    Record,
    read_records,
    read_summary,
    summary_path,
    write_arm,
)
from finetune.evaluation.scoring import check_references, score_records, summarise_arm
from finetune.evaluation.stopping import StopRule, stop_rule
from finetune.evaluation.suite import Suite
from finetune.telemetry.progress import Progress


def evaluate_arm(
    model: Any,
    tokenizer: Any,
    suite: Suite,
    items: Sequence[Item],
    *,
    arm: Arm,
    few_shot: Sequence[Row] | None = None,
    batch_size: int,
    out_folder: Path,
    key: str,
    adapter_sha256: str | None = None,
) -> ArmSummary:
    """Answer every item with one arm and write `<arm>.jsonl` and `<arm>.summary.json` into `out_folder`.

    key: digest of the weights, their quantization, the adapter and the compute type. Prompts (with tokenizer, template,
    system message and examples), decoding and items are added to it here.
    An arm that is complete under its key is not generated again, only scored again; an interrupted one continues after
    the answers it has; under another key it starts over. Raises UserError before any generation for an empty suite,
    repeated ids, references that cannot be scored, and prompts that do not fit the context.
    """
    _refuse_unusable(suite, items)
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    context = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
    prompts = build_prompts(suite, items, tokenizer, arm=arm, few_shot=few_shot, context_tokens=context)
    full_key = _arm_key(key, suite, items, prompts, arm)
    saved = _saved_answers(out_folder, arm, full_key)
    if saved is None:
        rule = stop_rule(
            tokenizer,
            max_new_tokens=suite.decoding.max_new_tokens,
            stop_strings=suite.decoding.stop,
            stop_ids=_stop_ids(tokenizer, inner),
        )
        saved = _answer_all(
            model, items, prompts, rule, arm=arm, batch_size=batch_size, folder=out_folder, key=full_key
        )
    records, seconds = score_records(suite, saved[0]), saved[1]
    summary = summarise_arm(
        suite,
        records,
        arm=arm,
        seconds=seconds,
        key=full_key,
        items_digest=items_digest(items),
        adapter_sha256=adapter_sha256,
        batch_size=batch_size,
        template_sha256=digest_json(tokenizer.chat_template),
    )
    write_arm(out_folder, summary, records)
    return summary


def _refuse_unusable(suite: Suite, items: Sequence[Item]) -> None:
    if not items:
        raise UserError(
            "the suite has no items",
            where=f"suite {suite.name}",
            fix="check its items section and the dataset's split",
        )
    refuse_duplicates([item.id for item in items], f"suite {suite.name}")
    check_references(suite, items)


def _arm_key(key: str, suite: Suite, items: Sequence[Item], prompts: Sequence[Prompt], arm: Arm) -> str:
    """What the answers depend on. The token ids carry tokenizer and template; scorers have no part in it."""
    return digest_json(
        {
            "model": key,
            "arm": arm,
            "decoding": suite.decoding.model_dump(mode="json"),
            "items": items_digest(items),
            "prompts": digest_json([prompt.ids for prompt in prompts]),
        }
    )


def _stop_ids(tokenizer: Any, model: Any) -> set[int]:
    """Every id that ends an answer: the template's end of turn, the tokenizer's and the model's own."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(generation_stop_ids(tokenizer))
    return ids | ({own} if isinstance(own, int) else set(own or ()))


def _saved_answers(folder: Path, arm: Arm, key: str) -> tuple[list[Record], float] | None:
    """Answers and seconds of a complete arm under this key."""
    if not summary_path(folder, arm).is_file():
        return None
    summary = read_summary(folder, arm)
    if summary.key != key:
        return None
    return read_records(folder, arm), summary.seconds


def _answer_all(
    model: Any,
    items: Sequence[Item],
    prompts: Sequence[Prompt],
    rule: StopRule,
    *,
    arm: Arm,
    batch_size: int,
    folder: Path,
    key: str,
) -> tuple[list[Record], float]:
    ids = [prompt.ids for prompt in prompts]
    prefix = common_prefix(ids)
    with (
        PartialRecords(folder, arm, key) as partial,
        Progress(f"evaluate {arm}", len(items), "items") as progress,
    ):
        done = dict(partial.done)
        progress.skip(len(done))
        todo = [index for index, item in enumerate(items) if item.id not in done]
        started = time.perf_counter()
        seconds = partial.seconds_before
        answers = generate(
            model, [ids[index] for index in todo], rule, batch_size=batch_size, shared_prefix=prefix
        )
        for completion in answers:
            index = todo[completion.index]
            record = _record(items[index], prompts[index], completion, arm)
            seconds = partial.seconds_before + time.perf_counter() - started
            partial.add(record, seconds)
            done[items[index].id] = record
            progress.advance()
    return [done[item.id] for item in items], seconds


def _record(item: Item, prompt: Prompt, completion: Completion, arm: Arm) -> Record:
    return {
        "item": item.id,
        "arm": arm,
        "cluster": item.cluster,
        "source": item.source,
        "tags": item.tags,
        "prompt": prompt.text,
        "reference": item.reference,
        "output": completion.text,
        "prompt_tokens": len(prompt.ids),
        "output_tokens": completion.output_tokens,
        "finish_reason": completion.finish_reason,
        "latency_seconds": round(completion.latency_seconds, 6),
        "scores": {},
    }
