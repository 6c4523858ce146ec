"""Answers are the model's own, whatever the batch size, the decoder or the shared prefix."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from finetune.evaluation import generate as decoding
from finetune.evaluation.generate import common_prefix, generate, packed_decoding_works
from finetune.evaluation.sampling import Sampler
from finetune.evaluation.stopping import StopRule, stop_rule

NEVER_STOPS: tuple[int, ...] = ()


def _prompts(n: int, *, shared: int = 12, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 60 own tokens behind `shared` common ones."""
    draw = random.Random(seed)
    head = [draw.randrange(3, 259) for _ in range(shared)]
    return [
        head + [draw.randrange(3, 259) for _ in range(draw.choice([1, 2, 5, 9, 30, 60]))] for _ in range(n)
    ]


def _rule(
    tokenizer: Any, *, tokens: int = 16, strings: tuple[str, ...] = (), ids: tuple[int, ...] = (2,)
) -> StopRule:
    return stop_rule(tokenizer, max_new_tokens=tokens, stop_strings=strings, stop_ids=ids)


def _answers(
    model: Any, prompts: list[list[int]], rule: StopRule, **options: Any
) -> dict[int, tuple[Any, ...]]:
    return {
        answer.index: (answer.text, answer.output_tokens, answer.finish_reason)
        for answer in generate(model, prompts, rule, **options)
    }


def _tokens(model: Any, prompt: list[int], rule: StopRule) -> list[int]:
    """Token by token, the prompt alone, the whole sequence recomputed every time."""
    produced: list[int] = []
    while not produced or rule.finish_reason(produced) is None:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + produced]), use_cache=False).logits
        produced.append(int(logits[0, -1].argmax()))
    return produced


def _reference(model: Any, prompts: list[list[int]], rule: StopRule) -> dict[int, tuple[Any, ...]]:
    produced = [_tokens(model, prompt, rule) for prompt in prompts]
    return {
        index: (rule.text(tokens), len(tokens), rule.finish_reason(tokens))
        for index, tokens in enumerate(produced)
    }


@pytest.mark.parametrize("decoder", ["packed", "padded"])
@pytest.mark.parametrize("shared", [0, 12])
def test_answers_do_not_depend_on_the_batch_size(
    lively_model: Any, tiny_tokenizer: Any, decoder: str, shared: int
) -> None:
    prompts = _prompts(33, shared=shared)
    stops = tuple(range(2, 20))  # frequent enough that rows end at different times and slots are refilled
    rule = _rule(tiny_tokenizer, ids=stops)
    expected = _reference(lively_model, prompts, rule)
    assert len({text for text, _, _ in expected.values()}) > 20
    assert {reason for _, _, reason in expected.values()} == {"stop", "length"}
    for batch_size in (1, 2, 5, 32):
        assert _answers(lively_model, prompts, rule, batch_size=batch_size, decoder=decoder) == expected


def test_answers_are_those_of_transformers_generate(lively_model: Any, tiny_tokenizer: Any) -> None:
    prompts = _prompts(6)
    answers = _answers(lively_model, prompts, _rule(tiny_tokenizer), batch_size=4)
    for index, prompt in enumerate(prompts):
        output = lively_model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=2, pad_token_id=2
        )
        assert answers[index][0] == tiny_tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)


def test_every_prompt_is_answered_once_and_the_longest_come_first(
    lively_model: Any, tiny_tokenizer: Any
) -> None:
    prompts = _prompts(9)
    order = [answer.index for answer in generate(lively_model, prompts, _rule(tiny_tokenizer), batch_size=1)]
    assert sorted(order) == list(range(9))
    lengths = [len(prompts[index]) for index in order]
    assert lengths == sorted(lengths, reverse=True)


def test_a_stop_string_ends_the_row_and_is_cut(lively_model: Any, tiny_tokenizer: Any) -> None:
    prompts = _prompts(8)
    free = _answers(lively_model, prompts, _rule(tiny_tokenizer, ids=NEVER_STOPS), batch_size=4)
    stop = free[3][0][4:6]
    assert stop
    rule = _rule(tiny_tokenizer, strings=(stop,), ids=NEVER_STOPS)
    for decoder in ("packed", "padded"):
        for batch_size in (1, 2, 8):
            stopped = _answers(lively_model, prompts, rule, batch_size=batch_size, decoder=decoder)
            assert stopped == _reference(lively_model, prompts, rule)
            assert stopped[3][2] == "stop"
            assert all(stop not in text for text, _, _ in stopped.values())
            assert all(free[index][0].startswith(stopped[index][0]) for index in stopped)


class _SpecialStopTokenizer:
    """What `stop_rule` needs of a tokenizer, with token 9 as the special '<|end|>', which decoding hides."""

    all_special_tokens = ("<|end|>",)
    added_tokens_decoder = {9: "<|end|>"}  # noqa: RUF012

    def convert_tokens_to_ids(self, token: str) -> int:
        return {"<|end|>": 9}[token]

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return "".join(
            "" if i == 9 and skip_special_tokens else "<|end|>" if i == 9 else chr(97 + i % 26) for i in ids
        )


