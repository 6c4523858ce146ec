"""Texts as 64-bit hashes of their words, and of runs of n words: the ground of near duplicates and decontamination.

Legend: `hashes` of a batch lie row after row in one array; row r owns hashes[offsets[r]:offsets[r + 1]].
A token is a word in folded form. In scripts without spaces (Han, Kana, Thai, …) every character is a token, and so is
every operator anywhere, for "3 + 4" and "3 - 4" are different questions. Sentence punctuation only separates.
The hash of a token depends on its text alone: not on the process, the machine, the batch or the rows around it.
"""

from __future__ import annotations

import hashlib
import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from finetune.data.fold import fold_characters

Hashes = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]

_SEPARATOR, _WORD, _SINGLE = 0, 1, 2
# Sentence punctuation parts words; all other symbols, and these, are tokens: they decide what a formula or code says.
_OPERATORS = frozenset("+-*/%=<>^|&~#@$\\−×÷±≠≤≥")
_NO_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # ideographic marks that stand for a character
    (0x3040, 0x312F),  # Hiragana, Katakana, Bopomofo
    (0x31F0, 0x31FF),  # Katakana extensions
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han, compatibility
)
_BEYOND_BMP = 0x10000
_LONGEST_VECTORISED_BYTES = 256
_BATCH_ROWS = 256
_BATCH_CHARACTERS = 1 << 18
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))  # MurmurHash3's 64-bit finaliser
_SHIFT = np.uint64(33)
_STEP = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing
# _LOW_BYTES[n] keeps the first n of eight little-endian bytes.
_LOW_BYTES = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)


class Texts(Protocol):
    """What the functions of this package read: a list of texts, or anything that fetches them one by one from disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenHashes:
    """Hashes of a batch of rows; `offsets` has one entry more than there are rows."""

    hashes: Hashes
    offsets: Offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Offsets:
        """How many hashes each row has."""
        return np.diff(self.offsets)


def batches(texts: Texts) -> Iterator[tuple[int, list[str]]]:
    """(index of its first row, its texts) of one batch after the other; small enough for a processor's cache."""
    batch: list[str] = []
    n_characters = 0
    for index in range(len(texts)):
        batch.append(texts[index])
        n_characters += len(batch[-1])
        if len(batch) >= _BATCH_ROWS or n_characters >= _BATCH_CHARACTERS:
            yield index + 1 - len(batch), batch
            batch, n_characters = [], 0
    if batch:
        yield len(texts) - len(batch), batch


def hash_tokens(texts: Sequence[str]) -> TokenHashes:
    """The tokens of each text as hashes, in the order of the text."""
    plain = [index for index, text in enumerate(texts) if text.isascii()]
    if len(plain) == len(texts):
        return _hash_ascii(texts)
    other = [index for index, text in enumerate(texts) if not text.isascii()]
    parts = [_hash_ascii([texts[index] for index in plain]), _hash_unicode([texts[index] for index in other])]
    return _interleave(parts, np.array(plain + other))


def ngrams(tokens: TokenHashes, n: int) -> TokenHashes:
    """Hashes of every run of `n` tokens of a row, in order, repeats included.

    A row of fewer tokens, but at least one, has one hash: that of all its tokens.
    """
    counts = tokens.counts
    hashes, offsets = tokens.hashes, tokens.offsets
    grams = np.zeros(len(hashes), np.uint64)
    for place in range(min(n, len(hashes))):
        grams *= _STEP
        grams[: len(hashes) - place] += hashes[place:]
        # Runs that begin in the last `place` positions of the batch are cut short; they belong to short rows below.
    is_start = np.ones(len(hashes), bool)
    for back in range(1, n):
        is_start[offsets[1:][counts >= back] - back] = False
    for row in np.flatnonzero((counts > 0) & (counts < n)):
        first = offsets[row]
        is_start[first] = True
        value = 0
        for token in hashes[first : offsets[row + 1]]:
            value = (value * int(_STEP) + int(token)) % 2**64
        grams[first] = value ^ int(counts[row])  # a short row is no prefix of a longer one
    kept = np.where(counts >= n, counts - n + 1, np.minimum(counts, 1))
    return TokenHashes(_mix(grams[is_start]), np.concatenate([[0], np.cumsum(kept)]).astype(np.int64))


def fold(text: str) -> str:
    """Compatibility forms (full-width letters, ligatures) and case folded; the words of a text are those of this."""
    return fold_characters(text)


def _hash_ascii(texts: Sequence[str]) -> TokenHashes:
    joined = "\n".join(texts).lower().encode("ascii")
    first, past = _token_edges(np.frombuffer(joined.translate(_ascii_kinds()), np.uint8))
    return TokenHashes(_hash_spans(joined, first, past), _row_offsets(first, texts))


