"""What holds for any rows: the ledger adds up, the same rows are chosen whatever their order, pieces and interruptions,
growth never moves a row, and nothing is on two sides."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data import build as build_module
from finetune.data.build import DatasetBuild, build_dataset
from finetune.data.check import check_build
from finetune.data.rows import SIDES, Side
from finetune.data.stages import parts, read, runner, work, write
from finetune.errors import UserError

THREE_WAYS = {"train": 0.6, "validation": 0.2, "test": 0.2}
WORDS = ("red", "green", "blue", "one", "two", "three", "four", "five", "six", "seven")


def text(least: int, most: int) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(WORDS), min_size=least, max_size=most).map(" ".join)


good_line = st.fixed_dictionaries(
    {
        "prompt": text(1, 12),
        "completion": text(1, 2),
        "user": st.sampled_from([f"u{n}" for n in range(9)]),
        "topic": st.sampled_from(["a", "b", None]),
    }
).map(lambda row: json.dumps(row).encode())
any_line = st.one_of(
    good_line, good_line, good_line, st.sampled_from([b"{", b"[]", b'{"prompt": "x"}', b"\xff"])
)
splits = st.fixed_dictionaries(
    {"shares": st.just(THREE_WAYS)},
    optional={"stratify_by": st.just("topic"), "unique_by": st.just(["topic"]), "unite_by": st.just("topic")},
)


def write_spec(folder: Path, lines: list[bytes], split: dict[str, Any], **source: Any) -> Path:
    (folder / "rows.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    given = {"kind": "jsonl", "files": ["rows.jsonl"], "max_reject_rate": 1.0, "tags": ["topic"]}
    spec = folder / "mine.yaml"
    spec.write_text(json.dumps({"name": "mine", "source": {**given, **source}, "split": split}))
    return spec


def try_build(spec: Path, builds: str, **options: Any) -> DatasetBuild | None:
    """The build, or None where the rows leave nothing to train on."""
    try:
        return build_dataset(spec, spec.parent / builds, **options)
    except UserError:
        return None


def sides_of(made: DatasetBuild) -> dict[str, Side]:
    return {row.id: side for side in SIDES for row in made.iter_rows(side)}


@settings(deadline=None, max_examples=60)
@given(st.lists(any_line, min_size=1, max_size=40), splits, st.booleans(), st.randoms(use_true_random=False))
def test_any_rows_are_accounted_for_and_their_order_and_pieces_change_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    split: dict[str, Any],
    by_user: bool,
    shuffler: random.Random,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    source = {"group_by": "user"} if by_user else {}
    made = try_build(write_spec(folder, lines, split, **source), "builds")
    shuffled = shuffler.sample(lines, len(lines))
    again = try_build(
        write_spec(folder, shuffled, split, **source), "again", piece_bytes=shuffler.randint(1, 500)
    )
    assert (made is None) == (again is None)
    if made is None or again is None:
        return
    ledger = made.manifest["ledger"]
    assert ledger["read"] == len(lines)
    assert ledger["kept"] == sum(len(made.rows(side)) for side in SIDES)
    assert ledger["read"] == ledger["kept"] + sum(ledger["dropped"].values()) + ledger["quarantined"]
    assert again.manifest["splits"] == made.manifest["splits"]
    assert again.manifest["ledger"] == ledger
    result = check_build(made)
    assert result.passed, result.faults()


@settings(deadline=None, max_examples=40)
@given(st.lists(good_line, min_size=1, max_size=25), st.lists(good_line, max_size=15), st.booleans())
def test_growth_never_moves_a_row(
    tmp_path_factory: pytest.TempPathFactory, first: list[bytes], more: list[bytes], unique: bool
) -> None:
    folder = tmp_path_factory.mktemp("growth")
    split = {"shares": THREE_WAYS} | ({"unique_by": "topic"} if unique else {})
    before = try_build(write_spec(folder, first, split), "builds")
    after = try_build(write_spec(folder, more + first, split), "builds")
    if before is not None and after is not None:
        now = sides_of(after)
        moved = {name for name, side in sides_of(before).items() if now.get(name, side) != side}
        assert not moved


@settings(deadline=None, max_examples=30)
@given(st.lists(good_line, min_size=5, max_size=25), st.lists(good_line, max_size=15), splits)
def test_frozen_quotas_never_move_a_row(
    tmp_path_factory: pytest.TempPathFactory, first: list[bytes], more: list[bytes], split: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("frozen")
    split = {**split, "stratify_by": "topic"}
    before = try_build(write_spec(folder, first, split, group_by="user"), "builds")
    if before is None:
        return
    (folder / "frozen.json").write_bytes((before.folder / "assignment.json").read_bytes())
    grown = write_spec(folder, more + first, {**split, "frozen_from": "frozen.json"}, group_by="user")
    after = try_build(grown, "builds")
    if after is not None:
        now = sides_of(after)
        assert not {name for name, side in sides_of(before).items() if now.get(name, side) != side}
        assert check_build(after).passed


ROWS = [
    json.dumps({"prompt": f"question number {n} {n * 7}", "completion": f"answer {n}"}).encode()
    for n in range(200)
]


class Killed(BaseException):
    """Stands for a process that ends in the middle of its work."""


def failing_at(call: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, until its `call`-th call, which ends the process before anything is done."""
    calls = 0

    def wrapped(*given: Any, **keys: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        return real(*given, **keys)

    return wrapped


HOOKS = [
    *((parts.PartWriter, "_finish", call) for call in (1, 3)),
    (parts.PartWriter, "add", 77),
    (work.WorkFolder, "remembered", 1),
    (work.np, "savez", 1),
    (write, "SideHasher", 2),
    (write.DigestingFile, "close", 3),
    (write.DigestingFile, "close", 6),
    (build_module, "make_build", 1),
    (build_module, "_publish", 1),
    (work.WorkFolder, "remove", 1),
]


@pytest.mark.parametrize(("place", "name", "call"), HOOKS)
def test_a_build_killed_anywhere_continues_to_the_same_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, call: int
) -> None:
    spec = write_spec(tmp_path, ROWS, {"shares": THREE_WAYS})
    whole = build_dataset(spec, tmp_path / "whole", piece_bytes=2000)
    with monkeypatch.context() as patch:
        patch.setattr(place, name, failing_at(call, getattr(place, name)))
        with pytest.raises(Killed):
            build_dataset(spec, tmp_path / "builds", piece_bytes=2000)
    visible = [path for path in (tmp_path / "builds").iterdir() if not path.name.startswith(".")]
    assert all((path / "manifest.json").is_file() for path in visible), "never half a build"
    left = list((tmp_path / "builds" / ".mine.work" / "parts").glob("[!.]*"))
    read_again: list[str] = []
    real = read.read_piece
    monkeypatch.setattr(read, "read_piece", lambda task: read_again.append(task.piece.key) or real(task))
    resumed = build_dataset(spec, tmp_path / "builds", piece_bytes=2000)
    assert not {path.name for path in left} & set(read_again), "finished parts are not read again"
    assert resumed.manifest == whole.manifest
    if name != "remove":  # what is left of finished work goes with the next build of the name
        remaining = {path.name for path in (tmp_path / "builds").iterdir()}
        assert remaining == {".mine.lock", resumed.folder.name}


