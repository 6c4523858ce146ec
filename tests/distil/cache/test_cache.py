"""A teacher cache: written shard by shard, killed and gone on from, refused when it is of something else or damaged."""

from __future__ import annotations

import copy
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.tokenise import IGNORED, TokenisedRow
from finetune.distil.cache.coding import Coding
from finetune.distil.cache.layout import CacheIdentity, cache_key, read_manifest, rows_digest, shard_size
from finetune.distil.cache.read import CachedTeaching, TeacherCache
from finetune.distil.cache.write import ModelSaying, cache_teacher, coding_of, padded, shard_rows
from finetune.distil.losses import divergence, target_places
from finetune.errors import UserError

VOCABULARY = 259
CODING = coding_of(k=16, vocabulary=VOCABULARY, temperatures=[1.0, 2.0])


def make_rows(n: int = 9) -> list[TokenisedRow]:
    """Rows of uneven length with 1 to 5 targets, two of them in two runs."""
    rows = []
    for index in range(n):
        ids = [(17 * index + 5 * place) % 250 + 3 for place in range(6 + index % 4)]
        labels = [IGNORED] * len(ids)
        for place in range(len(ids) - 1 - index % 5, len(ids)):
            labels[place] = ids[place]
        if index % 4 == 3:
            labels[2] = ids[2]
        n_targets = sum(label != IGNORED for label in labels)
        rows.append(TokenisedRow(f"row-{index}", ids, labels, n_targets))
    return rows


def identity_of(rows: Sequence[TokenisedRow], teacher: str = "a" * 64) -> CacheIdentity:
    return CacheIdentity(teacher, "b" * 64, rows_digest(rows), "tiny")


class Counting(ModelSaying):
    """Counts the shards it is asked for, and stops at one of them."""

    def __init__(self, model: Any, stops_at: int | None = None) -> None:
        super().__init__(model, tokens_per_batch=24)
        self.asked, self.stops_at = 0, stops_at

    def top_k(self, rows: Any, coding: Any, sample_every: int) -> Any:
        if self.asked == self.stops_at:
            raise KeyboardInterrupt
        self.asked += 1
        return super().top_k(rows, coding, sample_every)


@pytest.fixture
def fill(tiny_model: Any, tmp_path: Path) -> Callable[..., Any]:
    """fill(folder='cache', stops_at=None, …): a cache of `make_rows()` by the tiny model; returns (manifest, shards asked)."""

    def work(folder: str = "cache", *, stops_at: int | None = None, **options: Any) -> tuple[Any, int]:
        rows = options.pop("rows", make_rows())
        saying = Counting(tiny_model, stops_at)
        settings = {"identity": identity_of(rows), "coding": CODING, "shard_targets": 6} | options
        try:
            return cache_teacher(saying, rows, tmp_path / folder, **settings), saying.asked
        except KeyboardInterrupt:
            return None, saying.asked

    return work


def full_logits(model: Any, rows: Sequence[TokenisedRow]) -> torch.Tensor:
    """Logits at every target of rows, one row at a time, without padding: [n, V]."""
    found = []
    for row in rows:
        inputs = padded([row])
        places, _ = target_places(inputs["labels"])
        with torch.no_grad():
            found.append(model(input_ids=inputs["input_ids"]).logits[places])
    return torch.cat(found)


def test_targets_of_rows_are_those_of_the_teacher(fill: Any, tiny_model: Any, tmp_path: Path) -> None:
    rows = make_rows()
    manifest, _ = fill()
    cache = TeacherCache.open(tmp_path / "cache", rows, identity_of(rows))
    assert manifest.complete and len(manifest.shards) > 2
    for order in ([0], [4, 1, 8, 3], [7, 7]):
        wanted = full_logits(tiny_model, [rows[index] for index in order]).double()
        for temperature in (1.0, 2.0):
            found = cache.targets(order, temperature)
            assert found.ids is not None and found.logits is not None and found.logsumexp is not None
            ids = wanted.topk(16, dim=1)[1]
            assert torch.equal(found.ids.sort(dim=1)[0], ids.sort(dim=1)[0])
            log_p = found.logits.double() / temperature - found.logsumexp.double()[:, None]
            exact = torch.log_softmax(wanted / temperature, dim=1).gather(1, found.ids)
            assert torch.allclose(log_p, exact, atol=2e-3)
            student = wanted.float() * 1.1
            close = divergence("forward_kl", wanted.float(), found, temperature=temperature)
            apart = divergence("forward_kl", student, found, temperature=temperature)
            assert float(close.max()) < 1e-5 < float(apart.min())


