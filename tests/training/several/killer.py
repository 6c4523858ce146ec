"""Trainings that are killed with SIGKILL and run again, each in a fork of this process, so that nothing is imported twice.

    python killer.py FOLDER N_INSIDE N_WRITES N_MOMENTS SEED

Kills N_INSIDE trainings at a random one of the writes (open, rename, remove, make folder) of a checkpoint that is being
written, N_WRITES at any write below their run folder, and N_MOMENTS at a random moment; runs each again, to its end;
prints a JSON line for each.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.digest import digest_folder
from finetune.telemetry.events import read_events

_WRITES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def load_worker() -> Any:
    spec = importlib.util.spec_from_file_location("several_worker", Path(__file__).with_name("worker.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_fork(work: Callable[[], None], *, kill_after_seconds: float | None = None) -> tuple[int, float]:
    """Run `work` in a child; its exit code (-9: killed) and the seconds it took."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    if kill_after_seconds is not None:
        time.sleep(kill_after_seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), time.monotonic() - started


def count_writes(folder: Path, at_write: Callable[[int, str], None]) -> None:
    """From now on call `at_write(number, what)` before every write below `folder`."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        opens = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if not (opens or event in _WRITES) or not str(arguments[0]).startswith(f"{folder}/"):
            return
        count += 1
        at_write(count, f"{event} {Path(str(arguments[0])).relative_to(folder)}")

    sys.addaudithook(hook)


def main(folder: Path, n_inside: int, n_writes: int, n_moments: int, seed: int) -> None:
    worker = load_worker()
    gc.collect()
    gc.freeze()  # else every fork's collector copies the pages of all that is imported
    recipe = worker.recipe_of(
        adapter={"dropout": 0.1},
        checkpoint_every_steps=1,
        keep_checkpoints=2,
        validate_every_steps=2,
        result="best",
    )
    draw = random.Random(seed)

    def train(where: Path, at_write: Callable[[int, str], None] = lambda number, what: None) -> None:
        with Path(f"{where}.log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        count_writes(where, at_write)
        said: list[str] = []
        worker.train(where, recipe, said=said)
        Path(f"{where}.said").write_text("\n".join(said))

    whole = folder / "whole"
    writes = folder / "writes"

    def note(number: int, what: str) -> None:
        with writes.open("a") as log:
            log.write(f"{what}\n")

    code, seconds = in_fork(lambda: train(whole, note))
    assert code == 0, (folder / "whole.log").read_text()
    every = writes.read_text().splitlines()
    inside = [number for number, what in enumerate(every, start=1) if "checkpoints/.step-" in what]
    print(json.dumps({"whole": story(whole), "writes": len(every)}), flush=True)
    moments: list[tuple[int | None, float | None]] = [
        (number, None) for number in draw.sample(inside, n_inside)
    ]
    moments += [(draw.randint(1, len(every)), None) for _ in range(n_writes)]
    moments += [(None, draw.uniform(0.0, seconds)) for _ in range(n_moments)]
    for number, (write, moment) in enumerate(moments):
        killed = folder / f"killed-{number}"
        killed_at: Path = folder / f"killed-{number}.at"

        def die(count: int, what: str, write: int | None = write, place: Path = killed_at) -> None:
            if count == write:
                place.write_text(what)
                os.kill(os.getpid(), signal.SIGKILL)

        work = lambda killed=killed, die=die: train(killed, die)  # noqa: E731
        code, _ = in_fork(work, kill_after_seconds=moment)
        again, _ = in_fork(lambda killed=killed: train(killed))
        what = killed_at.read_text() if killed_at.exists() else f"after {moment} s"
        said = Path(f"{killed}.said").read_text() if again == 0 else Path(f"{killed}.log").read_text()[-2000:]
        print(json.dumps({"at": what, "codes": [code, again], "said": said, **story(killed)}), flush=True)
        shutil.rmtree(killed, ignore_errors=True)


def story(folder: Path) -> dict[str, Any]:
    """What a training left: the adapter's files by digest, its steps, and its checkpoints."""
    steps = [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]
    return {
        "adapter": digest_folder(folder / "adapter") if (folder / "adapter").is_dir() else {},
        "steps": [[step["step"], step["loss"], step["rows"], step["tokens"]] for step in steps],
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:6]))