def test_a_process_that_is_killed_continues_with_the_parts_it_had(tmp_path: Path) -> None:
    """SIGKILL in the fourth piece: three parts stay, none of them is read again."""
    spec = write_spec(tmp_path, ROWS, {"shares": THREE_WAYS})
    code = (
        "import os, pathlib, signal\n"
        "from finetune.data.build import build_dataset\n"
        "from finetune.data.stages import read\n"
        "real, done = read.read_piece, []\n"
        "def dying(task):\n"
        "    if len(done) == 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    done.append(task)\n"
        "    return real(task)\n"
        "read.read_piece = dying\n"
        f"build_dataset(pathlib.Path({str(spec)!r}), pathlib.Path({str(tmp_path / 'builds')!r}), piece_bytes=2000)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGKILL
    left = {path: path.stat().st_mtime_ns for path in (tmp_path / "builds/.mine.work/parts").glob("[!.]*/*")}
    assert len({path.parent for path in left}) == 3
    seen: dict[Path, int] = {}

    def look(share: float) -> None:
        seen.update({path: path.stat().st_mtime_ns for path in left if path.exists()})

    resumed = build_dataset(spec, tmp_path / "builds", piece_bytes=2000, on_progress=look)
    assert seen == left
    whole = build_dataset(spec, tmp_path / "whole")
    assert resumed.manifest == whole.manifest


def test_worker_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(tmp_path, [*ROWS, b"{"], {"shares": THREE_WAYS})
    here = build_dataset(spec, tmp_path / "here", piece_bytes=4000)
    monkeypatch.setattr(runner, "_SMALL_BYTES", 0)
    there = build_dataset(spec, tmp_path / "there", piece_bytes=4000, runner=runner.LocalRunner(2))
    assert there.manifest == here.manifest
    assert there.by_side == here.by_side


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, ROWS, {"shares": THREE_WAYS})
    code = (
        "import pathlib, sys, time\n"
        "from finetune.data.build import build_dataset\n"
        "from finetune.data.stages import runner\n"
        "if __name__ == '__main__':\n"
        "    runner._SMALL_BYTES = 0\n"
        "    def wait(share):\n"
        "        print('reading', flush=True)\n"
        "        time.sleep(600)\n"
        "    build_dataset(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), piece_bytes=500,\n"
        "                  runner=runner.LocalRunner(2), on_progress=wait)\n"
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    process = subprocess.Popen(
        [sys.executable, program, spec, tmp_path / "builds"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    process.kill()
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def test_a_change_of_the_split_reads_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(tmp_path, ROWS, {"shares": THREE_WAYS})
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "_publish", failing_at(1, build_module._publish))
        with pytest.raises(Killed):
            build_dataset(spec, tmp_path / "builds")
    monkeypatch.setattr(read, "read_piece", lambda task: pytest.fail("read again"))
    again = build_dataset(
        write_spec(tmp_path, ROWS, {"shares": THREE_WAYS, "salt": "2"}), tmp_path / "builds"
    )
    assert again.manifest["ledger"]["read"] == len(ROWS)


def test_progress_reaches_the_end_and_never_goes_back(tmp_path: Path) -> None:
    told: list[float] = []
    spec = write_spec(tmp_path, ROWS, {"shares": THREE_WAYS})
    build_dataset(spec, tmp_path / "builds", piece_bytes=1000, on_progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(set(told)) > 5


def test_a_file_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_spec(tmp_path, ROWS, {"shares": THREE_WAYS})
    real = read.iter_rows

    def disturbed(*given: Any, **keys: Any) -> Any:
        (tmp_path / "rows.jsonl").write_bytes(b"\n".join(ROWS[:100]))
        return real(*given, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(read, "iter_rows", disturbed)
        with pytest.raises(UserError, match="was changed while it was read"):
            build_dataset(spec, tmp_path / "builds")
    assert build_dataset(spec, tmp_path / "builds").manifest["ledger"]["read"] == 100


def test_two_processes_build_one_after_the_other(tmp_path: Path) -> None:
    """The second waits for the first and finds its build."""
    spec = write_spec(tmp_path, ROWS, {"shares": THREE_WAYS})
    found: list[DatasetBuild] = []
    with work.locked_work(tmp_path / "builds", "mine"):
        waiting = threading.Thread(
            target=lambda: found.append(build_dataset(spec, tmp_path / "builds")), daemon=True
        )
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and not found
    waiting.join(60)
    assert found[0].manifest["ledger"]["read"] == len(ROWS)


def test_a_ledger_that_does_not_add_up_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_spec(tmp_path, ROWS, {"shares": THREE_WAYS})
    monkeypatch.setattr(write, "_dropped_lines", lambda *given: iter([b"{}\n"]))
    with pytest.raises(AssertionError, match="row ledger: read 200 != kept 200"):
        build_dataset(spec, tmp_path / "builds")
    assert not list((tmp_path / "builds").glob("[!.]*"))


def test_many_small_files_are_read_in_few_pieces(tmp_path: Path) -> None:
    for number, line in enumerate(ROWS[:40]):
        (tmp_path / f"part {number:02d}.jsonl").write_bytes(line + b"\n")
    spec = write_spec(tmp_path, [], {"shares": {"train": 1.0}}, files=["part *.jsonl"])
    seen: list[Any] = []
    made = build_dataset(spec, tmp_path / "builds", runner=_Counting(seen))
    assert (len(seen), len(made.rows("train"))) == (1, 40)
    again = build_dataset(spec, tmp_path / "again", runner=_Counting(seen), piece_bytes=1000)
    assert 1 < len(seen) - 1 < 10
    assert again.manifest == made.manifest


class _Counting(runner.LocalRunner):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__(1)
        self._seen = seen

    def map(self, work: Any, tasks: Any, sizes: Any) -> Any:
        self._seen += tasks
        return super().map(work, tasks, sizes)
