"""A teacher behind an OpenAI-compatible server that tells the log-probabilities of a prompt's tokens (vLLM).

A row is sent as token ids, with `prompt_logprobs`: for every token of the prompt the k most likely ones by id. A server tells
log-probabilities at temperature 1 only, and the mass outside its top k at another temperature cannot be made from them, so
such a cache has temperature 1 and no other.

Shapes: n target tokens · k kept tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from finetune.data.tokenise import TokenisedRow
from finetune.distil.cache.coding import DTYPES, Coding, TopK, in_order
from finetune.errors import UserError

# How a server refuses a parameter that it does not know, or more log-probabilities than it was started for.
_NOT_TAKEN = re.compile(r"answered (400|422)\b")


class Server(Protocol):
    """A model behind a URL; `post` sends one request to a path below it and returns the JSON object that comes back."""

    @property
    def url(self) -> str: ...

    @property
    def name(self) -> str: ...

    def post(self, path: str, body: dict[str, Any], *, about: str = "") -> dict[str, Any]: ...


class ServerSaying:
    """A `Saying` (write.py) that asks a server, `concurrency` rows at a time. Nothing is known of the full distribution, so
    there is no reconstruction error."""

    def __init__(self, server: Server, *, concurrency: int = 8) -> None:
        self.server, self.concurrency = server, concurrency

    def top_k(
        self, rows: Sequence[TokenisedRow], coding: Coding, sample_every: int
    ) -> tuple[TopK, dict[str, Any]]:
        """See `Saying`. Raises UserError for a server without these log-probabilities, and for temperatures but 1."""
        if coding.temperatures != (1.0,):
            raise UserError(
                "a server's log-probabilities are those of temperature 1 only",
                where="distil.cache.temperatures",
                why="the mass outside the top k at another temperature cannot be known from them",
                fix="set distil.loss.temperature: 1 and leave out distil.cache.temperatures, or run the teacher here",
            )
        pool = ThreadPoolExecutor(max_workers=self.concurrency)
        try:
            found = list(pool.map(lambda row: self._ask(row, coding), rows))
        finally:
            pool.shutdown(cancel_futures=True)
        ids = torch.tensor([[token for token, _ in place] for row in found for place in row])
        logs = torch.tensor(
            [[log for _, log in place] for row in found for place in row], dtype=torch.float32
        )
        kept = DTYPES[coding.dtype]
        gaps = (logs - logs[:, :1]).clamp(min=torch.finfo(kept).min).to(kept).float()
        # The server's probabilities sum to 1: that of the largest gives the normaliser of the distances from it.
        return in_order(ids, gaps, -logs[:, :1]), {}

    def _ask(self, row: TokenisedRow, coding: Coding) -> list[list[tuple[int, float]]]:
        """For each target of a row its k most likely tokens with their log-probabilities, the largest first."""
        body = {
            "model": self.server.name,
            "prompt": row.input_ids,
            "max_tokens": 1,  # some servers refuse 0; the token is not used
            "temperature": 0.0,
            "prompt_logprobs": coding.k,
        }
        try:
            found = self.server.post("completions", body, about=f"row {row.row_id}")
        except UserError as error:
            said = error.faults[0].what
            if not _NOT_TAKEN.search(said):
                raise
            raise self._without(said, row, coding) from None
        try:
            places = found["choices"][0]["prompt_logprobs"]
            if len(places) != len(row.input_ids):
                raise ValueError
            spans = [place for first, last in row.spans() for place in range(first, last)]
            return [_most_likely(places[place], coding) for place in spans]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise self._without(json.dumps(found)[:300], row, coding) from None

    def _without(self, said: str, row: TokenisedRow, coding: Coding) -> UserError:
        return UserError(
            f"the server does not tell the {coding.k} most likely tokens of every place of a prompt: {said}",
            where=f"{self.server.url}, model {self.server.name}, row {row.row_id}",
            why="a cache is made of a completion's `prompt_logprobs` by token id",
            fix=f"serve the teacher with vLLM (`vllm serve … --max-logprobs {coding.k}`), lower distil.cache.k, or run the "
            "teacher here; finished shards are kept",
        )


def _most_likely(place: dict[str, dict[str, Any]], coding: Coding) -> list[tuple[int, float]]:
    """The k most likely of the tokens that the server tells (the prompt's own may be one more). Raises ValueError when they
    are fewer, or no ids of the vocabulary."""
    told = sorted(
        ((int(token), float(one["logprob"])) for token, one in place.items()), key=lambda one: -one[1]
    )
    kept = told[: coding.k]
    if len(kept) < coding.k or not all(0 <= token < coding.vocabulary and log <= 1e-3 for token, log in kept):
        raise ValueError
    return kept
