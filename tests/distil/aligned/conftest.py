"""Tokenizers of other kinds than the tiny one, with a chat template of their own."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.distil.aligned.token_bytes import TokenBytes

TEXTS = [
    "turn on the kitchen light and set it to 20 degrees",
    "the kitchen light is on, the degrees are set",
    "Größe, naïve, 20°C, 日本語 and emoji 🙂 in the kitchen 日本",
    "set the naïve light to 21°C in the Küche 🙂🙂",
]
# Another header, another end of turn, white space that the tiny template does not write.
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] | trim }} </s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def build(kind: str, *, vocabulary: int = 420) -> Any:
    """`byte_level` BPE with merges, or `sentencepiece`: BPE over ▁ with bytes to fall back on."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet, first = pre_tokenizers.ByteLevel.alphabet(), []
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet, first = [], [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*special, *first],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    texts = TEXTS if kind == "byte_level" else [text for text in TEXTS if text.isascii()]
    tokenizer.train_from_iterator(texts, trainer)
    if first:  # bytes are ordinary pieces, which the trainer knows as special ones only
        import json

        content = json.loads(tokenizer.to_str())
        content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] in special]
        tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def other_tokenizer(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.fixture(scope="session")
def other_bytes(other_tokenizer: Any) -> TokenBytes:
    return TokenBytes(other_tokenizer)


@pytest.fixture(scope="session")
def merging_tokenizer() -> Any:
    """Byte-level with merges: tokens of several bytes, and characters that fall apart in the middle."""
    return build("byte_level")
