"""Run one arm of a suite: answer, save as it goes, score, summarise. The same for the untuned and the tuned model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.rows import Row
from finetune.data.tokenise import generation_stop_ids
from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.evaluation.generate import Completion, common_prefix, generate
from finetune.evaluation.items import Item, items_digest, refuse_duplicates
from finetune.evaluation.measure import check_choices, measure_choices, measure_texts
from finetune.evaluation.prompts import Arm, Prompt, build_prompts, refuse_too_long
from finetune.evaluation.records import (
    ArmSummary,
    PartialRecords,
    Record,
    read_records,
    read_summary,
    summary_path,
    write_arm,
)
from finetune.evaluation.scoring import check_references, rescored, score_records, summarise_arm
from finetune.evaluation.server import ServerModel, server_answers
from finetune.evaluation.stopping import stop_rule
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
    base_model: Any = None,
) -> ArmSummary:
    """Answer every item with one arm and write `<arm>.jsonl` and `<arm>.summary.json` into `out_folder`.

    model: a transformers model, one wrapped by PEFT, or a `ServerModel`. batch_size: rows decoded, or requests sent, at
    a time. key: digest of the weights, their quantization, the adapter and the compute type. Prompts (with tokenizer, template,
    system message and examples), decoding and items are added to it here. base_model: the untuned model, only for
    suites that measure KL against it with a model that carries no adapter.
    An arm that is complete under its key is not answered again, only scored again; an interrupted one continues after
    the answers it has; under another key it starts over. Raises UserError before any answer for an empty suite,
    repeated ids, references that cannot be scored, and prompts that do not fit the context.
    """
    job = _prepare(tokenizer, suite, items, arm, few_shot, key)
    saved = _saved(job, out_folder)
    if saved is not None:
        return saved
    _check_model(job, model)
    records, seconds = _answer_all(job, model, base_model, batch_size=batch_size, folder=out_folder)
    records = score_records(suite, records)
    summary = summarise_arm(
        suite,
        records,
        arm=arm,
        seconds=seconds,
        key=job.key,
        items_digest=items_digest(items),
        adapter_sha256=adapter_sha256,
        batch_size=batch_size,
        template_sha256=digest_json(tokenizer.chat_template),
        backend="server" if isinstance(model, ServerModel) else "transformers",
    )
    write_arm(out_folder, summary, records)
    return summary


def _check_model(job: _Job, model: Any) -> None:
    """What has to be known of the model before the work: its context, and whether it can do the suite's task."""
    if not isinstance(model, ServerModel):
        context = getattr(_inner(model).config.get_text_config(), "max_position_embeddings", None)
        refuse_too_long(job.suite, job.items, job.prompts, context, job.arm)
    elif job.suite.task != "generate":
        raise UserError(
            f"suite {job.suite.name} measures likelihoods, which a server does not give for whole texts",
            fix="evaluate this suite without --server",
        )


def saved_arm(
    tokenizer: Any,
    suite: Suite,
    items: Sequence[Item],
    *,
    arm: Arm,
    few_shot: Sequence[Row] | None = None,
    out_folder: Path,
    key: str,
) -> ArmSummary | None:
    """The summary of an arm that is complete under this key, scored with the suite as it is now; None when answers are
    missing. Needs no model."""
    return _saved(_prepare(tokenizer, suite, items, arm, few_shot, key), out_folder)


@dataclass(frozen=True)
class _Job:
    tokenizer: Any
    suite: Suite
    items: Sequence[Item]
    prompts: Sequence[Prompt]
    arm: Arm
    key: str


