"""Files of scores: the four formats as they come, and every way in which two files must not be compared."""

from __future__ import annotations

import gc
import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.stats.records import read_pair


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scored(*scores: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"item": f"q{number}", "score": score, **more} for number, score in enumerate(scores)]


@pytest.fixture
def two(tmp_path: Path) -> Any:
    def make(rows_a: list[Any], rows_b: list[Any]) -> tuple[Path, Path]:
        return write(tmp_path / "a.jsonl", rows_a), write(tmp_path / "b.jsonl", rows_b)

    return make


def test_plain_lines_in_any_order(two: Any) -> None:
    pair = read_pair(*two(scored(0, 1, 0.5), scored(1, True, 0)[::-1]))
    assert (pair.metric, pair.items) == ("score", ["q0", "q1", "q2"])
    assert (pair.a, pair.b) == ([0.0, 1.0, 0.5], [1.0, 1.0, 0.0])
    assert pair.clusters is None
    assert pair.left_out == (0, 0)


def test_the_only_number_is_the_score(two: Any) -> None:
    rows = [{"item": "q", "accuracy": 1.0, "output_tokens": 5, "latency_seconds": 0.3, "output": "x"}]
    assert read_pair(*two(rows, rows)).metric == "accuracy"


def test_records_of_this_product(two: Any) -> None:
    rows = [
        {
            "item": f"q{n}",
            "cluster": f"t{n // 2}",
            "tags": {"room": "kitchen"},
            "scores": {"exact_match": 1.0, "f1": 0.5},
        }
        for n in range(4)
    ]
    pair = read_pair(*two(rows, rows), metric="f1")
    assert (pair.cluster_key, pair.clusters) == ("cluster", ["t0", "t0", "t1", "t1"])
    assert read_pair(*two(rows, rows), metric="f1", cluster="room").clusters == ["kitchen"] * 4
    assert read_pair(*two(rows, rows), metric="f1", cluster="none").clusters is None
    with pytest.raises(UserError, match="share 2 scores: exact_match, f1") as caught:
        read_pair(*two(rows, rows))
    assert "--metric exact_match" in str(caught.value)


def lm_eval(doc_id: int, score: float, *, filter_name: str = "none", doc_hash: str = "h") -> dict[str, Any]:
    return {
        "doc_id": doc_id,
        "doc": {"question": "…", "subject": f"s{doc_id // 2}"},
        "target": "x",
        "arguments": [["prompt"]],
        "resps": [["x"]],
        "filtered_resps": ["x"],
        "filter": filter_name,
        "metrics": ["exact_match"],
        "doc_hash": f"{doc_hash}{doc_id}",
        "prompt_hash": "p",
        "target_hash": "t",
        "exact_match": score,
    }


def test_lm_eval_samples(two: Any) -> None:
    pair = read_pair(*two([lm_eval(n, n % 2) for n in range(4)], [lm_eval(n, 1.0) for n in range(4)]))
    assert (pair.metric, pair.items, pair.a) == ("exact_match", ["0", "1", "2", "3"], [0.0, 1.0, 0.0, 1.0])
    by_subject = read_pair(
        *two([lm_eval(n, 1.0) for n in range(4)], [lm_eval(n, 1.0) for n in range(4)]), cluster="subject"
    )
    assert by_subject.clusters == ["s0", "s0", "s1", "s1"]


def test_lm_eval_filters_are_metrics(two: Any) -> None:
    rows = [
        lm_eval(n, float(name == "flexible"), filter_name=name)
        for name in ("strict", "flexible")
        for n in range(3)
    ]
    pair = read_pair(*two(rows, rows), metric="exact_match,flexible")
    assert pair.a == [1.0, 1.0, 1.0]
    with pytest.raises(UserError, match="exact_match,strict, exact_match,flexible"):
        read_pair(*two(rows, rows))


def test_lm_eval_filters_that_differ_are_not_compared(two: Any) -> None:
    a, b = ([lm_eval(n, 1.0, filter_name=name) for n in range(3)] for name in ("strict", "flexible"))
    with pytest.raises(UserError, match="A is scored behind the filter 'strict', B behind 'flexible'"):
        read_pair(*two(a, b))
    assert read_pair(*two(a, a)).metric == "exact_match"


