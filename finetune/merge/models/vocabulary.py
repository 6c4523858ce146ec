"""Vocabularies that differ: which row of which model belongs to each token of the result, by the token's text.

Legend: `rows[m][r]` is the row of model m that holds the result's row r, −1 where model m has no such token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.merge.companions import load_tokenizer_of
from finetune.merge.models.inputs import MergeModel
from finetune.paths import read_json

AVERAGE, ZERO, MEAN_ROW = -1, -2, -3
TOKENIZER_FILE = "tokenizer.json"


@dataclass(slots=True)
class Vocabulary:
    """Rows of the result's embeddings. `rows` int64 [models, n_rows]; `fallback` int64 [n_rows] says whose row models
    without the token take: a model's number, AVERAGE of those that have it, ZERO, or the MEAN_ROW of all tokens.

    `source` is the model whose tokenizer files are kept; `tokenizer` replaces its tokenizer.json, for a union.
    """

    n_rows: int
    n_tokens: int
    rows: torch.Tensor
    fallback: torch.Tensor
    source: MergeModel
    tokenizer: dict[str, Any] | None = None
    remarks: list[str] = field(default_factory=list)

    def digest(self) -> str:
        return digest_json([self.n_rows, self.rows.tolist(), self.fallback.tolist(), self.source.id])

    def read(
        self, model: int, start: int, stop: int, gather: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Rows [start, stop) of the result as model `model` has them, fp32; `gather(m, rows)` reads rows of model m."""
        mine = self.rows[model, start:stop]
        present = mine >= 0
        if bool(present.all()):
            return gather(model, mine).float()
        known = gather(model, mine[present]).float()
        values = known.new_zeros(stop - start, *known.shape[1:])
        values[present] = known
        fallback = self.fallback[start:stop]
        for donor in range(len(self.rows)):
            theirs = self.rows[donor, start:stop]
            taken = ~present & (fallback == donor)
            if bool(taken.any()):
                values[taken] = gather(donor, theirs[taken]).float()
            shared = ~present & (fallback == AVERAGE) & (theirs >= 0)
            if bool(shared.any()):
                values[shared] += gather(donor, theirs[shared]).float()
        averaged = ~present & (fallback == AVERAGE)
        if bool(averaged.any()):
            n_having = (self.rows[:, start:stop] >= 0).sum(0)[averaged]
            values[averaged] /= n_having.reshape(-1, *[1] * (values.dim() - 1))
        mean = ~present & (fallback == MEAN_ROW)
        if bool(mean.any()):
            values[mean] = self._mean_row(model, gather)
        return values

    def _mean_row(self, model: int, gather: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The mean of the rows of all tokens, for rows that only pad the table."""
        total: torch.Tensor | None = None
        for start in range(0, self.n_tokens, 1024):
            part = self.read(model, start, min(start + 1024, self.n_tokens), gather).double().sum(0)
            total = part if total is None else total + part
        assert total is not None
        return (total / self.n_tokens).float()


def check_same(models: Sequence[MergeModel], base: MergeModel) -> list[str]:
    """Every model must number its tokens as the base does. Returns remarks on models without a tokenizer."""
    remarks = []
    mine = read_tokens(base.folder)
    for model in models:
        if model is base or _same_file(model.folder, base.folder):
            continue
        theirs = read_tokens(model.folder)
        if mine is None or theirs is None:
            without = base if mine is None else model
            remarks.append(
                f"{without.id} has no tokenizer: that its tokens have the same numbers is taken for granted"
            )
            continue
        by_id, other = ({index: token for token, index in found.items()} for found in (mine, theirs))
        differing = sorted(
            index for index in by_id.keys() | other.keys() if by_id.get(index) != other.get(index)
        )
        if differing:
            first = differing[0]
            words = [repr(tokens[first]) if first in tokens else "no token" for tokens in (by_id, other)]
            raise UserError(
                f"{base.id} and {model.id} have other tokenizers ({len(mine)} and {len(theirs)} tokens): {len(differing)} ids "
                f"stand for other tokens, the first is {first} ({words[0]} and {words[1]})",
                where=str(model.folder),
                why="rows of unrelated tokens would be mixed",
                fix="align the rows by token: tokenizer: {source: union}, or source: base",
            )
    return remarks


def align(
    source: str, models: Sequence[MergeModel], base: MergeModel, *, keep_padding: bool, multiple: int | None
) -> Vocabulary | None:
    """Match the rows of all models by token text; None when nothing has to be moved and no row added.

    `source`: 'base', 'union' (the base's tokens, then those that only others have), or a model. `keep_padding` keeps rows
    of the source's embedding beyond its tokens; `multiple` rounds the number of rows up.
    """
    owner = base if source in ("base", "union") else next((m for m in models if m.id == source), None)
    if owner is None:
        raise UserError(
            f"the tokenizer's source '{source}' is no model of this merge",
            where="tokenizer.source",
            fix=f"write union, base, or one of {', '.join(model.id for model in models)}",
        )
    tokens_by_model = [read_tokens(model.folder) for model in models]
    without = [model.id for model, tokens in zip(models, tokens_by_model, strict=True) if tokens is None]
    if without:
        raise UserError(
            f"no tokenizer in {', '.join(without)}",
            where="tokenizer",
            fix="save the tokenizer into the model's folder, or delete the key tokenizer",
        )
    tables = [tokens for tokens in tokens_by_model if tokens is not None]
    content: dict[str, Any] | None = None
    tokens = tables[list(models).index(owner)]
    if source == "union":
        from finetune.merge.models.union import unite

        content = unite(owner, [model for model in models if model is not owner])
        if content is not None:
            tokens = tokens_of(content)
    return _matched(tokens, tables, models, owner, content, keep_padding, multiple)


def _matched(
    tokens: dict[str, int],
    tables: list[dict[str, int]],
    models: Sequence[MergeModel],
    owner: MergeModel,
    content: dict[str, Any] | None,
    keep_padding: bool,
    multiple: int | None,
) -> Vocabulary | None:
    n_tokens = max(tokens.values()) + 1
    heights = [_height(model) for model in models]
    n_rows = max(n_tokens, _height(owner)) if keep_padding else n_tokens
    if multiple:
        n_rows = -(-n_rows // multiple) * multiple
    rows = torch.full((len(models), n_rows), -1, dtype=torch.int64)
    for number, (table, height) in enumerate(zip(tables, heights, strict=True)):
        for token, index in tokens.items():
            row = table.get(token, -1)
            rows[number, index] = row if row < height else -1
        if keep_padding:  # which has no token: the same row, where the model pads there too
            used = {*table.values(), *tokens.values()}
            padding = [row for row in range(min(n_rows, height)) if row not in used]
            rows[number, padding] = torch.tensor(padding, dtype=torch.int64)
    present = rows >= 0
    base = list(models).index(owner)
    fallback = torch.full((n_rows,), AVERAGE, dtype=torch.int64)
    fallback[present[base]] = base
    alone = present.sum(0) == 1
    fallback[alone] = present.int().argmax(0)[alone]
    fallback[present.sum(0) == 0] = ZERO
    if multiple:
        fallback[n_tokens:][present[:, n_tokens:].sum(0) == 0] = MEAN_ROW
    identity = torch.arange(n_rows)
    if content is None and all(height == n_rows for height in heights) and bool((rows == identity).all()):
        return None
    nowhere = int(((present.sum(0) == 0)[:n_tokens]).sum())
    remarks = [f"{nowhere} rows of tokens that no model has an embedding for are zero"] if nowhere else []
    return Vocabulary(n_rows, n_tokens, rows, fallback, owner, content, remarks)


def read_tokens(folder: Path) -> dict[str, int] | None:
    """Token text -> id of the tokenizer in a folder, None without one."""
    path = folder / TOKENIZER_FILE
    if path.is_file():
        return tokens_of(read_json(path))
    tokenizer = load_tokenizer_of(folder)
    return None if tokenizer is None else dict(tokenizer.get_vocab())


def tokens_of(content: dict[str, Any]) -> dict[str, int]:
    """Token text -> id of a tokenizer.json: the model's vocabulary and the added tokens."""
    vocabulary = content["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: [token, score] by id
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    tokens = {str(token): int(index) for token, index in vocabulary.items()}
    for entry in content.get("added_tokens") or []:
        tokens[entry["content"]] = int(entry["id"])
    return tokens


def _height(model: MergeModel) -> int:
    """Rows of the input embedding."""
    name = model.embedding
    if name is None:
        raise UserError(
            f"no tensor of {model.id} is known as its input embedding",
            where=str(model.folder),
            why="its rows cannot be matched by token",
            fix="merge models with one tokenizer, without the key tokenizer",
        )
    return model.entries[name].n_rows


def _same_file(one: Path, two: Path) -> bool:
    paths = one / TOKENIZER_FILE, two / TOKENIZER_FILE
    return all(path.is_file() for path in paths) and paths[0].read_bytes() == paths[1].read_bytes()
