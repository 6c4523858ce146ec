"""Answers along the way on the page: by prompt and step, as text whatever they hold."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from finetune.report.page import render_page
from finetune.report.read import read_run
from finetune.report.samples import read_samples


def sample(step: int, name: str = "row-1", **fields: Any) -> dict[str, Any]:
    found = {
        "event": "sample",
        "step": step,
        "name": name,
        "prompt": "<|user|>\non",
        "output": f"answer {step}",
    }
    return {**found, "reference": "right", "kl_to_base": 0.5 * step, **fields}


@pytest.fixture
def with_samples(tmp_path: Path, factory: ModuleType) -> Any:
    """with_samples(events): the run of a folder whose events end in these."""

    def build(*events: dict[str, Any]) -> Any:
        folder = tmp_path / "run"
        factory.write_run(folder)
        factory.write_events(folder, 30, torn=False)
        with (folder / "events.jsonl").open("a") as stream:
            stream.writelines(json.dumps(event) + "\n" for event in events)
        return read_run(folder)

    return build


def test_each_prompt_has_its_answers_by_step(with_samples: Any) -> None:
    run = with_samples(
        sample(0, kl_to_base=0.0),
        sample(5),
        sample(0, "row-2", kl_to_base=None),
        sample(5, output="said-again"),
    )
    first, second = read_samples(run)
    assert [(one.step, str(one.output), one.kl) for one in first.answers] == [
        (0, "answer 0", "0"),
        (5, "said-again", "2.50"),
    ]
    assert (second.name, second.answers[0].kl) == ("row-2", None)
    page = render_page(run)
    assert page.index("Answers along the way") < page.index("said-again")


def test_of_many_steps_the_first_the_last_and_some_between_are_shown(with_samples: Any) -> None:
    (prompt,) = read_samples(with_samples(*(sample(step) for step in range(100))))
    steps = [answer.step for answer in prompt.answers]
    assert (len(steps), steps[0], steps[-1]) == (12, 0, 99)


def test_an_answer_is_text_and_nothing_else(with_samples: Any) -> None:
    evil = "<script>alert(1)</script>\u202e</pre>"
    page = render_page(with_samples(sample(3, evil, output=evil, prompt=evil, reference=evil)))
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page
    assert "\u202e" not in page


def test_a_run_without_samples_has_no_such_section_and_odd_events_are_passed_over(with_samples: Any) -> None:
    assert "Answers along the way" not in render_page(with_samples())
    assert (
        read_samples(
            with_samples({"event": "sample", "step": "x"}, {"event": "sample", "step": 3, "name": 7})
        )
        == ()
    )


def test_losses_by_source_stand_among_the_facts(with_samples: Any) -> None:
    event = {
        "event": "validation",
        "step": 30,
        "loss": 1.0,
        "sources": {"a.jsonl": {"loss": 0.75}, "b.jsonl": {"loss": 1.25}},
    }
    page = render_page(with_samples(event))
    assert "last validation loss, a.jsonl" in page and "0.75" in page
    many = {f"part-{n:02d}.jsonl": {"loss": 1.0, "target_tokens": n} for n in range(40)}
    page = render_page(with_samples({**event, "sources": many}))
    assert page.count("last validation loss, part-") == 8 and "part-39.jsonl" in page