def _prepare(
    tokenizer: Any,
    suite: Suite,
    items: Sequence[Item],
    arm: Arm,
    few_shot: Sequence[Row] | None,
    key: str,
) -> _Job:
    if not items:
        raise UserError(
            "the suite has no items",
            where=f"suite {suite.name}",
            fix="check its items section and the dataset's split",
        )
    refuse_duplicates([item.id for item in items], f"suite {suite.name}")
    if suite.task == "generate":
        check_references(suite, items)
    elif suite.task == "choice":
        check_choices(suite.name, items)
    prompts = build_prompts(suite, items, tokenizer, arm=arm, few_shot=few_shot)
    # The token ids carry tokenizer and template; scorers have no part in what the answers are.
    full_key = digest_json(
        {
            "model": key,
            "arm": arm,
            "task": suite.task,
            "decoding": suite.decoding.model_dump(mode="json"),
            "items": items_digest(items),
            "prompts": digest_json([prompt.ids for prompt in prompts]),
        }
    )
    return _Job(tokenizer, suite, items, prompts, arm, full_key)


def _saved(job: _Job, folder: Path) -> ArmSummary | None:
    if not summary_path(folder, job.arm).is_file():
        return None
    summary = read_summary(folder, job.arm)
    if summary.key != job.key:
        return None
    if summary.suite_digest != job.suite.digest:
        records, summary = rescored(job.suite, read_records(folder, job.arm), summary)
        write_arm(folder, summary, records)
    return summary


def _answer_all(
    job: _Job, model: Any, base_model: Any, *, batch_size: int, folder: Path
) -> tuple[list[Record], float]:
    items = job.items
    label = f"evaluate {job.suite.name}, {job.arm}"
    with (
        PartialRecords(folder, job.arm, job.key) as partial,
        Progress(label, len(items), "items") as progress,
    ):
        done = dict(partial.done)
        progress.skip(len(done))
        todo = [index for index, item in enumerate(items) if item.id not in done]
        started = time.perf_counter()
        seconds = partial.seconds_before
        for completion in _answers(job, todo, model, base_model, batch_size):
            index = todo[completion.index]
            record = _record(items[index], job.prompts[index], completion, job.arm)
            seconds = partial.seconds_before + time.perf_counter() - started
            partial.add(record, seconds)
            done[items[index].id] = record
            progress.advance()
    return [done[item.id] for item in items], seconds


def _answers(
    job: _Job, todo: Sequence[int], model: Any, base_model: Any, batch_size: int
) -> Iterator[Completion]:
    """The completions of the items `todo`; `Completion.index` is a place in `todo`."""
    prompts, items = [job.prompts[index] for index in todo], [job.items[index] for index in todo]
    if isinstance(model, ServerModel):
        yield from server_answers(model, prompts, job.suite.decoding, concurrency=batch_size)
        return
    if job.suite.task == "choice":
        yield from measure_choices(model, job.tokenizer, prompts, items)
        return
    if job.suite.task == "text":
        yield from measure_texts(
            model,
            prompts,
            every_prompt=job.prompts,
            kl_to_base=job.suite.measures_kl,
            tuned=job.arm == "tuned",
            base_model=base_model,
        )
        return
    decoding = job.suite.decoding
    rule = stop_rule(
        job.tokenizer,
        max_new_tokens=decoding.max_new_tokens,
        stop_strings=decoding.stop,
        stop_ids=_stop_ids(job.tokenizer, _inner(model)),
    )
    # Over all items, not only those left, so that a continued run repeats the arithmetic of an uninterrupted one.
    prefix = common_prefix([prompt.ids for prompt in job.prompts])
    ids = [prompt.ids for prompt in prompts]
    yield from generate(model, ids, rule, batch_size=batch_size, shared_prefix=prefix)


def _stop_ids(tokenizer: Any, model: Any) -> set[int]:
    """Every id that ends an answer: the template's end of turn, the tokenizer's and the model's own."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(generation_stop_ids(tokenizer))
    return ids | ({own} if isinstance(own, int) else set(own or ()))


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _record(item: Item, prompt: Prompt, completion: Completion, arm: Arm) -> Record:
    record: Record = {
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
    return record if item.check is None else {**record, "check": item.check}
