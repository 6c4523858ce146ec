"""Real trackers, offline, in a temporary folder: what they hold after a training is what events.jsonl says.

Each is skipped where its package is not installed: `pip install 'finetune-pipeline[tensorboard,mlflow,trackio,wandb]'`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from finetune.telemetry.events import read_events

_NAMES = ("loss", "update_ratio", "grad_norm_clipped", "learning_rate")


@pytest.fixture
def tracked(
    train: Any, make_recipe: Any, make_rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """tracked(tracker): a short training that reports to it, from an empty folder; returns its events."""

    def run(tracker: str) -> list[dict[str, Any]]:
        monkeypatch.chdir(tmp_path)
        recipe = make_recipe(train__epochs=1, train__pack_tokens=128, train__report_to=[tracker])
        _, folder, _ = train(recipe, name="tracked", validation=make_rows(3))
        return list(read_events(folder / "events.jsonl"))

    return run


def compare(events: list[dict[str, Any]], held: Mapping[str, Mapping[int, float]], *, eval_loss: str) -> None:
    """`held`: name -> step -> value, by the names of the events; validation under `eval_loss`."""
    steps = {event["step"]: event for event in events if event["event"] == "step"}
    assert len(steps) >= 2
    for name in _NAMES:
        assert held[name] == pytest.approx({step: event[name] for step, event in steps.items()}, rel=1e-5)
    (validation,) = [event for event in events if event["event"] == "validation"]
    assert held[eval_loss][validation["step"]] == pytest.approx(validation["loss"], rel=1e-5)


def test_tensorboard_holds_what_the_events_say(
    tracked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    events = tracked("tensorboard")
    board = reader.EventAccumulator(str(tmp_path / "board")).Reload()
    held = {
        name.removeprefix("train/"): {one.step: one.value for one in board.Scalars(name)}
        for name in board.Tags()["scalars"]
    }
    compare(events, held, eval_loss="eval/loss")


def test_mlflow_holds_what_the_events_say(
    tracked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    events = tracked("mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    held = {
        name: {one.step: one.value for one in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }
    compare(events, held, eval_loss="eval_loss")


def test_trackio_holds_what_the_events_say(
    tracked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):  # TRACKIO_DIR is read once, when it is imported
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    events = tracked("trackio")
    assert capsys.readouterr().out == ""  # standard output belongs to answers
    (project,) = sqlite_storage.SQLiteStorage.get_projects()
    (run,) = sqlite_storage.SQLiteStorage.get_runs(project)
    held: dict[str, dict[int, float]] = {}
    for entry in sqlite_storage.SQLiteStorage.get_logs(project, run):
        for name, value in entry.items():
            held.setdefault(name.removeprefix("train/"), {})[entry["train/global_step"]] = value
    compare(events, held, eval_loss="eval/loss")


def wandb_records(held: bytes) -> Iterator[bytes]:
    """Of an offline file: a header of 7 bytes, then LevelDB's log format, blocks of 32 KiB with records in fragments."""
    place, parts = 7, b""
    while place + 7 <= len(held):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", held, place)
        parts += held[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last fragment
            yield parts
            parts = b""


def test_wandb_holds_what_the_events_say(
    tracked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    events = tracked("wandb")
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    held: dict[str, dict[int, float]] = {}
    for data in wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        entry = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
        }
        for name, value in entry.items():
            held.setdefault(name.removeprefix("train/"), {})[entry["train/global_step"]] = value
    compare(events, held, eval_loss="eval/loss")
