"""Following an event log that another process writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.telemetry.follow import follow_events


def line(number: int) -> bytes:
    return json.dumps({"event": "step", "step": number}).encode() + b"\n"


def followed(folder: Path, additions: list[bytes]) -> list[list[int]]:
    """Steps of each batch; before each wait the next addition is written, and the writer ends after the last one."""
    left: Iterator[bytes] = iter(additions)
    remaining = [len(additions)]

    def wait(_: float) -> None:
        with (folder / "events.jsonl").open("ab") as stream:
            stream.write(next(left))
        remaining[0] -= 1

    def is_alive(_: Path) -> bool:
        return remaining[0] > 0

    batches: list[list[dict[str, Any]]] = list(follow_events(folder, is_alive=is_alive, wait=wait))
    return [[event["step"] for event in batch] for batch in batches]


def test_all_that_is_there_comes_first_and_then_what_is_added(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(line(1) + line(2))
    assert followed(tmp_path, [line(3), line(4) + line(5)]) == [[1, 2], [3], [4, 5]]


def test_a_line_waits_for_its_end_and_a_torn_one_is_passed_over(tmp_path: Path) -> None:
    whole = line(1)
    assert followed(tmp_path, [whole[:10], whole[10:], b'{"torn\n', line(2), line(3)[:5]]) == [
        [],
        [],
        [1],
        [],
        [2],
        [],
    ]


def test_a_run_that_has_not_begun_to_write_is_waited_for(tmp_path: Path) -> None:
    assert followed(tmp_path, [line(1)]) == [[], [1]]


def test_a_run_that_is_over_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(line(1))
    assert followed(tmp_path, []) == [[1]]
