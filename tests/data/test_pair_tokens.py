"""Both answers of a pair stand behind the same prompt tokens, and nothing of the prompt is learnt."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.pair_tokens import AnsweredPrompt, tokenise_preferences
from finetune.data.row_tokens import IGNORED, prompt_ids
from finetune.data.rows import Row
from finetune.errors import UserError

# No line break or special token between the question and the answer: words can merge across the boundary.
BARE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' or (loop.last and not add_generation_prompt) %}<|im_end|>{% endif %}{% endfor %}"
)


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def pair(chosen: str, rejected: str, prompt: str = "Turn it on", name: str = "p", **fields: Any) -> Row:
    return Row(
        name,
        (say("user", prompt),),
        name,
        "test",
        kind="preference",
        chosen=(say("assistant", chosen),),
        rejected=(say("assistant", rejected),),
        **fields,
    )


def judged(answer: str, label: bool, name: str = "k") -> Row:
    messages = (say("user", "Turn it on"), say("assistant", answer))
    return Row(name, messages, name, "test", kind="kto", label=label)


def one(row: Row, tokenizer: Any, **options: Any) -> AnsweredPrompt:
    options = {"unit": "pair", "max_tokens": 512} | options
    (found,) = tokenise_preferences([row], tokenizer, **options).rows
    return found


@pytest.fixture
def merging(make_tiny_tokenizer: Any) -> Any:
    """A tokenizer that has 'Answer' and ' s' as single tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    symbols = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("A", "n"), ("An", "s"), ("Ans", "w"), ("Answ", "e"), ("Answe", "r"), ("\u0120", "s")]
    vocabulary = {token: index for index, token in enumerate([*symbols, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    fast.chat_template = BARE
    return fast


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [("Ans", "wer", "wer seven"), ("The sum is ", "seven", "46"), ("Q ", "s", "t")],
)
def test_the_boundary_is_the_same_for_both_answers_and_loses_nothing(
    merging: Any, prompt: str, chosen: str, rejected: str
) -> None:
    together = merging(prompt + chosen, add_special_tokens=False)["input_ids"]
    alone = merging(prompt, add_special_tokens=False)["input_ids"]
    found = one(pair(chosen, rejected, prompt), merging)
    assert found.prompt == alone == prompt_ids([say("user", prompt)], merging)[0]
    for answer, text in zip(found.answers, (chosen, rejected), strict=True):
        assert merging.decode(answer.ids) == text + "<|im_end|>"
        assert answer.labels == answer.ids
    if prompt != "The sum is ":  # where one token holds the end of the prompt and the start of the answer
        assert together[: len(alone)] != alone


def test_the_prompt_is_what_the_model_is_given_and_the_answer_ends_with_its_end_of_turn(
    tiny_tokenizer: Any,
) -> None:
    found = one(pair("yes", "no, never"), tiny_tokenizer)
    assert found.prompt == prompt_ids([say("user", "Turn it on")], tiny_tokenizer)[0]
    assert tiny_tokenizer.decode(found.chosen.ids) == "yes<|im_end|>"
    assert tiny_tokenizer.decode(found.rejected.ids) == "no, never<|im_end|>"
    assert found.n_tokens == len(found.prompt) + len(found.chosen.ids) + len(found.rejected.ids)
    assert found.n_targets == 4 + 10


def test_only_the_assistant_speaks_in_what_is_learnt_from_an_answer_of_several_turns(
    tiny_tokenizer: Any,
) -> None:
    row = Row(
        "p",
        (say("user", "a"), say("assistant", "earlier"), say("user", "b")),
        "p",
        "test",
        kind="preference",
        chosen=(say("assistant", "look"), say("tool", "found"), say("assistant", "done")),
        rejected=(say("assistant", "no"),),
    )
    found = one(row, tiny_tokenizer)
    assert "earlier" in tiny_tokenizer.decode(found.prompt)
    learnt = tiny_tokenizer.decode([label for label in found.chosen.labels if label != IGNORED])
    assert learnt == "look<|im_end|>done<|im_end|>"
    assert "found" in tiny_tokenizer.decode(found.chosen.ids)


def test_identical_pairs_are_dropped_and_counted_up_to_one_per_cent(tiny_tokenizer: Any) -> None:
    good = [pair(f"yes {n}", "no", name=f"p{n}") for n in range(99)]
    split = tokenise_preferences(
        [*good, pair("same", "same", name="twin")], tiny_tokenizer, unit="pair", max_tokens=512
    )
    assert split.counts == {
        "read": 100,
        "kept": 99,
        "dropped_too_long": 0,
        "truncated": 0,
        "dropped_identical": 1,
        "dropped_empty": 0,
    }
    assert [(entry["id"], entry["reason"]) for entry in split.dropped] == [("twin", "identical")]
    with pytest.raises(UserError, match="2 of 101 pairs have the same"):
        twins = [pair("same", "same", name=f"twin{n}") for n in range(2)]
        tokenise_preferences([*good, *twins], tiny_tokenizer, unit="pair", max_tokens=512)


@pytest.mark.parametrize("answer", ["", "  \n", "\u200b \n"])
def test_an_answer_without_text_is_dropped(tiny_tokenizer: Any, answer: str) -> None:
    rows = [pair("yes", "no", name="good"), pair("yes", answer, name="empty")]
    split = tokenise_preferences(rows, tiny_tokenizer, unit="pair", max_tokens=512)
    assert [row.row_id for row in split.rows] == ["good"]
    assert split.counts["dropped_empty"] == 1


def test_a_long_prompt_is_cut_alike_for_both_answers(tiny_tokenizer: Any) -> None:
    row = pair("yes", "no, " * 10, prompt="word " * 100)
    rows = [row, pair("a", "b", name="short")]
    with pytest.raises(UserError, match="1 rows are longer than data"):
        tokenise_preferences(rows, tiny_tokenizer, unit="pair", max_tokens=200)
    dropped = tokenise_preferences(rows, tiny_tokenizer, unit="pair", max_tokens=200, long_rows="drop")
    assert dropped.counts["dropped_too_long"] == 1
    cut = tokenise_preferences(rows, tiny_tokenizer, unit="pair", max_tokens=200, long_rows="truncate_prompt")
    assert cut.counts["truncated"] == 1
    assert 190 <= len(cut.rows[0].input_ids) <= 200
    whole = one(row, tiny_tokenizer, max_tokens=2000)
    assert cut.rows[0].answers == whole.answers


def test_a_pair_gives_two_judged_answers(tiny_tokenizer: Any) -> None:
    rows = [pair("yes", "no"), judged("maybe", False)]
    split = tokenise_preferences(rows, tiny_tokenizer, unit="judged", max_tokens=512)
    assert [(row.row_id, row.wanted) for row in split.rows] == [
        ("p:chosen", True),
        ("p:rejected", False),
        ("k", False),
    ]
    assert [tiny_tokenizer.decode(row.chosen.ids) for row in split.rows] == [
        f"{text}<|im_end|>" for text in ("yes", "no", "maybe")
    ]


def test_rows_of_another_kind_are_refused_by_name(tiny_tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"row k is of kind 'kto'.*pairs"):
        tokenise_preferences([judged("a", True)], tiny_tokenizer, unit="pair", max_tokens=512)
    chat = Row("c", (say("user", "a"), say("assistant", "b")), "c", "test")
    with pytest.raises(UserError, match=r"row c is of kind 'chat'"):
        tokenise_preferences([chat], tiny_tokenizer, unit="pair", max_tokens=512)


def test_an_answer_with_a_weight_of_its_own_is_refused(tiny_tokenizer: Any) -> None:
    weighed = pair("yes", "no")
    weighed.chosen[0]["weight"] = 0.5
    with pytest.raises(UserError, match=r"row p \(test\): a turn of the answer has a weight"):
        tokenise_preferences([weighed], tiny_tokenizer, unit="pair", max_tokens=512)


@pytest.mark.parametrize(
    ("rows", "where", "fix"),
    [
        ([pair("on", "on")], "data.spec", "give each pair two different answers"),
        ([pair("", "on")], "data.spec", "write the missing answers"),
        (
            [pair("on", "on"), pair("on", "off" * 300)],
            "data.max_tokens",
            "raise data.max_tokens, and give each",
        ),
    ],
)
def test_where_no_pair_is_left_the_remedy_is_that_of_its_reason(
    rows: list[Row], where: str, fix: str, tiny_tokenizer: Any
) -> None:
    with pytest.raises(UserError, match="no row is left") as caught:
        tokenise_preferences(
            rows, tiny_tokenizer, unit="pair", max_tokens=300, long_rows="drop", max_identical_share=1.0
        )
    assert caught.value.faults[0].where == where
    assert caught.value.faults[0].fix.startswith(fix)
