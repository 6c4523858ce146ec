"""Which files of a dataset repository are a split of a configuration: what its card says, or else what they are called."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from finetune.data.read.sniff import format_of_name, is_data_name
from finetune.errors import UserError, did_you_mean

CARD = "README.md"
# Words of file and folder names that say the split, as the hub reads them.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_FRONT_MATTER = re.compile(r"\A\ufeff?---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)


def split_files(names: Sequence[str], card: str, config: str | None, split: str, where: str) -> list[str]:
    """The names, sorted, of the files that hold a split. `card` is the text of README.md, '' when there is none.

    Raises UserError, with what there is, for an unknown configuration or split, and for a repository without data files.
    """
    configs = _configs(card)
    if configs:
        chosen = _chosen(configs, config, where)
        by_split = _stated(chosen, names)
    else:
        inside = [name for name in names if config is None or name.startswith(f"{config.rstrip('/')}/")]
        by_split = _by_names(inside)
    if not any(by_split.values()):
        raise UserError(
            "the dataset has no files of rows" + (f" for the configuration '{config}'" if config else ""),
            where=where,
            why="datasets made by a script hold none; the hub keeps a Parquet copy of many at refs/convert/parquet",
            fix="set source.revision to the commit of that copy, or name another dataset",
        )
    if split not in by_split:
        raise UserError(f"the dataset has no split '{split}'", where=where, fix=did_you_mean(split, by_split))
    found = by_split[split]
    if not found:
        raise UserError(
            f"no file of the dataset is of the split '{split}', which its card names", where=where
        )
    return found


def _configs(card: str) -> list[dict[str, Any]]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    matter = _FRONT_MATTER.match(card)
    if matter is None:
        return []
    try:
        head = YAML(typ="safe").load(io.StringIO(matter[1]))
    except YAMLError:
        return []  # a card that the hub cannot read either: the names of the files decide
    listed = head.get("configs") if isinstance(head, dict) else None
    return [one for one in listed or [] if isinstance(one, dict) and one.get("data_files")]


def _chosen(configs: list[dict[str, Any]], wanted: str | None, where: str) -> dict[str, Any]:
    named = {str(one.get("config_name", "default")): one for one in configs}
    if wanted is not None:
        if wanted not in named:
            raise UserError(
                f"the dataset has no configuration '{wanted}'", where=where, fix=did_you_mean(wanted, named)
            )
        return named[wanted]
    standard = [one for name, one in named.items() if name == "default" or one.get("default")]
    if not standard and len(configs) > 1:
        raise UserError(
            f"the dataset has {len(configs)} configurations and none is the default",
            where=where,
            fix=f"set source.name to one of {', '.join(sorted(named))}",
        )
    return (standard or configs)[0]


def _stated(config: dict[str, Any], names: Sequence[str]) -> dict[str, list[str]]:
    folder = str(config.get("data_dir") or "").strip("/")
    given = config["data_files"]
    entries = given if isinstance(given, list) else [given]
    by_split: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (
            (entry.get("split", "train"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        )
        patterns = paths if isinstance(paths, list) else [paths]
        wanted = [
            _pattern(f"{folder}/{pattern}" if folder else str(pattern)) for pattern in patterns if pattern
        ]
        matched = sorted(name for name in names if any(pattern.fullmatch(name) for pattern in wanted))
        by_split.setdefault(str(split), []).extend(matched)
    return by_split


def _by_names(names: Sequence[str]) -> dict[str, list[str]]:
    data = [name for name in names if is_data_name(name) and not name.endswith(".md")]
    if not data:
        return {}
    [(most, _)] = Counter(format_of_name(name) for name in data).most_common(1)
    data = sorted(name for name in data if format_of_name(name) == most)
    by_split = {
        split: [
            name
            for name in data
            if re.search(rf"(?:\A|[^a-z0-9])(?:{'|'.join(words)})(?:[^a-z0-9]|\Z)", name.lower())
        ]
        for split, words in _SPLIT_WORDS.items()
    }
    told = {split: found for split, found in by_split.items() if found}
    return told or {"train": data}


def _pattern(glob: str) -> re.Pattern[str]:
    """A glob of the hub as a pattern for whole names: ** crosses folders, * and ? do not."""
    parts = re.split(r"(\*\*/?|\*|\?)", glob.removeprefix("./"))
    means = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(means.get(part, re.escape(part)) for part in parts))
