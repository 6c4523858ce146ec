"""The same spec on a Ray cluster of this machine: the same digests, and faults of the user as on one machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import build_dataset
from finetune.data.stages.ray_runner import RayRunner
from finetune.errors import UserError

SHARES = {"shares": {"train": 0.6, "validation": 0.2, "test": 0.2}}


def write_spec(folder: Path, **source: Any) -> Path:
    rows = [{"prompt": f"question number {n} {n * 7}", "completion": f"answer {n}"} for n in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    spec = folder / "mine.yaml"
    given = {"kind": "jsonl", "files": ["rows.jsonl"], **source}
    spec.write_text(json.dumps({"name": "mine", "source": given, "split": SHARES}))
    return spec


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayRunner]:
    pytest.importorskip("ray", reason="Ray is not installed (extra [cluster])")
    with RayRunner("local") as runner:
        yield runner


def test_a_cluster_builds_the_same_rows(tmp_path: Path, cluster: RayRunner) -> None:
    spec = write_spec(tmp_path)
    here = build_dataset(spec, tmp_path / "here")
    there = build_dataset(spec, tmp_path / "there", runner=cluster, piece_bytes=2000)
    assert there.manifest == here.manifest
    assert there.by_side == here.by_side


def test_what_a_user_can_mend_comes_back_as_it_is(tmp_path: Path, cluster: RayRunner) -> None:
    (tmp_path / "judge.py").write_text("def broken(row):\n    raise ValueError('no such key')\n")
    spec = write_spec(tmp_path)
    given = json.loads(spec.read_text())
    given["curate"] = {"verifiers": [{"name": "odd", "function": "judge.py:broken"}]}
    spec.write_text(json.dumps(given))
    with pytest.raises(UserError, match="the verifier 'odd' failed"):
        build_dataset(spec, tmp_path / "builds", runner=cluster, piece_bytes=2000)


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="Ray is not installed"), RayRunner("local"):
        pass
