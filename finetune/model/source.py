"""Where a base model comes from: the embedded one, a local folder, or a hub id. No weight is loaded here.

Only safetensors are accepted. Pickle files (`.bin`, `.pt`, `.pth`, `.ckpt`) run code while they are read, so a model
that has nothing else is refused, and one that has both is read from its safetensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.digest import digest_file, digest_json
from finetune.errors import Fault, UserError, did_you_mean
from finetune.model.embedded import BUILTIN_MODELS, convert_embedded
from finetune.model.hub import fetch_from_hub
from finetune.paths import cache_root, read_json, write_json

BUILTIN_PREFIX = "builtin:"
ADAPTER_CONFIG = "adapter_config.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A base model that exists on this machine.

    `path` is a folder that transformers loads; `digest` is a SHA-256 over weights, configuration and tokenizer, so that
    a manifest can name the model by content; `n_parameters` counts the tensors' elements and is None without weights.
    """

    id: str
    path: str
    revision: str | None
    digest: str
    n_parameters: int | None = None

    @property
    def folder(self) -> Path:
        return Path(self.path)


def resolve_model(
    id: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    trust_remote_code: bool | str = False,
    announce: Announce | None = None,
    where: str = "model.id",
    revision_where: str = "model.revision",
) -> ModelSource:
    """Find a base model, fetch or convert it once if needed, and refuse what cannot be a safe base model.

    `id` is `builtin:<name>`, a folder, or a hub id (only then `revision` may be given: a commit, tag or branch).
    `weights=False` asks for configuration and tokenizer only, which is all a memory forecast needs. `trust_remote_code`
    is False or the commit whose code may run. `where` and `revision_where` are the places of id and revision for faults.
    Raises UserError when there is no such model, or when it is an adapter, or pickle only.
    """
    folder, revision = locate_model(
        id,
        revision,
        weights=weights,
        trust_remote_code=trust_remote_code,
        announce=announce,
        where=where,
        revision_where=revision_where,
    )
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    n_parameters = _count_parameters(files)
    return ModelSource(id, str(folder), revision, _content_digest(files), n_parameters)


def locate_model(
    id: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    trust_remote_code: bool | str = False,
    announce: Announce | None = None,
    where: str = "model.id",
    revision_where: str = "model.revision",
) -> tuple[Path, str | None]:
    """`resolve_model` without its digest, which reads every weight: the model's folder and its revision."""
    refuse_idle_revision(id, revision, revision_where)
    if id.startswith(BUILTIN_PREFIX):
        name = id.removeprefix(BUILTIN_PREFIX)
        if name not in BUILTIN_MODELS:
            raise UserError(
                f"no embedded model is called '{name}'", where=where, fix=did_you_mean(name, BUILTIN_MODELS)
            )
        folder, revision = convert_embedded(BUILTIN_MODELS[name], announce=announce), None
    elif _is_folder(id):
        folder, revision = Path(id).expanduser().resolve(), None
        if not folder.is_dir():
            raise UserError(
                f"no such model folder: {folder}",
                where=where,
                fix="name a folder that holds config.json and *.safetensors",
            )
        if trust_remote_code:
            _require_pinned(folder, trust_remote_code)
    else:
        folder, revision = fetch_from_hub(
            id, revision, weights=weights, trust_remote_code=trust_remote_code, where=where
        )
    faults = _folder_faults(folder, where, weights=weights)
    if faults:
        raise UserError(faults)
    return folder, revision


def refuse_idle_revision(id: str, revision: str | None, where: str) -> None:
    """Raise UserError for a revision of a model that has none: it would be ignored, and the run seem pinned to it."""
    if revision == recorded_revision(id, revision):
        return
    embedded = id.startswith(BUILTIN_PREFIX)
    raise UserError(
        f"revision '{revision}' says nothing about {id}",
        where=where,
        why=f"{'an embedded model' if embedded else 'a folder'} is used as it is; only a model of the hub has revisions",
        fix="leave the revision out, or give the id of the model on the hub",
    )


def recorded_revision(id: str, revision: str | None) -> str | None:
    """The revision that a file of an earlier run or an adapter notes beside `id`: None where `id` is no hub id today."""
    return None if id.startswith(BUILTIN_PREFIX) or _is_folder(id) else revision


def _is_folder(id: str) -> bool:
    """Whether `id` means a place on this machine: it exists, or is written as a path."""
    return Path(id).expanduser().exists() or id.startswith((".", "/", "~"))


def require_commit(trust_remote_code: bool | str) -> str:
    """The commit whose code may run. Raises UserError for whatever else is given in its place."""
    if isinstance(trust_remote_code, str) and _COMMIT.fullmatch(trust_remote_code):
        return trust_remote_code
    raise UserError(
        f"'{trust_remote_code}' is not a commit",
        where="model.trust_remote_code",
        why="a branch or tag can be moved to other code after you read it",
        fix="write the 40-digit commit whose code you have read, or false",
    )


def _require_pinned(folder: Path, trust_remote_code: bool | str) -> None:
    """Of a folder only a snapshot of the hub's cache is known to be at a commit; any other can change under its pin."""
    commit = require_commit(trust_remote_code)
    if folder.parent.name == "snapshots" and folder.name == commit:
        return
    raise UserError(
        f"the code in {folder} is pinned by no commit",
        where="model.trust_remote_code",
        why=f"a folder can be changed after you read it, and nothing says that it is at {commit}",
        fix="set model.id to the hub id and model.revision to that commit, or set model.trust_remote_code: false",
    )


