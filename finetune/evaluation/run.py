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
from finetune.evaluation.answer_keys import Ask, arm_key, wanted_answers
from finetune.evaluation.generate import Completion, common_prefix, generate
from finetune.evaluation.items import Item, items_digest, refuse_duplicates
from finetune.evaluation.measure import check_choices, measure_choices, measure_texts
from finetune.evaluation.prompts import Arm, Prompt, build_prompts, refuse_too_long
from finetune.evaluation.records import (
    ArmSummary,
    PartialRecords,
    Record,
    SavedAnswers,
    read_summary,
    saved_answers,
    summary_path,
    write_arm,
)
from finetune.evaluation.sampling import Picker, Sampler, greedy, stream_name
from finetune.evaluation.scoring import check_references, score_records, summarise_arm
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
    reuse: Sequence[Path] = (),
) -> ArmSummary:
    """Answer every item with one arm, as often as the suite says, and write `<arm>.jsonl` and `<arm>.summary.json` into `out_folder`.

    model: a transformers model, one wrapped by PEFT, or a `ServerModel`. batch_size: rows decoded, or requests sent, at
    a time. key: digest of the weights, their quantization, the adapter and the compute type; tokenizer, template, decoding,
    prompt and repeat are added to it here, answer by answer (see `answer_keys`). base_model: the untuned model, only for
    suites that measure KL against it with a model that carries no adapter. reuse: folders with answers of the same arm,
    perhaps to other items.
    An answer that is saved under its key is not given again, only scored again: an interrupted arm continues, and
    a suite with more items or repeats asks for those alone. Raises UserError before any answer for an empty suite,
    repeated ids, references that cannot be scored, and prompts that do not fit the context.
    """
    job = _prepare(tokenizer, suite, items, arm, few_shot, key)
    saved = _saved(job, out_folder)
    if saved is not None:
        return saved
    _check_model(job, model)
    known = saved_answers([out_folder, *reuse], arm, job.wanted)
    answers = _answer_all(job, model, base_model, known, batch_size=batch_size, folder=out_folder)
    return _finish(
        job,
        answers,
        out_folder,
        adapter_sha256=adapter_sha256,
        batch_size=batch_size,
        backend="server" if isinstance(model, ServerModel) else "transformers",
    )


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
    """The summary of an arm that has all its answers saved, scored with the suite as it is now; None when answers are
    missing. Needs no model."""
    return _saved(_prepare(tokenizer, suite, items, arm, few_shot, key), out_folder)


@dataclass(frozen=True)
class _Job:
    tokenizer: Any
    suite: Suite
    items: Sequence[Item]
    prompts: Sequence[Prompt]
    arm: Arm
    asks: Sequence[Ask]

    @property
    def wanted(self) -> set[str]:
        return {ask.key for ask in self.asks}

    @property
    def key(self) -> str:
        return arm_key(self.asks)


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
    asks = wanted_answers(suite, items, prompts, tokenizer, arm=arm, model_key=key)
    return _Job(tokenizer, suite, items, prompts, arm, asks)


def _saved(job: _Job, folder: Path) -> ArmSummary | None:
    if not summary_path(folder, job.arm).is_file():
        return None
    summary = read_summary(folder, job.arm)
    now = (job.key, job.suite.digest, items_digest(job.items))
    if (summary.key, summary.suite_digest, summary.items_digest) == now:
        return summary
    known = saved_answers([folder], job.arm, job.wanted)
    if len(known.by_key) < len(job.asks):
        return None
    return _finish(
        job,
        known,
        folder,
        adapter_sha256=summary.adapter_sha256,
        batch_size=summary.batch_size,
        backend=summary.backend,
    )


