"""A teacher behind a server: top k by `prompt_logprobs`, at temperature 1, or a refusal that says what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.tokenise import IGNORED, TokenisedRow
from finetune.distil.cache.layout import CacheIdentity, read_manifest, rows_digest
from finetune.distil.cache.read import TeacherCache
from finetune.distil.cache.server import ServerSaying
from finetune.distil.cache.write import cache_teacher, coding_of
from finetune.errors import UserError

ROWS = [
    TokenisedRow("a", [5, 9, 11, 7], [IGNORED, IGNORED, 11, 7], 2),
    TokenisedRow("b", [8, 3, 12], [IGNORED, IGNORED, 12], 1),
]
V = 20


class Server:
    """Answers as vLLM does: for each place but the first the k most likely tokens, and the prompt's own besides."""

    url, name = "http://localhost:1/v1", "big"

    def __init__(self, breaks_on: str | None = None, answer: Any = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.breaks_on, self.answer = breaks_on, answer

    def post(self, path: str, body: dict[str, Any], *, about: str = "") -> dict[str, Any]:
        assert path == "completions"
        self.asked.append(body)
        if self.breaks_on is not None and about == f"row {self.breaks_on}":
            return self.answer
        places: list[Any] = [None]
        for place in range(1, len(body["prompt"])):
            logs = distribution(body["prompt"][:place])
            best = logs.topk(body["prompt_logprobs"])[1].tolist()
            told = {*best, body["prompt"][place]}
            places.append({str(token): {"logprob": float(logs[token]), "rank": 1} for token in told})
        return {"choices": [{"text": "", "prompt_logprobs": places}]}


def distribution(prompt: list[int]) -> torch.Tensor:
    """A teacher: log-probabilities [V] that depend on the prompt alone."""
    generator = torch.Generator().manual_seed(sum(prompt))
    return torch.log_softmax(2.0 * torch.randn(V, generator=generator), dim=0)


def fill(server: Server, folder: Path, **coding: Any) -> Any:
    settings = {"k": 6, "vocabulary": V} | coding
    return cache_teacher(
        ServerSaying(server, concurrency=2), ROWS, folder,
        identity=CacheIdentity("t", "k", rows_digest(ROWS)), coding=coding_of(**settings), shard_targets=1,
    )  # fmt: skip


def test_targets_are_what_the_server_tells(tmp_path: Path) -> None:
    server = Server()
    manifest = fill(server, tmp_path)
    assert manifest.complete and "reconstruction" not in manifest.measured
    assert [body["prompt"] for body in server.asked] == [row.input_ids for row in ROWS]
    cache = TeacherCache.open(tmp_path, ROWS, manifest.identity)
    found = cache.targets([1, 0], 1.0)
    wanted = torch.stack([distribution(prompt) for prompt in ([8, 3], [5, 9], [5, 9, 11])])
    assert found.ids is not None and found.logits is not None and found.logsumexp is not None
    assert torch.equal(found.ids.sort(dim=1)[0], wanted.topk(6, dim=1)[1].sort(dim=1)[0])
    assert torch.allclose(found.logits - found.logsumexp[:, None], wanted.gather(1, found.ids), atol=2e-3)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"text": "x"}]},
        {"choices": []},
        {"choices": [{"prompt_logprobs": None}]},
        {"choices": [{"prompt_logprobs": [None, {"4": {"logprob": -0.1}}, {"4": {"logprob": -0.1}}]}]},
        {"choices": [{"prompt_logprobs": [None] * 3}]},
        {"choices": [{"prompt_logprobs": [None, *[{f"tok{n}": {"logprob": -3.0} for n in range(6)}] * 2]}]},
        {"choices": [{"prompt_logprobs": [None, *[{str(n): {"logprob": -3.0} for n in range(18, 24)}] * 2]}]},
    ],
)
def test_a_server_without_log_probabilities_is_told_and_finished_shards_stay(
    answer: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="does not tell the 6 most likely tokens") as told:
        fill(Server("b", answer), tmp_path)
    assert "row b" in told.value.faults[0].where and "--max-logprobs 6" in told.value.faults[0].fix
    assert read_manifest(tmp_path).shards[0].last_row == 1
    again = Server()
    assert fill(again, tmp_path).complete and len(again.asked) == 1


def test_a_server_that_refuses_to_tell_is_told_apart_from_one_that_is_away(tmp_path: Path) -> None:
    class Refusing(Server):
        says = "answered 400: requested prompt logprobs of 6, which is greater than max allowed: 5"

        def post(self, path: str, body: dict[str, Any], *, about: str = "") -> dict[str, Any]:
            raise UserError(f"the server {self.says}", where="there", fix="check URL")

    with pytest.raises(UserError, match=r"does not tell the 6 most likely tokens .* max allowed: 5") as told:
        fill(Refusing(), tmp_path)
    assert "--max-logprobs 6" in told.value.faults[0].fix
    Refusing.says = "answered 503: busy"
    with pytest.raises(UserError, match="the server answered 503") as told:
        fill(Refusing(), tmp_path)
    assert told.value.faults[0].fix == "check URL"


def test_another_temperature_cannot_be_had_from_a_server(tmp_path: Path) -> None:
    server = Server()
    with pytest.raises(UserError, match="temperature 1 only"):
        fill(server, tmp_path, temperatures=[1.0, 2.0])
    assert not server.asked
