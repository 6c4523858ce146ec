"""Untuned answers are given once for all runs, by one process at a time, and every run folder has its own copy."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.digest import digest_folder
from finetune.evaluation import answering
from finetune.evaluation.generate import Completion, generate
from finetune.evaluation.items import Item
from finetune.evaluation.records import read_records, read_summary
from finetune.evaluation.run import ArmJob, prepare_arm
from finetune.evaluation.suite import ScorerSection, Suite, load_suite
from finetune.pipeline.baseline_store import fetch_baseline, store_root

SUITE = """\
suite: 1
name: numbers
items: {jsonl: items.jsonl}
decoding: {max_new_tokens: 6}
scorers: [normalised_match]
primary_metric: normalised_match
"""


@pytest.fixture
def items() -> list[Item]:
    return [Item(f"i{n}", ({"role": "user", "content": f"say {n}"},), str(n), f"i{n}") for n in range(8)]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    (tmp_path / "items.jsonl").write_text(
        '{"id":"a","messages":[{"role":"user","content":"q"}],"reference":"1"}\n'
    )
    (tmp_path / "suite.yaml").write_text(SUITE)
    return load_suite(tmp_path / "suite.yaml")


@pytest.fixture
def fetch(tiny_model: Any, tiny_tokenizer: Any, suite: Suite, items: list[Item], tmp_path: Path) -> Any:
    def call(
        run: str,
        *,
        of: Suite = suite,
        asked: list[Item] = items,
        key: str = "0123456789",
        model: Callable[[], Any] = lambda: tiny_model,
        said: list[str] | None = None,
    ) -> ArmJob:
        job = prepare_arm(tiny_tokenizer, of, asked, arm="zero_shot", key=key)
        fetch_baseline(
            job,
            tmp_path / run,
            model_key=key,
            model=model,
            batch_size=4,
            say=(said if said is not None else []).append,
        )
        return job

    return call


def _no_model() -> Any:
    pytest.fail("the model was loaded")


def test_a_second_run_copies_the_answers_without_a_model(
    fetch: Any, asked: list[int], tmp_path: Path
) -> None:
    fetch("one")
    fetch("two", model=_no_model)
    assert asked == [8]
    assert digest_folder(tmp_path / "one") == digest_folder(tmp_path / "two")
    for path in store_root().rglob("*"):  # a run folder stands by itself
        if path.is_file():
            path.unlink()
    fetch("one", model=_no_model)


def test_answers_in_a_run_folder_find_their_way_into_the_store(fetch: Any, asked: list[int]) -> None:
    fetch("one")
    for path in store_root().rglob("*.json*"):
        path.unlink()
    fetch("two")
    assert asked == [8, 8]
    fetch("two", model=_no_model)


@pytest.mark.parametrize("change", ["weights", "decoding", "items"])
def test_what_changes_the_answers_has_a_folder_of_its_own(
    fetch: Any, asked: list[int], suite: Suite, items: list[Item], change: str
) -> None:
    first = fetch("one")
    before = digest_folder(store_root())
    if change == "weights":
        other = fetch("two", key="9876543210")
    elif change == "items":  # the two old ones are known
        other = fetch("two", asked=[*items[:2], Item("new", ({"role": "user", "content": "new"},), "n", "n")])
    else:
        decoding = suite.decoding.model_copy(update={"max_new_tokens": 5})
        other = fetch("two", of=suite.model_copy(update={"decoding": decoding}))
    assert other.key != first.key
    assert asked == [8, 1 if change == "items" else 8]
    assert digest_folder(store_root()).items() >= before.items()


def test_another_scorer_is_scored_from_the_store(
    fetch: Any, asked: list[int], suite: Suite, tmp_path: Path
) -> None:
    fetch("one")
    more = ScorerSection(scorer="regex", parameters={"pattern": "a"})
    wider = suite.model_copy(update={"scorers": [*suite.scorers, more]})
    fetch("two", of=wider, model=_no_model)
    assert asked == [8]
    assert set(read_summary(tmp_path / "two", "zero_shot").metrics) == {"normalised_match", "regex"}
    assert set(read_summary(tmp_path / "one", "zero_shot").metrics) == {"normalised_match"}


def test_two_processes_that_want_the_same_answers_give_them_once(
    fetch: Any, asked: list[int], tiny_model: Any, tmp_path: Path
) -> None:
    """The second comes while the first is loading its model; a lock of one opening of a file also holds between threads."""
    loading, waiting = threading.Event(), threading.Event()
    said: list[str] = []

    def slow() -> Any:
        loading.set()
        assert waiting.wait(20)
        return tiny_model

    class _Said(list[str]):
        def append(self, line: str) -> None:
            said.append(line)
            waiting.set()

    first = threading.Thread(target=fetch, args=("one",), kwargs={"model": slow})
    first.start()
    assert loading.wait(20)
    second = threading.Thread(target=fetch, args=("two",), kwargs={"model": _no_model, "said": _Said()})
    second.start()
    first.join(30)
    second.join(30)
    assert asked == [8]
    assert said == ["another process answers numbers, zero_shot; waiting for it"]
    assert read_records(tmp_path / "one", "zero_shot") == read_records(tmp_path / "two", "zero_shot")


def test_an_interrupted_baseline_continues_in_the_store(
    fetch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[int]
) -> None:
    def dies(model: Any, prompts: Any, rule: Any, **options: Any) -> Iterator[Completion]:
        for number, answer in enumerate(generate(model, prompts, rule, **options)):
            if number == 5:
                raise KeyboardInterrupt
            yield answer

    with monkeypatch.context() as patch:
        patch.setattr(answering, "generate", dies)
        with pytest.raises(KeyboardInterrupt):
            fetch("one")
    assert not list(tmp_path.glob("one/*"))
    fetch("two")
    assert asked == [3]
    lines = (tmp_path / "two" / "zero_shot.jsonl").read_text().splitlines()
    assert [json.loads(line)["item"] for line in lines] == [f"i{n}" for n in range(8)]
