"""Tables of rows that are written on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from finetune.data.rows import Row
from finetune.data.stages.parts import PartWriter
from finetune.data.stages.table import RowTable

MakeTable = Callable[..., RowTable]


@pytest.fixture
def make_table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeTable]:
    """make_table(rows, …): each list of rows a part; pinned=[…] and origins=[…] have one entry a list."""
    made: list[RowTable] = []

    def make(
        *parts: Sequence[Row], origins: Sequence[int] | None = None, pinned: Sequence[bool] | None = None
    ) -> RowTable:
        folder: Path = tmp_path_factory.mktemp("parts")
        for number, rows in enumerate(parts):
            with PartWriter(folder / str(number)) as part:
                for row in rows:
                    part.add(row)
        made.append(
            RowTable.of_parts(
                [folder / str(number) for number in range(len(parts))],
                origins or [0] * len(parts),
                pinned or [False] * len(parts),
            )
        )
        return made[-1]

    yield make
    for table in made:
        table.lines.close()
