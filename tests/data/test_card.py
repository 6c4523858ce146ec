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
from finetune.data.build import DatasetBuild, build_dataset
from finetune.data.card import card_of, croissant_of, require_manifest, write_card
from finetune.data.stages import read as read_stage
from finetune.data.stages.work import WorkFolder
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
    assert "| 1 | own files | CC-BY-4.0 | 31 |" in text
    assert f"| 1 | rows.jsonl | `{digest[:16]}` |" in text
    assert f"| train | {len(made.rows('train'))} |" in text
    assert "31 rows read = 30 kept + 1 dropped + 0 quarantined" in text
    assert "| duplicate | 1 |" in text
    assert "Questions &lt;b>and&lt;/b> answers." in text


def test_an_unknown_licence_is_said_and_not_claimed(build: Build) -> None:
    made = build(ROWS)
    assert "unknown: ask whoever owns the sources" in card_of(made.manifest)
    assert "license" not in croissant_of(made.manifest)


def test_the_build_holds_its_card_and_metadata(made: DatasetBuild) -> None:
    assert (made.folder / "README.md").read_text() == card_of(made.manifest)
    assert json.loads((made.folder / "croissant.json").read_text()) == croissant_of(made.manifest)


def test_every_part_has_a_line_with_its_own_licence_and_rows(write_spec: Any, tmp_path: Path) -> None:
    spec = write_spec([*ROWS, {"prompt": "bad"}], licence="MIT")
    (tmp_path / "bought.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    (tmp_path / "pinned.jsonl").write_text('{"prompt": "always right", "completion": "yes"}\n')
    own = {"kind": "files", "files": ["rows.jsonl"], "max_reject_rate": 0.1}
    bought = {"kind": "files", "files": ["bought.jsonl"]}
    bought |= {"licence": "CC-BY-NC-4.0", "origin": "https://example.org/a|b"}
    content = json.loads(spec.read_text()) | {"source": [own, bought]}
    content["split"]["pinned"] = "pinned.jsonl"
    spec.write_text(json.dumps(content))
    made = build_dataset(spec, tmp_path / "builds")
    text = (made.folder / "README.md").read_text()
    assert "| 1 | own files | MIT | 31 |" in text
    assert "| 2 | https://example.org/a\\|b | CC-BY-NC-4.0 | 1 |" in text
    assert "| 3 | own files; pinned as regressions | MIT | 1 |" in text
    for number, name in enumerate(("rows", "bought", "pinned"), start=1):
        digest = hashlib.sha256((tmp_path / f"{name}.jsonl").read_bytes()).hexdigest()
        assert f"| {number} | {name}.jsonl | `{digest[:16]}` |" in text
    assert 'license: ["mit", "cc-by-nc-4.0"]' in text
    assert "each part has its own, and all of them hold for the whole (MIT; CC-BY-NC-4.0)" in text
    croissant = json.loads((made.folder / "croissant.json").read_text())
    assert croissant["license"] == ["MIT", "CC-BY-NC-4.0"]


def test_a_licence_or_origin_that_is_said_later_reads_nothing_again(
    write_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_spec(ROWS)
    monkeypatch.setattr(WorkFolder, "remove", lambda self: None)
    first = build_dataset(spec, tmp_path / "builds")
    monkeypatch.setattr(read_stage, "read_piece", lambda task: pytest.fail("read again"))
    spec = write_spec(ROWS, source={"licence": "MIT", "origin": "us"})
    second = build_dataset(spec, tmp_path / "builds")
    assert second.digest != first.digest
    assert second.manifest["splits"] == first.manifest["splits"]
    assert "| 1 | us | MIT | 30 |" in (second.folder / "README.md").read_text()


def test_parts_of_every_kind_say_where_they_are_from(made: DatasetBuild) -> None:
    sources = [
        {"kind": "hub", "dataset": "who/what@abc", "files": {"a.jsonl": "f" * 64}, "licence": "MIT"},
        {"kind": "home_intents", "packages": {"hassil": "3.13"}},
        {"kind": "generated", "model": "some/model", "prompts": "mine", "origin": "by hand", "files": {}},
    ]
    text = card_of({**made.manifest, "source": {"kind": "several", "sources": sources}})
    assert "| 1 | dataset who/what@abc of the Hugging Face hub | MIT |" in text
    assert "| 2 | sentence templates of Home Assistant, sampled | CC-BY-4.0 |" in text
    assert "| 2 | hassil | `3.13` |" in text
    row = "| 3 | answers of the model some/model to the prompts of mine (by hand) | CC-BY-4.0; terms of the model: "
    assert row + "unknown: find out whether" in text
    assert (
        "unknown: ask whoever owns the sources" in text
    )  # the licence of the prompts does not cover the answers
    sources[2]["model_licence"] = "Apache-2.0"
    text = card_of({**made.manifest, "source": {"kind": "several", "sources": sources}})
    assert row + "Apache-2.0 |" in text and "unknown" not in text
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