def test_a_trainer_finds_what_was_kept_of_its_batch(fill: Any, tmp_path: Path) -> None:
    rows = make_rows()
    fill()
    cache = TeacherCache.open(tmp_path / "cache", rows, identity_of(rows))
    batch = {**padded([rows[5], rows[2]]), "rows": [5, 2]}
    found = CachedTeaching(cache, 2.0).targets(batch)
    assert len(found) == int(target_places(batch["labels"])[0].sum()) == rows[5].n_targets + rows[2].n_targets
    alone = cache.targets([2], 2.0)
    assert found.ids is not None and alone.ids is not None
    assert torch.equal(found.ids[rows[5].n_targets :], alone.ids)


def test_bytes_are_those_of_the_formula(fill: Any, tmp_path: Path) -> None:
    manifest, _ = fill()
    tensor_bytes = 0
    for shard in manifest.shards:
        path = tmp_path / "cache" / shard.file
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        tensor_bytes += path.stat().st_size - header
    assert tensor_bytes == manifest.targets * CODING.bytes_per_target
    assert CODING.bytes_per_target == 16 * 2 + 15 * 2 + 2 * 4
    assert manifest.bytes_on_disk == sum(
        (tmp_path / "cache" / one.file).stat().st_size for one in manifest.shards
    )


def test_coverage_and_reconstruction_are_told(fill: Any, tiny_model: Any) -> None:
    manifest, _ = fill()
    logits = full_logits(tiny_model, make_rows()).double()
    for temperature in (1.0, 2.0):
        mass = torch.softmax(logits / temperature, dim=1).topk(16, dim=1)[0].sum(dim=1)
        told = manifest.measured["coverage"][str(temperature)]
        assert told["mean"] == pytest.approx(float(mass.mean()), abs=1e-4)
        assert told["least"] == pytest.approx(float(mass.min()), abs=1e-4)
        assert told["share_below_0.9"] == 1.0  # a random model spreads its mass
        error = manifest.measured["reconstruction"][str(temperature)]
        assert error["sampled_targets"] == manifest.targets  # few enough to measure all
        assert 0.0 <= error["rounding_kl"]["mean"] < 1e-6
        spread = torch.log_softmax(logits / temperature, dim=1)
        assert error["uniform_tail_kl"]["mean"] == pytest.approx(float(_spread_kl(spread).mean()), rel=1e-2)


def _spread_kl(log_p: torch.Tensor) -> torch.Tensor:
    """KL of distributions [n, V] to themselves with all but the 16 most likely made equal."""
    kept, ids = log_p.topk(16, dim=1)
    others = (1.0 - kept.exp().sum(dim=1)).log() - torch.log(torch.tensor(log_p.shape[1] - 16.0))
    flat = others[:, None].expand_as(log_p).scatter(1, ids, kept)
    return (log_p.exp() * (log_p - flat)).sum(dim=1)


def test_an_interrupted_cache_goes_on_to_the_same_bytes(fill: Any, tmp_path: Path) -> None:
    whole, n_shards = fill("whole")
    assert fill("broken", stops_at=2) == (None, 2)
    rows = make_rows()
    with pytest.raises(UserError, match=r"holds \d+ of \d+ targets"):
        TeacherCache.open(tmp_path / "broken", rows, identity_of(rows))
    done, asked = fill("broken")
    assert asked == n_shards - 2 and done == whole
    for shard in whole.shards:
        assert (tmp_path / "whole" / shard.file).read_bytes() == (
            tmp_path / "broken" / shard.file
        ).read_bytes()
    assert fill("broken")[1] == 0  # nothing is asked again


_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_cache, conftest
class Killed(test_cache.Counting):
    def top_k(self, *arguments):
        if self.asked == 2:
            Path(sys.argv[1], ".shard-00002.safetensors.half").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().top_k(*arguments)
rows = test_cache.make_rows()
test_cache.cache_teacher(Killed(conftest.build_tiny_model()), rows, Path(sys.argv[1]),
    identity=test_cache.identity_of(rows), coding=test_cache.CODING, shard_targets=6)
