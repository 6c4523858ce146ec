"""A byte-level BPE tokenizer as the metadata of a GGUF file: tokens, their types, merges, special ids, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import UserError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types of the format (`gguf.TokenType`)."""

# How text is cut before the merges, by what tokenizer.json says; llama.cpp knows each by a name.
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_NAMES = {
    (("ByteLevel", ""),): "gpt-2",
    (("Digits", "single"), ("ByteLevel", "")): "smollm",
    (("Split", _LLAMA3), ("ByteLevel", "")): "llama-bpe",
    (("Split", _QWEN2), ("ByteLevel", "")): "qwen2",
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What a GGUF file says of a tokenizer. `pre`: llama.cpp's name of the way text is cut."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    pre: str
    special_ids: Mapping[str, int]
    chat_template: str | None
    add_bos: bool


def read_gguf_tokenizer(folder: Path, n_rows: int) -> GgufTokenizer:
    """The tokenizer of a model folder, padded to the `n_rows` rows of its embedding.

    Raises UserError for a tokenizer that is no byte-level BPE, or cuts text in a way that llama.cpp has no name for: the
    served model would read other tokens than it was trained on.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder} has no tokenizer.json", fix="save the model with its fast tokenizer first")
    held = json.loads(path.read_text(encoding="utf-8"))
    model = held["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UserError(
            f"the tokenizer of {folder} is no byte-level BPE ({model.get('type')}"
            f"{', with byte fallback' if model.get('byte_fallback') else ''})",
            fix="convert this family with llama.cpp's own script; the merged folder is what it reads",
        )
    texts: dict[int, tuple[str, int]] = {index: (text, NORMAL) for text, index in model["vocab"].items()}
    for added in held.get("added_tokens", []):
        texts[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    if max(texts) >= n_rows:
        raise UserError(
            f"the tokenizer has ids up to {max(texts)}, the embedding {n_rows} rows",
            fix="resize the embedding, or save the tokenizer that the model was trained with",
        )
    filled = [texts.get(index, (f"[PAD{index}]", UNUSED)) for index in range(n_rows)]
    return GgufTokenizer(
        tokens=tuple(text for text, _ in filled),
        types=tuple(kind for _, kind in filled),
        merges=tuple(one if isinstance(one, str) else " ".join(one) for one in model["merges"]),
        pre=_pre_name(held.get("pre_tokenizer"), folder),
        special_ids=_special_ids(folder),
        chat_template=_chat_template(folder),
        add_bos=_adds_bos(folder),
    )


def _pre_name(section: Mapping[str, Any] | None, folder: Path) -> str:
    parts = section.get("pretokenizers", [section]) if section else []
    shape = tuple((part["type"], _detail(part)) for part in parts if part)
    if shape not in _PRE_NAMES:
        raise UserError(
            f"the tokenizer of {folder} cuts text in a way that has no name in llama.cpp here: "
            f"{', '.join(kind for kind, _ in shape) or 'not at all'}",
            why="with another name it would read other tokens than it was trained on",
            fix="convert this family with llama.cpp's own script; the merged folder is what it reads",
        )
    return _PRE_NAMES[shape]


def _detail(part: Mapping[str, Any]) -> str:
    if part["type"] == "Digits":
        return "single" if part.get("individual_digits") else "groups"
    if part["type"] == "Split":
        return str(part["pattern"].get("Regex", part["pattern"].get("String")))
    return ""


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _special_ids(folder: Path) -> dict[str, int]:
    tokenizer = _tokenizer(folder)
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    return {name: index for name, index in ids.items() if index is not None}


def _chat_template(folder: Path) -> str | None:
    template = _tokenizer(folder).chat_template
    return template if isinstance(template, str) else None


def _adds_bos(folder: Path) -> bool:
    tokenizer = _tokenizer(folder)
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
