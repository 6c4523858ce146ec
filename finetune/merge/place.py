"""Output folders: refused when used, too small, or not writable; filled beside the target and renamed when complete."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import UserError
from finetune.paths import disk_faults, write_atomic
from finetune.units import format_bytes

KEY_FILE = ".merge-key"


def refuse_used_folder(out: Path) -> None:
    """A merge needs a folder of its own: weights of an earlier save would win, silently, when the model is loaded."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file", where="--out", fix="name a folder that does not exist yet")
    names = sorted(path.name for path in out.iterdir())
    weights = [
        name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".gguf", ".index.json"))
    ]
    if names:
        what = (
            f"weights already ({', '.join(weights[:3])})"
            if weights
            else f"files already ({', '.join(names[:3])})"
        )
        raise UserError(
            f"{out} holds {what}",
            where="--out",
            why="of two sets of weights in one folder the older can win, silently, when the model is loaded",
            fix="name a folder that does not exist yet, or delete that one",
        )


def refuse_small_disk(out: Path, n_bytes: int) -> None:
    """Raise UserError when the file system of `out` lacks `n_bytes`."""
    parent = out.resolve().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < n_bytes:
        raise UserError(
            f"the result needs {format_bytes(n_bytes)}, {parent} has {format_bytes(free)} free",
            where="--out",
            fix="free some space, or choose another disk with --out",
        )


@contextmanager
def put_in_place(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` when the block ends well, and vanishes when it does not.

    Folders of merges that were killed are removed first. Where `out` is a link, it becomes what the link names.
    """
    out = out.resolve()
    with disk_faults(out):
        folder = _folder_beside(out)
        try:
            yield folder
            folder.chmod(0o755)
            _sync(folder)
            _rename(folder, out)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def file_in_place(out: Path) -> Iterator[Path]:
    """Like `put_in_place` for a single file: a path of the same name in a folder beside `out`, gone when the block ends."""
    out = out.resolve()
    with disk_faults(out):
        folder = _folder_beside(out)
        try:
            yield folder / out.name
            _sync(folder / out.name)
            (folder / out.name).replace(out)
            _sync(out.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _folder_beside(out: Path) -> Path:
    """A new hidden folder of this process beside `out` (no link); those of processes that were killed are removed."""
    prefix = f".{out.name}.merging-"
    out.parent.mkdir(parents=True, exist_ok=True)
    for stale in out.parent.glob(f"{glob.escape(prefix)}*"):
        process = stale.name.removeprefix(prefix).partition("-")[0]
        if process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(stale, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=out.parent))


@contextmanager
def resumable_place(out: Path, key: str) -> Iterator[Path]:
    """Like `put_in_place`, but a folder of the same `key` that was interrupted is taken up again with what it holds.

    The folder stays when the process is killed or interrupted, and vanishes on any other fault. One of another key is
    emptied. Raises UserError while another process writes it.
    """
    out = out.resolve()
    folder = out.parent / f".{out.name}.merging"
    with disk_faults(out):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is writing {out}", where="--out", fix="wait for it, or name another folder"
            ) from None
        marker = folder / KEY_FILE
        if not marker.is_file() or marker.read_text() != key:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            write_atomic(marker, key)
        try:
            with disk_faults(out):
                yield folder
                marker.unlink()
                folder.chmod(0o755)
                _sync(folder)
                _rename(folder, out)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(handle)


def _rename(folder: Path, out: Path) -> None:
    """Put a complete folder in place. Raises UserError when somebody else has filled `out` meanwhile."""
    refuse_used_folder(out)
    folder.replace(out)
    _sync(out.parent)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
