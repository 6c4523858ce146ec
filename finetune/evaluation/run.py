"""Run one arm of a suite: answer, save as it goes, score, summarise. The same for the untuned and the tuned model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.data.rows import Row
from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.evaluation.answer_keys import Ask, arm_key, wanted_answers
from finetune.evaluation.answering import Answering
from finetune.evaluation.early_stop import EarlyStop, blocks_of
from finetune.evaluation.generate import Completion
from finetune.evaluation.items import Item, items_digest, refuse_duplicates
from finetune.evaluation.measure import check_choices
from finetune.evaluation.prompts import Arm, Prompt, build_prompts
from finetune.evaluation.records import (
    ArmSummary,
    PartialRecords,
    Record,
    SavedAnswers,
    is_intact,
    read_summary,
    saved_answers,
    summary_path,
    write_arm,
)
from finetune.evaluation.scoring import check_references, score_records, summarise_arm
from finetune.evaluation.slicing import check_slices
from finetune.evaluation.suite import Suite
from finetune.evaluation.suite_data import check_units
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
    baseline: Sequence[Record] | None = None,
) -> ArmSummary:
    """Answer every item with one arm, as often as the suite says, and write `<arm>.jsonl` and `<arm>.summary.json` into `out_folder`.

    model: a transformers model, one wrapped by PEFT, or a `ServerModel`. batch_size: rows decoded, or requests sent, at
    a time. key: digest of the weights, their quantization, the adapter and the compute type; tokenizer, template, decoding,
    prompt and repeat are added to it here, answer by answer (see `answer_keys`). base_model: the untuned model, only for
    suites that measure KL against it with a model that carries no adapter. baseline: the answers that this arm will be
    compared with; a suite with `stop_early` then asks no more than it needs.
    An answer that is saved under its key is not given again, only scored again: an interrupted arm continues, and
    a suite with more items or repeats asks for those alone. Raises UserError before any answer for an empty suite,
    repeated ids, references that cannot be scored, and prompts that do not fit the context.
    """
    job = prepare_arm(tokenizer, suite, items, arm=arm, few_shot=few_shot, key=key)
    return job.evaluate(
        model,
        out_folder,
        batch_size=batch_size,
        adapter_sha256=adapter_sha256,
        base_model=base_model,
        baseline=baseline,
    )


@dataclass(frozen=True)
class ArmJob:
    """One arm of a suite with everything that decides its answers, before any is given. Made by `prepare_arm`."""

    tokenizer: Any
    suite: Suite
    items: Sequence[Item]
    prompts: Sequence[Prompt]
    arm: Arm
    asks: Sequence[Ask]

    @property
    def key(self) -> str:
        """Digest of everything that decides the arm's answers, over all of them."""
        return arm_key(self.asks)

    def saved(self, folder: Path) -> ArmSummary | None:
        """The arm's summary where `folder` has all its answers, scored as the suite scores now; else None."""
        if not summary_path(folder, self.arm).is_file():
            return None
        summary = read_summary(folder, self.arm)
        if not is_intact(folder, summary):
            return None  # edited or gone: answered again, not believed
        now = (self.key, self.suite.digest, items_digest(self.items))
        if (summary.key, summary.suite_digest, summary.items_digest) == now:
            return summary
        known = saved_answers([folder], self.arm, {ask.key for ask in self.asks})
        if len(known.by_key) < len(self.asks):
            return None
        return _finish(
            self,
            known,
            folder,
            adapter_sha256=summary.adapter_sha256,
            batch_size=summary.batch_size,
            backend=summary.backend,
        )

    def evaluate(
        self,
        model: Any,
        folder: Path,
        *,
        batch_size: int,
        adapter_sha256: str | None = None,
        base_model: Any = None,
        baseline: Sequence[Record] | None = None,
        reuse: Sequence[Path] = (),
    ) -> ArmSummary:
        """Give the answers that `folder` lacks (see `evaluate_arm`). reuse: other folders that may have some of them."""
        saved = self.saved(folder)
        if saved is not None:
            return saved
        answering = Answering(
            model, self.tokenizer, self.suite, self.items, self.prompts, self.arm, batch_size, base_model
        )
        answering.check()
        stop = None
        if self.suite.stop_early is not None and baseline is not None:
            stop = EarlyStop(self.suite, baseline, self.items)
        known = saved_answers([folder, *reuse], self.arm, {ask.key for ask in self.asks})
        answers = _answer_all(self, answering, known, stop, folder=folder)
        return _finish(
            self,
            answers,
            folder,
            adapter_sha256=adapter_sha256,
            batch_size=batch_size,
            backend="server" if answering.on_server else "transformers",
        )


