"""One tokenizer that knows the tokens of several: the first one's, then what only the others have, as tokenizer.json."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from finetune.errors import UserError
from finetune.merge.models.inputs import MergeModel
from finetune.paths import read_json

_TOKENIZER_FILE = "tokenizer.json"
_GROWING = ("BPE", "WordPiece", "WordLevel")


def unite(owner: MergeModel, others: Sequence[MergeModel]) -> dict[str, Any] | None:
    """The owner's tokenizer.json with the tokens of the others appended; None when they have no others.

    Ids of the owner stay. Added tokens are added again; tokens of the vocabulary join the vocabulary, of a BPE model with
    the merges that lead to them, which come after the owner's. Raises UserError for kinds that cannot grow (Unigram).
    """
    content = copy.deepcopy(_read(owner))
    model = content["model"]
    vocabulary = model.get("vocab", {})
    names = list(vocabulary) if isinstance(vocabulary, dict) else [entry[0] for entry in vocabulary]
    added = content.setdefault("added_tokens", [])
    known = {*names, *(entry["content"] for entry in added)}
    ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))]
    free = max([*ids, *(entry["id"] for entry in added)]) + 1
    grown = False
    for other in others:
        theirs = _read(other)
        their_added = {entry["content"]: entry for entry in theirs.get("added_tokens") or []}
        their_vocabulary = theirs["model"].get("vocab", {})
        their_names = (
            list(their_vocabulary) if isinstance(their_vocabulary, dict) else [e[0] for e in their_vocabulary]
        )
        new = [token for token in their_names if token not in known and token not in their_added]
        if new and (model["type"] not in _GROWING or model["type"] != theirs["model"]["type"]):
            raise UserError(
                f"{other.id} has {len(new)} tokens that {owner.id} lacks, e.g. '{new[0]}', and a tokenizer of the kind "
                f"{theirs['model']['type']} cannot be joined to one of the kind {model['type']}",
                where="tokenizer.source: union",
                fix="take the tokenizer of one model: tokenizer: {source: base}",
            )
        for token in new:
            vocabulary[token] = free
            known.add(token)
            free += 1
        for token, entry in their_added.items():
            if token not in known:
                added.append({**entry, "id": free})
                known.add(token)
                free += 1
                grown = True
        if new:
            grown = True
            _add_merges(model, theirs["model"])
    return content if grown else None


def _add_merges(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Append merges of which both parts and the result are now in the vocabulary."""
    if mine["type"] != "BPE":
        return
    present = {_pair(merge) for merge in mine["merges"]}
    as_text = bool(mine["merges"]) and isinstance(mine["merges"][0], str)
    for merge in theirs["merges"]:
        left, right = _pair(merge)
        if (left, right) not in present and {left, right, left + right} <= mine["vocab"].keys():
            mine["merges"].append(f"{left} {right}" if as_text else [left, right])
            present.add((left, right))


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _read(model: MergeModel) -> dict[str, Any]:
    path = model.folder / _TOKENIZER_FILE
    if not path.is_file():
        raise UserError(
            f"{model.id} has no {_TOKENIZER_FILE}, which a union of tokenizers is made of",
            where=str(model.folder),
            fix="save its tokenizer in the fast form: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        )
    content: dict[str, Any] = read_json(path)
    return content