def test_a_special_token_hidden_by_decoding_stops_and_cuts_at_its_first_place() -> None:
    rule = stop_rule(_SpecialStopTokenizer(), max_new_tokens=8, stop_strings=["<|end|>"], stop_ids=[2])
    assert rule.stop_ids == {2, 9}
    assert rule.finish_reason([4, 5, 9]) == "stop"
    assert rule.finish_reason([4, 5, 6]) is None
    assert rule.text([4, 5, 9, 4, 9, 6]) == "ef"


def test_a_stop_string_that_spans_a_special_token_is_found_and_hidden() -> None:
    rule = stop_rule(_SpecialStopTokenizer(), max_new_tokens=8, stop_strings=["f<|end|>"], stop_ids=[2])
    assert rule.stop_ids == {2}
    assert rule.finish_reason([4, 9]) is None
    assert rule.finish_reason([4, 9, 5, 9]) == "stop"
    assert rule.text([4, 9, 5, 9]) == "e"


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_special_stop_gives_the_same_text_for_every_batch_size(
    lively_model: Any, tiny_tokenizer: Any, batch_size: int
) -> None:
    prompts = [prompt[:length] for prompt, length in zip(_prompts(3, seed=4), (5, 9, 13), strict=True)]
    third = _tokens(lively_model, prompts[0], _rule(tiny_tokenizer, ids=NEVER_STOPS))[2]
    symbol = tiny_tokenizer.convert_ids_to_tokens(third)
    tiny_tokenizer.add_special_tokens({"additional_special_tokens": [symbol]})
    rule = _rule(tiny_tokenizer, strings=(symbol,), ids=NEVER_STOPS)
    assert rule.stop_ids == {third}
    answers = _answers(lively_model, prompts, rule, batch_size=batch_size)
    assert answers == _reference(lively_model, prompts, rule)
    assert answers[0][2] == "stop"
    assert answers[0][1] <= 3


def test_common_prefix_leaves_every_prompt_a_token() -> None:
    assert common_prefix([[1, 2, 3, 4], [1, 2, 5]]) == 2
    assert common_prefix([[1, 2, 3], [1, 2, 3]]) == 2
    assert common_prefix([[1], [1, 2]]) == 0
    assert common_prefix([[7, 8, 9]]) == 2
    assert common_prefix([]) == 0


def test_the_self_check_refuses_models_whose_attention_it_cannot_carry() -> None:
    from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

    size = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    windowed = MistralForCausalLM(MistralConfig(**size, sliding_window=4)).eval()
    assert not packed_decoding_works(windowed, list(range(3, 40)))
    plain = Qwen3ForCausalLM(Qwen3Config(**size)).eval()
    assert packed_decoding_works(plain, list(range(3, 40)))


@pytest.mark.parametrize("family", ["mistral_window", "gpt2", "qwen3"])
def test_other_families_answer_as_they_do_alone(tiny_tokenizer: Any, family: str) -> None:
    import transformers as hf

    torch.manual_seed(1)
    size = {
        "vocab_size": 259, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.4,
    }  # fmt: skip
    model: Any
    if family == "mistral_window":
        model = hf.MistralForCausalLM(hf.MistralConfig(**size, sliding_window=8))
    elif family == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**size))
    else:
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=259, n_embd=64, n_layer=2, n_head=4, initializer_range=0.4)
        )
    prompts = _prompts(7)
    rule = _rule(tiny_tokenizer, tokens=8)
    assert _answers(model.eval(), prompts, rule, batch_size=3) == _reference(model, prompts, rule)


def test_the_model_is_left_as_it_was(lively_model: Any, tiny_tokenizer: Any) -> None:
    lively_model.train()
    before = lively_model.config._attn_implementation
    answers = generate(lively_model, _prompts(4), _rule(tiny_tokenizer), batch_size=2)
    next(answers)
    assert torch.is_grad_enabled()
    assert lively_model.config._attn_implementation == before
    answers.close()
    assert lively_model.training


def test_a_lora_adapter_is_used(lively_model: Any, tiny_tokenizer: Any) -> None:
    from peft import LoraConfig, get_peft_model

    prompts, rule = _prompts(5), _rule(tiny_tokenizer)
    base = _answers(lively_model, prompts, rule, batch_size=3)
    torch.manual_seed(0)
    tuned = get_peft_model(lively_model, LoraConfig(r=4, lora_alpha=64, target_modules="all-linear")).eval()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    answers = _answers(tuned, prompts, rule, batch_size=3, decoder="packed")
    assert answers != base
    assert answers == _reference(tuned, prompts, rule)
    with tuned.disable_adapter():
        assert _answers(tuned, prompts, rule, batch_size=3) == base


