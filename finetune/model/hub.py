"""Models from the Hugging Face hub: safetensors and text only, and a remedy for every way in which a download fails."""

from __future__ import annotations

import os
from pathlib import Path

from finetune.errors import UserError
from finetune.model.embedded import BUILTIN_MODELS

# What a download may bring: configuration and tokenizer as text, weights as safetensors. Never pickle.
_CONFIG_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHT_PATTERNS = ("*.safetensors",)


def fetch_from_hub(
    id: str, revision: str | None, *, weights: bool, trust_remote_code: bool | str, where: str
) -> tuple[Path, str | None]:
    """Snapshot folder and commit of a hub id, from the local cache or, unless offline, from the hub.

    `weights=False` leaves the weights out. Code is only accepted when `trust_remote_code` is the very commit that the
    revision stands for. Raises UserError for everything that can keep the model from arriving.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = [*_CONFIG_PATTERNS, *(_WEIGHT_PATTERNS if weights else ())]
    if trust_remote_code:
        patterns.append("*.py")
    try:
        folder = Path(snapshot_download(id, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise _explain(error, id, revision, where) from error
    commit = folder.name if folder.parent.name == "snapshots" else revision
    if trust_remote_code and trust_remote_code != commit:
        raise UserError(
            f"model.trust_remote_code names commit {trust_remote_code}, the model is at {commit}",
            where="model.trust_remote_code",
            fix="set model.revision and model.trust_remote_code to the same commit, after reading its code",
        )
    return folder, commit


def _explain(error: Exception, id: str, revision: str | None, where: str) -> UserError:
    """What went wrong with a download, most special case first."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    embedded = [f"builtin:{name}" for name in BUILTIN_MODELS]
    full_id = f"{id}@{revision}" if revision else id
    if isinstance(error, HFValidationError):
        return UserError(
            f"'{id}' is neither a folder nor a hub id",
            where=where,
            fix=f"write owner/name, an existing folder, or one of: {', '.join(embedded)}",
        )
    if isinstance(error, GatedRepoError):
        return UserError(
            f"the hub model '{full_id}' needs its licence accepted",
            where=where,
            fix="accept it on the model's page, then log in with `hf auth login`",
        )
    if isinstance(error, RevisionNotFoundError):
        return UserError(
            f"the hub model '{id}' has no revision '{revision}'",
            where="model.revision",
            fix="name a commit, tag or branch of that repository",
        )
    if isinstance(error, RepositoryNotFoundError):
        return UserError(
            f"the hub has no model '{id}'",
            where=where,
            why="it does not exist, or it is private and no token is set",
            fix="check the spelling, or log in with `hf auth login`",
        )
    what = f"there is no folder '{id}', and the hub model '{full_id}' is not in the local cache"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return UserError(
            what,
            where=where,
            why="HF_HUB_OFFLINE is set, so nothing is downloaded",
            fix=f"unset HF_HUB_OFFLINE and run again, or fetch it first with `hf download {id}`",
        )
    return UserError(
        what,
        where=where,
        why=f"the hub was not reached: {error}",
        fix=f"check the network, or use {embedded[0]}, which needs none",
    )
