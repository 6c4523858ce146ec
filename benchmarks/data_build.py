"""How long a whole dataset build of a million chat rows takes, and how much memory all its processes hold at once.

    python benchmarks/data_build.py                # 1,000,000 rows, about 1 GB: minutes
    python benchmarks/data_build.py --rows 50000

One row in fifty repeats another word for word, one in fifty is another with a word changed, one in a thousand is faulty.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import orjson
import psutil
from results import table, write_section

from finetune.paths import read_json

_SECONDS_BETWEEN_SAMPLES = 0.05
_FULL_ROWS = 1_000_000
_WORDS_ASKED, _WORDS_ANSWERED, _WORDS_A_PHRASE = 50, 100, 5
_SPEC = """\
dataset: 1
name: benchmark
source: {kind: jsonl, files: [rows.jsonl]}
"""


def write_rows(path: Path, n_rows: int, seed: int = 17) -> int:
    """A file of chat rows of about a thousand bytes each; its size in bytes."""
    rng = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, range(26, 0, -1), k=rng.randint(2, 9))) for _ in range(30_000)]
    likely = [
        1 / (rank + 10) for rank in range(len(words))
    ]  # as words of a language are: few common, many rare
    pool = rng.choices(words, likely, k=4_000_000)
    recent: list[dict[str, Any]] = []

    def some(count: int) -> list[str]:
        starts = [rng.randrange(len(pool) - _WORDS_A_PHRASE) for _ in range(count // _WORDS_A_PHRASE)]
        return [word for start in starts for word in pool[start : start + _WORDS_A_PHRASE]]

    with path.open("wb", buffering=1 << 20) as stream:
        for number in range(n_rows):
            kind = rng.random()
            if kind < 0.001:
                stream.write(b'{"messages": [{"role": "user", "content": "cut off\n')
                continue
            if kind < 0.041 and recent:
                row = recent[rng.randrange(len(recent))]
                if kind >= 0.021:
                    row = _with_one_word_changed(row, rng.choice(words), rng)
            else:
                row = {
                    "messages": [_turn("user", some(_WORDS_ASKED)), _turn("assistant", some(_WORDS_ANSWERED))]
                }
            if len(recent) < 20_000:
                recent.append(row)
            else:
                recent[number % 20_000] = row
            stream.write(orjson.dumps(row) + b"\n")
    return path.stat().st_size


def _turn(role: str, words: list[str]) -> dict[str, str]:
    return {"role": role, "content": " ".join(words)}


def _with_one_word_changed(row: dict[str, Any], word: str, rng: random.Random) -> dict[str, Any]:
    asked, answered = row["messages"]
    words = asked["content"].split()
    words[rng.randrange(len(words))] = word
    return {"messages": [_turn("user", words), answered]}


class MemoryOfTree(threading.Thread):
    """Samples the memory of a process and of all below it. `peak_bytes` counts shared pages once for each process."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._process = psutil.Process(pid)
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(_SECONDS_BETWEEN_SAMPLES):
            total = 0
            try:
                for process in (self._process, *self._process.children(recursive=True)):
                    total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            self.peak_bytes = max(self.peak_bytes, total)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def measured(code: str, *arguments: Path) -> tuple[str, float, float, int]:
    """What a program printed, the seconds it took, the processor's seconds, and the peak bytes, of it and its children."""
    start, used = time.perf_counter(), _children_seconds()
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    memory = MemoryOfTree(process.pid)
    memory.start()
    printed, _ = process.communicate()
    seconds = time.perf_counter() - start
    memory.stop()
    if process.returncode:
        raise SystemExit(process.returncode)
    return printed.strip(), seconds, _children_seconds() - used, memory.peak_bytes


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


BUILD = """\
import pathlib, sys
from finetune.data.build import build_dataset
print(build_dataset(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])).folder)
"""
CHECK = """\
import pathlib, sys
from finetune.data.build import open_build
from finetune.data.check import check_build
result = check_build(open_build(pathlib.Path(sys.argv[1])))
print(result.passed, {kind: len(found) for kind, found in result.leaks.items()})
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=_FULL_ROWS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        n_bytes = write_rows(folder / "rows.jsonl", options.rows)
        (folder / "benchmark.yaml").write_text(_SPEC)
        built, *build_figures = measured(BUILD, folder / "benchmark.yaml", folder / "builds")
        ledger = read_json(Path(built) / "manifest.json")["ledger"]
        proved, *check_figures = measured(CHECK, Path(built))
    rows = [
        [
            what,
            f"{seconds / 60:.1f} min",
            f"{options.rows / seconds:,.0f}",
            f"{processor_seconds / 60:.1f} min",
            f"{peak_bytes / 1e9:.2f} GB",
            limit,
        ]
        for what, (seconds, processor_seconds, peak_bytes), limit in (
            ("build", build_figures, "10 min, 2 GB"),
            ("proof (`data check`)", check_figures, ""),
        )
    ]
    lines = table(
        ["stage", "time", "rows/s", "processor time", "peak memory of all processes", "limit"], rows
    )
    lines += ["", f"{options.rows:,} chat rows, {n_bytes / 1e9:.2f} GB. Ledger: {ledger}. Proof: {proved}."]
    if options.rows == _FULL_ROWS:
        write_section("Dataset build", lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
