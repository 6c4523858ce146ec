"""What a reader must know before believing a difference: how the answers of both arms ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finetune.evaluation.fairness import fairness
from finetune.evaluation.records import ArmSummary


def _arm(name: str, cut: int, n: int = 100) -> ArmSummary:
    return ArmSummary(
        suite="s", suite_digest="d", items_digest="i", arm=name, n=n, metrics={}, output_tokens=1, seconds=1.0,
        latency_seconds={}, finish_reasons={"length": cut, "stop": n - cut} if cut else {"stop": n},
        adapter_sha256=None, key="k", batch_size=8, prompt_tokens=1, template_sha256="t",
    )  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [(30, 4), (4, 30)])
def test_a_gap_between_the_arms_cut_answers_is_a_warning_that_names_both(before: int, after: int) -> None:
    found = fairness(_arm("few_shot", before), _arm("tuned", after))
    assert found["cut"] == {"baseline": before / 100, "arm": after / 100}
    assert found["finish_reasons"]["baseline"] == {"length": before, "stop": 100 - before}
    (note,) = found["notes"]
    more, less = ("few_shot", "tuned") if before > after else ("tuned", "few_shot")
    assert note.startswith(
        f"warning: the token limit cut 30.0% of the answers of {more} and 4.0% of those of {less}"
    )
    assert "max_new_tokens" in note


def test_alike_arms_need_no_warning_but_many_cut_answers_a_note() -> None:
    assert fairness(_arm("few_shot", 3), _arm("tuned", 5))["notes"] == []
    notes = fairness(_arm("few_shot", 30), _arm("tuned", 31))["notes"]
    assert [note.split(" were cut")[0] for note in notes] == [
        "30% of the answers of few_shot",
        "31% of the answers of tuned",
    ]


def test_other_batch_sizes_are_noted() -> None:
    (note,) = fairness(_arm("few_shot", 0), replace(_arm("tuned", 0), batch_size=4))["notes"]
    assert "latencies are not comparable" in note
