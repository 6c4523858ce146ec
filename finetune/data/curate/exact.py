"""Exact duplicates by 128-bit digests: sixteen bytes a row, however long the texts are."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from finetune.data.curate.tokens import Texts

Digests = npt.NDArray[np.uint64]  # shape [rows, 2]
Rows = npt.NDArray[np.int64]


def text_digest(text: str) -> bytes:
    """16 bytes of BLAKE2b over the UTF-8 of the text; a lone surrogate counts as the character it is."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def text_digests(texts: Texts) -> Digests:
    """The digests of all texts, in order, as two numbers each. Texts are fetched one at a time."""
    packed = b"".join(text_digest(texts[row]) for row in range(len(texts)))
    return np.frombuffer(packed, "<u8").reshape(-1, 2)


def first_of_equal(digests: Digests) -> Rows:
    """Row -> the first row with the same digest, itself when it is the first."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal digests keep the order of their rows
    in_order = digests[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    first = np.empty(len(order), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return first


def groups_of_equal(digests: Digests, at_least: int = 2) -> list[Rows]:
    """The rows of every digest that at least so many rows share, each group in order, the largest group first."""
    first = first_of_equal(digests)
    order = np.argsort(first, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(first[order])) + 1) if len(order) else []
    return sorted((rows for rows in groups if len(rows) >= at_least), key=lambda rows: (-len(rows), rows[0]))
