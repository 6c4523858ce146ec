"""Pushing to a hub, with a stand-in for its client: what is asked of it, and every way in which it says no."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from finetune.errors import UserError
from finetune.model.hub_push import push_folder


def refused(status: int, kind: type[HfHubHTTPError] = HfHubHTTPError) -> HfHubHTTPError:
    request = httpx2.Request("POST", "https://hub.example/api")
    return kind("refused\nat length", response=httpx2.Response(status, request=request))


class Hub:
    """What is there, and what was asked. `faults` maps a call to the error that it raises."""

    def __init__(self, private: bool | None = None, **faults: Exception) -> None:
        self.private, self.faults, self.calls = private, faults, {}
        self.lost: set[str] = set()

    def _asked(self, call: str, **given: Any) -> None:
        self.calls[call] = given
        if call in self.faults:
            raise self.faults[call]

    def whoami(self) -> dict[str, str]:
        self._asked("whoami")
        return {"name": "somebody"}

    def repo_info(self, id: str) -> Any:
        self._asked("repo_info", id=id)
        if self.private is None:
            raise refused(404, RepositoryNotFoundError)
        return SimpleNamespace(private=self.private)

    def create_repo(self, id: str, *, private: bool, exist_ok: bool) -> Any:
        self._asked("create_repo", id=id, private=private)
        return SimpleNamespace(repo_id=id if "/" in id else f"somebody/{id}")

    def upload_folder(self, **given: Any) -> Any:
        self._asked("upload_folder", **given)
        folder = Path(given["folder_path"])
        self.files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        return SimpleNamespace(oid="c0ffee")

    def list_repo_files(self, id: str, revision: str) -> list[str]:
        assert revision == "c0ffee"
        return [*(self.files - self.lost), ".gitattributes"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ready" / "additional_chat_templates").mkdir(parents=True)
    for name in ("model.safetensors", "README.md", "additional_chat_templates/tools.jinja"):
        (tmp_path / "ready" / name).write_text(name)
    return tmp_path / "ready"


def push(folder: Path, hub: Hub, id: str = "owner/name", public: bool = False) -> Any:
    return push_folder(folder, id, public=public, message="first", api=hub)


def test_a_new_repository_is_private_unless_asked_otherwise(folder: Path) -> None:
    for public in (False, True):
        hub = Hub()
        done = push(folder, hub, public=public)
        assert hub.calls["create_repo"]["private"] is done.private is not public
        assert done.commit == "c0ffee"
        assert done.url == "https://huggingface.co/owner/name"


def test_weights_of_an_earlier_push_go_in_the_same_commit(folder: Path) -> None:
    hub = Hub(private=True)
    push(folder, hub)
    assert "create_repo" not in hub.calls
    assert "*.safetensors" in hub.calls["upload_folder"]["delete_patterns"]


def test_a_name_without_owner_goes_to_whoever_is_logged_in(folder: Path) -> None:
    assert push(folder, Hub(), id="name").id == "somebody/name"


def test_a_repository_that_everybody_can_read_is_not_filled_by_mistake(folder: Path) -> None:
    hub = Hub(private=False)
    with pytest.raises(UserError, match="everybody can read it"):
        push(folder, hub)
    assert "upload_folder" not in hub.calls
    assert push(folder, hub, public=True).private is False


def test_files_that_did_not_arrive_are_named(folder: Path) -> None:
    hub = Hub()
    hub.lost = {"model.safetensors"}
    with pytest.raises(UserError, match=r"1 files did not arrive in owner/name, e\.g\. model\.safetensors"):
        push(folder, hub)


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        ("whoami", LocalTokenNotFoundError("none"), "without a token"),
        ("whoami", refused(401), "does not know this token"),
        ("whoami", OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        ("repo_info", httpx2.ConnectError("no route"), "was not reached: no route"),
        ("create_repo", refused(403), "may not write to owner/name"),
        ("upload_folder", refused(500), "the hub refused: refused"),
        ("upload_folder", TimeoutError(), "was not reached: TimeoutError"),
    ],
)
def test_every_refusal_has_a_remedy(folder: Path, call: str, error: Exception, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as told:
        push(folder, Hub(**{call: error}))
    assert told.value.faults[0].fix
    if call == "upload_folder":
        assert f"hf upload owner/name {folder}" in told.value.faults[0].fix


def test_an_id_that_is_none(folder: Path) -> None:
    with pytest.raises(UserError, match="'a/b/c' is no hub id"):
        push(folder, Hub(), id="a/b/c")


def test_a_fault_of_ours_stays_a_fault(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        push(folder, Hub(upload_folder=ZeroDivisionError()))