def prepare_arm(
    tokenizer: Any,
    suite: Suite,
    items: Sequence[Item],
    *,
    arm: Arm,
    few_shot: Sequence[Row] | None = None,
    key: str,
) -> ArmJob:
    """Build the prompts and the keys of all answers. Raises UserError as `evaluate_arm` does before any answer."""
    if not items:
        raise UserError(
            "the suite has no items",
            where=f"suite {suite.name}",
            fix="check its items section and the dataset's split",
        )
    refuse_duplicates([item.id for item in items], f"suite {suite.name}")
    check_slices(suite, items)
    check_units(suite, items)
    if suite.task == "generate":
        check_references(suite, items)
    elif suite.task == "choice":
        check_choices(suite.name, items)
    prompts = build_prompts(suite, items, tokenizer, arm=arm, few_shot=few_shot)
    asks = wanted_answers(suite, items, prompts, tokenizer, arm=arm, model_key=key)
    return ArmJob(tokenizer, suite, items, prompts, arm, asks)


def _finish(
    job: ArmJob,
    answers: SavedAnswers,
    folder: Path,
    *,
    adapter_sha256: str | None,
    batch_size: int,
    backend: str,
) -> ArmSummary:
    """Score the answers with the suite and the items as they are now, and write the arm."""
    given = [ask for ask in job.asks if ask.key in answers.by_key]
    records = [_again(job, answers, ask) for ask in given]
    if job.suite.task == "lm_eval":
        from finetune.evaluation.harness.answers import task_scores

        own = task_scores([job.items[ask.place] for ask in given], [record["output"] for record in records])
        records = [{**record, "task_scores": scores} for record, scores in zip(records, own, strict=True)]
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
    if len(given) < len(job.asks):
        summary = replace(summary, stopped=_stopped(job, given))
    return write_arm(folder, summary, records)


def _stopped(job: ArmJob, given: Sequence[Ask]) -> dict[str, int]:
    return {
        "answered": len({ask.place for ask in given}),
        "of": len(job.items),
        "largest_cluster": max(Counter(item.cluster for item in job.items).values()),
    }


def _answer_all(
    job: ArmJob, answering: Answering, known: SavedAnswers, stop: EarlyStop | None, *, folder: Path
) -> SavedAnswers:
    """The known answers and the missing ones, which are saved as they come; with `stop`, up to the block that is enough."""
    label = f"evaluate {job.suite.name}, {job.arm}"
    unit = "items" if job.suite.decoding.repeats == 1 else "answers"
    blocks = [list(job.asks)]
    if stop is not None and job.suite.stop_early is not None:
        blocks = blocks_of(job.suite.stop_early, job.items, job.asks)
    answers, seen = SavedAnswers(dict(known.by_key), known.seconds), SavedAnswers()
    with (
        PartialRecords(folder, job.arm, known) as partial,
        Progress(label, len(job.asks), unit) as progress,
    ):
        progress.skip(len(known.by_key))
        started = time.perf_counter()
        for block in blocks:
            todo = [ask for ask in block if ask.key not in answers.by_key]
            for completion in answering.answers(todo) if todo else ():
                ask = todo[completion.index]
                answers.seconds = known.seconds + time.perf_counter() - started
                answers.by_key[ask.key] = _record(job, ask, _answer(completion))
                partial.add(answers.by_key[ask.key], answers.seconds)
                progress.advance()
            seen.by_key |= {ask.key: answers.by_key[ask.key] for ask in block}
            if stop is not None and stop.enough([_again(job, answers, ask) for ask in block]):
                break
    seen.seconds = answers.seconds
    return seen


def _again(job: ArmJob, answers: SavedAnswers, ask: Ask) -> Record:
    """A saved answer beside its item as it is now."""
    return _record(job, ask, {name: answers.by_key[ask.key][name] for name in _ANSWER})


_ANSWER = ("output", "output_tokens", "finish_reason", "latency_seconds")


def _answer(completion: Completion) -> Record:
    return {
        "output": completion.text,
        "output_tokens": completion.output_tokens,
        "finish_reason": completion.finish_reason,
        "latency_seconds": round(completion.latency_seconds, 6),
    }


def _record(job: ArmJob, ask: Ask, answer: Record) -> Record:
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
        "question": item.asked,
        "prompt_tokens": len(prompt.ids),
        "reference": item.reference,
        **answer,
        "scores": {},
        "key": ask.key,
    }
    return record if item.check is None else {**record, "check": item.check}
