"""Reading and validating rows: the same records in every format, beside `datasets` and bare parsing, which check nothing.

    python benchmarks/data_reading.py [--megabytes 200] [--processes 2]

One set of chat records of about 1 kB is written in each format. Our side makes a checked canonical row of every record
(strict JSON, shape, group, digest), in ranges by several processes where the format allows it; `datasets` loads the
JSON lines into Arrow by as many processes; `orjson` and `json` parse the lines and throw them away. Rates are MB/s of
the file as it lies on the disk, medians of five. All files are read once before, so that the disk is not measured.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet
import zstandard
from results import table, write_section

from finetune.data.read import Range, Reject, SourceFile, iter_rows, source_files, split_ranges
from finetune.data.spec_source import FilesSource

RUNS = 5
RANGE_BYTES = 4 << 20
LIMIT_MB_PER_SECOND = 150


def records(n_bytes: int, seed: int = 17) -> Iterator[dict[str, Any]]:
    """Chat records of about 1 kB, with line breaks and some characters beyond ASCII, until their JSON fills `n_bytes`."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(5000)] + [
        "größe",
        "naïve",
        "日本",
    ]
    written = 0
    while written < n_bytes:
        asked, answered = (" ".join(draw.choices(words, k=count)) for count in (50, 95))
        record = {
            "messages": [
                {"role": "user", "content": asked[:150] + "\n\n" + asked[150:]},
                {"role": "assistant", "content": answered},
            ],
            "topic": draw.choice(words),
        }
        written += len(orjson.dumps(record)) + 1
        yield record


def write_files(folder: Path, n_bytes: int) -> dict[str, str]:
    """Title -> name of the file, of the same records in every format."""
    made = list(records(n_bytes))
    compact = b"".join(orjson.dumps(record) + b"\n" for record in made)
    (folder / "compact.jsonl").write_bytes(compact)
    (folder / "spaced.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made))
    (folder / "rows.json").write_bytes(b"[\n" + compact.rstrip().replace(b"\n", b",\n") + b"\n]\n")
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(compact, compresslevel=3))
    (folder / "rows.jsonl.zst").write_bytes(zstandard.compress(compact))
    pa.parquet.write_table(pa.Table.from_pylist(made), folder / "rows.parquet", row_group_size=10_000)
    with (folder / "rows.csv").open("w", newline="") as stream:
        import csv

        writer = csv.writer(stream)
        writer.writerow(["prompt", "completion", "topic"])
        for record in made:
            asked, answered = record["messages"]
            writer.writerow([asked["content"], answered["content"], record["topic"]])
    return {
        "JSON lines, as compact writers make them": "compact.jsonl",
        "JSON lines, as `json.dumps` makes them": "spaced.jsonl",
        "JSON lines in gzip": "rows.jsonl.gz",
        "JSON lines in zstandard": "rows.jsonl.zst",
        "JSON array": "rows.json",
        "CSV": "rows.csv",
        "Parquet": "rows.parquet",
    }


def count_rows(file: SourceFile, source: FilesSource, within: Range | None) -> tuple[int, int]:
    """Rows and rejects of a range."""
    rows = rejects = 0
    for one in iter_rows(file, source, within=within):
        if isinstance(one, Reject):
            rejects += 1
        else:
            rows += 1
    return rows, rejects


def ours(path: Path, pool: ProcessPoolExecutor) -> int:
    """Rows of the file, from the search for its format on."""
    source = FilesSource(kind="files", files=[path.name], tags=[] if path.suffix == ".json" else ["topic"])
    [file] = source_files(source, path.parent)
    ranges = split_ranges(file, RANGE_BYTES)
    counts = list(pool.map(partial(count_rows, file, source), ranges))
    assert not sum(rejects for _, rejects in counts)
    return sum(rows for rows, _ in counts)


def by_datasets(path: Path, processes: int) -> int:
    """Rows that `datasets` writes to a fresh Arrow cache."""
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        files = [str(path)]
        loaded = datasets.load_dataset(
            "json", data_files=files, split="train", cache_dir=cache, num_proc=processes
        )
        return len(loaded)


def parse(loads: Callable[[bytes], Any], path: Path) -> int:
    """Lines parsed by one process and thrown away."""
    with path.open("rb") as stream:
        return sum(1 for line in stream if loads(line))


def median_seconds(read: Callable[[], int], n_rows: int) -> float:
    """Of RUNS calls, each of which must find all rows."""
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        found = read()
        seconds.append(time.perf_counter() - start)
        assert found == n_rows, (found, n_rows)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, ProcessPoolExecutor(options.processes) as pool:
        folder = Path(made)
        with ProcessPoolExecutor(1) as other:  # so that the heaps of those that read are not full of holes
            files = other.submit(write_files, folder, options.megabytes * 1_000_000).result()
        n_rows = (folder / "compact.jsonl").read_bytes().count(b"\n")
        rates: dict[str, float] = {}
        rows = []
        for title, name in files.items():
            path = folder / name
            n_bytes = path.stat().st_size
            seconds = median_seconds(partial(ours, path, pool), n_rows)
            rates[name] = n_bytes / seconds / 1e6
            rows.append(
                [title, f"{n_bytes / 1e6:.0f} MB", f"{rates[name]:.0f} MB/s", f"{n_rows / seconds:,.0f}"]
            )
        lines = folder / "compact.jsonl"
        others: dict[str, Callable[[], int]] = {
            f"`datasets`, {options.processes} processes, JSON lines to Arrow": partial(
                by_datasets, lines, options.processes
            ),
            "`orjson.loads` alone, 1 process": partial(parse, orjson.loads, lines),
            "`json.loads` alone, 1 process": partial(parse, json.loads, lines),
        }
        size = lines.stat().st_size
        for title, read in others.items():
            seconds = median_seconds(read, n_rows)
            rows.append(
                [
                    title,
                    f"{size / 1e6:.0f} MB",
                    f"{size / seconds / 1e6:.0f} MB/s",
                    f"{n_rows / seconds:,.0f}",
                ]
            )
    slowest = min(rates["compact.jsonl"], rates["spaced.jsonl"])
    write_section(
        "Reading rows",
        [
            f"{n_rows:,} chat records of 1 kB, {options.processes} processes; every row checked, grouped and hashed.",
            "",
            *table(["what", "file", "rate", "rows/s"], rows),
            "",
            f"JSON lines: {slowest:.0f} MB/s at the least, of {LIMIT_MB_PER_SECOND} MB/s wanted "
            f"({slowest / LIMIT_MB_PER_SECOND:.2f}).",
        ],
    )


if __name__ == "__main__":
    main()
