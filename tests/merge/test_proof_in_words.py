"""The last screen of a merge: its verdict, in words, follows from the figures."""

from __future__ import annotations

from typing import Any

from finetune.merge.measure import MergeProof


def proof(**given: Any) -> MergeProof:
    figures: dict[str, Any] = {
        "dtype": "bf16", "kind": "DoRA", "base": "owner/base", "base_digest": "b" * 64, "adapter_sha256": "a" * 64,
        "quantize": "none", "onto": "original", "n_prompts": 6, "n_positions": 36, "max_logit_difference": 0.03,
        "mean_kl": 2e-3, "noise_floor_kl": 1e-3, "weights_kl": 1e-5, "effect_kl": 0.5, "greedy_tokens": 48,
        "greedy_identical": 47, "delta_lost": 0.25,
    }  # fmt: skip
    return MergeProof(**(figures | given))


def test_a_bf16_merge_is_measured_by_the_noise_of_bf16_and_by_the_tuning() -> None:
    text = "\n".join(proof().in_words())
    assert text.startswith("The merge is good: it answers like owner/base with its adapter (DoRA).")
    assert "47 of 48 places" in text
    assert "0.4 % of what the tuning changed: 2.0 times what computing in bf16 does by itself" in text
    assert "75 % of the change of the weights is kept in bf16" in text


def test_an_fp32_merge_has_no_noise_to_be_measured_by() -> None:
    text = "\n".join(
        proof(dtype="fp32", noise_floor_kl=None, greedy_identical=48, delta_lost=1e-7).in_words()
    )
    assert "all 48 places" in text
    assert "by at most 3e-02 (1e-04 is permitted)" in text
    assert "more than 99.9 % of the change of the weights is kept in fp32" in text


def test_a_hint_is_a_reservation() -> None:
    assert "good, with a reservation below" in proof(hints=["bf16 rounds away 25%"]).in_words()[0]


def test_on_another_base_than_the_trained_one_it_is_not_simply_good() -> None:
    drift = {"dequantised": 1e-8, "original": 0.05}
    onto_codes = proof(quantize="nf4", onto="dequantised", drift=drift).in_words()
    assert onto_codes[0].startswith("The merge is good:")
    assert (
        "less than 0.1 % (KL 1.0e-08); it would be, merged onto the original base, 10 % (KL 5.0e-02)"
        in onto_codes[-1]
    )
    onto_original = proof(quantize="nf4", drift=drift).in_words()
    assert "not the one it was trained on" in onto_original[0]
    assert "merged onto the original base, 10 %" in onto_original[-1]
