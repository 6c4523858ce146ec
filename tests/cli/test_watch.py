"""`finetune watch`: a run is found, shown, followed to its end by another process, and told as JSON."""

from __future__ import annotations

import fcntl
import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from finetune.cli.watch import _Screen, find_run, watch
from finetune.errors import UserError
from finetune.pipeline.manifest import LOCK_NAME, is_worked_on
from finetune.telemetry.events import EventLog
from finetune.telemetry.follow import follow_events
from finetune.telemetry.terminal import RunView

app = typer.Typer()
app.command()(watch)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder of recipe `tiny` with two steps and an answer."""
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
    folder = tmp_path / "tiny-01234567"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    log = EventLog(folder / "events.jsonl")
    log.write("start", step=0, total_steps=4)
    for step in (1, 2):
        log.write("step", step=step, loss=2.0 / step, grad_norm=1.0, epoch=0.5)
    log.write("sample", step=2, index=0, name="row-0", output="an answer")
    return folder


def test_a_run_is_found_by_path_by_name_and_by_recipe(run: Path) -> None:
    assert (
        find_run(str(run))
        == find_run("tiny-01234567")
        == find_run("tiny")
        == find_run("sft/tiny.yaml")
        == run
    )
    with pytest.raises(UserError, match="no run folder"):
        find_run("other")


def test_a_recipe_whose_file_has_another_name_than_its_runs_is_found(run: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "another.yaml"
    recipe.write_text(
        "name: tiny\nmodel: {id: tiny}\ndata: {spec: tiny}\neval: {suites: [tiny]}\n", encoding="utf-8"
    )
    assert find_run(str(recipe)) == run


def test_how_it_stands(run: Path) -> None:
    text = call("tiny", "--once").stdout
    assert text.startswith("step 2/4, epoch 0.50")
    assert "row-0: an answer" in text
    found = json.loads(call("tiny", "--once", "--json").stdout)
    assert (found["step"]["loss"], found["total_steps"], found["is_running"]) == (1.0, 4, False)
    assert found["samples"][0]["output"] == "an answer"


def test_a_finished_run_is_shown_and_left(run: Path) -> None:
    result = call("tiny")
    assert "step 2/4" in result.stdout
    assert "no process works in" in result.stderr
    events = [json.loads(line) for line in call("tiny", "--json").stdout.splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "step", "sample"]


def test_a_lock_tells_whether_somebody_works_there(run: Path) -> None:
    assert not is_worked_on(run)
    with (run / LOCK_NAME).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert is_worked_on(run)
    assert not is_worked_on(run)


def test_a_run_of_another_process_is_followed_to_its_end(run: Path) -> None:
    writer = textwrap.dedent(
        """
        import fcntl, sys, time
        from pathlib import Path
        from finetune.telemetry.events import EventLog
        folder = Path(sys.argv[1])
        lock = (folder / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("locked", flush=True)
        time.sleep(0.3)
        log = EventLog(folder / "events.jsonl")
        for step in (3, 4):
            log.write("step", step=step, loss=0.5)
            time.sleep(0.2)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", writer, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        lines = [json.loads(line) for line in call("tiny", "--json").stdout.splitlines()]
    finally:
        process.wait(timeout=60)
    assert [event["step"] for event in lines if event["event"] == "step"] == [1, 2, 3, 4]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def drawn(events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """What a terminal is sent when the events come one by one."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    view = RunView()
    screen = _Screen(view, as_json=False)
    for event in events:
        view.add(event)
        screen.show([event])
    screen.end()
    return terminal.getvalue()


STEPS: list[dict[str, Any]] = [
    {"event": "step", "step": step, "loss": 2.0, "grad_norm": 1.0, "epoch": 0.5} for step in (1, 2, 3)
]


def test_a_terminal_is_drawn_over_and_a_dumb_one_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = drawn(STEPS, monkeypatch, TERM="xterm", COLUMNS="60", LINES="24", NO_COLOR="1")
    assert sent.count("\x1b[3A\x1b[J") == 2
    assert sent.count("\x1b") == 4  # nothing but the cursor: no colour, with NO_COLOR or without
    dumb = drawn(STEPS, monkeypatch, TERM="dumb", COLUMNS="60", LINES="24")
    assert "\x1b" not in dumb and "step 3" in dumb


def test_a_small_window_is_drawn_within_its_lines_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor cannot go back above the first line of a window, and a broken line takes two."""
    answers = [
        {"event": "sample", "step": 3, "index": n, "name": f"row-{n}", "output": "\u6c34" * 50}
        for n in range(9)
    ]
    sent = drawn([*STEPS, *answers], monkeypatch, TERM="xterm", COLUMNS="30", LINES="8")
    last = sent.rpartition("\x1b[J")[2].splitlines()
    assert len(last) == 7 and "lines more" in last[-1]
    from rich.cells import cell_len

    assert all(cell_len(line) <= 30 for line in last)
    for width in ("1", "2", "5"):
        drawn([*STEPS, *answers], monkeypatch, TERM="xterm", COLUMNS=width, LINES="3")


def test_letters_that_a_stream_does_not_have_are_escaped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EventLog(run / "events.jsonl").write("sample", step=2, index=1, name="row-1", output="caf\u00e9 \u6c34")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    watch(str(run))
    stream.seek(0)
    assert "caf\\xe9 \\u6c34" in stream.read()


def test_a_run_that_was_killed_says_where_it_ended(run: Path) -> None:
    EventLog(run / "events.jsonl").write("stage", name="train", status="running")
    assert "ended inside the stage train" in call("tiny").stderr
    EventLog(run / "events.jsonl").write("stage", name="report", status="complete", seconds=1.0)
    assert "ended inside" not in call("tiny").stderr


ODD: list[Any] = [
    None,
    "x",
    "",
    -1,
    1.5,
    True,
    [],
    {},
    [[1]],
    {"a": 1},
    {"a": {"loss": "x"}},
    10**400,
    "2026-01-01",
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:20])
def test_any_field_of_any_event_may_be_damaged(odd: Any, run: Path) -> None:
    """As far as it can be read, the run is shown."""
    whole: list[dict[str, Any]] = [
        {
            "event": "start",
            "time": "2026-01-01T00:00:00.000+00:00",
            "step": 0,
            "total_steps": 4,
            "max_grad_norm": 1.0,
        },
        {
            "event": "step",
            "time": "2026-01-01T00:00:01.000+00:00",
            "step": 1,
            "epoch": 0.1,
            "loss": 1.0,
            "mfu": 0.1,
        },
        {
            "event": "step",
            "time": "2026-01-01T00:00:02.000",
            "step": 2,
            "epoch": 0.1,
            "loss": 1.0,
            "memory_bytes": 1,
        },
        {"event": "validation", "step": 2, "loss": 1.0, "sources": {"a": {"loss": 1.0, "target_tokens": 1}}},
        {"event": "sample", "step": 2, "name": "a", "output": "b", "kl_to_base": 0.1},
        {"event": "finding", "step": 2, "title": "a", "why": "b"},
        {
            "event": "rewind",
            "step": 2,
            "from_step": 3,
            "rows": ["a"],
            "rate_factor": 0.5,
            "reason": "diverged",
        },
        {"event": "stop", "step": 2, "reason": "diverged"},
        {"event": "resume", "step": 2},
        {"event": "stage", "name": "train", "status": "running", "seconds": 1.0},
    ]
    for chosen in whole:
        for name in chosen:
            events = [{**event, name: odd} if event is chosen else event for event in whole]
            lines = [json.dumps(event) for event in events]
            (run / "events.jsonl").write_text("\n".join([*lines, ""]))
            view = RunView()
            for batch in follow_events(run, is_alive=lambda _: False):
                for event in batch:
                    view.add(event)
            assert view.lines(60) and json.dumps(view.summary(), allow_nan=False)


def test_lines_that_are_no_events_are_passed_over(run: Path) -> None:
    with (run / "events.jsonl").open("a") as stream:
        stream.write(
            "\n".join(["{torn", "[" * 100_000, '{"event": NaN}', '{"event": ["step"]}', "7", "\0", ""])
        )
    assert call("tiny", "--once").stdout.startswith("step 2/4")


def test_what_is_no_json_does_not_come_out_as_json(run: Path) -> None:
    with (run / "events.jsonl").open("a") as stream:
        stream.write('{"event": "step", "step": 3, "loss": NaN}\n')
    (line,) = [line for line in call("tiny", "--json").stdout.splitlines() if '"step": 3' in line]
    assert json.loads(line)["loss"] == "NaN"


def test_events_that_cannot_be_read_are_an_error_and_no_traceback(run: Path) -> None:
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").mkdir()
    with pytest.raises(UserError, match=r"events.jsonl cannot be read"):
        call("tiny", "--once")