def _sampler(n: int, repeat: int = 0) -> Sampler:
    return Sampler([f"17/{repeat}/{index}" for index in range(n)], temperature=0.9, top_p=0.95)


@pytest.mark.parametrize("decoder", ["packed", "padded"])
def test_sampled_answers_do_not_depend_on_batch_size_order_or_decoder(
    lively_model: Any, tiny_tokenizer: Any, decoder: str
) -> None:
    prompts = _prompts(33)
    prompts[7] = prompts[21] = list(prompts[3])  # items of equal text still have numbers of their own
    rule = _rule(tiny_tokenizer, ids=tuple(range(2, 20)))
    expected = _answers(lively_model, prompts, rule, batch_size=1, decoder="padded", pick=_sampler(33))
    assert len({expected[index][0] for index in (3, 7, 21)}) == 3
    assert expected != _answers(lively_model, prompts, rule, batch_size=32)
    for batch_size in (1, 5, 32):
        options: dict[str, Any] = {"batch_size": batch_size, "decoder": decoder}
        assert _answers(lively_model, prompts, rule, pick=_sampler(33), **options) == expected
    order = list(range(33))
    random.Random(1).shuffle(order)
    turned = Sampler([f"17/0/{index}" for index in order], temperature=0.9, top_p=0.95)
    found = _answers(
        lively_model, [prompts[i] for i in order], rule, batch_size=8, decoder=decoder, pick=turned
    )
    assert {order[place]: answer for place, answer in found.items()} == expected
    assert _answers(lively_model, prompts, rule, batch_size=8, pick=_sampler(33, repeat=1)) != expected


@pytest.mark.parametrize("decoder", ["packed", "padded"])
@pytest.mark.parametrize("sampled", [False, True])
def test_stop_strings_and_equal_texts_give_the_same_answers_alone_and_together(
    lively_model: Any, tiny_tokenizer: Any, decoder: str, sampled: bool
) -> None:
    prompts = _prompts(32)
    prompts[20:28] = [list(prompts[2]) for _ in range(8)]
    free = _answers(lively_model, prompts, _rule(tiny_tokenizer, ids=NEVER_STOPS), batch_size=8)
    stops = tuple(text[3:5] for text in (free[2][0], free[9][0]) if text[3:5])
    rule = _rule(tiny_tokenizer, strings=(*stops, "\n"), ids=(2, 3))

    def answers(batch_size: int) -> dict[int, tuple[Any, ...]]:
        options: dict[str, Any] = {"pick": _sampler(32)} if sampled else {}
        return _answers(lively_model, prompts, rule, batch_size=batch_size, decoder=decoder, **options)

    alone = answers(1)
    assert answers(32) == answers(7) == alone
    assert {reason for _, _, reason in alone.values()} == {"stop", "length"}
    assert (len({alone[index] for index in (2, *range(20, 28))}) == 1) is not sampled


def test_the_shared_prefix_is_computed_once_and_a_free_slot_is_refilled_at_once(
    lively_model: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[tuple[int, int]] = []  # tokens, rows of every forward pass
    original = decoding.packed_forward

    def counted(model: Any, tokens: Any, positions: Any, keep: Any, device: Any) -> Any:
        fed.append((len(tokens), len(keep)))
        return original(model, tokens, positions, keep, device)

    monkeypatch.setattr(decoding, "packed_forward", counted)
    prompts = _prompts(24, shared=50)
    rule = _rule(tiny_tokenizer, ids=tuple(range(2, 60)))
    answers = _answers(lively_model, prompts, rule, batch_size=6, decoder="packed")
    lengths = [tokens for _, tokens, _ in answers.values()]
    assert len(set(lengths)) > 3
    assert fed[0] == (50, 1)
    own = sum(len(prompt) - 50 for prompt in prompts)
    assert sum(tokens for tokens, _ in fed) == 50 + own + sum(length - 1 for length in lengths)
    rows = [rows for _, rows in fed[1:]]
    # All six slots are busy until nothing waits any more; then rows only leave.
    assert rows == sorted(rows, reverse=True)
    assert len(rows) - rows.count(6) < 16


def test_only_what_is_left_is_sampled_as_it_would_have_been(lively_model: Any, tiny_tokenizer: Any) -> None:
    """An interrupted set: the rest alone, with the prefix of the whole set and the streams of its own answers."""
    prompts = _prompts(12)
    rule = _rule(tiny_tokenizer)
    whole = _answers(lively_model, prompts, rule, batch_size=4, pick=_sampler(12))
    rest = Sampler([f"17/0/{index}" for index in range(5, 12)], temperature=0.9, top_p=0.95)
    found = _answers(
        lively_model, prompts[5:], rule, batch_size=3, shared_prefix=common_prefix(prompts), pick=rest
    )
    assert [found[place] for place in range(7)] == [whole[index] for index in range(5, 12)]
