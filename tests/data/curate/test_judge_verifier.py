"""A model as a verifier: what it is shown and asked, how its replies are read, and what a server that is away does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from finetune.data.build import DatasetBuild
from finetune.data.curate.judge import JudgeVerifier
from finetune.data.spec_curate import JudgeSection, VerifierSection
from finetune.errors import UserError
from finetune.paths import read_jsonl

REPLY = '{"score": 0.9, "reason": "right"}'
ROW = {"id": "r", "source": "s", "tags": {"secret": "x"}, "messages": [{"role": "user", "content": "q"}]}


class Judge(ThreadingHTTPServer):
    """Answers every question by `reply`, which is given what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: Callable[[str], str | int] = lambda asked: REPLY
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []

    @property
    def section(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        return {"server": url, "model": "m", "criterion": "The answer is right."}


class Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers.get("Authorization")))
        reply = self.server.reply(body["messages"][-1]["content"])
        self.send_response(reply if isinstance(reply, int) else 200)
        self.end_headers()
        if isinstance(reply, str):
            self.wfile.write(json.dumps({"choices": [{"message": {"content": reply}}]}).encode())

    def log_message(self, *given: Any) -> None:
        """Silence."""


@pytest.fixture
def judge() -> Iterator[Judge]:
    server = Judge()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def asked(judge: Judge, **more: Any) -> JudgeVerifier:
    return JudgeVerifier(JudgeSection(**judge.section, **more), threshold=0.5, seconds_per_row=30)


def test_the_judge_is_told_the_criterion_and_shown_what_is_learnt(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    verdict = asked(judge, key_variable="JUDGE_KEY")(ROW)
    assert (verdict.keep, verdict.score, verdict.reason) == (True, 0.9, "right")
    [(path, body, key)] = judge.requests
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer k", "m", 0)
    told, shown = (turn["content"] for turn in body["messages"])
    assert "The answer is right." in told
    assert json.loads(shown) == {"messages": ROW["messages"]}
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match="JUDGE_KEY is not set"):
        asked(judge, key_variable="JUDGE_KEY")


@pytest.mark.parametrize(
    ("reply", "keep", "failed", "reason"),
    [
        ("0.7", True, False, ""),
        (f"```json\n{REPLY}\n```", True, False, "right"),
        ('{"score": 0.2, "reason": "wrong"}', False, False, "score 0.2 is below 0.5: wrong"),
        ("I think it is fine.", False, True, "its reply is no JSON: 'I think it is fine.'"),
        ('{"verdict": "good"}', False, True, "it answered"),
        (500, False, True, "gave no reply: HTTP Error 500"),
    ],
)
def test_replies_in_every_form(judge: Judge, reply: str | int, keep: bool, failed: bool, reason: str) -> None:
    judge.reply = lambda asked: reply
    verdict = asked(judge)(ROW)
    assert (verdict.keep, verdict.failed) == (keep, failed)
    assert reason in verdict.reason


def test_a_request_that_fails_once_is_sent_again(judge: Judge) -> None:
    replies: Iterator[str | int] = iter([503, REPLY])
    judge.reply = lambda asked: next(replies)
    assert asked(judge)(ROW).keep
    assert len(judge.requests) == 2


def test_a_build_asks_for_every_row_and_a_judge_that_is_away_fails_it(
    judge: Judge, build: Callable[..., DatasetBuild]
) -> None:
    rows = [{"prompt": f"question {n}", "completion": "yes" if n % 3 else "no"} for n in range(9)]
    judge.reply = lambda asked: '{"score": 0, "reason": "it says no"}' if '"no"' in asked else REPLY
    curate = {"verifiers": [{"name": "helpful", "judge": judge.section}]}
    made = build(rows, curate=curate)
    assert made.manifest["ledger"]["dropped"] == {"rejected_by_helpful": 3}
    assert {entry["why"] for entry in read_jsonl(made.folder / "ledger.jsonl")} == {
        "score 0 is below 0.5: it says no"
    }
    assert len(judge.requests) == 9
    judge.reply = lambda asked: 503
    with pytest.raises(UserError, match=r"'helpful' failed on \d+ of \d+ rows(?s:.*)503"):
        build([*rows, {"prompt": "one more", "completion": "yes"}], curate=curate)


def test_a_verifier_is_one_of_three(judge: Judge) -> None:
    for given in ({}, {"function": "a:b", "judge": judge.section}, {"function": "a:b", "command": "c"}):
        with pytest.raises(ValueError, match="one of function, command and judge"):
            VerifierSection(name="x", **given)
    with pytest.raises(ValueError, match="server"):
        VerifierSection(name="x", judge={**judge.section, "server": "localhost:8000"})