def _hash_unicode(texts: Sequence[str]) -> TokenHashes:
    """The same in code points, whose tokens are then hashed over their UTF-8 bytes, as those of ASCII are."""
    folded = [fold(text) for text in texts]
    joined = "\n".join(folded)
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    first, past = _token_edges(np.take(_kinds(), codes, mode="clip"))  # beyond its end: the last entry
    data = joined.encode("utf-8", "surrogatepass")
    wide = np.flatnonzero(codes > 0x7F)
    extra = np.concatenate([[0], np.cumsum(1 + (codes[wide] > 0x7FF) + (codes[wide] > 0xFFFF))])
    first_byte, past_byte = (place + extra[np.searchsorted(wide, place)] for place in (first, past))
    return TokenHashes(_hash_spans(data, first_byte, past_byte), _row_offsets(first, folded))


def _token_edges(kinds: npt.NDArray[np.uint8]) -> tuple[Offsets, Offsets]:
    """The position of the first character of every token, and that just past its last.

    Where the kind changes, and at every single character, a stretch begins that ends where the next one does.
    """
    begins = np.empty(len(kinds), bool)
    begins[:1] = True
    np.not_equal(kinds[1:], kinds[:-1], out=begins[1:])
    begins |= kinds == _SINGLE
    edges = np.append(np.flatnonzero(begins), len(kinds))
    is_token = kinds[edges[:-1]] != _SEPARATOR
    return edges[:-1][is_token], edges[1:][is_token]


def _row_offsets(first: Offsets, texts: Sequence[str]) -> Offsets:
    """Which tokens are whose, the texts being joined by one character."""
    ends = np.fromiter(itertools.accumulate(len(text) + 1 for text in texts), np.int64, len(texts))
    return np.concatenate([[0], np.searchsorted(first, ends)]).astype(np.int64)


def _hash_spans(data: bytes, first: Offsets, past: Offsets) -> Hashes:
    """Hashes of data[first:past], eight bytes at a time for all spans together."""
    padded = np.frombuffer(data + bytes(8), np.uint8)
    octets = np.lib.stride_tricks.as_strided(padded[:8].view("<u8"), (len(data) + 1,), (1,))
    lengths = past - first
    hashes = _mix(octets[first] & _LOW_BYTES[np.minimum(lengths, 8)])
    rest = np.flatnonzero((lengths > 8) & (lengths <= _LONGEST_VECTORISED_BYTES))
    done = 8
    while rest.size:
        part = octets[first[rest] + done] & _LOW_BYTES[np.minimum(lengths[rest] - done, 8)]
        hashes[rest] = _mix(hashes[rest] * _STEP + part)
        done += 8
        rest = rest[lengths[rest] > done]
    for span in np.flatnonzero(lengths > _LONGEST_VECTORISED_BYTES):
        digest = hashlib.blake2b(data[first[span] : past[span]], digest_size=8).digest()
        hashes[span] = int.from_bytes(digest, "little")
    return hashes


def _mix(values: Hashes) -> Hashes:
    """A bijection of 64-bit numbers after which every bit depends on every bit."""
    mixed = values ^ (values >> _SHIFT)
    for factor in _MIX:
        mixed *= factor
        mixed ^= mixed >> _SHIFT
    return mixed


def _interleave(parts: Sequence[TokenHashes], order: Offsets) -> TokenHashes:
    """Rows of several batches in another order: row r of the batches, one after the other, becomes row order[r]."""
    hashes = np.concatenate([part.hashes for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    starts = np.concatenate([[0], np.cumsum(counts)])[:-1]
    back = np.argsort(order)
    offsets = np.concatenate([[0], np.cumsum(counts[back])]).astype(np.int64)
    return TokenHashes(hashes[gather_ranges(starts[back], counts[back])], offsets)


def gather_ranges(starts: Offsets, counts: Offsets) -> Offsets:
    """Indices starts[0], starts[0] + 1, … (counts[0] of them), then those of the next range, and so on."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + counts, counts)


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """What each character of the basic plane is; the last entry stands for all beyond it (Han extensions, emoji)."""
    kinds = np.empty(_BEYOND_BMP + 1, np.uint8)
    kinds[:_BEYOND_BMP] = [_kind(chr(code)) for code in range(_BEYOND_BMP)]
    for first, last in _NO_SPACES:
        block = kinds[first : last + 1]
        block[block == _WORD] = _SINGLE
    kinds[_BEYOND_BMP] = _SINGLE
    return kinds


@cache
def _ascii_kinds() -> bytes:
    """The same for `bytes.translate`."""
    return bytes(_kinds()[:256])


def _kind(character: str) -> int:
    category = unicodedata.category(character)
    if character in _OPERATORS or category[0] == "S":
        return _SINGLE
    return _WORD if category[0] in "LMN" or character == "_" else _SEPARATOR
