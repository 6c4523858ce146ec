"""The reference page and the JSON Schema of the dataset spec are made from the schema of today."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from finetune.cli.data import app
from finetune.data.reference import dataset_json_schema, dataset_reference_markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dataset_reference.md"


def test_the_committed_page_is_current() -> None:
    renew = "finetune data schema --markdown > docs/dataset_reference.md"
    assert PAGE.read_text(encoding="utf-8") == dataset_reference_markdown(), f"renew it: {renew}"


def test_every_section_and_kind_of_source_has_a_table() -> None:
    page = dataset_reference_markdown()
    for title in (
        "`split.guard`",
        "`curate.verifiers`",
        "`source` with `kind: hub`",
        "`source` with `kind: files or jsonl`",
    ):
        assert f"## {title}\n" in page
    assert "| `split.guard.any_ngram` | a whole number or null, ≥ 2, ≤ 64 | `13` |" in page
    assert "| `name` | text, pattern `^[A-Za-z0-9][A-Za-z0-9._-]*$` | **required** |" in page
    rows = [line.removesuffix(" |").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert all(row[-1].strip() for row in rows), "every key has a meaning"


def test_the_json_schema_is_closed() -> None:
    schema = dataset_json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"name", "source"}
    runner = CliRunner()
    assert json.loads(runner.invoke(app, ["schema"]).stdout) == schema
    assert runner.invoke(app, ["schema", "--markdown"]).stdout == dataset_reference_markdown()
