"""Which bytes of a text a token stands for, read from a tokenizer's own decoder.

Character offsets do not tell it: they give all tokens of a character that is split the whole character, and byte-level
tokenizers trim them around white space. Two families cover the causal language models in use: byte-level BPE (GPT-2,
Llama 3, Qwen, SmolLM), which writes every byte as one letter, and SentencePiece (Llama 2, Mistral, Gemma), which writes a
space as ▁ and a byte that it has no piece for as <0xE2>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

from finetune.errors import UserError

_SPACE = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of every ordinary token of a tokenizer; special tokens have none.

    Raises UserError for a tokenizer whose decoder is of neither family.
    """

    def __init__(self, tokenizer: Any, *, where: str = "distil.alignment") -> None:
        self.tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"Metaspace", "Replace ▁"}:
            raise UserError(
                f"the tokens of {tokenizer.name_or_path or 'this tokenizer'} cannot be taken apart into bytes",
                where=where,
                why=f"its decoder is {', '.join(sorted(kinds)) or 'not known'}; byte-level BPE and SentencePiece can be aligned",
                fix="let the student learn the teacher's answers as text: distil.way: answers (docs/distillation.md)",
            )
        self._falls_back = "ByteFallback" in kinds

    @cached_property
    def by_id(self) -> dict[int, bytes]:
        """Bytes of every ordinary token by its id."""
        added = {id: token.content.encode() for id, token in self.tokenizer.added_tokens_decoder.items()}
        found = {id: content for id, content in added.items() if id not in self.special}
        for token, id in self.tokenizer.get_vocab().items():
            if id not in added and id not in self.special and (read := self._read(token)) is not None:
                found[id] = read
        return found

    @cached_property
    def special(self) -> dict[int, str]:
        """Special tokens by id: they structure a conversation and are no text."""
        own = set(self.tokenizer.all_special_ids)
        marked = {id for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return {id: self.tokenizer.convert_ids_to_tokens(id) for id in sorted(own | marked)}

    @cached_property
    def spelling(self) -> set[int]:
        """Ids of the bytes that a SentencePiece tokenizer spells with what it has no piece for."""
        if not self._falls_back:
            return set()
        return {id for token, id in self.tokenizer.get_vocab().items() if _BYTE_PIECE.fullmatch(token)}

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of tokens in turn; a special one among them counts with its name."""
        return [
            self.by_id[id] if id in self.by_id else self.special.get(id, "\N{REPLACEMENT CHARACTER}").encode()
            for id in ids
        ]

    def _read(self, token: str) -> bytes | None:
        if self._byte_level:
            letters = _byte_letters()
            return bytes(letters[one] for one in token) if all(one in letters for one in token) else None
        if self._falls_back and (byte := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.replace(_SPACE, " ").encode()


@cache
def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level token stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """Names of the steps of a fast tokenizer's decoder; empty for a tokenizer without one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return set()
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps if "type" in step}
    if any(step.get("pattern") == {"String": _SPACE} for step in steps):
        kinds.add("Replace ▁")
    return kinds
