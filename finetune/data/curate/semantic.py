"""Semantic duplicates: rows that say the same in other words, by cosine similarity of embeddings. Off unless asked for.

The embedding is the user's: any function from a list of texts to an array [texts, dimensions], by name, or a folder of
a static embedding model for the package model2vec. Every pair of rows is compared, so that no pair is proposed and left
unverified; the price is quadratic, hence the limit on rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.data.curate.functions import load_function
from finetune.data.curate.near import NearDuplicates
from finetune.data.curate.tokens import Texts, batches
from finetune.errors import UserError

Vectors = npt.NDArray[np.float32]
Embed = Callable[[list[str]], Any]

_MOST_ROWS = 200_000
_ROWS_AT_ONCE = 1024


def load_embedding(name: str, *, folder: Path | None = None, where: str = "") -> Embed:
    """`package.module:function`, `file.py:function`, or `model2vec:FOLDER`."""
    scheme, _, path = name.partition(":")
    if scheme != "model2vec":
        return load_function(name, folder=folder, where=where)
    try:
        from model2vec import StaticModel
    except ImportError as error:
        raise UserError(
            "the package model2vec is not installed", where=where, fix="pip install model2vec"
        ) from error
    model = StaticModel.from_pretrained((folder or Path()) / path)
    return lambda texts: model.encode(texts)


def find_semantic_duplicates(texts: Texts, embed: Embed, *, threshold: float = 0.95) -> NearDuplicates:
    """All pairs of texts whose embeddings have a cosine similarity of at least `threshold`, each with that similarity.

    Texts of white space alone are near to nothing. Raises UserError beyond
    200,000 rows, or when the function gives something else than one finite vector a text.
    """
    if len(texts) > _MOST_ROWS:
        raise UserError(
            f"{len(texts)} rows are too many to compare each with each",
            fix=f"leave near duplicates out first, or look at {_MOST_ROWS} rows at most",
        )
    vectors, empty = _embed_all(texts, embed)
    first, second, cosines = [], [], []
    for start in range(0, len(vectors), _ROWS_AT_ONCE):
        block = vectors[start : start + _ROWS_AT_ONCE]
        cosine = block @ vectors[start:].T
        at, other = np.nonzero(np.triu(cosine >= threshold, k=1))
        first.append(at + start)
        second.append(other + start)
        cosines.append(cosine[at, other].astype(np.float64))
    none = np.empty(0, np.int64)
    return NearDuplicates(
        np.concatenate([none, *first]),
        np.concatenate([none, *second]),
        np.concatenate([np.empty(0), *cosines]),
        empty,
        none,
        len(vectors) * (len(vectors) - 1) // 2,
    )


def _embed_all(texts: Texts, embed: Embed) -> tuple[Vectors, npt.NDArray[np.int64]]:
    """Unit vectors, shape [texts, dimensions], zero for empty texts; and which those are."""
    parts: list[Vectors] = []
    empty: list[int] = []
    for first, batch in batches(texts):
        parts.append(_unit_vectors(embed(batch), batch))
        blank = [row for row, text in enumerate(batch) if not text.strip()]
        parts[-1][blank] = 0.0
        empty += [first + row for row in blank]
    return (np.concatenate(parts) if parts else np.empty((0, 1), np.float32)), np.array(empty, np.int64)


def _unit_vectors(made: Any, batch: Sequence[str]) -> Vectors:
    vectors = np.array(made, np.float32)
    if vectors.ndim != 2 or len(vectors) != len(batch) or not np.isfinite(vectors).all():
        raise UserError(
            f"the embedding gave an array of shape {vectors.shape} for {len(batch)} texts, or values that are not finite",
            fix="return one finite vector a text: an array [texts, dimensions]",
        )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Vectors = vectors / np.maximum(lengths, 1e-12)
    return unit
