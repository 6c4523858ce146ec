"""Rows to look at come from a build, a spec or a file; what is passed over is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.data.build import DatasetBuild
from finetune.data.look import rows_to_look_at
from finetune.errors import UserError

ROWS = [{"prompt": f"p{n}", "completion": f"c{n}"} for n in range(5)]


def test_the_same_rows_by_build_spec_and_file(build: Callable[..., DatasetBuild], tmp_path: Path) -> None:
    made = build(ROWS)
    for source in (made.folder, tmp_path / "mine.yaml", tmp_path / "rows.jsonl"):
        found = rows_to_look_at(str(source), builds_root=tmp_path / "builds")
        assert {row.answer for row in found} == {f"c{n}" for n in range(5)}


def test_faulty_rows_of_a_file_are_told(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)) + "\n{broken\n[]\n")
    said: list[str] = []
    assert len(list(rows_to_look_at(str(file), say=said.append))) == 5
    (line,) = said
    assert "2 of 7 rows are faulty" in line and f"finetune data inspect {file}" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "there are no rows"), (b"\n\n", "there are no rows"), (b"{broken\n", "no row of .* can be used")],
)
def test_a_file_without_a_sound_row_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(rows_to_look_at(str(file)))
