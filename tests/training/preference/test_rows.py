"""Steps of preference runs name their rows and the worst of them, so that spikes can be traced to what caused them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.telemetry.events import read_events


def first_step(folder: Path) -> dict[str, Any]:
    return next(event for event in read_events(folder / "events.jsonl") if event["event"] == "step")


@pytest.mark.parametrize(("method", "options"), [("dpo", {"reference": "base"}), ("simpo", {})])
@pytest.mark.parametrize("packing", [True, False])
def test_the_worst_row_is_the_one_with_the_highest_loss(
    method: str,
    options: dict[str, Any],
    packing: bool,
    dpo_recipe: Any,
    train_pairs: Any,
    make_pairs: Any,
    moved_model: Any,
) -> None:
    """With next to no rate, what validation finds for each row after the step is what the step began with."""
    recipe = dpo_recipe(
        method,
        **options,
        train__packing=packing,
        train__pack_tokens=4096,
        train__gradient_accumulation_steps=1 if packing else 6,
        train__max_steps=1,
        train__learning_rate=1e-12,
    )
    rows = make_pairs(6)
    _, folder, _ = train_pairs(recipe, rows=rows, validation=rows, model=moved_model(recipe))
    losses = json.loads((folder / "validation_rows.json").read_text())["sums"]
    # Validation goes over packs, whose members may stand in another order than the rows.
    step = first_step(folder)
    assert sorted(step["rows"]) == [row.row_id for row in rows]
    assert step["worst_row_loss"] == pytest.approx(max(losses), abs=1e-5)
    assert step["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    if not packing:
        assert step["worst_row"] == rows[losses.index(max(losses))].row_id


@pytest.mark.parametrize("method", ["kto", "orpo", "cpo"])
def test_every_method_names_its_rows(method: str, dpo_recipe: Any, train_pairs: Any, make_pairs: Any) -> None:
    rows = make_pairs(6, unit="judged" if method == "kto" else "pair")
    _, folder, _ = train_pairs(dpo_recipe(method, train__max_steps=1, train__pack_tokens=4096), rows=rows)
    step = first_step(folder)
    assert sorted(step["rows"]) == sorted(row.row_id for row in rows)
    assert step["worst_row"] in step["rows"] and step["worst_row_loss"] >= step["loss"] - 1e-6
