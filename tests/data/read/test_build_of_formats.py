"""A build of the same rows is the same whatever the format of the file; its ledger adds up, faults and all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.data.build import DatasetBuild, build_dataset
from finetune.errors import UserError
from finetune.paths import read_jsonl

RECORDS = [{"prompt": f"question {n}", "completion": f"0{n}", "topic": "ab"[n % 2]} for n in range(24)]


def build(folder: Path, name: str, **source: Any) -> DatasetBuild:
    spec = folder / "mine.yaml"
    section = {"kind": "files", "files": [name], "tags": ["topic"], **source}
    spec.write_text(
        json.dumps({"name": "mine", "source": section, "split": {"shares": {"train": 0.5, "test": 0.5}}})
    )
    return build_dataset(spec, folder / "builds")


def splits(made: DatasetBuild) -> dict[str, str]:
    return {side: entry["digest"] for side, entry in made.manifest["splits"].items()}


def test_the_same_rows_are_the_same_build(tmp_path: Path, written: Callable[..., str], form: str) -> None:
    made = build(tmp_path, written(form, RECORDS))
    plain = build(tmp_path, written("jsonl", RECORDS))
    assert splits(made) == splits(plain)
    assert made.manifest["ledger"] == {"read": 24, "kept": 24, "dropped": {}, "quarantined": 0}


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"prompt": "p {n}", "chosen": "a", "rejected": "b"}, "preference"),
        ({"prompt": "p {n}", "completion": "a", "label": "yes"}, "kto"),
        ({"text": "words {n}"}, "text"),
        ({"prompt": "p {n}", "completions": ["a"], "labels": [True]}, "stepwise"),
        ({"input_ids": [1, 2]}, "tokens"),
    ],
)
def test_rows_of_every_kind_are_built_and_found_again(
    tmp_path: Path, record: dict[str, Any], kind: str
) -> None:
    records = [
        json.loads(json.dumps(record).replace("{n}", str(n)).replace("[1, 2]", f"[{n}, 2]"))
        for n in range(24)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    made = build(tmp_path, "rows.jsonl")
    rows = [row for side in ("train", "test") for row in made.rows(side)]  # type: ignore[arg-type]
    assert [row.kind for row in rows] == [kind] * 24
    assert len({row.content_digest() for row in rows}) == 24
    assert all(made.manifest["splits"][side]["rows"] for side in ("train", "test"))


def test_rows_that_are_not_learnt_together_are_refused_with_their_numbers(tmp_path: Path) -> None:
    pairs = [{"prompt": f"p{n}", "chosen": "a", "rejected": "b"} for n in range(9)]
    lines = [*pairs, {"prompt": "p", "completion": "c"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with pytest.raises(UserError, match=r"9 preference, 1 chat(?s:.*)source\.shape"):
        build(tmp_path, "rows.jsonl")
    made = build(tmp_path, "rows.jsonl", shape="preference", max_reject_rate=0.2)
    assert made.manifest["ledger"]["quarantined"] == 1
    texts = [
        {"text": "t"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in texts * 2))
    assert build(tmp_path, "rows.jsonl").manifest["ledger"]["kept"] == 2


def test_a_fault_is_told_with_its_place_as_far_as_the_format_has_one(
    tmp_path: Path, written: Callable[..., str]
) -> None:
    faulty = [{"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": ""}]
    for form, place in (("parquet", r"rows\.parquet:2: "), ("jsonl", r"rows\.jsonl:2 \(byte 35\): ")):
        with pytest.raises(UserError, match=place + "'completion' is empty"):
            build(tmp_path, written(form, faulty))


rows = st.lists(
    st.fixed_dictionaries(
        {"prompt": st.text(max_size=6), "completion": st.sampled_from(["a", "", "007", None, 7, "NA"])}
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=rows)
@pytest.mark.parametrize("form", ["jsonl", "json_indented", "gzip"])
def test_the_ledger_adds_up(
    tmp_path: Path, written: Callable[..., str], form: str, records: list[dict[str, Any]]
) -> None:
    good = {"prompt": "one that is good", "completion": "a"}
    spec = tmp_path / "mine.yaml"
    name = written(form, [*records, good])
    source = {"kind": "files", "files": [name], "max_reject_rate": 1.0}
    spec.write_text(json.dumps({"name": "mine", "source": source, "split": {"shares": {"train": 1.0}}}))
    made = build_dataset(spec, tmp_path / "builds")
    ledger = made.manifest["ledger"]
    assert ledger["read"] == len(records) + 1
    assert ledger["read"] == ledger["kept"] + sum(ledger["dropped"].values()) + ledger["quarantined"]
    faulty = sum(record["completion"] in ("", None, 7) for record in records)
    assert ledger["quarantined"] == faulty == len(read_jsonl(made.folder / "rejects.jsonl"))
