"""A build is found again by its inputs, appears whole or not at all, and its spec is a closed schema."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.data import build as build_module
from finetune.data.build import (
    LEDGER,
    MANIFEST,
    DatasetBuild,
    build_dataset,
    code_digest,
    load_spec,
    open_build,
    split_digest,
)
from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.paths import read_json, read_jsonl, shipped_names, shipped_root

Build = Callable[..., DatasetBuild]
ROWS = [{"prompt": f"p{n}", "completion": f"c{n}"} for n in range(30)]
THREE_WAYS = {"shares": {"train": 0.6, "validation": 0.2, "test": 0.2}}


def test_the_folder_holds_what_the_manifest_says(build: Build) -> None:
    made = build([*ROWS, ROWS[0]], split=THREE_WAYS)
    manifest = read_json(made.folder / MANIFEST)
    assert manifest == made.manifest
    assert made.folder.name == f"mine-{manifest['digest'][:8]}"
    for side, entry in manifest["splits"].items():
        rows = made.rows(side)
        assert (len(rows), split_digest(rows)) == (entry["rows"], entry["digest"])
    assert manifest["ledger"] == {"read": 31, "kept": 30, "dropped": {"duplicate": 1}, "quarantined": 0}
    (entry,) = read_jsonl(made.folder / LEDGER)
    assert (entry["reason"], entry["source"]) == ("duplicate", "rows.jsonl:31")
    assert open_build(made.folder).by_side == made.by_side
    for name, entry in manifest["files"].items():
        path = made.folder / name
        assert (path.stat().st_size, digest_file(path)) == (entry["bytes"], entry["sha256"])


def test_the_same_inputs_find_the_same_build(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(ROWS)
    monkeypatch.setattr(build_module, "make_build", lambda *_: pytest.fail("built again"))
    assert build(ROWS).folder == made.folder


def test_changed_bytes_spec_or_code_make_a_new_build(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """DL06: the key covers the raw bytes (same size, same time stamp), the spec, and the code that reads them."""
    first = build(ROWS)
    changed = [dict(ROWS[0], completion="C0"), *ROWS[1:]]
    path = first.folder.parent.parent / "rows.jsonl"
    stamp = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"c0"', b'"C0"'))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = build_dataset(path.with_name("mine.yaml"), first.folder.parent)
    assert {row.answer for row in second.rows("train")} == {row["completion"] for row in changed}
    third = build(ROWS, source={"system": "s"})
    monkeypatch.setattr(build_module, "code_digest", lambda start: "other code")
    fourth = build(ROWS)
    assert len({made.digest for made in (first, second, third, fourth)}) == 4
    assert fourth.manifest["splits"] == first.manifest["splits"]


def test_the_code_digest_follows_what_decides_the_rows_and_nothing_else(tmp_path: Path) -> None:
    package = tmp_path / "data"
    shutil.copytree(Path(build_module.__file__).parent, package)

    def digests() -> tuple[str, str]:
        return code_digest("build.py", package), code_digest("stages/read.py", package)

    build, reader = digests()
    assert build == code_digest("build.py") != reader == code_digest("stages/read.py")
    for name in ("packing", "look", "lengths", "card", "tokenise", "curate/account", "curate/flags"):
        (package / f"{name}.py").write_text("# other tokens, other words about the rows\n")
    assert digests() == (build, reader)
    (package / "stages" / "settle.py").write_text("# another way to settle\n")
    assert digests()[0] != build and digests()[1] == reader
    build, reader = digests()
    (package / "read" / "turns.py").write_text("# another way to read\n")
    assert digests()[0] != build and digests()[1] != reader


@pytest.mark.parametrize(
    "imported",
    [
        "from finetune.data.curate import other",
        "from finetune.data import other",
        "from finetune.data.curate import (\n    first,\n    other,\n)",
        "def late():\n    from finetune.data.curate.other import name  # only when asked for",
    ],
)
def test_a_module_counts_however_it_is_imported(tmp_path: Path, imported: str) -> None:
    for folder in ("", "curate"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "other.py").write_text("one = 1\n")
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "start.py").write_text(f"import os\n{imported}\n")
    before = code_digest("start.py", tmp_path)
    for folder in ("", "curate"):
        (tmp_path / folder / "other.py").write_text("one = 2\n")
    assert code_digest("start.py", tmp_path) != before


def test_a_folder_left_by_a_killed_process_is_not_taken_for_a_build(build: Build) -> None:
    made = build(ROWS)
    (made.folder / MANIFEST).unlink()
    (made.folder / "train.jsonl").write_text("")
    assert len(build(ROWS).rows("train")) == 30
    (made.folder / "test.jsonl").unlink()
    assert build(ROWS).rows("test") == []


def test_a_folder_that_cannot_be_written_is_a_user_error(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write"):
        build_dataset(write_spec(ROWS), tmp_path / "file" / "builds")


def test_paths_are_relative_to_the_spec(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_spec(ROWS)
    monkeypatch.chdir("/")
    here = build_dataset(spec, tmp_path / "builds")
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(tmp_path / "rows.jsonl", moved)
    shutil.copy(spec, moved)
    assert build_dataset(moved / spec.name, tmp_path / "builds").digest == here.digest


def test_what_is_no_build_is_refused(tmp_path: Path, build: Build) -> None:
    with pytest.raises(UserError, match="not a dataset build"):
        open_build(tmp_path)
    with pytest.raises(UserError, match="did you mean 'validation'"):
        build(ROWS).rows("validaton")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"split": {"share": {}}}, "shares"),
        ({"split": {"shares": {"train": 0.5, "test": 0.4}}}, "add up to 0.9"),
        ({"split": {"shares": {"train": 0.0, "test": 1.0}}}, "train needs a share"),
        ({"split": {"shares": {"trian": 1.0}}}, "trian"),
        ({"source": {"kind": "jsonl"}}, "files"),
        ({"source": {"kind": "csv", "files": ["x"]}}, "csv"),
        ({"source": {"kind": "jsonl", "files": ["x"], "max_reject_rate": 2}}, "max_reject_rate"),
        ({"sead": 3}, "seed"),
    ],
)
def test_faults_of_a_spec_are_named_with_their_place(
    tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(json.dumps({"name": "x", "source": {"kind": "jsonl", "files": ["x.jsonl"]}, **change}))
    with pytest.raises(UserError) as caught:
        load_spec(path)
    assert expected in str(caught.value)
    assert "s.yaml:1:" in str(caught.value)


def test_every_shipped_spec_is_valid_and_named_like_its_file() -> None:
    names = shipped_names("data")
    assert "home_intents" in names
    for name in names:
        assert load_spec(shipped_root() / "data" / f"{name}.yaml").value.name == name


def test_the_same_prompt_is_on_one_side_and_a_repeated_row_is_counted(tmp_path: Path) -> None:
    """DL08: rows 3 and 11 ask the same up to case and spaces, row 7 is there twice; in any order of the rows."""
    rows = [{"prompt": f"Question {n}?", "completion": f"answer {n}"} for n in range(19)]
    rows[11] = {"prompt": "  qUESTION   3? ", "completion": "answer 11"}
    rows.append(rows[7])
    folders = {}
    for name, given in (("one", rows), ("other", [rows[n * 7 % 20] for n in range(20)])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
        (folder / "mine.yaml").write_text(
            "name: mine\nsource: {kind: jsonl, files: [rows.jsonl]}\nsplit: {shares: {train: 0.7, test: 0.3}}\n"
        )
        made = build_dataset(folder / "mine.yaml", folder / "builds")
        asked = {side: {row.messages[0]["content"] for row in made.rows(side)} for side in ("train", "test")}
        same = {"Question 3?", "  qUESTION   3? "}
        assert [bool(same & asked["train"]), bool(same & asked["test"])].count(True) == 1
        assert made.manifest["ledger"] == {
            "read": 20,
            "kept": 19,
            "dropped": {"duplicate": 1},
            "quarantined": 0,
        }
        assert made.rows("train") and made.rows("test")
        folders[name] = {row.answer: (side, row.group) for side in asked for row in made.rows(side)}
    assert folders["one"] == folders["other"]


def test_a_side_that_stays_empty_is_warned_of(build: Build) -> None:
    """Few groups, whose hashes miss a side: nothing could be measured, and nothing would say so."""
    few = build(ROWS[:2], split={"salt": "5"})
    empty = [side for side in ("validation", "test") if not few.rows(side)]  # type: ignore[arg-type]
    assert empty
    [warning] = few.manifest["warnings"]
    assert all(side in warning for side in empty) and "here 2" in warning
    assert build(ROWS, split=THREE_WAYS).manifest["warnings"] == []
    assert build(ROWS[:1], split={"shares": {"train": 1.0}}).manifest["warnings"] == []


def test_a_declared_tag_that_no_row_has_is_warned_of_with_the_nearest_key(build: Build) -> None:
    rows = [dict(row, topic="a") for row in ROWS]
    [warning] = build(rows, source={"tags": ["topik"]}).manifest["warnings"]
    assert warning == "no row has 'topik', which source.tags names; did you mean 'topic'?"
    some = [dict(ROWS[0], topik="x"), *rows[1:]]  # one row has it
    warnings = build(some, source={"tags": ["topik"]}).manifest["warnings"]
    assert not any("no row has" in line for line in warnings)


@pytest.mark.parametrize("key", ["stratify_by", "unique_by", "unite_by"])
def test_a_tag_that_is_declared_and_in_no_row_guards_nothing(build: Build, key: str) -> None:
    rows = [dict(row, topic="a") for row in ROWS]
    with pytest.raises(UserError, match="no row has the tag 'topc'") as caught:
        build(rows, source={"tags": ["topc"]}, split={key: "topc"})
    assert "source.tags names it" in str(caught.value)
