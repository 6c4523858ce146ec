"""Answers from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, TGI) that the user has started.

The server gets the very token ids that the local decoder would get, so template, system message and BOS are ours and the
same for both arms. Sampling gets a seed of each answer's own; how far a server keeps to it, and what its batching does to
near ties, is its own, and an A/A run measures it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from finetune.errors import UserError
from finetune.evaluation.generate import Completion
from finetune.evaluation.prompts import Prompt
from finetune.evaluation.sampling import server_seed
from finetune.evaluation.suite import DecodingSection

_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_LONGEST_WAIT_SECONDS = 60.0
# How servers say that a prompt does not fit: vLLM and OpenAI, llama.cpp, TGI.
_TOO_LONG = re.compile(
    r"context.{0,24}(length|size|window)|max_new_tokens.{0,20}must be|input is too long", re.I
)

_HALF_PAIR = re.compile("[\ud800-\udfff]")  # JSON can hold half a surrogate pair; no file or tokenizer can


class ServerAwayError(UserError):
    """The server was busy, slow or unreachable at every try; a later one may do better, unlike a refusal."""


@dataclass(frozen=True)
class ServerModel:
    """A model behind a URL. `url` ends in `/v1` or the like; `name` is the server's name of the model or adapter.

    key_variable: environment variable that holds the API key; the key itself is never written anywhere.
    sends_tokens: token ids as prompts; False sends the rendered text, for servers that take no ids.
    """

    url: str
    name: str
    key_variable: str | None = None
    timeout_seconds: float = 120.0
    tries: int = 4
    wait_seconds: float = 1.0
    sends_tokens: bool = True

    def post(self, path: str, body: dict[str, Any], *, about: str = "") -> dict[str, Any]:
        """One request, tried again when the server is busy or away, after the time that it asks for.

        about: what the request is for, named in every message. Raises ServerAwayError when it stays away, UserError when it
        refuses.
        """
        request = self._request(path, body)
        for attempt in range(1, self.tries + 1):
            wait_seconds = self.wait_seconds * 2 ** (attempt - 1)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_seconds) as response:
                    found = json.load(response)
                    if not isinstance(found, dict):
                        raise ValueError("the answer is not a JSON object")
                    return found
            except urllib.error.HTTPError as error:
                said = error.read(2000).decode(errors="replace")
                if error.code not in _RETRIED_STATUS or attempt == self.tries:
                    kind = ServerAwayError if error.code in _RETRIED_STATUS else UserError
                    raise self.fault(f"answered {error.code}: {said[:300]}", kind, about=about) from None
                wait_seconds = max(wait_seconds, _asked_to_wait(error.headers.get("Retry-After")))
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                if attempt == self.tries:
                    raise self.fault(
                        f"gave no usable answer: {error}", ServerAwayError, about=about
                    ) from None
            time.sleep(wait_seconds)
        raise AssertionError("unreachable: the last try returns or raises")

    def _request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        try:
            if not self.url.startswith(("http://", "https://")):
                raise ValueError("it begins with neither http:// nor https://")
            return urllib.request.Request(
                f"{self.url.rstrip('/')}/{path}", json.dumps(body).encode(), headers=self._headers()
            )
        except ValueError as error:
            raise UserError(
                f"'{self.url}' is no URL of a server: {error}", fix="write it as http://localhost:8000/v1"
            ) from None

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.key_variable is not None:
            key = os.environ.get(self.key_variable)
            if not key:
                raise UserError(
                    f"the environment variable {self.key_variable} is not set", fix="set it to the API key"
                )
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def fault(self, what: str, kind: type[UserError] = UserError, *, about: str = "") -> UserError:
        """A user error of this server: what it did, about what."""
        where = f"{self.url}, model {self.name}" + (f", {about}" if about else "")
        if kind is UserError and _TOO_LONG.search(what):
            return UserError(
                f"the server {what}",
                where=where,
                why="the prompt and its answer do not fit the context that the server was started with",
                fix="start the server with a longer context, lower decoding.max_new_tokens, or shorten the item",
            )
        return kind(
            f"the server {what}",
            where=where,
            fix="check URL, model name and the server's log; answers so far are saved, the same command continues",
        )


def _asked_to_wait(seconds: str | None) -> float:
    """The `Retry-After` of a busy server, where it is a number of seconds; never more than a minute."""
    try:
        return min(float(seconds or 0.0), _LONGEST_WAIT_SECONDS)
    except ValueError:
        return 0.0


def server_answers(
    server: ServerModel,
    prompts: Sequence[Prompt],
    decoding: DecodingSection,
    *,
    streams: Sequence[str],
    names: Sequence[str],
    concurrency: int,
) -> Iterator[Completion]:
    """Yield the completion of every prompt as it arrives, `concurrency` requests at a time.

    streams: names of the answers' random numbers (see `stream_name`), for sampling only. names: what is asked, for
    messages. `latency_seconds` is the time of the request. Raises UserError when a request fails for good; the requests
    that are under way are waited for, those not yet sent are dropped.
    """
    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        waiting = [
            pool.submit(_ask, server, prompt, decoding, place, stream, name)
            for place, (prompt, stream, name) in enumerate(zip(prompts, streams, names, strict=True))
        ]
        for done in as_completed(waiting):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _ask(
    server: ServerModel, prompt: Prompt, decoding: DecodingSection, place: int, stream: str, name: str
) -> Completion:
    started = time.perf_counter()
    sampling = {"top_p": decoding.top_p, "seed": server_seed(stream)} if decoding.is_sampled else {}
    found = server.post(
        "completions",
        {
            "model": server.name,
            "prompt": prompt.ids if server.sends_tokens else prompt.text,
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "n": 1,
            **sampling,
            **({"stop": decoding.stop} if decoding.stop else {}),
        },
        about=f"item {name}",
    )
    seconds = time.perf_counter() - started
    try:
        choice = found["choices"][0]
        text, reason = choice["text"], choice.get("finish_reason")
        tokens = int(found["usage"]["completion_tokens"])
        if not isinstance(text, str) or tokens < 0:
            raise ValueError
    except (KeyError, IndexError, TypeError, ValueError):
        raise server.fault(
            f"answered in another format: {json.dumps(found)[:300]}", about=f"item {name}"
        ) from None
    text = _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", text)
    cuts = [at for at in (text.find(stop) for stop in decoding.stop) if at >= 0]
    return Completion(
        place,
        text[: min(cuts)] if cuts else text,
        tokens,
        "length" if reason == "length" else "stop",
        seconds,
    )
