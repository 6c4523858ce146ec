"""A model that judges answers: behind an OpenAI-compatible server, or loaded here. Replies are asked for, kept and reused.

A reply is text; what form it must have is for the one who asks. A reply out of form is asked for again, with
a reminder (a greedy model would otherwise repeat itself), and what never comes in form is missing: never a loss. Replies in
form are kept under runs/judgements by the digest of judge and question, so that an interrupted judging continues, and
the base's answers are judged once for all runs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.evaluation.server import ServerAwayError, ServerModel
from finetune.paths import disk_faults, runs_root

Found = TypeVar("Found")
TRIES = 3
_MAX_NEW_TOKENS = 128
_MOST_AWAY = (
    5  # replies in a row that a server did not give: it is gone, and waiting for each of the rest is no use
)
_FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)
_REMINDER = "\n\nReply in the agreed form: one JSON object and nothing else."


@dataclass(frozen=True)
class Question:
    """What the judge is told (rules, rubric) and asked (the answers to judge)."""

    told: str
    asked: str

    def messages(self, attempt: int) -> list[dict[str, str]]:
        """The conversation of the try `attempt`, from 0."""
        asked = self.asked + (_REMINDER if attempt else "")
        return [{"role": "system", "content": self.told}, {"role": "user", "content": asked}]


class JudgeModel(Protocol):
    """Replies to questions. `identity` changes with anything that can change a reply."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...

    def replies(self, questions: Sequence[Question], attempt: int) -> Iterator[tuple[int, str | None]]:
        """(place in `questions`, reply) as they come; None when no reply came in time."""
        ...