def test_a_cluster_that_is_not_a_number_is_none(two: Any) -> None:
    rows = [{"item": n, "score": 1.0, "cluster": "a" if n else float("nan")} for n in range(3)]
    with pytest.raises(UserError, match="no cluster 'cluster' for 1 of 3 items"):
        read_pair(*two(rows, rows))


def test_lm_eval_old_files_without_filter_or_metrics(two: Any) -> None:
    rows = [{"doc_id": n, "doc": {}, "target": 0, "resps": [], "acc": 1.0} for n in range(3)]
    assert read_pair(*two(rows, rows)).metric == "acc"


def test_lm_eval_array_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    path.write_text(json.dumps([lm_eval(n, 1.0) for n in range(3)]))
    assert read_pair(path, path).a == [1.0, 1.0, 1.0]


def test_lm_eval_two_tasks_in_one_file(two: Any) -> None:
    rows = [lm_eval(0, 1.0), lm_eval(1, 1.0), lm_eval(0, 0.0)]
    with pytest.raises(UserError, match="doc_id 0 appears twice") as caught:
        read_pair(*two(rows, rows))
    assert "a.jsonl:3" in str(caught.value)
    assert "one task at a time" in str(caught.value)


def test_same_number_other_document(two: Any) -> None:
    a, b = (
        [lm_eval(n, 1.0) for n in range(3)],
        [lm_eval(n, 1.0, doc_hash="other" if n else "h") for n in range(3)],
    )
    with pytest.raises(UserError, match=r"2 items have the same name but another content \(1, 2\)"):
        read_pair(*two(a, b))


def inspect_sample(identity: Any, value: Any, *, epoch: int = 1, text: str = "…") -> dict[str, Any]:
    return {
        "id": identity,
        "epoch": epoch,
        "input": text,
        "target": "4",
        "scores": {"match": {"value": value, "answer": "4", "explanation": ""}},
        "metadata": {"topic": f"t{epoch}"},
    }


def inspect_log(path: Path, samples: list[dict[str, Any]]) -> Path:
    path.write_text(
        json.dumps({"version": 2, "status": "success", "eval": {"task": "sums"}, "samples": samples})
    )
    return path


def test_inspect_log(tmp_path: Path) -> None:
    a = inspect_log(tmp_path / "a.json", [inspect_sample(n, grade) for n, grade in enumerate("CIPN")])
    b = inspect_log(tmp_path / "b.json", [inspect_sample(n, 1) for n in range(4)])
    pair = read_pair(a, b)
    assert (pair.metric, pair.a, pair.b) == ("match", [1.0, 0.0, 0.5, 0.0], [1.0] * 4)


def test_inspect_epochs_are_repeated_samples(tmp_path: Path) -> None:
    samples = [inspect_sample("x", grade, epoch=epoch) for epoch, grade in enumerate("CCI", start=1)]
    log = inspect_log(tmp_path / "a.json", samples)
    pair = read_pair(log, log)
    assert pair.samples_a == [[1.0, 1.0, 0.0]]
    assert pair.a == [pytest.approx(2 / 3)]


def test_inspect_scores_with_parts(tmp_path: Path) -> None:
    log = inspect_log(tmp_path / "a.json", [inspect_sample(1, {"form": 1, "content": "C"})])
    assert read_pair(log, log, metric="match/content").a == [1.0]
    with pytest.raises(UserError, match="match/form, match/content"):
        read_pair(log, log)


