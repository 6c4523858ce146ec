"""Generate and verify: a model's answers to the prompts of a dataset, judged, sorted, and written as rows to learn from.

Every answer is drawn from a generator of its own, so neither the batch nor an interruption changes it; answers and
verdicts are kept as they come. Only train rows are asked: what is learnt from the answers never met an evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.build import build_dataset, default_builds_root, load_spec
from finetune.data.curate.verifiers import Verifier
from finetune.data.generated.judge import open_verifier, verifier_digest
from finetune.data.generated.select import FORMAT, AnsweredRow, Judged, pass_rates, select_rows
from finetune.data.generated.store import (
    LineStore,
    complete_rows,
    found_rows,
    generated_folder,
    write_rows,
)
from finetune.data.row_tokens import prompt_ids
from finetune.data.rows import Row, digest_content
from finetune.data.spec import DatasetSpec
from finetune.data.spec_source import GeneratedSource
from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.evaluation.drawn import draw_answers
from finetune.evaluation.raw_prompts import Prompt
from finetune.evaluation.server import ServerModel
from finetune.evaluation.suite_sections import DecodingSection
from finetune.paths import find_declarative
from finetune.pipeline.answerer import Answerer, Say, find_answerer
from finetune.telemetry.progress import Progress

DEFAULT_BATCH_SIZE = 32
_REASONS_SHOWN = 10


@dataclass(frozen=True)
class Generated:
    """The rows of one source. `fresh`: made now, not found."""

    folder: Path
    manifest: dict[str, Any]
    fresh: bool


@dataclass(frozen=True)
class _Job:
    """One generated source with everything that it names."""

    source: GeneratedSource
    folder: Path  # of the spec
    prompts_spec: DatasetSpec
    prompts_digest: str
    rows: list[Row]
    prompts: list[Prompt]
    answerer: Answerer
    where: Callable[[str], str]

    @property
    def decoding(self) -> DecodingSection:
        given = self.source.sampling.model_dump()
        return DecodingSection(repeats=given.pop("answers"), **given)

    @property
    def answers_key(self) -> str:
        """Of everything that decides an answer but its prompt and its number."""
        template = digest_json(self.answerer.tokenizer.chat_template)
        return digest_json([self.answerer.digest, template, self.decoding.of_one_answer()])

    @property
    def verifier_digest(self) -> str:
        return verifier_digest(self.source.verifier, prompts=self.prompts_spec, folder=self.folder)

    @property
    def verdicts_key(self) -> str:
        return digest_json([self.answers_key, self.verifier_digest])

    @property
    def key(self) -> str:
        """Of everything that decides the rows."""
        return digest_json([self.verdicts_key, self.source.settings(), self.prompts_digest])


def generate_rows(
    spec: str | Path,
    *,
    say: Say,
    batch_size: int = DEFAULT_BATCH_SIZE,
    server: ServerModel | None = None,
    relative_to: Path | None = None,
) -> list[Generated]:
    """Make the rows of every generated source of a dataset spec, or find them complete.

    server: answers in place of a model loaded here; the spec's model still gives tokenizer and chat template. Raises
    UserError when the spec has no such source, names a run that is not finished, or its verifier fails too often.
    """
    path = find_declarative("data", str(spec), relative_to=relative_to)
    loaded = load_spec(path)
    sources = [source for source in loaded.value.sources if isinstance(source, GeneratedSource)]
    if not sources:
        raise UserError(
            f"nothing is generated for {loaded.value.name}",
            where=loaded.where("source"),
            why="its spec has no source of kind generated",
            fix="build it: finetune data build",
        )
    jobs = [_prepare(source, path.parent, loaded.where, server=server, say=say) for source in sources]
    return [_run(job, batch_size=batch_size, say=say) for job in jobs]


def ensure_generated(spec_path: Path, *, say: Say, server: ServerModel | None = None) -> None:
    """Make what a dataset spec says is generated, unless it is there; a spec without such sources costs nothing. server:
    answers in place of a model loaded here, as in `generate_rows`."""
    for source in load_spec(spec_path).value.sources:
        if isinstance(source, GeneratedSource):
            try:
                complete_rows(source.name, source.settings())
            except UserError:
                say(f"data: the rows of '{source.name}' are generated first")
                generate_rows(spec_path, say=say, server=server)
                return


def _prepare(
    source: GeneratedSource,
    folder: Path,
    where: Callable[[str], str],
    *,
    server: ServerModel | None,
    say: Say,
) -> _Job:
    prompts_path = find_declarative("data", source.prompts, relative_to=folder, where=where("source.prompts"))
    build = build_dataset(prompts_path, default_builds_root())
    rows = _askable(build.rows("train"), where("source.prompts"))[: source.max_prompts]
    answerer = find_answerer(source.model, folder, where("source.model"), server=server, say=say)
    prompts = []
    for row in rows:
        ids, text = prompt_ids(row.prompt, answerer.tokenizer, tools=row.tools)
        prompts.append(Prompt(text, ids))
    return _Job(
        source=source,
        folder=folder,
        prompts_spec=load_spec(prompts_path).value,
        prompts_digest=build.digest,
        rows=rows,
        prompts=prompts,
        answerer=answerer,
        where=where,
    )


def _askable(rows: Sequence[Row], where: str) -> list[Row]:
    """Rows with a prompt, each prompt once."""
    found: dict[str, Row] = {}
    for row in rows:
        if row.kind not in ("text", "tokens"):
            found.setdefault(digest_content([row.prompt, row.tools]), row)
    if not found:
        raise UserError(
            "the dataset has no train row with a prompt", where=where, fix="name a dataset of chats"
        )
    return list(found.values())


def _run(job: _Job, *, batch_size: int, say: Say) -> Generated:
    folder, key = generated_folder(job.source.name), job.key
    found = found_rows(job.source.name, key)
    if found is not None:
        return Generated(folder, found, fresh=False)
    answers = _answer(job, folder, batch_size=batch_size)
    answered = _judge(job, folder, answers)
    selection = select_rows(answered, job.source.keep, write=job.source.write, seed=job.source.sampling.seed)
    if not selection.records:
        raise UserError(
            f"no row came out of {len(job.rows)} prompts with {job.source.sampling.answers} answers each",
            where=job.where("source"),
            why="for pairs a prompt needs an answer that passes and one that fails; by how many of their answers pass: "
            + ", ".join(f"{counts['prompts']} {name}" for name, counts in selection.prompts.items())
            + _most_failed(answered),
            fix="raise sampling.temperature or sampling.answers, or set keep.reference_as_chosen; the answers are kept",
        )
    manifest = _describe(job, key, answers, answered) | {"difficulty": selection.prompts}
    return Generated(folder, write_rows(folder, selection.records, manifest), fresh=True)


def _most_failed(answered: Sequence[AnsweredRow]) -> str:
    """Why answers failed most often, where there is a reason."""
    reasons = Counter(one.reason for row in answered for one in row.answers if one.reason and not one.passed)
    return "".join(f"; {count} answers failed for '{reason}'" for reason, count in reasons.most_common(1))


def _answer(job: _Job, folder: Path, *, batch_size: int) -> list[list[dict[str, Any]]]:
    """The answers to every prompt in order; what is not there yet is drawn."""
    n_answers = job.source.sampling.answers
    with LineStore(folder, "answers", job.answers_key) as store:
        wanted = [(place, number) for place in range(len(job.rows)) for number in range(n_answers)]
        asked = [digest_content(prompt.ids)[:16] for prompt in job.prompts]

        def is_known(place: int, number: int) -> bool:
            known = store.known.get((job.rows[place].id, number))
            return known is not None and known["asked"] == asked[place]

        todo = [(place, number) for place, number in wanted if not is_known(place, number)]
        with Progress(f"answers, {job.source.name}", len(wanted), "answers") as progress:
            progress.skip(len(wanted) - len(todo))
            if todo:
                for completion in draw_answers(
                    job.answerer.load(),
                    job.answerer.tokenizer,
                    [(job.rows[place].id, number) for place, number in todo],
                    [job.prompts[place] for place, _ in todo],
                    job.decoding,
                    every_prompt=job.prompts,
                    batch_size=batch_size,
                ):
                    place, number = todo[completion.index]
                    store.add(
                        {
                            "prompt": job.rows[place].id,
                            "number": number,
                            "asked": asked[place],
                            "output": completion.text,
                            "output_tokens": completion.output_tokens,
                            "finish_reason": completion.finish_reason,
                        }
                    )
                    progress.advance()
        return [[store.known[(row.id, number)] for number in range(n_answers)] for row in job.rows]


def _judge(job: _Job, folder: Path, answers: Sequence[Sequence[dict[str, Any]]]) -> list[AnsweredRow]:
    """The verdict on every answer. A cut one fails in form without being judged; what the verifier failed on is asked anew."""
    found: list[AnsweredRow] = []
    failures: list[str] = []
    section, where = job.source.verifier, job.where("source.verifier")
    with (
        LineStore(folder, "verdicts", job.verdicts_key) as store,
        open_verifier(section, prompts=job.prompts_spec, folder=job.folder, where=where) as verifier,
        Progress(f"verdicts, {job.source.name}", sum(map(len, answers)), "answers") as progress,
    ):
        for row, given in zip(job.rows, answers, strict=True):
            verdicts = []
            for record in given:
                digest = digest_content(record["output"])[:16]
                verdict = store.known.get((row.id, record["number"]))
                if verdict is None or verdict["failed"] or verdict["answer"] != digest:
                    verdict = _verdict(row, record, verifier) | {"answer": digest}
                    store.add(verdict)
                verdicts.append(verdict)
                progress.advance()
            failures += [verdict["reason"] for verdict in verdicts if verdict["failed"]]
            judged = zip(given, verdicts, strict=True)
            found.append(
                AnsweredRow(row, tuple(Judged(r["output"], v["passed"], v["reason"]) for r, v in judged))
            )
    n = sum(map(len, answers))
    if len(failures) > job.source.keep.max_failed_share * n:
        raise UserError(
            f"the verifier failed on {len(failures)} of {n} answers",
            where=where,
            why=failures[-1],
            fix="mend the verifier, or raise keep.max_failed_share",
        )
    return found


def _verdict(row: Row, record: dict[str, Any], verifier: Verifier) -> dict[str, Any]:
    """What the verifier says of an answer, as it is stored. It is given a row as stored, and the row's own answer; of an
    answer that is empty or was cut it is not asked."""
    about = {"prompt": row.id, "number": record["number"]}
    if record["finish_reason"] == "length":
        return about | {
            "passed": False,
            "failed": False,
            "reason": f"{FORMAT}: cut at sampling.max_new_tokens",
        }
    if not record["output"].strip():
        return about | {"passed": False, "failed": False, "reason": f"{FORMAT}: empty"}
    answer = {"role": "assistant", "content": record["output"]}
    asked = Row(row.id, (*row.prompt, answer), row.group, row.source, row.tags, row.tools)
    verdict = verifier(asked.to_dict() | {"reference": row.answer})
    return about | {"passed": verdict.keep, "failed": verdict.failed, "reason": verdict.reason}


def _describe(
    job: _Job, key: str, answers: Sequence[Sequence[dict[str, Any]]], answered: Sequence[AnsweredRow]
) -> dict[str, Any]:
    """The manifest, without the rows: what decided them, and what became of every answer."""
    every = [answer for one in answered for answer in one.answers]
    passed = sum(answer.passed for answer in every)
    reasons = Counter(answer.reason for answer in every if not answer.passed)
    return {
        "format": 1,
        "key": key,
        "source": job.source.settings(),
        "model": job.answerer.digest,
        "verifier": job.verifier_digest,
        "prompts": {"dataset": job.prompts_spec.name, "digest": job.prompts_digest, "count": len(job.rows)},
        "answers": len(every),
        "output_tokens": sum(record["output_tokens"] for given in answers for record in given),
        "passed": passed,
        "pass_rate": round(passed / len(every), 4),
        "format_failures": sum(answer.fails_in_form for answer in every),
        "reasons": dict(reasons.most_common(_REASONS_SHOWN)),
        "pass_rate_by": pass_rates(answered, job.source.report_by),
    }
