"""What the data tests share: specs and files written on the spot, and tokenizers with templates of many kinds."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import DatasetBuild, build_dataset

WriteSpec = Callable[..., Path]


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


@pytest.fixture
def write_spec(tmp_path: Path) -> WriteSpec:
    """write_spec(content, *, split=…, select=…, source=…): a spec beside a file rows.jsonl with that content."""

    def write(content: bytes | list[dict[str, Any]], **sections: dict[str, Any]) -> Path:
        raw = content if isinstance(content, bytes) else as_lines(content)
        (tmp_path / "rows.jsonl").write_bytes(raw)
        spec = {
            "dataset": 1,
            "name": "mine",
            "source": {"kind": "jsonl", "files": ["rows.jsonl"], **sections.pop("source", {})},
            "split": {"shares": {"train": 1.0}},
            **sections,
        }
        path = tmp_path / "mine.yaml"
        path.write_text(json.dumps(spec))  # JSON is YAML
        return path

    return write


@pytest.fixture
def build(write_spec: WriteSpec, tmp_path: Path) -> Callable[..., DatasetBuild]:
    """build(content, **sections): write the spec and build it under tmp_path/builds."""

    def run(content: bytes | list[dict[str, Any]], **sections: dict[str, Any]) -> DatasetBuild:
        return build_dataset(write_spec(content, **sections), tmp_path / "builds")

    return run


@pytest.fixture
def with_template(tiny_tokenizer: Any) -> Callable[..., Any]:
    """with_template(template, extra=[…], **special): the tiny tokenizer with another template and special tokens."""

    def make(template: str, extra: tuple[str, ...] = (), **special: str) -> Any:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.add_special_tokens({"additional_special_tokens": list(extra)})
        for name, token in special.items():
            setattr(tokenizer, name, token)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def merging_tokenizer() -> Any:
    """Byte-level BPE that merges two line breaks into one token: a prompt's end can merge with an answer's start."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    newline = "Ċ"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|im_start|>": 0, "<|im_end|>": 1}
    vocabulary |= {symbol: index for index, symbol in enumerate(alphabet, start=2)}
    vocabulary[newline * 2] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(newline, newline)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast
