"""Files of ours: written whole or not at all, and read back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.paths import read_jsonl, write_json, write_jsonl


def test_every_text_comes_back_from_jsonl_also_half_a_surrogate_pair(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("plain", "línia\u2028nova", "\U0001f600", "broken \ud83d pair", "")]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert read_jsonl(tmp_path / "rows.jsonl") == rows


def test_a_number_that_is_none_is_never_written(tmp_path: Path) -> None:
    for write, value in ((write_json, {"score": float("nan")}), (write_jsonl, [{"score": float("inf")}])):
        with pytest.raises(ValueError):
            write(tmp_path / "file", value)
    assert not list(tmp_path.iterdir())


def test_a_damaged_line_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(UserError, match=r"rows\.jsonl:2"):
        read_jsonl(tmp_path / "rows.jsonl")


def test_a_key_written_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n{"id": 2, "reference": "a", "reference": "b"}\n')
    with pytest.raises(UserError, match="the key 'reference' is written twice") as told:
        read_jsonl(tmp_path / "rows.jsonl")
    assert "rows.jsonl:2" in str(told.value)
