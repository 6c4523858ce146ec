"""Likelihoods are totals over tokens: the same for every batch, and at least one answer token for every request."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from finetune.evaluation.likelihood import Request, encode_continuation, log_likelihoods, token_weighted_nll


def _requests(lengths: list[int], seed: int = 0) -> list[Request]:
    draw = random.Random(seed)
    ids = [[draw.randrange(3, 259) for _ in range(length)] for length in lengths]
    return [Request(index, row[:1], row[1:]) for index, row in enumerate(ids)]


def _by_hand(model: Any, request: Request) -> float:
    ids = torch.tensor([request.given + request.scored])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(request.given) - 1 : -1]
    return -float(functional.cross_entropy(logits, ids[0, len(request.given) :], reduction="sum"))


def test_the_loss_is_token_weighted_for_every_batch_size(lively_model: Any) -> None:
    """Five rows of very different lengths: a mean of batch means would change with the batch."""
    requests = _requests([5, 60, 7, 90, 30])
    values = [_by_hand(lively_model, request) for request in requests]
    truth = -sum(values) / sum(len(request.scored) for request in requests)
    means = []
    for batch in (1, 2, 5):
        results = list(log_likelihoods(lively_model, requests, tokens_per_batch=90 * batch))
        assert sorted(one.index for one in results) == [0, 1, 2, 3, 4]
        for one in results:
            assert one.log_likelihood == pytest.approx(values[one.index], rel=1e-5)
        means.append(token_weighted_nll(results))
    assert means == pytest.approx([truth] * 3, rel=1e-6)
    row_means = [-value / len(request.scored) for value, request in zip(values, requests, strict=True)]
    assert abs(sum(row_means) / 5 - truth) > 0.01  # the trap: these two are not the same number


def test_greedy_says_whether_every_token_was_the_first_choice(lively_model: Any) -> None:
    given = [5, 6, 7]
    with torch.no_grad():
        best = int(lively_model(input_ids=torch.tensor([given])).logits[0, -1].argmax())
    requests = [Request(0, given, [best]), Request(1, given, [best - 1]), Request(2, given, [best, best])]
    found = {one.index: one for one in log_likelihoods(lively_model, requests)}
    assert found[0].greedy
    assert not found[1].greedy
    assert found[0].log_likelihood > found[1].log_likelihood
    assert found[2].tokens == 2


def test_kl_to_the_base_is_zero_without_adapter_and_positive_with_one(lively_model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    requests = _requests([9, 14])
    assert all(one.kl == 0.0 for one in log_likelihoods(lively_model, requests, kl_to_base=True))
    torch.manual_seed(0)
    tuned = get_peft_model(lively_model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    for one in log_likelihoods(tuned, requests, kl_to_base=True):
        ids = torch.tensor([requests[one.index].given + requests[one.index].scored])
        with torch.no_grad():
            after = tuned(input_ids=ids).logits[0, :-1].log_softmax(-1)
            with tuned.disable_adapter():
                before = tuned(input_ids=ids).logits[0, :-1].log_softmax(-1)
        expected = functional.kl_div(after, before, log_target=True, reduction="sum")
        assert one.kl == pytest.approx(float(expected), rel=1e-4)
        assert one.kl is not None and one.kl > 0.01


class _MergingTokenizer:
    """Word pieces, longest first, so that text at a boundary merges: 'world' is one token, 'wor' and 'ld' are others."""

    pieces = ("hello ", "world", "wor", "ld", "Answer", "Ans", "wer", ": seven", ":", " seven", " ")
    bos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        ids = []
        while text:
            piece = next(piece for piece in self.pieces if text.startswith(piece))
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        return {"input_ids": ids}

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[token] for token in ids)


@pytest.mark.parametrize(
    ("prompt", "answer"), [("hello wor", "ld"), ("Ans", "wer"), ("Answer:", " seven"), ("hello ", "world")]
)
def test_an_answer_that_merges_with_its_prompt_keeps_all_its_tokens(prompt: str, answer: str) -> None:
    tokenizer = _MergingTokenizer()
    given, scored = encode_continuation(prompt, answer, tokenizer)
    assert scored
    assert tokenizer.decode(given) == prompt
    assert tokenizer.decode(scored) == answer


def test_the_tokens_are_those_of_the_whole_text_where_nothing_merges() -> None:
    tokenizer = _MergingTokenizer()
    given, scored = encode_continuation("hello ", "worldld", tokenizer)
    assert given + scored == tokenizer("hello worldld")["input_ids"]


def test_a_long_request_does_not_lose_the_others(lively_model: Any) -> None:
    requests = _requests([200, 4, 4])
    results = list(log_likelihoods(lively_model, requests, tokens_per_batch=16))
    assert len(results) == 3
    assert all(math.isfinite(one.log_likelihood) for one in results)
