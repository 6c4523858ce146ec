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
    monkeypatch.setattr(module, "training_attention", lambda *_: "document")
    accumulation, packing = quick_invariants(recipe, None, None, [])
    assert accumulation.status == "ok"
    assert packing.status == status and bool(packing.remedy) == (status == "fault")


@pytest.mark.parametrize(
    ("deviation", "packing", "status"), [(1e-2, True, "fault"), (1e-2, False, "warning"), (1e-7, False, "ok")]
)
def test_an_attention_that_the_recipe_does_not_train_with_is_no_fault_of_it(
    deviation: float, packing: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.invariants, "packing_error", lambda *_: {"gradient": deviation})
    (finding,) = module._packing(None, None, None, [], "document", in_use=packing)  # type: ignore[arg-type]
    assert finding.status == status
    assert bool(finding.remedy) == (status == "fault")


def test_packing_that_does_not_run_is_a_fault_only_where_the_recipe_packs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(*_: object) -> None:
        raise ValueError("packed sequences cannot be kept apart")

    monkeypatch.setattr(module.invariants, "packing_error", raises)
    found = [
        module._packing(None, None, None, [], "sdpa", in_use=in_use)  # type: ignore[arg-type]
        for in_use in (True, False)
    ]
    assert [finding.status for (finding,) in map(list, found)] == ["fault", "skipped"]
