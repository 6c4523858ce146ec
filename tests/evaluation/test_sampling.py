"""Sampled tokens follow the model's distribution, and an answer's numbers belong to it alone."""

from __future__ import annotations

import pytest
import torch

from finetune.evaluation.sampling import Sampler, greedy, server_seed, stream_name


def _counts(sampler: Sampler, logits: torch.Tensor, n: int) -> torch.Tensor:
    drawn = sampler(logits.expand(n, -1), range(n))
    return torch.bincount(torch.tensor(drawn), minlength=logits.shape[-1]) / n


def test_frequencies_are_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5])
    n = 20_000
    for temperature in (0.5, 1.0, 2.0):
        found = _counts(Sampler([str(index) for index in range(n)], temperature=temperature), logits, n)
        expected = torch.softmax(logits / temperature, dim=-1)
        assert (found - expected).abs().max() < 4 * 0.5 / n**0.5


def test_top_p_keeps_the_fewest_tokens_that_hold_it() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.15, 0.3, 0.05]))
    n = 20_000
    found = _counts(Sampler([str(index) for index in range(n)], temperature=1.0, top_p=0.75), logits, n)
    expected = torch.tensor([0.0, 0.4, 0.15, 0.3, 0.0]) / 0.85
    assert found[0] == found[4] == 0.0
    assert (found - expected).abs().max() < 4 * 0.5 / n**0.5
    tiny = Sampler([str(index) for index in range(50)], temperature=1.0, top_p=1e-9)
    assert tiny(logits.expand(50, -1), range(50)) == [1] * 50


def test_a_wide_nucleus_is_found_beyond_the_first_look() -> None:
    """A flat distribution over 3,000 tokens: half of its mass needs 1,500 of them."""
    generator = torch.Generator().manual_seed(0)
    logits = 0.01 * torch.randn(3000, generator=generator)
    n = 4000
    found = _counts(Sampler([str(index) for index in range(n)], temperature=1.0, top_p=0.5), logits, n)
    order = logits.argsort(descending=True)
    kept = int((torch.softmax(logits, -1)[order].cumsum(0) < 0.5).sum()) + 1
    assert 1400 < kept < 1500
    assert found[order[kept:]].sum() == 0.0
    assert (found[order[:kept]] > 0).sum() > 1000


def test_a_row_draws_its_own_numbers_wherever_it_stands() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 40, generator=generator)
    names = [stream_name(17, f"item-{index}", 0) for index in range(6)]
    together = Sampler(names, temperature=1.0, top_p=0.9)
    steps = [together(logits, range(6)) for _ in range(5)]
    for row in range(6):
        alone = Sampler(names, temperature=1.0, top_p=0.9)
        assert [alone(logits[row : row + 1], [row])[0] for _ in range(5)] == [step[row] for step in steps]
    turned = Sampler(names, temperature=1.0, top_p=0.9)
    assert turned(logits.flip(0), [5, 4, 3, 2, 1, 0]) == steps[0][::-1]


def test_seed_item_and_repeat_each_change_the_stream() -> None:
    names = {stream_name(seed, item, repeat) for seed in (1, 2) for item in ("a", "b") for repeat in (0, 1)}
    assert len(names) == 8
    assert len({server_seed(name) for name in names}) == 8
    assert all(0 <= server_seed(name) < 2**31 for name in names)


def test_a_certain_token_is_always_drawn_and_greedy_takes_the_likeliest() -> None:
    logits = torch.full((64, 10), float("-inf"))
    logits[:, 7] = 0.0
    assert Sampler([str(row) for row in range(64)], temperature=1.3)(logits, range(64)) == [7] * 64
    assert greedy(torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]]), [0, 1]) == [1, 0]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, 1.5)])
def test_settings_out_of_range_are_refused(temperature: float, top_p: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        Sampler(["a"], temperature=temperature, top_p=top_p)
