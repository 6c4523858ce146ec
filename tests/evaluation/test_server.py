"""A server answers the same prompts; a busy one is asked again, a faulty one is a user error that loses no answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.evaluation.items import Item
from finetune.evaluation.records import partial_path, read_records
from finetune.evaluation.run import evaluate_arm
from finetune.evaluation.server import ServerModel
from finetune.evaluation.suite import Suite


class FakeServer(ThreadingHTTPServer):
    """Answers with the model's name and the number of prompt tokens; `faults` are sent first, one a request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.faults: list[tuple[int, bytes]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            status, answer = self.server.faults.pop(0) if self.server.faults else (200, b"")
        if status == 200 and not answer:
            text = f"{body['model']} {len(body['prompt'])} STOP more"
            usage = {"completion_tokens": 4}
            answer = json.dumps(
                {"choices": [{"text": text, "finish_reason": "stop"}], "usage": usage}
            ).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever, daemon=True)
        thread.start()
        yield fake
        fake.shutdown()


@pytest.fixture
def evaluate(server: FakeServer, tiny_tokenizer: Any, suite: Suite, items: list[Item], tmp_path: Path) -> Any:
    def call(**changes: Any) -> Any:
        model = ServerModel(server.url, "mine", wait_seconds=0.0, timeout_seconds=5.0, **changes)
        options: dict[str, Any] = {
            "arm": "zero_shot",
            "batch_size": 3,
            "out_folder": tmp_path / "out",
            "key": "k",
        }
        return evaluate_arm(model, tiny_tokenizer, suite, items, **options)

    return call


def test_the_server_gets_our_tokens_and_decodes_greedily(
    evaluate: Any, server: FakeServer, tmp_path: Path
) -> None:
    summary = evaluate()
    records = read_records(tmp_path / "out", "zero_shot")
    assert [record["output"] for record in records] == [
        f"mine {r['prompt_tokens']} STOP more" for r in records
    ]
    assert len(server.asked) == 10
    assert all(body["temperature"] == 0.0 and body["max_tokens"] == 12 for body in server.asked)
    assert {len(body["prompt"]) for body in server.asked} == {record["prompt_tokens"] for record in records}
    assert (summary.backend, summary.output_tokens) == ("server", 40)


def test_stop_strings_are_sent_and_cut(
    evaluate: Any, server: FakeServer, suite: Suite, tmp_path: Path
) -> None:
    suite.decoding.stop.append("STOP")
    evaluate()
    assert server.asked[0]["stop"] == ["STOP"]
    assert all(record["output"].endswith(" ") for record in read_records(tmp_path / "out", "zero_shot"))


def test_text_is_sent_to_servers_that_take_no_tokens(evaluate: Any, server: FakeServer) -> None:
    evaluate(sends_tokens=False)
    assert server.asked[0]["prompt"].startswith("<|im_start|>system\nAnswer with JSON.")


def test_a_busy_server_is_asked_again(evaluate: Any, server: FakeServer) -> None:
    server.faults = [(503, b"busy"), (500, b"oops"), (200, b"not json"), (429, b"slow down")]
    assert evaluate().n == 10
    assert len(server.asked) == 14


def test_a_refusal_is_told_at_once_and_answers_are_kept(
    evaluate: Any, server: FakeServer, tmp_path: Path
) -> None:
    server.faults = [(200, b"")] * 4 + [(404, b"no such model")] * 6
    with pytest.raises(UserError, match="answered 404: no such model") as caught:
        evaluate()
    assert "model mine" in str(caught.value)
    kept = len(partial_path(tmp_path / "out", "zero_shot").read_text().splitlines())
    asked = len(server.asked)
    server.faults = []
    assert evaluate().n == 10
    assert len(server.asked) == asked + 10 - kept


@pytest.mark.parametrize("answer", [b'{"choices":[]}', b'{"choices":[{"text":"a"}]}', b'{"error":"x"}'])
def test_an_answer_in_another_format_is_named(evaluate: Any, server: FakeServer, answer: bytes) -> None:
    server.faults = [(200, answer)] * 10
    with pytest.raises(UserError, match="answered in another format"):
        evaluate()


def test_a_server_that_is_not_there_is_a_user_error(evaluate: Any, server: FakeServer) -> None:
    server.faults = [(503, b"down")] * 100
    with pytest.raises(UserError, match="answered 503"):
        evaluate(tries=2)


def test_the_key_comes_from_the_environment(
    evaluate: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(UserError, match="MY_KEY is not set"):
        evaluate(key_variable="MY_KEY")
    monkeypatch.setenv("MY_KEY", "s3cret")
    evaluate(key_variable="MY_KEY")
    assert set(server.keys) == {"Bearer s3cret"}


def test_likelihood_suites_are_refused(
    server: FakeServer, tiny_tokenizer: Any, suite: Suite, items: list[Item], tmp_path: Path
) -> None:
    texts = suite.model_copy(update={"task": "text"})
    with pytest.raises(UserError, match="measures likelihoods"):
        evaluate_arm(
            ServerModel(server.url, "mine"), tiny_tokenizer, texts, items,
            arm="zero_shot", batch_size=1, out_folder=tmp_path, key="k",
        )  # fmt: skip
