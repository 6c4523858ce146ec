"""Datasets of the Hugging Face hub: the files of one revision, fetched once and read like any others.

The files are never opened by `datasets`, which guesses the types of text: they are found by the dataset's card and
names, and read by the readers of this package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from finetune.data.read.hub_layout import CARD, split_files
from finetune.data.spec_source import HubSource
from finetune.errors import UserError
from finetune.paths import cache_root, read_json, write_json

_COMMIT = re.compile(r"[0-9a-f]{40}")
Named = list[tuple[str, Path]]


def hub_paths(source: HubSource, spec_folder: Path, where: str) -> Named:
    """Name and local path of every file of the split, in order of name.

    `source.id` may also name a folder, relative to the spec, that holds a copy of the dataset. A revision that was
    fetched before is found in the cache of `huggingface_hub`, without a network too.
    Raises UserError when the dataset, its revision, configuration or split is not there, or cannot be fetched.
    """
    folder = spec_folder / Path(source.id).expanduser()
    if folder.is_dir():
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return [(f"{source.id}/{name}", folder / name) for name in _chosen(source, names, folder, where)]
    commit, names = _listing(source, where)
    card = _fetch(source, commit, [CARD], where) if CARD in names else None
    chosen = _chosen(source, names, card, where)
    local = _fetch(source, commit, chosen, where)
    return [(f"{source.id}@{commit[:12]}/{name}", local / name) for name in chosen]


def _chosen(source: HubSource, names: Sequence[str], folder: Path | None, where: str) -> list[str]:
    card = folder / CARD if folder is not None else None
    text = card.read_text(encoding="utf-8", errors="replace") if card is not None and card.is_file() else ""
    return split_files(names, text, source.name, source.split, where)


def _listing(source: HubSource, where: str) -> tuple[str, list[str]]:
    """The commit of the revision and the names of its files; kept, so that a fixed commit is asked for once."""
    kept = cache_root() / "hub" / f"{source.id.replace('/', '--')}@{source.revision.replace('/', '--')}.json"
    if _COMMIT.fullmatch(source.revision) and kept.is_file():
        found = read_json(kept)
        return str(found["commit"]), list(found["files"])
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(source.id, revision=source.revision)
    except Exception as error:  # the client's HTTP library, and so its errors, change between its versions
        if kept.is_file() and not _says_no(error):
            found = read_json(kept)
            return str(found["commit"]), list(found["files"])
        raise _unreachable(source, error, where) from error
    commit, files = str(info.sha), sorted(one.rfilename for one in info.siblings or [])
    write_json(kept, {"commit": commit, "files": files})
    return commit, files


def _fetch(source: HubSource, commit: str, names: Sequence[str], where: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(source.id, repo_type="dataset", revision=commit, allow_patterns=list(names))
        )
    except Exception as error:
        raise _unreachable(source, error, where) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(names)} files of {source.id} are not in the cache: {missing[0]}, …",
            where=where,
            fix="run it once with a network",
        )
    return folder


def _says_no(error: Exception) -> bool:
    """Whether the hub itself answered that there is no such thing, or that it is not for this user."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError))


def _unreachable(source: HubSource, error: Exception, where: str) -> UserError:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return UserError(
        f"the dataset {source.id} at revision {source.revision} cannot be fetched: {said}",
        where=where,
        why="it is not in the local cache",
        fix="check source.id and source.revision (`hf auth login` for a private one); without a network, download it "
        "elsewhere and name its folder as source.id",
    )
