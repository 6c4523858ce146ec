"""A small suite over byte-level tiny models, whose answers vary from prompt to prompt."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from finetune.evaluation.items import Item
from finetune.evaluation.suite import Suite, load_suite

SUITE = """\
suite: 1
name: tiny
items: {jsonl: items.jsonl}
zero_shot: {system: Answer with JSON.}
few_shot: {k: 2, seed: 3, spread_by: intent}
decoding: {max_new_tokens: 12}
scorers: [exact_match, valid_json, intent_accuracy, slot_f1]
primary_metric: exact_match
margin: 0.02
"""


@pytest.fixture
def lively_model(tiny_model: Any) -> Any:
    """The tiny Llama with weights large enough that greedy text changes with the prompt and from step to step."""
    import torch

    generator = torch.Generator().manual_seed(5)
    tiny_model.lm_head.weight = torch.nn.Parameter(torch.empty_like(tiny_model.lm_head.weight))  # untied
    with torch.no_grad():
        for name, parameter in tiny_model.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.35 * torch.randn(parameter.shape, generator=generator))
    return tiny_model


@pytest.fixture
def items() -> list[Item]:
    return [
        Item(
            id=f"item-{index}",
            messages=({"role": "user", "content": f"command {'x' * (7 * index % 23)} {index}"},),
            reference=f'{{"intent":"I{index % 3}","slot":{index}}}',
            cluster=f"template-{index // 2}",
            tags={"intent": f"I{index % 3}"},
        )
        for index in range(10)
    ]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "items.jsonl").write_text(
        '{"id":"a","messages":[{"role":"user","content":"q"}],"reference":"{}"}\n'
    )
    (folder / "tiny.yaml").write_text(SUITE)
    return load_suite(folder / "tiny.yaml")


class FakeServer(ThreadingHTTPServer):
    """Answers with the model's name and the number of prompt tokens; `faults` are sent first, one a request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.faults: list[tuple[int, bytes]] = []
        self.headers: dict[str, str] = {}
        self.slow = 0  # how many requests get no answer in time
        self.model: Any = None  # gives the likelihoods of echoed prompts
        self.lock = threading.Lock()
        self.released = threading.Event()

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
            waits, self.server.slow = self.server.slow > 0, self.server.slow - 1
        if waits:
            self.server.released.wait(timeout=30.0)
            return
        if status == 200 and not answer and body.get("echo") and self.server.model is not None:
            answer = json.dumps(_echo(self.server.model, body["prompt"])).encode()
        if status == 200 and not answer:
            text = f"{body['model']} {len(body['prompt'])} STOP more"
            usage = {"completion_tokens": 4}
            answer = json.dumps(
                {"choices": [{"text": text, "finish_reason": "stop"}], "usage": usage}
            ).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def _echo(model: Any, ids: list[int]) -> dict[str, Any]:
    """A prompt with the log-probabilities of its tokens, and one token that nobody asked for."""
    import torch

    with torch.no_grad():
        logs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], dim=-1)
    chosen = [None, *(float(logs[place, token]) for place, token in enumerate(ids[1:]))]
    best = [None, *({"best": float(logs[place].max())} for place in range(len(ids) - 1))]
    marks = {"token_logprobs": [*chosen, -1.0], "top_logprobs": [*best, {"x": -1.0}]}
    return {"choices": [{"text": "", "logprobs": marks}], "usage": {"completion_tokens": 1}}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever, daemon=True)
        thread.start()
        yield fake
        fake.released.set()
        fake.shutdown()