"""


def test_a_killed_process_loses_one_shard(fill: Any, tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = _KILLED.replace("sys.argv[2])", f"sys.argv[2]); sys.path.insert(0, {str(here.parents[1])!r})")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache"), str(here)],
        capture_output=True,
        env=os.environ,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    whole, n_shards = fill("whole")
    resumed, asked = fill()
    assert asked == n_shards - 2
    assert [shard.sha256 for shard in resumed.shards] == [shard.sha256 for shard in whole.shards]


def test_a_teacher_that_says_nan_is_refused_by_row_and_finished_shards_stay(
    fill: Any, tiny_model: Any, tmp_path: Path
) -> None:
    class Breaking(ModelSaying):
        def top_k(self, rows: Any, coding: Any, sample_every: int) -> Any:
            top, sums = super().top_k(rows, coding, sample_every)
            if any(row.row_id == "row-5" for row in rows):
                spans = [row.n_targets for row in rows]
                top.gaps[sum(spans[: [row.row_id for row in rows].index("row-5")]), 3] = torch.nan
            return top, sums

    rows = make_rows()
    with pytest.raises(UserError, match="the teacher's logits are not finite") as told:
        cache_teacher(
            Breaking(tiny_model),
            rows,
            tmp_path / "cache",
            identity=identity_of(rows),
            coding=CODING,
            shard_targets=6,
        )
    assert (
        told.value.faults[0].where == "row row-5" and "distil.teacher.dtype: fp32" in told.value.faults[0].fix
    )
    kept = len(read_manifest(tmp_path / "cache").shards)
    assert kept > 0
    manifest, asked = fill()
    assert manifest.complete and asked == len(manifest.shards) - kept

    broken = copy.deepcopy(tiny_model)
    broken.model.norm.weight.data[3] = torch.nan
    with pytest.raises(UserError, match="the teacher's logits are not finite"):
        cache_teacher(
            ModelSaying(broken), rows, tmp_path / "other", identity=identity_of(rows), coding=CODING
        )


def test_what_a_process_left_that_was_killed_while_it_wrote_goes_away(fill: Any, tmp_path: Path) -> None:
    fill(stops_at=2)
    left = [tmp_path / "cache" / name for name in (".shard-00002.safetensors.a1b2", ".manifest.json.c3d4")]
    for path in left:
        path.write_bytes(b"half")
    assert fill()[0].complete
    assert not any(path.exists() for path in left)


def test_a_cache_that_may_not_be_written_to_is_read_when_it_is_whole(
    fill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill("begun", stops_at=2)
    whole, _ = fill()
    opened = Path.open

    def read_only(self: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        if "w" in mode:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(self, mode, *more, **options)

    monkeypatch.setattr(Path, "open", read_only)
    again, asked = fill()
    assert again == whole and asked == 0
    with pytest.raises(UserError, match=r"cannot write .*: Read-only file system"):
        fill("begun")


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_shard_is_refused_and_made_again(damage: str, fill: Any, tmp_path: Path) -> None:
    rows = make_rows()
    manifest, _ = fill()
    path = tmp_path / "cache" / manifest.shards[1].file
    raw = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(raw[:-7])
    elif damage == "changed":
        path.write_bytes(raw[:-7] + bytes([raw[-7] ^ 1]) + raw[-6:])
    else:
        path.unlink()
    with pytest.raises(UserError, match=f"{path.name} (has|is)") as told:
        TeacherCache.open(tmp_path / "cache", rows, identity_of(rows))
    assert "finetune distil cache" in told.value.faults[0].fix
    said: list[str] = []
    again, asked = fill(say=said.append)
    assert asked == 1 and again == manifest and path.read_bytes() == raw
    assert len(said) == 1 and "it is made again" in said[0]


@pytest.mark.parametrize("what", ["teacher", "tokenizer", "data"])
def test_a_cache_of_something_else_is_refused_with_its_digest(what: str, fill: Any, tmp_path: Path) -> None:
    rows = make_rows()
    fill()
    before = (tmp_path / "cache" / "manifest.json").read_bytes()
    other = replace(identity_of(rows), **{what: "f" * 64})
    for attempt in (
        lambda: TeacherCache.open(tmp_path / "cache", rows, other),
        lambda: fill(identity=other),
    ):
        with pytest.raises(UserError, match=f"of another {what}") as told:
            attempt()
        assert "ffffffffffff" in told.value.faults[0].why
        assert getattr(identity_of(rows), what)[:12] in told.value.faults[0].why
    assert (tmp_path / "cache" / "manifest.json").read_bytes() == before


def test_a_cache_that_was_begun_with_other_shards_becomes_whole(fill: Any, tmp_path: Path) -> None:
    rows = make_rows()
    fill(stops_at=3)
    manifest, _ = fill(shard_targets=11)
    assert manifest.complete and sum(shard.targets for shard in manifest.shards) == manifest.targets
    fill("whole")
    found, wanted = (
        TeacherCache.open(tmp_path / name, rows, identity_of(rows)).targets(range(len(rows)), 1.0)
        for name in ("cache", "whole")
    )
    assert found.ids is not None and wanted.ids is not None and torch.equal(found.ids, wanted.ids)


def test_a_whole_cache_of_other_shards_is_not_made_again(fill: Any) -> None:
    manifest, _ = fill()
    again, asked = fill(shard_targets=11)
    assert asked == 0 and again.shards == manifest.shards


def test_the_size_of_shards_follows_that_of_the_cache() -> None:
    sizes = [shard_size(n) for n in (0, 10_000, 100_000, 10**9)]
    assert sizes == [1024, 1024, 6250, 32_768]


def test_other_settings_are_refused(fill: Any) -> None:
    fill()
    with pytest.raises(UserError, match="keeps other things") as told:
        fill(coding=coding_of(k=8, vocabulary=VOCABULARY, temperatures=[1.0, 2.0]))
    assert "it has k 16" in told.value.faults[0].why and "wanted is k 8" in told.value.faults[0].why


def test_a_temperature_that_was_not_planned_is_refused(fill: Any, tmp_path: Path) -> None:
    rows = make_rows()
    fill()
    cache = TeacherCache.open(tmp_path / "cache", rows, identity_of(rows))
    with pytest.raises(UserError, match="no normaliser for temperature 3, only for 1, 2"):
        cache.targets([0], 3.0)


def test_too_little_coverage_stops_after_the_first_shard(fill: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the top 16 hold \d+\.\d% of the teacher's mass at temperature"):
        fill(least_coverage=0.9)
    assert len(read_manifest(tmp_path / "cache").shards) == 1  # what is computed stays
    assert fill(least_coverage=0.01)[0].complete


def test_rows_without_an_answer_are_refused_by_name(fill: Any, tmp_path: Path) -> None:
    rows = make_rows(3)
    empty = [TokenisedRow("row-x", [4, 5], [IGNORED, IGNORED], 0)]
    with pytest.raises(UserError, match="1 rows have an empty answer: row-x"):
        fill(rows=rows + empty)
    with pytest.raises(UserError, match="there are no rows"):
        fill(rows=[])
    assert not (tmp_path / "cache").exists()


def test_a_manifest_that_is_not_ours_is_refused(fill: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no teacher cache"):
        read_manifest(tmp_path)
    fill()
    path = tmp_path / "cache" / "manifest.json"
    for change in ({"format": 9}, {"shards": [{"file": "x"}]}, {"coding": 3}):
        good = path.read_text()
        path.write_text(json.dumps(json.loads(good) | change))
        with pytest.raises(UserError, match="is not the manifest of a teacher cache"):
            read_manifest(tmp_path / "cache")
        path.write_text(good)


def test_the_key_names_all_that_decides_the_content() -> None:
    rows = make_rows()
    base = identity_of(rows)
    keys = {
        cache_key(base, CODING),
        cache_key(identity_of(rows, teacher="c" * 64), CODING),
        cache_key(identity_of(rows[:-1]), CODING),
        cache_key(base, Coding(8, VOCABULARY, "fp16", (1.0, 2.0))),
        cache_key(base, Coding(16, VOCABULARY, "fp16", (1.0,))),
    }
    assert len(keys) == 5
    assert cache_key(replace(base, teacher_name="another name"), CODING) in keys
    moved = [replace(rows[0], labels=[*rows[0].labels[:-1], IGNORED]), *rows[1:]]
    assert rows_digest(moved) != rows_digest(rows)


def test_shards_are_whole_rows() -> None:
    rows = make_rows()
    spans = list(shard_rows(rows, 6))
    assert [row for first, last in spans for row in range(first, last)] == list(range(len(rows)))
    assert all(sum(row.n_targets for row in rows[first:last]) >= 6 for first, last in spans[:-1])
