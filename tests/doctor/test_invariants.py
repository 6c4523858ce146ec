"""What the doctor makes of the deviations that the invariants measure."""

from __future__ import annotations

import pytest

from finetune.doctor import invariants as module
from finetune.doctor.invariants import quick_invariants
from finetune.recipe.schema import Recipe


@pytest.mark.parametrize(("deviation", "status"), [(1.1e-5, "ok"), (1e-2, "fault"), (float("nan"), "fault")])
def test_rounding_of_many_layers_is_no_fault_and_documents_that_see_each_other_are(
    deviation: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.model_validate(
        {"name": "t", "model": {"id": "t"}, "data": {"spec": "t"}, "eval": {"suites": ["t"]}}
    )
    deviations = {"per-token loss": deviation, "gradient": 1e-7}
    monkeypatch.setattr(module.invariants, "accumulation_error", lambda *_: 1e-7)
    monkeypatch.setattr(module.invariants, "packing_error", lambda *_: deviations)
    accumulation, packing = quick_invariants(recipe, None, None, [])
    assert accumulation.status == "ok"
    assert packing.status == status and bool(packing.remedy) == (status == "fault")
