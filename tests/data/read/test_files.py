"""Files, folders and globs: each file once, in a stable order, and what is missing is named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from finetune.data.build import load_spec
from finetune.data.read import Reject, iter_rows, source_files
from finetune.data.rows import Row
from finetune.data.spec_source import FilesSource
from finetune.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "b/2.jsonl",
        "b/10.jsonl",
        "b/deep/3.csv",
        "a.jsonl",
        "b/.hidden.jsonl",
        "b/_old/4.jsonl",
        "b/notes.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'text\n"{name}"\n' if name.endswith("csv") else json.dumps({"text": name}) + "\n")
    for name in ("b/README.md", "b/dataset_info.json", "b/image.png"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def names(folder: Path, *entries: str) -> list[str]:
    return [file.name for file in source_files(FilesSource(kind="files", files=list(entries)), folder)]


def read(folder: Path, *entries: str, **source: Any) -> list[Row | Reject]:
    section = FilesSource(kind="files", files=list(entries), **source)
    return [one for file in source_files(section, folder) for one in iter_rows(file, section)]


def test_folders_hold_files_of_rows_at_any_depth(folder: Path) -> None:
    assert names(folder, "b") == names(folder, "b/") == ["b/10.jsonl", "b/2.jsonl", "b/deep/3.csv"]


def test_globs(folder: Path) -> None:
    assert names(folder, "b/*.jsonl") == ["b/.hidden.jsonl", "b/10.jsonl", "b/2.jsonl"]
    assert names(folder, "**/[0-9].*") == ["b/2.jsonl", "b/_old/4.jsonl", "b/deep/3.csv"]
    assert names(folder, f"{folder}/?.jsonl") == [str(folder / "a.jsonl")]


@pytest.mark.parametrize("entry", ["b", "b/*.jsonl", "b/?.jsonl"])
def test_a_link_to_a_file_that_is_gone_is_no_row_less(folder: Path, entry: str) -> None:
    (folder / "b" / "z.txt").symlink_to("gone.txt")  # no file of rows: nothing is lost
    assert len(names(folder, "b")) == 3
    (folder / "b" / "5.jsonl").symlink_to("../.annex/5.jsonl")
    with pytest.raises(UserError, match=r"5\.jsonl is a link to \.\./\.annex/5\.jsonl, where nothing is"):
        names(folder, entry)


def test_each_file_is_read_once_under_its_first_name(folder: Path) -> None:
    assert names(folder, "b/2.jsonl", "a.jsonl", "b", "./a.jsonl") == [
        "b/2.jsonl",
        "a.jsonl",
        "b/10.jsonl",
        "b/deep/3.csv",
    ]


def test_files_of_several_formats_are_one_set(folder: Path) -> None:
    rows = read(folder, "b", "a.jsonl")
    assert [row.text for row in rows if isinstance(row, Row)] == [
        "b/10.jsonl",
        "b/2.jsonl",
        "b/deep/3.csv",
        "a.jsonl",
    ]
    assert [row.source for row in rows] == ["b/10.jsonl:1", "b/2.jsonl:1", "b/deep/3.csv:2", "a.jsonl:1"]


def test_a_file_with_the_characters_of_a_glob_in_its_name(folder: Path) -> None:
    (folder / "a[1].jsonl").write_text('{"text": "x"}\n')
    assert names(folder, "a[1].jsonl") == ["a[1].jsonl"]


def test_all_that_is_missing_is_named_with_the_line_of_the_spec(folder: Path) -> None:
    spec = folder / "s.yaml"
    spec.write_text(
        "name: s\nsource:\n  kind: files\n  files:\n    - a.jsnl\n    - none/*.csv\n    - empty\n"
    )
    (folder / "empty").mkdir()
    loaded = load_spec(spec)
    with pytest.raises(UserError) as caught:
        source_files(loaded.value.sources[0], folder, where=loaded.where)
    said = str(caught.value)
    assert said.count("s.yaml:5:") == 3
    assert "no such file" in said and "did you mean 'a.jsonl'?" in said
    assert "no file matches" in said
    assert "no files of rows in the folder" in said


def test_a_folder_of_save_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        {"prompt": f"p{n}", "completion": word}
        for n, word in enumerate(["42", "007", "NA", "null", "2024-01-05"])
    ]
    made = datasets.Dataset.from_list(words)
    made.save_to_disk(tmp_path / "saved", num_shards=2)
    rows = read(tmp_path, "saved")
    assert [row.answer for row in rows if isinstance(row, Row)] == [word["completion"] for word in words]
    assert rows[0].source == "saved/data-00000-of-00002.arrow:1"
    (tmp_path / "saved" / "cache-1.arrow").write_text("not of the dataset")
    assert len(read(tmp_path, "saved")) == 5
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"lacks data-00001-of-00002\.arrow"):
        read(tmp_path, "saved")


def test_a_saved_dataset_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"several splits \(train, test\)(?s:.*)saved/train"):
        read(tmp_path, "saved")
    assert [row.text for row in read(tmp_path, "saved/test") if isinstance(row, Row)] == ["test"]
    datasets.DatasetDict(train=parts["train"]).save_to_disk(tmp_path / "one")
    assert [row.source for row in read(tmp_path, "one")] == ["one/train/data-00000-of-00001.arrow:1"]


def test_a_conversation_saved_with_mixed_contents_is_what_it_was(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"arguments": {"n": 1}}}]},
    ]
    datasets.Dataset.from_list([{"messages": turns}] * 2, on_mixed_types="use_json").save_to_disk(
        tmp_path / "saved"
    )
    rows = read(tmp_path, "saved")
    assert [list(row.messages) for row in rows if isinstance(row, Row)] == [
        [{"role": "user", "content": "q"}, turns[1]]
    ] * 2
