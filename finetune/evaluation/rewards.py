"""Reward models under a suite of choices: what is measured of an answer is its score, not its likelihood."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from finetune.data.chat_spans import closing_of
from finetune.errors import UserError
from finetune.evaluation.likelihood import Likelihood, Request
from finetune.evaluation.suite import Suite


def check_reward_suite(suite: Suite) -> None:
    """Raise UserError for a suite that a reward model cannot answer: it writes nothing, and its scores have no length."""
    names = [one if isinstance(one, str) else one.scorer for one in suite.scorers]
    by_length = [name for name in names if name in ("choice_accuracy_per_token", "choice_accuracy_per_byte")]
    if suite.task == "choice" and suite.prompt_format == "chat" and not by_length:
        return
    raise UserError(
        "a reward model scores whole answers, and this suite asks for something else",
        where=f"suite {suite.name}",
        why=f"{by_length[0]} divides by a length, which scores do not have"
        if by_length
        else f"its task is {suite.task}, its prompts are {suite.prompt_format}",
        fix="use task: choice, prompt_format: chat and the scorer choice_accuracy over pairs, as eval/home_intents_pairs.yaml",
    )


@torch.no_grad()
def answer_scores(model: Any, requests: Sequence[Request], *, tokenizer: Any) -> Iterator[Likelihood]:
    """The score of every answer behind its prompt, ended as in training, in the place of a log-likelihood.

    One text at a time, so that no padding touches a score.
    """
    end_id = int(tokenizer.convert_tokens_to_ids(closing_of(tokenizer).end_of_turn))
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        for request in requests:
            ids = torch.tensor([[*request.given, *request.scored, end_id]], device=device)
            score = float(model(input_ids=ids, use_cache=False).logits[0, 0])
            yield Likelihood(request.index, score, 1, greedy=False)
    finally:
        model.train(was_training)
