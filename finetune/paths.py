"""Where things are: shipped recipes, specs and suites (in a checkout or an installed wheel), caches, and safe writing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.digest import each_key_once
from finetune.errors import UserError, did_you_mean

_KINDS = {
    "recipes": ("recipes", b"recipe"),
    "merges": ("recipes", b"merge"),
    "searches": ("recipes", b"merge_search"),
    "data": ("data", b"dataset"),
    "eval": ("eval", b"suite"),
}  # kind -> its folder and its version key
_NOT_WRITABLE = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOENT,
        errno.ENAMETOOLONG,
    }
)  # fmt: skip
_VERSION_KEY = re.compile(rb"^(recipe|merge|merge_search|dataset|suite):", re.MULTILINE)


def shipped_root() -> Path:
    """The folder that holds `recipes/`, `data/` and `eval/`: the checkout when there is one, else the wheel's share.

    The share lies below the prefix of the installation, which is not always `sys.prefix` (`pip install --user`,
    `--prefix`, `--target`), but is always a folder above the package.
    """
    above = Path(__file__).resolve().parents[1:]
    if (above[0] / "recipes").is_dir() and (above[0] / "pyproject.toml").is_file():
        return above[0]
    shares = [prefix / "share" / "finetune" for prefix in above]
    return next((share for share in shares if share.is_dir()), Path(sys.prefix) / "share" / "finetune")


def find_declarative(
    kind: str, name: str, *, relative_to: Path | None = None, where: str = "", working_folder: bool = True
) -> Path:
    """Resolve a recipe, dataset spec or suite by path or by shipped name.

    Tried in order: the path as given (absolute or from the working folder, unless `working_folder` is False), relative
    to the file that names it (`relative_to`), then `<shipped root>/<folder>/<name>[.yaml]`. `kind` is 'recipes', 'merges',
    'searches', 'data' or 'eval'.
    Raises UserError with the nearest shipped name when nothing matches.
    """
    assert kind in _KINDS, kind
    given = Path(name)
    with contextlib.suppress(RuntimeError):  # '~nobody': left as written, and so not found
        given = given.expanduser()
    bases = [Path.cwd()] if working_folder else []
    bases += ([relative_to] if relative_to else []) + [shipped_root() / _KINDS[kind][0], shipped_root()]
    others: list[Path] = []
    for base in bases:
        for candidate in (base / given, base / f"{given}.yaml"):
            with contextlib.suppress(OSError):  # a name that the file system cannot have
                if candidate.is_file() and not _is_of_another_kind(candidate, kind):
                    return candidate.resolve()
                if candidate.is_file():
                    others.append(candidate)
    known = shipped_names(kind)
    if others:
        key = sorted(version_keys(others[0]))[0].decode()
        raise UserError(
            f"{others[0]} is another kind of file: it begins with '{key}:', not '{_KINDS[kind][1].decode()}:'",
            where=where,
            fix=did_you_mean(name.removesuffix(".yaml"), known),
        )
    raise UserError(
        f"no such file or shipped {kind} entry: '{name}'",
        where=where,
        why=f"looked in {', '.join(str(base) for base in dict.fromkeys(bases))}",
        fix=did_you_mean(name.removesuffix(".yaml"), known),
    )


def _is_of_another_kind(path: Path, kind: str) -> bool:
    """A suite and the dataset it asks may share a name: the version key at the top tells them apart."""
    found = version_keys(path)
    return bool(found) and _KINDS[kind][1] not in found


def version_keys(path: Path) -> set[bytes]:
    """Which kinds a declarative file says it is, e.g. {b'recipe'}; none for a recipe that extends another one."""
    return set(_VERSION_KEY.findall(path.read_bytes()))


def shipped_names(kind: str) -> list[str]:
    """Names of everything shipped under a declarative folder, without '.yaml', e.g. 'sft/home_intents_lora'."""
    root = shipped_root() / _KINDS[kind][0]
    # A recipe that extends another one holds no version key; a merge recipe always does.
    files = [path for path in root.rglob("*.yaml") if not _is_of_another_kind(path, kind)]
    if kind in ("merges", "searches"):
        files = [path for path in files if version_keys(path)]
    names = (path.relative_to(root).with_suffix("").as_posix() for path in files)
    return sorted(name for name in names if not name.startswith("launch/"))  # accelerate's files, no recipes


def cache_root() -> Path:
    """Converted models and other derived files, safe to delete: $FINETUNE_CACHE or ~/.cache/finetune."""
    given = os.environ.get("FINETUNE_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "finetune"


def runs_root() -> Path:
    """Where run folders are made: $FINETUNE_RUNS or ./runs."""
    return Path(os.environ.get("FINETUNE_RUNS", "runs"))


@contextlib.contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn 'disk full' and 'not writable' into user errors that name the path and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left while writing {path}",
                fix="free some space, or choose a folder on another disk (for runs: --run-dir or FINETUNE_RUNS)",
            ) from error
        if error.errno in _NOT_WRITABLE:
            raise UserError(
                f"cannot write {path}: {error.strerror}",
                fix="choose a folder you may write to, or mend its permissions",
            ) from error
        raise


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write beside, fsync, rename: a reader sees the old bytes or the new ones, never half of them."""
    raw = data.encode() if isinstance(data, str) else data
    with disk_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(raw)
                stream.flush()
                os.fsync(stream.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, atomically; refuses NaN so that no page or gate ever reads one."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, *, fix: str = "delete it and run again") -> Any:
    """Parse a JSON file of ours; a damaged one is a user error with the path. `fix`: for files that are the user's."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"no such file: {path}", fix="check the path or the run folder") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}", fix=fix) from None


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line, atomically."""
    write_atomic(path, b"".join(_json_line(row) for row in rows))


def _json_line(row: dict[str, Any]) -> bytes:
    """UTF-8 as it is; a row with half a surrogate pair, which UTF-8 cannot hold, is written in escapes."""
    try:
        return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(row, allow_nan=False) + "\n").encode()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every line of a JSONL file of ours as a dict; a damaged line, or a key written twice, is a user error with its number."""
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UserError(f"no such file: {path}", fix="check the path or the run folder") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line, object_pairs_hook=each_key_once))
        except (ValueError, RecursionError) as error:
            raise UserError(f"not valid JSON: {error}", where=f"{path}:{number}") from None
    return rows
