"""Several adapters into one: exact sums, ranks, TIES and DARE on true deltas, and what has no sum."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.errors import UserError
from finetune.merge.adapter import merge_adapter
from finetune.merge.combine import combine_adapters
from finetune.merge.low_rank import Factors, concatenate, truncate, truncate_factors
from finetune.merge.sparse import drop_and_rescale, ties, trim
from finetune.model.source import resolve_model


def deltas_of(model: Any) -> dict[str, torch.Tensor]:
    """Module -> s·BA of a PeftModel's layers, by PEFT."""
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "get_delta_weight")
    }


def loaded(pair: Any, adapter: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pair.base), adapter).eval()


@pytest.fixture
def two(make_pair: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Two adapters of one base; options for each."""

    def build(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None) -> list[Any]:
        return [make_pair("one", seed=1, **(first or {})), make_pair("two", seed=2, **(second or {}))]

    return build


def combine(pairs: list[Any], out: Path, **options: Any) -> Any:
    return combine_adapters(
        resolve_model(str(pairs[0].base)), [pair.adapter for pair in pairs], out, **options
    )


OTHER_RANK = {"r": 6, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}


def test_a_sum_is_exact_whatever_rank_scale_and_targets_the_parts_have(tmp_path: Path, two: Any) -> None:
    pairs = two({}, OTHER_RANK)
    done = combine(pairs, tmp_path / "out", weights=[0.6, 0.4])
    one, other = (deltas_of(pair.model) for pair in pairs)
    found = deltas_of(loaded(pairs[0], tmp_path / "out"))
    assert found.keys() == one.keys() | other.keys()
    for module, delta in found.items():
        wanted = 0.6 * one.get(module, torch.zeros(1)) + 0.4 * other.get(module, torch.zeros(1))
        torch.testing.assert_close(delta, wanted, rtol=1e-4, atol=1e-6)
    assert (done.rank, done.error, done.n_modules) == (10, 0.0, 6)


def test_a_single_weight_of_one_is_the_identity_for_rslora(tmp_path: Path, two: Any) -> None:
    pairs = two({"use_rslora": True}, {})
    combine(pairs, tmp_path / "out", weights=[1.0, 0.0])
    wanted, found = deltas_of(pairs[0].model), deltas_of(loaded(pairs[0], tmp_path / "out"))
    for module, delta in found.items():
        torch.testing.assert_close(delta, wanted[module], rtol=1e-4, atol=1e-6)


def test_a_combination_merges_into_its_base_and_is_proven(
    tmp_path: Path, two: Any, logits_of: Callable[..., torch.Tensor]
) -> None:
    pairs = two({}, OTHER_RANK)
    combine(pairs, tmp_path / "sum")
    merge_adapter(resolve_model(str(pairs[0].base)), tmp_path / "sum", tmp_path / "out", dtype="fp32")
    difference = logits_of(tmp_path / "out") - logits_of(loaded(pairs[0], tmp_path / "sum"))
    assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("rank", [4, 8])
def test_a_truncated_sum_prints_the_error_that_it_has(rank: int, tmp_path: Path, two: Any) -> None:
    pairs = two()
    done = combine(pairs, tmp_path / "out", weights=[0.6, 0.4], method="svd", rank=rank)
    one, other = (deltas_of(pair.model) for pair in pairs)
    found = deltas_of(loaded(pairs[0], tmp_path / "out"))
    wanted = {module: 0.6 * one[module] + 0.4 * other[module] for module in one}
    error = sum(float((found[m] - wanted[m]).square().sum()) for m in wanted)
    total = sum(float(delta.square().sum()) for delta in wanted.values())
    assert done.error == pytest.approx((error / total) ** 0.5, abs=1e-4)
    assert (done.error < 1e-6) == (rank == 8)


def test_an_exact_sum_of_dora_is_refused(tmp_path: Path, two: Any) -> None:
    """Two DoRA adapters that are active at once give neither their sum nor what merging one by one gives."""
    pairs = two(
        {"use_dora": True, "target_modules": ["q_proj"]}, {"use_dora": True, "target_modules": ["q_proj"]}
    )
    with pytest.raises(UserError, match="exact sum of DoRA adapters does not exist"):
        combine(pairs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_dora_is_converted_through_its_true_delta(tmp_path: Path, two: Any) -> None:
    pairs = two({"use_dora": True}, {})
    done = combine(pairs, tmp_path / "out", weights=[1.0, 0.0], method="svd", rank=64)
    merged = pairs[0].model.merge_and_unload().state_dict()
    base = load_file(pairs[0].base / "model.safetensors")
    for module, delta in deltas_of(loaded(pairs[1], tmp_path / "out")).items():
        wanted = merged[f"{module}.weight"] - base[f"{module}.weight"]
        torch.testing.assert_close(delta, wanted, rtol=1e-3, atol=1e-5)
    assert done.error < 1e-6


def test_ties_acts_on_the_deltas_and_not_on_their_factors(tmp_path: Path, two: Any) -> None:
    pairs = two()
    combine(pairs, tmp_path / "out", weights=[0.5, 0.5], method="ties", rank=64, density=0.3)
    one, other = (deltas_of(pair.model) for pair in pairs)
    for module, delta in deltas_of(loaded(pairs[0], tmp_path / "out")).items():
        wanted = ties(torch.stack([one[module], other[module]]), torch.tensor([0.5, 0.5]), 0.3)
        torch.testing.assert_close(delta, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["dare", "dare_ties"])
def test_dare_is_reproducible_and_independent_of_the_order(method: str, tmp_path: Path, two: Any) -> None:
    pairs = two()
    options: dict[str, Any] = {"method": method, "rank": 16, "density": 0.5}
    combine(pairs, tmp_path / "a", weights=[0.7, 0.3], seed=3, **options)
    combine(pairs[::-1], tmp_path / "b", weights=[0.3, 0.7], seed=3, **options)
    combine(pairs, tmp_path / "c", weights=[0.7, 0.3], seed=4, **options)
    a, b, c = (deltas_of(loaded(pairs[0], tmp_path / name)) for name in "abc")
    for module, delta in a.items():
        torch.testing.assert_close(delta, b[module], rtol=1e-3, atol=1e-6)
        assert not torch.allclose(delta, c[module], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"weights": [1.0]}, "1 weights for 2 adapters"),
        ({"weights": [0.0, 0.0]}, "combine to nothing"),
        ({"weights": [1.0, float("nan")]}, "combine to nothing"),
        ({"method": "svd"}, "svd needs a rank"),
        ({"rank": 4}, "exact sum has the sum of the ranks"),
        ({"method": "ties", "rank": 4, "density": 0.0}, "density of 0"),
        ({"method": "mean"}, "unknown method 'mean'"),
    ],
)
def test_requests_that_mean_nothing(options: dict[str, Any], expected: str, tmp_path: Path, two: Any) -> None:
    with pytest.raises(UserError, match=expected):
        combine(two(), tmp_path / "out", **options)


def test_adapters_that_carry_more_than_differences(tmp_path: Path, two: Any) -> None:
    with pytest.raises(UserError, match="carries 1 trained modules"):
        combine(two({"modules_to_save": ["lm_head"]}), tmp_path / "out")


def test_an_adapter_of_another_base(tmp_path: Path, two: Any, make_tiny_model: Any) -> None:
    with pytest.raises(UserError, match="2 of its 6 modules do not exist here"):
        combine(two({}, {"model": make_tiny_model(layers=3)}), tmp_path / "out")


def test_ranks_that_differ_by_layer_survive_a_round_trip(tmp_path: Path, two: Any) -> None:
    pairs = two({}, {"target_modules": ["layers.1.self_attn.q_proj"]})
    combine(pairs, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_bytes())
    assert config["r"] == 4
    assert config["rank_pattern"] == {"model.layers.1.self_attn.q_proj": 8}
    assert len(deltas_of(loaded(pairs[0], tmp_path / "out"))) == 4


def random_factors(rank: int, seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    return Factors(torch.randn(rank, 9, generator=generator), torch.randn(12, rank, generator=generator))


def test_truncation_is_the_best_and_both_ways_agree() -> None:
    both = concatenate([random_factors(2, 0), random_factors(3, 1)], [0.6, 0.4])
    delta = both.b @ both.a
    dense, thin = truncate(delta, 3), truncate_factors(both, 3)
    torch.testing.assert_close(dense.singular_values[:5], thin.singular_values, rtol=1e-6, atol=1e-9)
    for found in (dense, thin):
        product = found.factors.b @ found.factors.a
        assert float((product - delta).square().sum()) == pytest.approx(found.error_squares, rel=1e-4)
        assert found.total_squares == pytest.approx(float(delta.square().sum()), rel=1e-5)
    exact = truncate_factors(both, 5)
    assert exact.error_squares == pytest.approx(0, abs=1e-9)


def test_ties_elects_by_weighted_sums_and_is_odd() -> None:
    deltas = torch.tensor([[1.0, 1.0], [-1.0, -2.0], [0.0, 3.0]])
    weights = torch.tensor([0.2, 1.0, 1.0])
    merged = ties(deltas, weights, 1.0)
    # Element 0: sum 0.2 − 1 < 0, only −1 agrees. Element 1: sum 1.2 > 0, 1 and 3 agree: (0.2 + 3)/1.2. Times 2.2.
    torch.testing.assert_close(merged, torch.tensor([-2.2, 3.2 / 1.2 * 2.2]))
    torch.testing.assert_close(ties(-deltas, weights, 1.0), -merged)
    torch.testing.assert_close(ties(deltas[1:2], torch.tensor([0.3]), 1.0), 0.3 * deltas[1])


def test_a_zero_sum_takes_the_majority_sign_of_the_tensor() -> None:
    deltas = torch.tensor([[1.0, -2.0, -2.0], [-1.0, -1.0, -1.0]])
    merged = ties(deltas, torch.tensor([0.5, 0.5]), 1.0)
    torch.testing.assert_close(merged, torch.tensor([-1.0, -1.5, -1.5]))
    torch.testing.assert_close(ties(-deltas, torch.tensor([0.5, 0.5]), 1.0), -merged)


@pytest.mark.parametrize(
    ("density", "kept"), [(0.5, {3.0, -4.0}), (1.0, {1.0, -2.0, 3.0, -4.0}), (0.1, set())]
)
def test_trimming_keeps_the_largest_magnitudes(density: float, kept: set[float]) -> None:
    trimmed = trim(torch.tensor([1.0, -2.0, 3.0, -4.0]), density)
    assert set(trimmed[trimmed != 0].tolist()) == kept


def test_dropping_keeps_the_expectation() -> None:
    delta = torch.full((200, 200), 2.0)
    dropped = drop_and_rescale(delta, 0.25, torch.Generator().manual_seed(0))
    assert set(dropped.unique().tolist()) == {0.0, 8.0}
    assert float(dropped.mean()) == pytest.approx(2.0, rel=0.05)
    assert torch.equal(drop_and_rescale(delta, 1.0, torch.Generator()), delta)
