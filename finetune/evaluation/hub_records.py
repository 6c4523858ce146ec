"""Records of a dataset of the Hugging Face hub at a fixed revision, text exactly as its files have it.

JSON and CSV files are parsed here: `datasets` would guess column types, and turn the answer "2024-01-05" into a date and
"007" into 7. Parquet and Arrow files carry their types, and are left to `datasets`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import UserError, did_you_mean
from finetune.evaluation.item_source import ItemsSection

Record = Mapping[str, Any]


def hub_records(section: ItemsSection, split: str, *, where: str, folder: Path) -> list[Record]:
    """The records of one split, in order. `hub` may also name a local folder, relative to `folder`.

    Raises UserError when the dataset, its revision, configuration or split is not there, or the hub cannot be reached.
    """
    import datasets

    assert section.hub is not None
    local = folder / section.hub
    path = str(local) if local.is_dir() else section.hub
    datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(path, section.name, revision=section.revision)
        files = builder.config.data_files or {}
        splits = [str(one) for one in files]
        if files and split not in splits:
            raise UserError(
                f"{section.hub} has no split '{split}'", where=where, fix=did_you_mean(split, splits)
            )
        if builder.name in _PARSED_HERE:
            manager = datasets.DownloadManager(dataset_name=builder.dataset_name)
            parse = _PARSED_HERE[builder.name]
            found = manager.download_and_extract(list(files[split]))
            return [record for file in found for record in parse(Path(file))]
        return list(datasets.load_dataset(path, section.name, split=split, revision=section.revision))
    except (OSError, ValueError, ImportError) as error:
        raise _unreachable(section, split, error, where) from None
    finally:
        datasets.enable_progress_bars()


def _json_records(file: Path) -> Iterator[Record]:
    """A file of one array, or of one object a line."""
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        yield from json.loads(text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UserError(f"not valid JSON: {error}", where=f"{file}:{number}") from None


def _csv_records(file: Path) -> Iterator[Record]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        yield from csv.DictReader(stream)


_PARSED_HERE = {"json": _json_records, "csv": _csv_records}


def _unreachable(section: ItemsSection, split: str, error: Exception, where: str) -> UserError:
    return UserError(
        f"the dataset {section.hub} at revision {section.revision}, split '{split}', cannot be read: {error}",
        where=f"{where}: items.hub",
        why="it is fetched from the Hugging Face hub, unless it is in the cache of `datasets`",
        fix="check id, revision, name and split, and that HF_HUB_OFFLINE is not set; without a network, download it "
        "elsewhere and name its folder as items.hub",
    )
