"""Put a folder onto the Hugging Face hub: private unless asked otherwise, in one commit, and looked at afterwards."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.errors import UserError

# Weights of an earlier push would be loaded beside, or instead of, the new ones.
_OLD_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True, slots=True)
class Pushed:
    """Where the folder lies now. `commit` is the commit that holds exactly it."""

    id: str
    url: str
    commit: str
    private: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def hub_api() -> Any:
    """The hub's client, with the token of `hf auth login` or HF_TOKEN."""
    from huggingface_hub import HfApi

    return HfApi(library_name="finetune")


def check_push(id: str, *, public: bool, api: Any) -> bool | None:
    """Refuse, before anything is prepared, what cannot be pushed; returns whether the repository is private, None if new.

    Raises UserError for an id that is none, a missing or powerless token, no network, and for a repository that everybody
    can read where `public` does not permit that.
    """
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(id)
        api.whoami()
        try:
            private = bool(api.repo_info(id).private)
        except RepositoryNotFoundError:
            return None
    except Exception as error:
        raise _explain(error, id) from error
    if not private and not public:
        raise UserError(
            f"{id} is there already, and everybody can read it",
            where="--push",
            why="models are pushed to private repositories unless asked otherwise",
            fix="add --public when that is meant, or name another repository",
        )
    return private


def push_folder(folder: Path, id: str, *, public: bool, message: str, api: Any) -> Pushed:
    """Upload `folder` in one commit, which also removes weights of earlier pushes, and check that every file arrived.

    A new repository is private unless `public`; one that exists keeps what it is. Raises UserError with a remedy.
    """
    private = check_push(id, public=public, api=api)
    try:
        if private is None:
            id, private = api.create_repo(id, private=not public, exist_ok=True).repo_id, not public
        commit = api.upload_folder(
            repo_id=id, folder_path=str(folder), commit_message=message, delete_patterns=list(_OLD_WEIGHTS)
        )
        arrived = set(api.list_repo_files(id, revision=commit.oid))
    except Exception as error:
        raise _explain(error, id, folder) from error
    sent = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if missing := sorted(sent - arrived):
        raise UserError(
            f"{len(missing)} files did not arrive in {id}, e.g. {missing[0]}", fix=_again(id, folder)
        )
    return Pushed(id, f"https://huggingface.co/{id}", commit.oid, private)


def _again(id: str, folder: Path | None) -> str:
    return f"the folder is complete, so push it again: hf upload {id} {folder}" if folder else "try again"


def _explain(error: Exception, id: str, folder: Path | None = None) -> Exception:
    """What went wrong, with a remedy; an error that is no fault of hub, network or id is returned as it is."""
    import httpx2
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    if isinstance(error, HFValidationError):
        return UserError(f"'{id}' is no hub id", where="--push", fix="write owner/name")
    if isinstance(error, OfflineModeIsEnabled):
        return UserError(
            "nothing can be pushed: HF_HUB_OFFLINE is set",
            where="--push",
            fix="unset it, or leave --push out",
        )
    if isinstance(error, LocalTokenNotFoundError):
        return UserError("nothing can be pushed without a token", where="--push", fix=_LOG_IN)
    if isinstance(error, HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        if status == 401:
            return UserError("the hub does not know this token", where="--push", fix=_LOG_IN)
        if status == 403:
            return UserError(
                f"the token may not write to {id}",
                where="--push",
                fix="log in with a token that has write access, or name a repository of your own",
            )
        return UserError(f"the hub refused: {_first_line(error)}", where="--push", fix=_again(id, folder))
    if isinstance(error, httpx2.HTTPError | OSError):
        return UserError(
            f"the hub was not reached: {_first_line(error)}",
            where="--push",
            fix=f"check the network; {_again(id, folder)}",
        )
    return error


_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
