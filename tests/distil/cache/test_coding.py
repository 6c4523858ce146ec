"""What is kept of a teacher's top k: exact ids, the size that the formula says, and a stated rounding."""

from __future__ import annotations

import pytest
import torch

from finetune.distil.cache.coding import Coding, from_tensors, keep_top_k, temperatures_of, to_tensors
from finetune.distil.cache.measure import covered_mass, read_back
from finetune.distil.cache.write import coding_of
from finetune.distil.losses import divergence
from finetune.distil.targets import TeacherTargets
from finetune.errors import UserError


def logits(n: int, v: int, scale: float = 4.0) -> torch.Tensor:
    return scale * torch.randn(n, v, generator=torch.Generator().manual_seed(v))


# k 1, 64 and V; vocabularies of one page of ids, at its edge, of several, and of so many ids that they take 32 bits
SIZES = [
    (259, 8),
    (259, 259),
    (65_536, 64),
    (65_537, 2),
    (131_073, 1),
    (151_936, 64),
    (262_145, 64),
    (70_000, 70_000),
]


@pytest.mark.parametrize(("vocabulary", "k"), SIZES)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_what_is_read_is_what_was_kept(vocabulary: int, k: int, dtype: str) -> None:
    coding = coding_of(k=k, vocabulary=vocabulary, dtype=dtype, temperatures=(1.0, 2.0))
    values = logits(3, vocabulary)
    values[0, vocabulary - 1] = 100.0  # the first of its row lies in the last page
    top = keep_top_k(values, coding)
    tensors = to_tensors(top, coding)
    assert sum(one.numel() * one.element_size() for one in tensors.values()) == 3 * coding.bytes_per_target
    again = from_tensors(tensors, coding)
    assert torch.equal(again.ids, top.ids) and torch.equal(again.gaps, top.gaps)
    assert torch.equal(again.logsumexp, top.logsumexp)
    assert torch.equal(again.ids.sort(dim=1)[0], values.topk(k, dim=1)[1].sort(dim=1)[0])


def test_ids_of_a_vocabulary_of_several_pages_take_32_bits_where_their_code_would_be_large() -> None:
    assert coding_of(k=4096, vocabulary=70_000).wide_ids is False
    many = Coding(150_000, 400_000, "fp16", (1.0,))
    assert many.wide_ids and many.parts()["ids"] == 4 * 150_000 and many.code_bytes == 0
    small = Coding(k=400, vocabulary=8 * 65_536, dtype="fp16", temperatures=(1.0,))
    assert small.wide_ids
    top = keep_top_k(logits(2, small.vocabulary), small)
    assert torch.equal(from_tensors(to_tensors(top, small), small).ids, top.ids)


@pytest.mark.parametrize(
    ("vocabulary", "n_temperatures", "n_bytes"),
    [(49_152, 1, 258), (49_152, 2, 262), (128_256, 1, 259), (151_936, 1, 260)],
)
def test_bytes_of_a_target_at_k_64(vocabulary: int, n_temperatures: int, n_bytes: int) -> None:
    coding = coding_of(k=64, vocabulary=vocabulary, temperatures=[1.0, 2.0][:n_temperatures])
    assert coding.bytes_per_target == n_bytes
    assert coding.formula().startswith("64 ids x 2") and coding.formula().endswith(f"= {n_bytes} bytes")


def test_the_error_of_fp16_is_what_the_docstring_says() -> None:
    coding = coding_of(k=64, vocabulary=500)
    values = logits(200, 500)
    top = keep_top_k(values, coding)
    true = torch.softmax(values.double(), dim=1).gather(1, top.ids)
    found = (top.gaps.double() - top.logsumexp.double()).exp()
    relative = (found / true - 1.0).abs()
    distance = (true[:, :1] / true).log()
    # The logit's own rounding, that of the fp32 normaliser, and that of the sum of all of them (near the largest p: none).
    assert bool((relative <= 1.01 * distance * 2.0**-11 + 3e-4).all())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_losses_from_the_cache_are_those_of_the_exact_top_k(temperature: float, dtype: str) -> None:
    p, q = logits(40, 300, 2.0).double(), logits(40, 301, 2.0).double()[:, :300]
    coding = coding_of(k=16, vocabulary=300, dtype=dtype, temperatures=[temperature])
    kept, ids = p.topk(16, dim=1)
    exact = TeacherTargets.top_k(ids, kept, torch.logsumexp(p / temperature, dim=1))
    read = read_back(keep_top_k(p, coding), coding, temperature)
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        wanted = divergence(kind, q, exact, temperature=temperature)
        found = divergence(kind, q, read, temperature=temperature)
        assert torch.allclose(found, wanted, rtol=3e-3 if dtype == "fp16" else 1e-4, atol=1e-5)


def test_a_teacher_that_is_sure_keeps_the_mass_of_its_tail() -> None:
    """Rounding of the top must not swallow a tail of 0.001 %."""
    values = torch.full((1, 2000), -17.0)
    values[0, :2] = torch.tensor([0.0, -0.4])
    values[0, 2:6] = torch.tensor([-9.1, -9.3, -9.7, -9.9])
    coding = coding_of(k=3, vocabulary=2000, temperatures=[1.0])
    top = keep_top_k(values, coding)
    tail = 1.0 - float(covered_mass(top, coding, 1.0))
    true = 1.0 - float(torch.softmax(values.double(), dim=1).topk(3, dim=1)[0].sum())
    assert true == pytest.approx(1.9e-4, rel=0.2) and tail == pytest.approx(true, rel=1e-2)


def test_the_tail_at_another_temperature_is_its_own() -> None:
    values = logits(4, 5000, 2.0)
    coding = coding_of(k=8, vocabulary=5000, temperatures=[2.0, 1.0, 2.0])
    assert coding.temperatures == (1.0, 2.0) == temperatures_of([2, 1])
    top = keep_top_k(values, coding)
    for temperature in coding.temperatures:
        true = torch.softmax(values.double() / temperature, dim=1).gather(1, top.ids).sum(dim=1)
        assert torch.allclose(covered_mass(top, coding, temperature), true, atol=1e-3)


def test_filler_of_minus_infinity_has_no_mass() -> None:
    values = torch.tensor([[1.0, 0.0, -torch.inf, -torch.inf]])
    coding = coding_of(k=3, vocabulary=4, temperatures=[1.0])
    top = from_tensors(to_tensors(keep_top_k(values, coding), coding), coding)
    assert sorted(top.ids[0, :2].tolist()) == [0, 1]
    assert float(covered_mass(top, coding, 1.0)) == pytest.approx(1.0)
    assert bool(torch.isfinite(top.gaps).all()) and bool(torch.isfinite(top.logsumexp).all())


@pytest.mark.parametrize("k", [0, 260])
def test_a_k_that_the_vocabulary_does_not_have_is_refused(k: int) -> None:
    with pytest.raises(
        UserError, match=f"k = {k}, but teacher and student share a vocabulary of 259"
    ) as told:
        coding_of(k=k, vocabulary=259)
    assert told.value.faults[0].where == "distil.cache.k" and "at most 259" in told.value.faults[0].fix


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype int8"):
        coding_of(k=1, vocabulary=2, dtype="int8")
    for temperatures in ([], [0.0]):
        with pytest.raises(ValueError, match="temperatures"):
            coding_of(k=1, vocabulary=2, temperatures=temperatures)