@dataclass(frozen=True)
class ServedJudge:
    """A judge behind `server`, asked `concurrency` questions at a time."""

    server: ServerModel
    concurrency: int = 4

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def identity(self) -> str:
        return digest_json({"url": self.server.url, "name": self.server.name})

    def replies(self, questions: Sequence[Question], attempt: int) -> Iterator[tuple[int, str | None]]:
        """Raises UserError when the server refuses, or answers none of several questions in a row at the first try."""
        away = 0
        pool = ThreadPoolExecutor(max_workers=self.concurrency)
        try:
            waiting = [pool.submit(self._reply, question, attempt) for question in questions]
            for place, one in enumerate(waiting):
                try:
                    reply, away = one.result(), 0
                except ServerAwayError:
                    reply, away = None, away + 1
                    if attempt == 0 and away >= min(_MOST_AWAY, len(questions)):
                        raise
                yield place, reply
        finally:
            pool.shutdown(cancel_futures=True)

    def _reply(self, question: Question, attempt: int) -> str | None:
        found = self.server.post(
            "chat/completions",
            {
                "model": self.server.name,
                "messages": question.messages(attempt),
                "temperature": 0.0,
                "seed": attempt,
                "max_tokens": _MAX_NEW_TOKENS,
            },
        )
        try:
            content = found["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            return None
        return content if isinstance(content, str) else None


@dataclass
class LocalJudge:
    """A judge loaded on this machine: a folder, a hub id or `builtin:…`. Loaded at the first question, in `dtype`."""

    id: str
    dtype: str = "bf16"
    batch_size: int = 8
    _loaded: list[Any] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        return self.id

    @property
    def identity(self) -> str:
        return digest_json({"weights": self._source().digest, "dtype": self.dtype})

    def replies(self, questions: Sequence[Question], attempt: int) -> Iterator[tuple[int, str | None]]:
        """Greedy, longest question first. Raises UserError when a question does not fit the judge's context."""
        from finetune.data.tokenise import generation_stop_ids, prompt_ids
        from finetune.evaluation.generate import generate
        from finetune.evaluation.stopping import stop_rule

        model, tokenizer = self._model()
        prompts = [prompt_ids(question.messages(attempt), tokenizer)[0] for question in questions]
        self._refuse_too_long(model, prompts)
        rule = stop_rule(
            tokenizer,
            max_new_tokens=_MAX_NEW_TOKENS,
            stop_strings=(),
            stop_ids=generation_stop_ids(tokenizer),
        )
        for completion in generate(model, prompts, rule, batch_size=self.batch_size):
            yield completion.index, completion.text

    def _source(self) -> Any:
        from finetune.model.source import resolve_model

        return resolve_model(self.id, where="judge")

    def _model(self) -> tuple[Any, Any]:
        from finetune.model.load import load_model, load_tokenizer

        if not self._loaded:
            source = self._source()
            self._loaded[:] = [load_model(source, dtype=self.dtype), load_tokenizer(source)]
        return self._loaded[0], self._loaded[1]

    def _refuse_too_long(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(map(len, prompts), default=0)
        if context is not None and longest + _MAX_NEW_TOKENS > context:
            raise UserError(
                f"a question to the judge has {longest} tokens; {context - _MAX_NEW_TOKENS} fit",
                where=f"judge {self.id}",
                fix="take a judge with a longer context",
            )


@cache
def find_judge(
    *, server: str | None, model: str | None, key: str | None, local: str | None, concurrency: int = 4
) -> JudgeModel:
    """The judging model behind a server, or loaded here; one of each in a process."""
    if server is not None and local is None:
        if not model:
            raise UserError("the server's name of the judging model is missing", fix="add --model NAME")
        return ServedJudge(ServerModel(server, model, key), concurrency)
    if local is not None and server is None:
        return LocalJudge(local)
    raise UserError(
        "who is to judge?",
        fix="--server URL with --model NAME, or --local with a folder, a hub id or builtin:…",
    )


def ask_judge(
    judge: JudgeModel,
    questions: Sequence[Question],
    parse: Callable[[str], Found | None],
    *,
    tries: int = TRIES,
    on_reply: Callable[[], None] = lambda: None,
) -> list[Found | None]:
    """What `parse` makes of the judge's reply to every question, in their order; None where no reply was ever in form.

    on_reply: called once for every question, when it is settled. Raises UserError when the judge cannot be asked at all;
    replies that came by then are kept.
    """
    found: list[Found | None] = [None] * len(questions)
    kept = _KeptReplies(judge)
    left = []
    for place, question in enumerate(questions):
        found[place] = _parsed(kept.get(question), parse)
        if found[place] is None:
            left.append(place)
        else:
            on_reply()
    for attempt in range(tries):
        if not left:
            break
        asked = left
        for index, reply in judge.replies([questions[place] for place in asked], attempt):
            place = asked[index]
            found[place] = _parsed(reply, parse)
            if found[place] is not None and reply is not None:
                kept.add(questions[place], reply)
            if found[place] is not None or attempt == tries - 1:
                on_reply()
        left = [place for place in asked if found[place] is None]
    return found


def _parsed(reply: str | None, parse: Callable[[str], Found | None]) -> Found | None:
    return parse(_unfenced(reply.strip())) if reply is not None else None


def _unfenced(reply: str) -> str:
    """The inside of a reply that is one code block as a whole: many models wrap their JSON, and it is still the one object."""
    fenced = _FENCED.fullmatch(reply)
    return fenced[1] if fenced else reply


class _KeptReplies:
    """Replies of one judge on disk, one JSON line each; a line that is damaged is as if never written."""

    def __init__(self, judge: JudgeModel) -> None:
        self._path: Path = runs_root() / "judgements" / f"{judge.identity[:16]}.jsonl"
        raw = self._path.read_bytes().split(b"\n") if _mended(self._path) else []
        self._replies: dict[str, str] = dict(filter(None, map(_kept_reply, raw)))

    def get(self, question: Question) -> str | None:
        return self._replies.get(_key(question))

    def add(self, question: Question, reply: str) -> None:
        self._replies[_key(question)] = reply
        with disk_faults(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"key": _key(question), "reply": reply}) + "\n")
                stream.flush()
                os.fsync(stream.fileno())


def _kept_reply(line: bytes) -> tuple[str, str] | None:
    try:
        found = json.loads(line)
        key, reply = found["key"], found["reply"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return (key, reply) if isinstance(key, str) and isinstance(reply, str) else None


def _key(question: Question) -> str:
    return digest_json([question.told, question.asked])


def _mended(path: Path) -> bool:
    """Whether the file is there, with half a last line removed from it."""
    if not path.is_file():
        return False
    raw = path.read_bytes()
    if raw and not raw.endswith(b"\n"):
        with path.open("r+b") as stream:
            stream.truncate(raw.rfind(b"\n") + 1)
    return True