def test_inspect_archive(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", "{}")
        archive.writestr("summaries.json", "[]")
        for n in range(3):
            archive.writestr(f"samples/{n}_epoch_1.json", json.dumps(inspect_sample(n, "C")))
    assert read_pair(path, path).a == [1.0, 1.0, 1.0]


def test_inspect_archive_damaged(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    path.write_bytes(b"not a zip")
    with pytest.raises(UserError, match="cannot read the archive") as caught:
        read_pair(path, path)
    assert "inspect log convert log.eval --to json" in str(caught.value)


def test_inspect_archive_with_unknown_compression(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("samples/1_epoch_1.json", json.dumps(inspect_sample(1, "C")))
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        data[data.index(signature) + offset] = 97  # a method that no Python reads
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match="cannot read the archive"):
        read_pair(path, path)


def test_inspect_sample_that_failed_has_no_score(tmp_path: Path) -> None:
    broken = {"id": 2, "epoch": 1, "input": "…", "target": "4", "error": {"message": "timeout"}}
    a = inspect_log(tmp_path / "a.json", [inspect_sample(1, "C"), broken])
    b = inspect_log(tmp_path / "b.json", [inspect_sample(1, "C"), inspect_sample(2, "C")])
    with pytest.raises(UserError, match="1 of 2 items have no usable 'match'"):
        read_pair(a, b)
    pair = read_pair(a, b, inner=True)
    assert (pair.items, pair.left_out) == (["1"], (1, 1))


def test_other_items_are_counted_on_each_side(two: Any) -> None:
    a = [{"item": name, "score": 1} for name in "abcde"]
    b = [{"item": name, "score": 0} for name in "dexy"]
    with pytest.raises(UserError, match=r"3 only in A \(a, b, c\), 2 only in B \(x, y\)") as caught:
        read_pair(*two(a, b))
    assert "--inner" in str(caught.value)
    pair = read_pair(*two(a, b), inner=True)
    assert (pair.items, pair.left_out) == (["d", "e"], (3, 2))


def test_no_shared_item_is_refused_even_with_inner(two: Any) -> None:
    with pytest.raises(UserError, match="no item is scored in both"):
        read_pair(*two([{"item": "a", "score": 1}], [{"item": "b", "score": 1}]), inner=True)


def test_duplicates(two: Any) -> None:
    rows = [*scored(1, 0), {"item": "q0", "score": 0}]
    with pytest.raises(UserError, match="item 'q0' appears twice") as caught:
        read_pair(*two(rows, scored(1, 0)))
    assert "a.jsonl:3" in str(caught.value)
    assert "a.jsonl:1" in str(caught.value)


def test_numbered_repeats_are_samples_and_not_duplicates(two: Any) -> None:
    rows = [{"item": "q", "score": score, "repeat": repeat} for repeat, score in enumerate([1, 0, 0, 1])]
    pair = read_pair(*two(rows, [{"item": "q", "score": 1}]))
    assert (pair.a, pair.samples_a) == ([0.5], [[1.0, 0.0, 0.0, 1.0]])
    with pytest.raises(UserError, match="appears twice"):
        read_pair(*two([*rows, rows[0]], rows))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_scores_that_are_none(two: Any, value: Any) -> None:
    rows = scored(1.0, value, 0.0)
    with pytest.raises(UserError, match="1 of 3 items have no usable 'score'") as caught:
        read_pair(*two(rows, scored(1, 1, 1)))
    assert "a.jsonl:2" in str(caught.value)
    assert "neither right nor wrong" in str(caught.value)
    assert read_pair(*two(rows, scored(1, 1, 1)), inner=True).items == ["q0", "q2"]


def test_a_failed_sample_takes_its_item_out(two: Any) -> None:
    rows = [
        {"item": "q", "score": 1, "repeat": 0},
        {"item": "q", "score": None, "repeat": 1},
        {"item": "r", "score": 1},
    ]
    assert read_pair(*two(rows, [*scored(1), {"item": "r", "score": 1}]), inner=True).items == ["r"]


def test_missing_metric(two: Any) -> None:
    rows = [{"item": "q", "scores": {"exact_match": 1}}]
    with pytest.raises(UserError, match=r"no metric 'exact_mach' in .*a.jsonl") as caught:
        read_pair(*two(rows, rows), metric="exact_mach")
    assert "did you mean 'exact_match'?" in str(caught.value)


def test_a_metric_that_some_items_lack(two: Any) -> None:
    rows = [{"item": "q", "scores": {"f1": 1}}, {"item": "r", "scores": {}}]
    with pytest.raises(UserError, match="1 of 2 items have no usable 'f1'"):
        read_pair(*two(rows, rows))


def test_no_shared_metric(two: Any) -> None:
    with pytest.raises(UserError, match="share no score") as caught:
        read_pair(*two([{"item": "q", "acc": 1}], [{"item": "q", "em": 1}]))
    assert "A has acc; B has em" in str(caught.value)


def test_a_score_that_is_text(two: Any) -> None:
    rows = [{"item": "q", "scores": {"f1": "high"}}]
    with pytest.raises(UserError, match="'f1' is 'high', not a number"):
        read_pair(*two(rows, rows))


def test_empty_files(two: Any) -> None:
    with pytest.raises(UserError, match="holds no items"):
        read_pair(*two([], scored(1)))
    with pytest.raises(UserError, match="holds no items"):
        read_pair(*two(scored(1), []))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_pair(tmp_path / "none.jsonl", tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is a folder"):
        read_pair(tmp_path, tmp_path)
    with pytest.raises(UserError, match="cannot read the file: File name too long"):
        read_pair(tmp_path / ("x" * 3000), tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl"])
def test_packed_files(two: Any, tmp_path: Path, name: str) -> None:
    plain, other = two(scored(0, 1), scored(1, 1))
    packed = gzip.compress(plain.read_bytes())
    (tmp_path / name).write_bytes(packed)
    assert read_pair(tmp_path / name, other).a == [0.0, 1.0]
    (tmp_path / name).write_bytes(packed[:-12])
    with pytest.raises(UserError, match="cannot unpack it"):
        read_pair(tmp_path / name, other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"item": "q", "score": 1}\n{"item": ', "not valid JSON"),
        ("[1, 2]\n", "not a JSON object"),
        ('{"score": 1}\n', "no 'item'"),
        ('{"item": {"a": 1}, "score": 1}\n', "no 'item'"),
        ('{"doc_id": 1, "metrics": ["a"], "a": 1}\n{"a": 1}\n', "no 'doc_id'"),
        ('{"doc_id": null, "metrics": ["a"], "a": 1}\n', "no 'doc_id'"),
        ('{"item": "q", "score": "1.0"}\n', "'score' is '1.0', not a number"),
        ('{"item": "q", "score": [1, 0]}\n', "is .1, 0., not a number"),
        (f'{{"item": "q", "score": {10**400}}}\n', "not a number"),
        ('{"item": "q", "score": 1, "cluster": ["t"]}\n', "not a label"),
        ('{"item": "q", "score": 1, "o": ' + "[" * 50_000 + "]" * 50_000 + "}\n", "not valid JSON"),
    ],
)
def test_damaged_lines(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_pair(path, path)
    assert "a.jsonl:" in str(caught.value)


def test_json_that_is_neither(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"results": {}}')
    with pytest.raises(UserError, match="neither a list of items nor an inspect log"):
        read_pair(path, path)
    path.write_text('{"samples": [{"no": "id"}]}')
    with pytest.raises(UserError, match="a sample without 'id'"):
        read_pair(path, path)
    path.write_text('{"samples": [{"id": 1, "scores": [1]}]}')
    with pytest.raises(UserError, match="'scores' is no mapping"):
        read_pair(path, path)


def test_labels_that_only_one_file_has_hold_for_both(two: Any) -> None:
    labelled = [{"item": item, "score": 1, "cluster": cluster} for item, cluster in ("qt", "rt", "su")]
    bare = scored(0, 0, 0)[:1] + [{"item": item, "score": 0} for item in "qrs"]
    for files in (two(labelled, bare), two(labelled, bare)[::-1]):
        assert read_pair(*files, inner=True).clusters == ["t", "t", "u"]
        with pytest.raises(UserError, match="do not hold the same items"):
            read_pair(*files)
    with pytest.raises(UserError, match="no cluster 'tmplate'"):
        read_pair(*two(labelled, bare), cluster="tmplate")


def test_clusters_that_do_not_hold(two: Any) -> None:
    labelled = [{"item": "q", "score": 1, "cluster": "t"}, {"item": "r", "score": 1, "cluster": "t"}]
    moved = [{"item": "q", "score": 1, "cluster": "t"}, {"item": "r", "score": 1, "cluster": "u"}]
    with pytest.raises(UserError, match=r"1 items are in another cluster in B \(r\)"):
        read_pair(*two(labelled, moved))
    partly = [labelled[0], {"item": "r", "score": 1}]
    with pytest.raises(UserError, match="no cluster 'cluster'"):
        read_pair(*two(labelled, partly), cluster="cluster")
    with pytest.raises(UserError, match="no cluster 'cluster' for 1 of 2 items"):
        read_pair(*two(labelled, partly))
    assert read_pair(*two(labelled, partly), cluster="none").clusters is None
    samples = [{"item": "q", "score": 1, "repeat": n, "cluster": f"t{n}"} for n in range(2)]
    with pytest.raises(UserError, match="in different clusters"):
        read_pair(*two(samples, samples))


def test_collector_is_on_again_afterwards(two: Any) -> None:
    assert gc.isenabled()
    read_pair(*two(scored(1), scored(0)))
    assert gc.isenabled()
    with pytest.raises(UserError):
        read_pair(*two([], []))
    assert gc.isenabled()
