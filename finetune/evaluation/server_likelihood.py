"""Log-likelihoods from a server that echoes a prompt with its log-probabilities (vLLM, SGLang, llama.cpp's older API).

The prompt is sent as token ids, so that the scored tokens are known by place and no text has to be matched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from finetune.errors import UserError
from finetune.evaluation.likelihood import Likelihood, Request
from finetune.evaluation.server import ServerModel


def server_likelihoods(
    server: ServerModel, requests: Sequence[Request], *, concurrency: int
) -> Iterator[Likelihood]:
    """The likelihood of every request as it arrives. Raises UserError for a server that takes no token ids or does not
    give the log-probabilities of a prompt."""
    if not server.sends_tokens:
        raise UserError(
            "likelihoods need a server that takes token ids",
            where=server.url,
            why="only then is it known which log-probability belongs to which token",
            fix="evaluate suites of choices and texts without --server, or on a server such as vLLM",
        )
    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        waiting = [pool.submit(_measure, server, request) for request in requests]
        for done in as_completed(waiting):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _measure(server: ServerModel, request: Request) -> Likelihood:
    ids = request.given + request.scored
    found = server.post(
        "completions",
        {
            "model": server.name,
            "prompt": ids,
            "max_tokens": 1,  # some servers refuse 0; the token is not used
            "temperature": 0.0,
            "logprobs": 1,
            "echo": True,
        },
        about=request.about,
    )
    try:
        marks = found["choices"][0]["logprobs"]
        chosen, best = marks["token_logprobs"], marks["top_logprobs"]
        if len(chosen) not in (len(ids), len(ids) + 1):
            raise ValueError
        own = slice(len(request.given), len(ids))
        scores = [float(one) for one in chosen[own]]
        tops = [max(map(float, one.values())) for one in best[own]]
        if len(tops) != len(scores) or not all(map(math.isfinite, scores)):
            raise ValueError
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise _no_likelihoods(server, found) from None
    return Likelihood(
        index=request.index,
        log_likelihood=math.fsum(scores),
        tokens=len(scores),
        greedy=all(score >= top for score, top in zip(scores, tops, strict=True)),
    )


def _no_likelihoods(server: ServerModel, found: dict[str, Any]) -> UserError:
    return UserError(
        f"the server does not give the log-probability of every prompt token: {json.dumps(found)[:300]}",
        where=f"{server.url}, model {server.name}",
        why="suites of choices and texts are measured by `echo` with `logprobs`",
        fix="evaluate these suites without --server, or on a server that echoes log-probabilities, such as vLLM",
    )
