"""Parquet and Arrow: values as stored, keys that a row never had stay away, and damage is a reject."""

from __future__ import annotations

import datetime
import decimal
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from finetune.data.read import Reject, iter_rows, source_files, split_ranges
from finetune.data.spec_source import FilesSource
from finetune.errors import UserError

Read = Callable[..., Any]


def parquet(table: pa.Table, **how: Any) -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(table, sink, **how)
    return sink.getvalue()


def arrow(table: pa.Table, opened: Callable[..., Any] = pa.ipc.new_stream) -> bytes:
    sink = io.BytesIO()
    with opened(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def test_keys_of_other_rows_are_not_filled_in(read: Read) -> None:
    """DL04: Arrow gives row 1 an argument `count` and the user's turn `tool_calls`, both null; the row has neither."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
            ]
        }
        for arguments in ({"city": "Oslo"}, {"count": 3})
    ]
    table = pa.Table.from_pylist(rows)
    assert table.to_pylist()[0]["messages"][0].keys() == {"role", "content", "tool_calls"}
    for name, raw in (("rows.parquet", parquet(table)), ("rows.arrow", arrow(table))):
        found = read(raw, name)
        assert [list(row.messages) for row in found.rows] == [row["messages"] for row in rows]


def test_arguments_in_a_json_text_stay_text(read: Read) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]},
            ]
        }
        for text in ('{"city":  "Oslo"}', "42", "null")
    ]
    found = read(parquet(pa.Table.from_pylist(rows)), "rows.parquet")
    assert [list(row.messages) for row in found.rows] == [row["messages"] for row in rows]


def test_a_column_of_the_json_type_is_parsed(read: Read) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "007"}]
    storage = pa.array([[json.dumps(turn) for turn in turns], ['{"role": "user"', "7"]])
    column = storage.cast(pa.list_(pa.string()))
    table = pa.table(
        {
            "messages": pa.ListArray.from_arrays(
                column.offsets, pa.ExtensionArray.from_storage(pa.json_(), column.values)
            )
        }
    )
    for name, raw in (("rows.parquet", parquet(table)), ("rows.arrow", arrow(table))):
        found = read(raw, name)
        assert [list(row.messages) for row in found.rows] == [turns]
        assert "not valid JSON" in found.reasons[0]
        assert found.rejects[0].line == 2


@pytest.mark.parametrize(
    ("values", "described"),
    [
        ([datetime.datetime(2024, 1, 5)], "a datetime"),
        ([datetime.date(2024, 1, 5)], "a date"),
        ([decimal.Decimal("1.50")], "a Decimal"),
        ([42], "a number"),
        ([True], "true or false"),
        ([["a"]], "not"),
        ([None], "no 'completion'|neither"),
    ],
)
def test_what_another_reader_made_of_a_text_is_no_text(read: Read, values: list[Any], described: str) -> None:
    import re

    table = pa.table({"prompt": ["p"] * len(values), "completion": values})
    found = read(parquet(table), "rows.parquet")
    assert found.rows == []
    assert re.search(described, found.reasons[0])
    json.dumps(found.rejects[0].to_dict())


def test_tags_and_groups_of_any_type_are_text(read: Read) -> None:
    table = pa.table(
        {
            "prompt": ["p"],
            "completion": ["c"],
            "when": [datetime.date(2024, 1, 5)],
            "n": [7],
            "share": [0.5],
            "nothing": pa.array([None], pa.string()),
            "kind": pa.array(["x"]).dictionary_encode(),
        }
    )
    found = read(parquet(table), "rows.parquet", tags=["when", "n", "share", "nothing", "kind"], group_by="n")
    assert found.rows[0].tags == {"when": "2024-01-05", "n": "7", "share": "0.5", "kind": "x"}
    assert found.rows[0].group == "n=7"


def test_bytes_that_are_text_are_text(read: Read) -> None:
    table = pa.table({"text": pa.array([b"caf\xc3\xa9", b"caf\xe9"], pa.binary())})
    found = read(parquet(table), "rows.parquet")
    assert [row.text for row in found.rows] == ["café"]
    assert found.reasons == ["the column 'text' holds bytes that are not text in UTF-8"]


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (float("nan"), "holds nan"),
        (datetime.date(2024, 1, 5), "holds a date"),
        (decimal.Decimal(1), "holds a Decimal"),
    ],
)
def test_what_json_does_not_have_is_refused_inside_a_turn(read: Read, held: Any, reason: str) -> None:
    turns = [{"role": "user", "content": "q", "x": None}, {"role": "assistant", "content": "a", "x": held}]
    found = read(parquet(pa.Table.from_pylist([{"messages": turns}])), "rows.parquet")
    assert found.rows == []
    assert reason in found.reasons[0]


def test_maps_are_objects(read: Read) -> None:
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    turns = [[("role", "user"), ("content", "q")], [("role", "assistant"), ("content", "a")]]
    doubled = [[("role", "user"), ("role", "user")]]
    found = read(parquet(pa.table({"messages": pa.array([turns, doubled], kind)})), "rows.parquet")
    assert [list(row.messages) for row in found.rows] == [[dict(turn) for turn in turns]]
    assert "a key twice" in found.reasons[0]


def test_large_and_view_types(read: Read) -> None:
    for kind in (pa.large_string(), pa.string_view()):
        assert read(arrow(pa.table({"text": pa.array(["007"], kind)})), "rows.arrow").rows[0].text == "007"
    ids = pa.array([[1, 2]], pa.large_list(pa.int64()))
    assert read(parquet(pa.table({"input_ids": ids})), "rows.parquet").rows[0].input_ids == (1, 2)
    ids = pa.array([[1, 2]], pa.list_(pa.int32(), 2))
    assert read(parquet(pa.table({"input_ids": ids})), "rows.parquet").rows[0].input_ids == (1, 2)


def test_a_damaged_row_group_is_one_reject_and_the_others_are_read(read: Read) -> None:
    table = pa.table({"text": [f"text {n} " * 50 for n in range(30)]})
    raw = bytearray(parquet(table, row_group_size=10, compression="zstd"))
    column = pa.parquet.ParquetFile(io.BytesIO(bytes(raw))).metadata.row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    raw[begin + 30 : begin + column.total_compressed_size] = bytes(column.total_compressed_size - 30)
    found = read(bytes(raw), "rows.parquet")
    numbers = [int(row.text.split()[1]) for row in found.rows]
    assert numbers == [*range(10), *range(20, 30)]
    assert [row.source for row in found.rows[10:11]] == ["rows.parquet:21"]
    [entry] = found.rejects
    assert "damaged from row 11 on" in entry.reason


@pytest.mark.parametrize("end", [-1, -8, 20])
def test_a_cut_file_is_named(read: Read, end: int) -> None:
    raw = parquet(pa.table({"text": ["a"]}))
    with pytest.raises(UserError, match=r"cannot be read as parquet(?s:.*)was cut"):
        read(raw[:end], "rows.parquet")


def test_a_cut_arrow_stream_keeps_its_whole_batches(read: Read) -> None:
    table = pa.table({"text": [f"t{n}" for n in range(100)]})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    found = read(sink.getvalue()[:-400], "rows.arrow")
    assert [row.text for row in found.rows] == [f"t{n}" for n in range(len(found.rows))]
    assert len(found.rows) >= 80
    assert "damaged from row" in found.reasons[0]


def test_two_columns_of_one_name_are_refused(read: Read) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pytest.raises(UserError, match="have one name"):
        read(arrow(table), "rows.arrow")


def test_row_groups_are_ranges(tmp_path: Path) -> None:
    table = pa.table({"text": [f"t{n}" for n in range(100)]})
    (tmp_path / "a.parquet").write_bytes(parquet(table, row_group_size=7))
    source = FilesSource(kind="files", files=["a.parquet"])
    [file] = source_files(source, tmp_path)
    assert len(split_ranges(file, 1)) == 15
    assert len(split_ranges(file, 1 << 30)) == 1
    rows = [row for within in split_ranges(file, 100) for row in iter_rows(file, source, within=within)]
    assert [row.source for row in rows] == [f"a.parquet:{n + 1}" for n in range(100)]
    assert not any(isinstance(row, Reject) for row in rows)
