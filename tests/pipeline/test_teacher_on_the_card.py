"""A model that another one taught names it on its card, with what its terms allow, or that they are unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.paths import write_json
from finetune.pipeline.provenance import _run_ingredients
from finetune.report.hub_card import Publication, hub_card
from finetune.report.read import read_run


@pytest.mark.parametrize(("licence", "told"), [("Apache-2.0", "Apache-2.0"), (None, "unknown")])
def test_the_teacher_is_an_ingredient(tmp_path: Path, licence: str | None, told: str) -> None:
    (tmp_path / "recipe.resolved.yaml").write_text("model: {id: builtin:smollm2-135m-instruct}\n")
    teacher = {"name": "owner/big", "digest": "d" * 64, "licence": licence}
    write_json(tmp_path / "distillation.json", {"teacher": teacher, "student": {}})
    found = _run_ingredients(read_run(tmp_path))
    (taught_by,) = [one for one in found if one.what == "teacher"]
    assert (taught_by.name, taught_by.licence) == ("owner/big", licence)
    card = hub_card(Publication("student", "model", None, tuple(found)))
    (line,) = [line for line in card.splitlines() if line.startswith("| teacher |")]
    assert "owner/big" in line and line.endswith(f"| {told} |")
    assert ("**Warning**" in card and "the teacher owner/big allow" in card) is (licence is None)
