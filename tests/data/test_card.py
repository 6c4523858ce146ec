"""The card and the Croissant metadata say what the manifest says, and a reader of Croissant gets the rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune.cli.data_card import card
from finetune.data.build import DatasetBuild
from finetune.data.card import card_of, croissant_of, require_manifest, write_card
from finetune.errors import UserError

Build = Callable[..., DatasetBuild]
ROWS = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(30)]


@pytest.fixture
def made(build: Build) -> DatasetBuild:
    return build(
        [*ROWS, ROWS[0]],
        licence="CC-BY-4.0",
        description="Questions <b>and</b> answers.",
        split={"shares": {"train": 0.7, "test": 0.3}},
    )


def test_the_card_names_licence_source_sides_and_what_was_left_out(made: DatasetBuild) -> None:
    text = card_of(made.manifest)
    assert 'license: "cc-by-4.0"' in text
    assert "Licence: CC-BY-4.0." in text
    assert "- {split: train, path: train.jsonl}" in text and "validation.jsonl}" not in text
    digest = hashlib.sha256((made.folder.parent.parent / "rows.jsonl").read_bytes()).hexdigest()
    assert f"| rows.jsonl | CC-BY-4.0 | `{digest[:16]}` |" in text
    assert f"| train | {len(made.rows('train'))} |" in text
    assert "31 rows read = 30 kept + 1 dropped + 0 quarantined" in text
    assert "| duplicate | 1 |" in text
    assert "Questions &lt;b>and&lt;/b> answers." in text


def test_an_unknown_licence_is_said_and_not_claimed(build: Build) -> None:
    made = build(ROWS)
    assert "unknown: ask whoever owns the sources" in card_of(made.manifest)
    assert "license" not in croissant_of(made.manifest)


def test_several_sources_have_a_line_each_with_their_own_licence(made: DatasetBuild) -> None:
    sources = [
        {"kind": "files", "files": {"a|b.jsonl": "f" * 64}, "licence": "MIT"},
        {"kind": "home_intents", "packages": {"hassil": "3.13"}},
    ]
    text = card_of({**made.manifest, "source": {"kind": "several", "sources": sources}})
    assert "| a\\|b.jsonl | MIT | `ffffffffffffffff` |" in text
    assert "| hassil | CC-BY-4.0 | `3.13` |" in text
    many = {"kind": "files", "files": {f"{n}.jsonl": "0" * 64 for n in range(60)}}
    assert "and 10 more" in card_of({**made.manifest, "source": many})


def test_the_same_build_has_the_same_card(made: DatasetBuild, tmp_path: Path) -> None:
    one, other = (write_card(tmp_path / name, made.manifest) for name in ("one", "other"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


def test_croissant_lists_the_files_with_their_digests(made: DatasetBuild) -> None:
    found = croissant_of(made.manifest)
    assert [part["@id"] for part in found["distribution"]] == ["train.jsonl", "test.jsonl"]
    for part in found["distribution"]:
        data = (made.folder / part["contentUrl"]).read_bytes()
        assert part["sha256"] == hashlib.sha256(data).hexdigest()
        assert part["contentSize"] == f"{len(data)} B"
    names = {field["name"] for field in found["recordSet"][0]["field"]}
    assert names == {"id", "roles", "contents", "group", "source"}
    assert json.loads(json.dumps(found)) == found


def test_a_reader_of_croissant_finds_no_fault_and_gets_the_rows(made: DatasetBuild) -> None:
    croissant: Any = pytest.importorskip("mlcroissant")
    _, path = write_card(made.folder, made.manifest)
    records = list(croissant.Dataset(jsonld=str(path)).records("train"))
    rows = made.rows("train")
    assert [record["train/id"].decode() for record in records] == [row.id for row in rows]
    assert [part.decode() for part in records[0]["train/contents"]] == [
        turn["content"] for turn in rows[0].messages
    ]


def test_the_command_writes_both(made: DatasetBuild, tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(card)
    result = CliRunner().invoke(
        app, [str(made.folder), "--out", str(tmp_path / "out"), "--json"], catch_exceptions=False
    )
    found = json.loads(result.stdout)
    assert Path(found["card"]).read_text() == card_of(made.manifest)
    assert json.loads(Path(found["croissant"]).read_text()) == croissant_of(made.manifest)
    with pytest.raises(UserError, match="build the data set again"):
        require_manifest({}, "x")
