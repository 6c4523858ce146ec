"""Runs that learn from preferences: both rewards and the margin are drawn, and what was flagged stands under trust."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.report.curves import read_curves
from finetune.report.page import render_page
from finetune.report.read import read_run
from finetune.report.trust import read_trust


def _steps(**rewards: Any) -> list[dict[str, Any]]:
    return [
        {"event": "step", "step": step, "loss": 0.69, **{name: sign * step for name, sign in rewards.items()}}
        for step in range(1, 5)
    ]


def _drawn(plot: Any) -> dict[str, list[Any]]:
    found = re.search(r'data-plot="([^"]+)"', str(plot.drawing))
    assert found is not None
    series = json.loads(found[1].replace("&#34;", '"'))["series"]
    return {one["name"]: [point[1] for point in one["at"]] for one in series}


def test_rewards_of_both_answers_and_their_margin_are_drawn(factory: ModuleType, tmp_path: Path) -> None:
    rows = _steps(reward_chosen=-0.5, reward_rejected=-2.0, reward_margin=1.5)
    factory.rewrite_lines(tmp_path / "events.jsonl", rows)
    curves = read_curves(read_run(tmp_path))
    plots = {plot.key: plot for plot in curves.plots}
    assert list(plots)[:3] == ["loss", "rewards", "margin"]
    assert _drawn(plots["rewards"]) == {
        "chosen": [-0.5, -1.0, -1.5, -2.0],
        "rejected": [-2.0, -4.0, -6.0, -8.0],
    }
    assert _drawn(plots["margin"]) == {"margin": [1.5, 3.0, 4.5, 6.0]}
    assert plots["rewards"].legend == (("train", "chosen"), ("rejected", "rejected"))
    assert plots["loss"].unit == "mean over examples"


def test_a_run_on_single_answers_has_no_margin_of_its_own(factory: ModuleType, tmp_path: Path) -> None:
    factory.rewrite_lines(tmp_path / "events.jsonl", _steps(reward_chosen=0.25))
    plots = {plot.key: plot for plot in read_curves(read_run(tmp_path)).plots}
    assert _drawn(plots["rewards"]) == {"chosen": [0.25, 0.5, 0.75, 1.0]}
    assert plots["margin"].drawing is None


def test_a_run_without_preferences_has_neither_curve_nor_flag(run_folder: Path) -> None:
    run = read_run(run_folder)
    assert not {"rewards", "margin"} & {plot.key for plot in read_curves(run).plots}
    assert read_trust(run).training == ()


def test_flags_are_told_once_each_and_as_text(factory: ModuleType, run_folder: Path) -> None:
    lines = [json.loads(line) for line in (run_folder / "events.jsonl").read_text().splitlines()[:-1]]
    fall = {"event": "flag", "name": "chosen_falls", "message": "the chosen <b>answers</b> became unlikely"}
    lines += [{**fall, "step": 4}, {**fall, "step": 9}, {"event": "flag", "name": "odd", "message": None}]
    factory.rewrite_lines(run_folder / "events.jsonl", lines)
    run = read_run(run_folder)
    assert read_trust(run).training == ("The chosen <b>answers</b> became unlikely.",)
    page = render_page(run)
    trust = page[page.index('id="trust"') :]
    assert "The chosen &lt;b&gt;answers&lt;/b&gt; became unlikely." in trust