def read_config(source: ModelSource) -> dict[str, Any]:
    """config.json of the model as a dict; no weights are read."""
    return read_model_json(source.folder / "config.json")


def read_model_json(path: Path) -> dict[str, Any]:
    """A JSON file that came with a model or an adapter. Raises UserError when it is damaged or holds no keys."""
    content = read_json(path, fix="copy or download the file again, then repeat")
    if not isinstance(content, dict):
        raise UserError(
            f"{path} holds no keys, so it does not describe a model",
            fix="copy or download the file again, then repeat",
        )
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder that transformers reads, sorted by name."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_model_json(index).get("weight_map")
        names = {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("*.safetensors"))


def _folder_faults(folder: Path, where: str, *, weights: bool) -> list[Fault]:
    """Everything that stops `folder` from being a base model, all at once."""
    if (folder / ADAPTER_CONFIG).is_file():
        base = _named_base(folder)
        return [
            Fault(
                f"{folder} is an adapter, not a base model",
                where,
                "transformers would load its base and silently put the adapter on top",
                f"set model.id to the adapter's base{f' ({base})' if base else ''}, or merge the adapter first: "
                "finetune merge adapter",
            )
        ]
    if not (folder / "config.json").is_file():
        return [
            Fault(
                f"{folder} holds no config.json, so it is not a model",
                where,
                "",
                "name the folder that save_pretrained wrote, with config.json, *.safetensors and the tokenizer",
            )
        ]
    faults = _weight_faults(folder, where) if weights else []
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        faults.append(
            Fault(
                f"{folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})",
                where,
                "rows cannot be turned into tokens",
                "save the model's tokenizer into the same folder: tokenizer.save_pretrained(folder)",
            )
        )
    return faults


def _weight_faults(folder: Path, where: str) -> list[Fault]:
    """Faults of the weight files: none, pickle only, shards missing, or two sets of weights in one folder."""
    files = weight_files(folder)
    if not files:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
        if pickles:
            return [
                Fault(
                    f"{folder} holds its weights only as pickle ({', '.join(pickles[:3])}); the files are refused",
                    where,
                    "reading a pickle file runs whatever code it contains",
                    "convert the weights to safetensors on a machine you can afford to lose, or take a revision that has "
                    "*.safetensors",
                )
            ]
        return [Fault(f"{folder} holds no *.safetensors file", where, "", "name a folder with weights")]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        return [
            Fault(
                f"{folder} lacks {len(missing)} of the {len(files)} weight files its index names: {', '.join(missing[:3])}",
                where,
                "the copy or the download was interrupted",
                "copy or download the model again",
            )
        ]
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file() and single.is_file() and single not in files:
        return [
            Fault(
                f"{folder} holds two sets of weights: model.safetensors and the shards of {index.name}",
                where,
                "transformers would silently load the single file, which may be the older one",
                "delete the set that is not meant",
            )
        ]
    return []


def _named_base(folder: Path) -> str:
    try:
        return str(json.loads((folder / ADAPTER_CONFIG).read_bytes()).get("base_model_name_or_path") or "")
    except (ValueError, AttributeError):
        return ""


def _count_parameters(files: list[Path]) -> int | None:
    """Elements of all tensors, read from the safetensors headers; None when there are no weights.

    Raises UserError, naming the file, for one that is damaged or cut short.
    """
    from safetensors import SafetensorError, safe_open

    weights = [path for path in files if path.suffix == ".safetensors"]
    total = 0
    for path in weights:
        try:
            with safe_open(str(path), framework="numpy") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    total += math.prod(tensors.get_slice(key).get_shape())
        except SafetensorError as error:
            raise UserError(
                f"{path.name} is damaged: {error}",
                where=str(path),
                fix="copy or download the file again, then repeat",
            ) from None
    return total if weights else None


def _content_digest(files: list[Path]) -> str:
    """SHA-256 over name and content of every file that decides what the model computes.

    Hashing tens of gigabytes takes minutes, so each file's hash is remembered by path, size and modification time.
    """
    suffixes = (".safetensors", ".json", ".jinja", ".model", ".txt", ".py")
    counted = [path for path in files if path.suffix in suffixes]
    memory = cache_root() / "digests" / f"{digest_json([str(path) for path in counted])[:16]}.json"
    known: dict[str, Any] = {}
    if memory.is_file():
        try:
            known = json.loads(memory.read_bytes())
        except ValueError:
            known = {}
    digests: dict[str, str] = {}
    seen: dict[str, list[Any]] = {}
    for path in counted:
        stat = path.stat()
        entry = known.get(path.name)
        if isinstance(entry, list) and entry[:2] == [stat.st_size, stat.st_mtime_ns]:
            digests[path.name] = str(entry[2])
        else:
            digests[path.name] = digest_file(path)
        seen[path.name] = [stat.st_size, stat.st_mtime_ns, digests[path.name]]
    if seen != known:
        write_json(memory, seen)
    return digest_json(digests)
