"""Several sampled answers to each of many prompts, on whichever backend the model lives; no suite, no scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from finetune.evaluation.answering import stop_ids
from finetune.evaluation.generate import Completion, common_prefix, generate
from finetune.evaluation.raw_prompts import Prompt
from finetune.evaluation.sampling import Sampler, stream_name
from finetune.evaluation.server import ServerModel, server_answers
from finetune.evaluation.stopping import stop_rule
from finetune.evaluation.suite_sections import DecodingSection


def draw_answers(
    model: Any,
    tokenizer: Any,
    asks: Sequence[tuple[str, int]],
    prompts: Sequence[Prompt],
    decoding: DecodingSection,
    *,
    every_prompt: Sequence[Prompt],
    batch_size: int,
) -> Iterator[Completion]:
    """The completions of `asks`, (name of the prompt, number of the answer), as they end; `index` is a place in them.

    model: a transformers model, one wrapped by PEFT, or a `ServerModel`. prompts: one an ask. every_prompt: all prompts of
    the job, so that what is left of an interrupted one is computed as in an uninterrupted one. batch_size: rows decoded,
    or requests sent, at a time; it does not change what is drawn.
    """
    streams = [stream_name(decoding.seed, name, number) for name, number in asks]
    if isinstance(model, ServerModel):
        names = [f"{name}, answer {number}" for name, number in asks]
        yield from server_answers(
            model, prompts, decoding, streams=streams, names=names, concurrency=batch_size
        )
        return
    rule = stop_rule(
        tokenizer,
        max_new_tokens=decoding.max_new_tokens,
        stop_strings=decoding.stop,
        stop_ids=stop_ids(tokenizer, model),
    )
    yield from generate(
        model,
        [prompt.ids for prompt in prompts],
        rule,
        batch_size=batch_size,
        shared_prefix=common_prefix([prompt.ids for prompt in every_prompt]),
        pick=Sampler(streams, temperature=decoding.temperature, top_p=decoding.top_p),
    )
