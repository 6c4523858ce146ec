"""The files of a source: names, folders and globs of the spec expanded in a stable order, each with its nature."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.data.generated.store import complete_rows
from finetune.data.read.sniff import Nature, format_of_name, is_data_name, sniff
from finetune.data.spec_source import FilesSource, Format, GeneratedSource, HubSource, RowsSource
from finetune.errors import Fault, UserError, nearest
from finetune.paths import read_json

_GLOB_CHARACTERS = frozenset("*?[")
Where = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to read. `name` is how users know it: as written in the spec, or the path from the spec's folder."""

    name: str
    path: Path
    size_bytes: int
    nature: Nature

    @property
    def format(self) -> Format:
        """Of the content."""
        return self.nature.format

    def decoded_as(self, encoding: str) -> SourceFile:
        """The same file in another encoding."""
        return replace(self, nature=replace(self.nature, encoding=encoding))


def source_files(
    source: RowsSource, spec_folder: Path, *, where: Where = lambda key: key
) -> list[SourceFile]:
    """The files of a source, each once: entries in the order of the spec, what an entry expands to in order of name.

    Files of a hub dataset are fetched first, unless they are in the cache; generated rows have to be made already.
    `where` gives the place of a dotted key in the spec (`Loaded.where`). Raises UserError with all that are missing, and
    for files that cannot be read as rows.
    """
    if isinstance(source, HubSource):
        from finetune.data.read.hub import hub_paths  # brings a client of the hub: only when asked for

        named = hub_paths(source, spec_folder, where("source.id"))
        return [_described(name, path, source, where("source.id")) for name, path in named]
    if isinstance(source, GeneratedSource):
        made = complete_rows(source.name, source.settings(), where("source.name"))
        return [_described(f"generated/{source.name}", made, source, where("source.name"))]
    assert isinstance(source, FilesSource)
    found: dict[Path, str] = {}
    faults: list[Fault] = []
    for entry in source.files:
        try:
            for name, path in _expand(entry, spec_folder):
                found.setdefault(path.resolve(), name)
        except _NothingThereError as missing:
            faults.append(Fault(str(missing), where("source.files"), "", missing.remedy))
    if faults:
        raise UserError(faults)
    return [_described(name, path, source, where("source.files")) for path, name in found.items()]


def _described(name: str, path: Path, source: RowsSource, where: str) -> SourceFile:
    try:
        return SourceFile(name, path, path.stat().st_size, sniff(path, source))
    except UserError as error:
        raise UserError([replace(fault, where=fault.where or where) for fault in error.faults]) from None


class _NothingThereError(Exception):
    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def _expand(entry: str, spec_folder: Path) -> Iterator[tuple[str, Path]]:
    path = spec_folder / Path(entry).expanduser()
    if path.is_file():
        yield entry, path
    elif path.is_dir():
        yield from _in_folder(entry, path)
    elif _GLOB_CHARACTERS & set(entry):
        files = sorted(match for match in _matches(path) if _is_file(match))
        if not files:
            raise _NothingThereError(
                f"no file matches {path}", "correct the pattern; ** stands for any folders"
            )
        yield from ((_shown(match, entry, spec_folder), match) for match in files)
    elif path.exists():
        raise _NothingThereError(
            f"{path} is no file", "write what comes through a pipe or a device to a file first"
        )
    else:
        siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        hint = f"did you mean '{near}'? " if near else ""
        raise _NothingThereError(
            f"no such file: {path}",
            f"{hint}correct the path; relative paths are taken from the folder of the spec",
        )


def _matches(pattern: Path) -> Iterator[Path]:
    """The paths that a pattern with a fixed beginning matches."""
    fixed = next(index for index, part in enumerate(pattern.parts) if _GLOB_CHARACTERS & set(part))
    return Path(*pattern.parts[:fixed]).glob(str(Path(*pattern.parts[fixed:])))


def _in_folder(entry: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of rows below a folder; of one made by `save_to_disk`, those that its state names, in their order."""
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    if splits.is_file():
        names = read_json(splits).get("splits", [])
        if len(names) != 1:
            raise _NothingThereError(
                f"{folder} is a saved dataset of several splits ({', '.join(names)})",
                f"name one of them: {entry.rstrip('/')}/{names[0] if names else 'train'}",
            )
        yield from _in_folder(f"{entry.rstrip('/')}/{names[0]}", folder / names[0])
        return
    if state.is_file() and "_data_files" in (saved := read_json(state)):
        files = [folder / entry["filename"] for entry in saved["_data_files"]]
        lost = [path.name for path in files if not path.is_file()]
        if lost:
            raise _NothingThereError(
                f"{folder} lacks {lost[0]}, which its state.json names", "copy the whole folder"
            )
    else:
        files = sorted(path for path in folder.rglob("*") if _is_rows(path, folder) and _is_file(path))
    if not files:
        raise _NothingThereError(
            f"no files of rows in the folder {folder}",
            "name files of another ending, such as texts, one by one or with a pattern: folder/*.txt",
        )
    for path in files:
        yield f"{entry.rstrip('/')}/{path.relative_to(folder).as_posix()}", path


def _is_file(path: Path) -> bool:
    """Whether it is a file; a link to a file that is gone would lose its rows without a word."""
    if path.is_symlink() and not path.exists():
        raise _NothingThereError(
            f"{path} is a link to {path.readlink()}, where nothing is",
            "fetch what it links to (git annex get, dvc pull), mend the link, or delete it",
        )
    return path.is_file()


def _is_rows(path: Path, folder: Path) -> bool:
    return is_data_name(path.relative_to(folder).as_posix()) and format_of_name(path.name) != "text"


def _shown(path: Path, entry: str, spec_folder: Path) -> str:
    return (
        str(path)
        if Path(entry).expanduser().is_absolute()
        else Path(os.path.relpath(path, spec_folder)).as_posix()
    )
