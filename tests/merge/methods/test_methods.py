"""What each method promises in the dialect of the papers, and that nothing depends on how a tensor is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from finetune.merge.methods.chunk import Chunk, MemoryChunks, Settings, merge_tensors
from finetune.merge.methods.draw import below, stream, uniform
from finetune.merge.methods.registry import METHODS
from finetune.merge.models.plan import n_passes
from finetune.recipe.merge_methods import METHOD_RULES


def drawn(n: int, shape: tuple[int, ...] = (24, 16), seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(n)]


def settings(n: int, **given: Any) -> Settings:
    fields = {
        "weight": (0.6,) * n,
        "density": (0.5,) * n,
        "gamma": (0.05,) * n,
        "epsilon": (0.2,) * n,
        "streams": tuple(stream(17, "w", i) for i in range(n)),
    }
    return Settings(**{**fields, **given})


def merged(
    method: str, tensors: list[torch.Tensor], base: torch.Tensor | None = None, **given: Any
) -> torch.Tensor:
    rows = given.pop("rows", None)
    return merge_tensors(METHODS[method], tensors, settings(len(tensors), **given), base=base, rows=rows)


def n_models(method: str) -> int:
    low, high = METHOD_RULES[method].n_models
    return min(max(low, 3), high)


@pytest.mark.parametrize("dialect", ["paper", "mergekit"])
@pytest.mark.parametrize("method", METHODS)
def test_the_size_of_chunks_does_not_change_a_value(method: str, dialect: str) -> None:
    base, *tuned = drawn(1 + n_models(method))
    given: dict[str, Any] = {"dialect": dialect, "select_topk": 0.4}
    start = base if METHOD_RULES[method].base in ("deltas", "end") else None
    whole = merged(method, tuned, start, **given)
    assert torch.isfinite(whole).all()
    for rows in (1, 5, 24):
        cut = merged(method, tuned, start, rows=rows, **given)
        assert torch.allclose(cut, whole, rtol=1e-6, atol=1e-6)


class _Counted(MemoryChunks):
    passes = 0

    def map(self, work: Any) -> Any:
        self.passes += 1
        return super().map(work)


@pytest.mark.parametrize("dialect", ["paper", "mergekit"])
@pytest.mark.parametrize("method", METHODS)
def test_the_plan_counts_the_passes_that_a_method_makes(method: str, dialect: Any) -> None:
    base, *tuned = drawn(1 + n_models(method))
    needs = METHOD_RULES[method].base in ("deltas", "end")
    chunks = _Counted(tuned, base if needs else None)
    given = settings(len(tuned), dialect=dialect, select_topk=0.4)
    planned = n_passes(method, given, chunks.shape)
    if method == "ties" and dialect == "paper":
        # A plan measures thresholds over the whole model, in a pass that it counts by itself.
        given = settings(len(tuned), dialect=dialect, thresholds=(0.5,) * len(tuned))
    list(chunks.map(METHODS[method](chunks, given)))
    assert chunks.passes == planned


def test_task_arithmetic_of_a_negated_task_forgets_it() -> None:
    base, tuned = drawn(2)
    forgotten = merged("task_arithmetic", [tuned], base, weight=(-1.0,))
    assert torch.allclose(forgotten, base - (tuned - base), atol=1e-6)


def test_ties_of_the_paper_is_odd_also_where_deltas_cancel() -> None:
    zero = torch.zeros(1, 4)
    deltas = [torch.tensor([[1.0, -2.0, 3.0, -0.5]]), torch.tensor([[-1.0, -1.0, 1.0, -0.5]])]
    given: dict[str, Any] = {"density": (1.0, 1.0), "weight": (1.0, 1.0)}
    there = merged("ties", deltas, zero, **given)
    back = merged("ties", [-delta for delta in deltas], zero, **given)
    assert torch.equal(there, -back)
    # Two negative sums against one positive: where 1 and −1 cancel the negative one is taken.
    assert there.tolist() == [[-1.0, -1.5, 2.0, -0.5]]
    kit = [merged("ties", [sign * d for d in deltas], zero, dialect="mergekit", **given) for sign in (1, -1)]
    assert not torch.equal(kit[0], -kit[1])


def test_ties_keeps_the_asked_share_of_the_largest_changes() -> None:
    base = torch.zeros(20, 10)
    (tuned,) = drawn(1, (20, 10))
    result = merged("ties", [tuned], base, density=(0.3,), weight=(1.0,))
    kept = result != 0
    assert int(kept.sum()) == 60
    assert torch.equal(result[kept], tuned[kept])
    assert float(tuned[kept].abs().min()) > float(tuned[~kept].abs().max())


@pytest.mark.parametrize("method", ["dare_linear", "della_linear"])
def test_random_drops_of_the_paper_keep_the_expectation(method: str) -> None:
    base = torch.zeros(400, 64)
    delta = torch.linspace(0.5, 1.5, 64).expand(400, 64)
    found = merged(method, [delta], base, density=(0.5,), weight=(1.0,))
    dropped = float((found == 0).float().mean())
    assert 0.45 < dropped < 0.55
    low, high = (
        float(found[:, part].mean() / delta[:, part].mean()) for part in (slice(0, 16), slice(48, 64))
    )
    assert low == pytest.approx(1.0, abs=0.06)
    assert high == pytest.approx(1.0, abs=0.06)


def test_della_of_mergekit_favours_large_changes() -> None:
    base = torch.zeros(400, 64)
    delta = torch.linspace(0.5, 1.5, 64).expand(400, 64)
    found = merged("della_linear", [delta], base, density=(0.5,), weight=(1.0,), dialect="mergekit")
    low, high = (
        float(found[:, part].mean() / delta[:, part].mean()) for part in (slice(0, 16), slice(48, 64))
    )
    assert low < 0.8
    assert high > 1.1


def test_dare_of_density_zero_is_the_base_and_of_one_is_task_arithmetic() -> None:
    base, *tuned = drawn(3)
    for dialect in ("paper", "mergekit", "peft"):
        assert torch.equal(merged("dare_linear", tuned, base, density=(0.0, 0.0), dialect=dialect), base)
        full = merged("dare_linear", tuned, base, density=(1.0, 1.0), dialect=dialect)
        assert torch.equal(full, merged("task_arithmetic", tuned, base))


def test_slerp_stays_on_the_sphere_and_is_bounded_where_mergekits_explodes() -> None:
    one, two = drawn(2)
    one, two = one / one.norm(), two / two.norm()
    middle = merged("slerp", [two], one, t=0.5)
    assert float(middle.norm()) == pytest.approx(1.0, abs=1e-5)
    assert torch.allclose(middle, merged("slerp", [two], one, t=0.5, dialect="mergekit"), atol=1e-6)
    angle = math.radians(178.5)
    a = torch.tensor([[1.0, 0.0]])
    b = 2 * torch.tensor([[math.cos(angle), math.sin(angle)]])
    assert float(merged("nuslerp", [a, b], weight=(1.0, 1.0)).norm()) == pytest.approx(1.5, abs=1e-3)
    assert float(merged("nuslerp", [a, b], weight=(1.0, 1.0), dialect="mergekit").norm()) > 30


def test_interpolation_ends_at_its_ends() -> None:
    one, two = drawn(2)
    for dialect in ("paper", "mergekit"):
        assert torch.allclose(merged("slerp", [two], one, t=0.0, dialect=dialect), one, atol=1e-6)
        assert torch.allclose(merged("slerp", [two], one, t=1.0, dialect=dialect), two, atol=1e-6)
        zero = torch.zeros_like(one)
        assert torch.isfinite(merged("slerp", [zero], one, t=0.5, dialect=dialect)).all()


def test_model_stock_keeps_the_base_where_changes_point_apart() -> None:
    base = torch.zeros(1, 2)
    angle = math.acos(-0.9926)
    apart = [torch.tensor([[1.0, 0.0]]), torch.tensor([[math.cos(angle), math.sin(angle)]])]
    assert torch.equal(merged("model_stock", apart, base), base)
    wild = merged("model_stock", apart, base, dialect="mergekit")
    mean = (apart[0] + apart[1]) / 2
    assert float(wild.norm() / mean.norm()) == pytest.approx(267, rel=0.02)
    same = merged("model_stock", [apart[0], apart[0].clone()], base)
    assert torch.allclose(same, apart[0])


def test_karcher_mean_of_two_directions_is_slerp_half_way() -> None:
    one, two = (tensor / tensor.norm() for tensor in drawn(2))
    mean = merged("karcher", [one, two], weight=(1.0, 1.0))
    assert torch.allclose(mean, merged("slerp", [two], one, t=0.5), atol=1e-6)
    assert torch.allclose(merged("karcher", [one, one.clone()], weight=(1.0, 1.0)), one, atol=1e-6)
    assert torch.equal(merged("karcher", [one * 0, two * 0], weight=(1.0, 1.0)), one * 0)


def test_karcher_mean_has_no_tangent_left() -> None:
    units = [tensor / tensor.norm() for tensor in drawn(3)]
    mean = merged("karcher", units, weight=(1.0, 1.0, 1.0))
    tangent = torch.zeros_like(mean)
    for unit in units:
        cosine = float((mean * unit).sum())
        theta = math.acos(cosine)
        tangent += theta / math.sin(theta) * (unit - cosine * mean)
    assert float(tangent.norm()) < 1e-5


def test_sce_takes_the_side_with_more_energy_and_only_what_varies() -> None:
    base = torch.zeros(1, 4)
    tuned = [torch.tensor([[2.0, 1.0, 0.5, 0.0]]), torch.tensor([[-1.0, 1.0, 0.4, 0.0]])]
    result = merged("sce", tuned, base, select_topk=0.5)  # two elements vary: one is selected
    assert result.tolist() == [[2.0, 0.0, 0.0, 0.0]]


def test_weights_that_sum_to_zero_have_no_mean() -> None:
    with pytest.raises(ZeroDivisionError):
        merged("linear", drawn(2), weight=(1.0, -1.0))
    assert torch.isfinite(merged("linear", drawn(2), weight=(1.0, -1.0), normalize=False)).all()


def test_draws_depend_on_position_and_name_alone() -> None:
    seed = stream(17, "model.norm.weight", 0)
    whole = below(seed, 0, torch.Size((101,)), 0.3)
    numbers = uniform(seed, 0, torch.Size((101,)))
    for start in (1, 2, 37):
        assert torch.equal(below(seed, start, torch.Size((64,)), 0.3), whole[start : start + 64])
        assert torch.equal(uniform(seed, start, torch.Size((64,))), numbers[start : start + 64])
    assert not torch.equal(below(stream(17, "other", 0), 0, torch.Size((101,)), 0.3), whole)
    assert not torch.equal(below(stream(17, "model.norm.weight", 1), 0, torch.Size((101,)), 0.3), whole)
    assert seed == 163716591675811237722693859000007231185


def test_a_chunk_hands_out_deltas_in_its_own_memory() -> None:
    base, tuned = drawn(2)
    chunk = Chunk(0, base, [tuned.clone()])
    (delta,) = chunk.deltas()
    assert torch.equal(delta, tuned - base)
    assert delta.data_ptr() == chunk.tensors[0].data_ptr()