def _finish(
    job: _Job,
    answers: SavedAnswers,
    folder: Path,
    *,
    adapter_sha256: str | None,
    batch_size: int,
    backend: str,
) -> ArmSummary:
    """Score the answers with the suite and the items as they are now, and write the arm."""
    records = [
        _record(job, ask, {name: answers.by_key[ask.key][name] for name in _ANSWER})
        for ask in job.asks
        if ask.key in answers.by_key
    ]
    records = score_records(job.suite, records)
    summary = summarise_arm(
        job.suite,
        records,
        arm=job.arm,
        seconds=answers.seconds,
        key=job.key,
        items_digest=items_digest(job.items),
        adapter_sha256=adapter_sha256,
        batch_size=batch_size,
        template_sha256=digest_json(job.tokenizer.chat_template),
        backend=backend,
    )
    write_arm(folder, summary, records)
    return summary


def _answer_all(
    job: _Job, model: Any, base_model: Any, known: SavedAnswers, *, batch_size: int, folder: Path
) -> SavedAnswers:
    """The known answers and the missing ones, which are saved as they come."""
    label = f"evaluate {job.suite.name}, {job.arm}"
    unit = "items" if job.suite.decoding.repeats == 1 else "answers"
    answers = SavedAnswers(dict(known.by_key), known.seconds)
    todo = [ask for ask in job.asks if ask.key not in known.by_key]
    with (
        PartialRecords(folder, job.arm, known) as partial,
        Progress(label, len(job.asks), unit) as progress,
    ):
        progress.skip(len(known.by_key))
        started = time.perf_counter()
        for completion in _answers(job, todo, model, base_model, batch_size):
            ask = todo[completion.index]
            answers.seconds = known.seconds + time.perf_counter() - started
            answers.by_key[ask.key] = _record(job, ask, _answer(completion))
            partial.add(answers.by_key[ask.key], answers.seconds)
            progress.advance()
    return answers


def _answers(
    job: _Job, todo: Sequence[Ask], model: Any, base_model: Any, batch_size: int
) -> Iterator[Completion]:
    """The completions of `todo`; `Completion.index` is a place in it."""
    prompts, items = [job.prompts[ask.place] for ask in todo], [job.items[ask.place] for ask in todo]
    decoding = job.suite.decoding
    streams = [stream_name(decoding.seed, job.items[ask.place].id, ask.repeat) for ask in todo]
    if isinstance(model, ServerModel):
        yield from server_answers(model, prompts, decoding, streams=streams, concurrency=batch_size)
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
    rule = stop_rule(
        job.tokenizer,
        max_new_tokens=decoding.max_new_tokens,
        stop_strings=decoding.stop,
        stop_ids=_stop_ids(job.tokenizer, _inner(model)),
    )
    # Over all items, not only those left, so that a continued run repeats the arithmetic of an uninterrupted one.
    prefix = common_prefix([prompt.ids for prompt in job.prompts])
    ids = [prompt.ids for prompt in prompts]
    pick: Picker = greedy
    if decoding.is_sampled:
        pick = Sampler(streams, temperature=decoding.temperature, top_p=decoding.top_p)
    yield from generate(model, ids, rule, batch_size=batch_size, shared_prefix=prefix, pick=pick)


def _stop_ids(tokenizer: Any, model: Any) -> set[int]:
    """Every id that ends an answer: the template's end of turn, the tokenizer's and the model's own."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(generation_stop_ids(tokenizer))
    return ids | ({own} if isinstance(own, int) else set(own or ()))


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


_ANSWER = ("output", "output_tokens", "finish_reason", "latency_seconds")


def _answer(completion: Completion) -> Record:
    return {
        "output": completion.text,
        "output_tokens": completion.output_tokens,
        "finish_reason": completion.finish_reason,
        "latency_seconds": round(completion.latency_seconds, 6),
    }


def _record(job: _Job, ask: Ask, answer: Record) -> Record:
    """An answer beside the item as it is now."""
    item, prompt = job.items[ask.place], job.prompts[ask.place]
    record: Record = {
        "item": item.id,
        "repeat": ask.repeat,
        "arm": job.arm,
        "cluster": item.cluster,
        "source": item.source,
        "tags": item.tags,
        "prompt": prompt.text,
        "prompt_tokens": len(prompt.ids),
        "reference": item.reference,
        **answer,
        "scores": {},
        "key": ask.key,
    }
    return record if item.check is None else {**record, "check": item.check}
