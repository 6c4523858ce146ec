"""Take the measurements of a merge, judge them, and keep them as one record."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from finetune.merge.adapter_plan import MergePlan
from finetune.merge.base_weights import DequantisedWeights, StoredWeights, quantized_parameters
from finetune.merge.execute import Begin, Changes
from finetune.merge.proof import (
    FP32_TOLERANCE,
    NOISE_FACTOR,
    Probe,
    check_gate,
    continue_greedily,
    distance,
    greedy_agreement,
    logits_at,
)
from finetune.merge.reference import Models
from finetune.model.load import model_skeleton
from finetune.recipe.schema import ModelSection

DELTA_LOSS_LIMIT = 0.1
"""Above this share of the tuning lost to rounding, saving in fp32 is advised."""


@dataclass(slots=True)
class MergeProof:
    """What was compared and measured. KL values are means over positions, in nats, KL(reference ‖ merged).

    `max_logit_difference` and `mean_kl` compare base plus adapter with the merged files, both computing in the written
    type; `noise_floor_kl` is what bf16 alone does to base plus adapter, None for fp32; `weights_kl` computes both sides
    in fp32, so that only the rounding of the written weights is left; `effect_kl` is base against base plus adapter.
    `drift` (quantized training only): KL from the model that was trained, for both bases one can merge onto.
    `delta_lost` is the share of the weight change that the written type rounds away, by norm; `unmoved_share` the share
    of changed weights that kept the base's value.
    """

    dtype: str
    kind: str
    base: str
    base_digest: str
    adapter_sha256: str
    quantize: str
    onto: str
    n_prompts: int
    n_positions: int
    max_logit_difference: float
    mean_kl: float
    noise_floor_kl: float | None
    weights_kl: float
    effect_kl: float
    greedy_tokens: int
    greedy_identical: int
    drift: dict[str, float] = field(default_factory=dict)
    n_decoded_layers: int = 0
    n_tensors: int = 0
    n_targets: int = 0
    n_targets_changed: int = 0
    untied: bool = False
    n_bytes: int = 0
    delta_lost: float = 0.0
    unmoved_share: float = 0.0
    hints: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def add_changes(self, changes: Changes, plan: MergePlan) -> None:
        """Complete the record with what was seen while writing."""
        self.n_tensors, self.n_targets = len(plan.tensors), len(plan.targets)
        self.n_targets_changed, self.untied, self.n_bytes = changes.n_changed, plan.untied, plan.n_bytes
        self.delta_lost, self.unmoved_share = changes.delta_lost, changes.unmoved_share
        if self.dtype == "bf16" and self.delta_lost > DELTA_LOSS_LIMIT:
            self.hints.append(
                f"bf16 rounds away {self.delta_lost:.0%} of the weight change ({self.unmoved_share:.0%} of the changed "
                "weights kept the base's value); --dtype fp32 keeps it"
            )
        if self.n_targets_changed < self.n_targets:
            self.hints.append(
                f"{self.n_targets - self.n_targets_changed} of {self.n_targets} adapted tensors equal the base's"
            )

    def in_words(self) -> list[str]:
        """For the last screen: whether the merge is good, and by what that is known. Figures stand in `facts`."""
        how = f"After the same {self.n_prompts} prompts both would say the same next token in {_of(self.greedy_identical, self.greedy_tokens)} places"
        lines = [
            f"The merge is {self._judged()}: it answers like {self.base} with its adapter ({self.kind}).",
            f"  {how}.",
        ]
        share = self.mean_kl / self.effect_kl if self.effect_kl > 0 else 0.0
        if self.noise_floor_kl is None:
            lines.append(
                f"  Scores of tokens differ by at most {self.max_logit_difference:.0e} ({FP32_TOLERANCE:.0e} is permitted)."
            )
        else:
            times = self.mean_kl / self.noise_floor_kl if self.noise_floor_kl > 0 else 0.0
            lines.append(
                f"  What still differs is {_percent(share)} of what the tuning changed: {times:.1f} times what computing in "
                f"bf16 does by itself ({NOISE_FACTOR:g} times is permitted)."
            )
        lines.append(
            f"  {_percent(1 - self.delta_lost)} of the change of the weights is kept in {self.dtype}."
        )
        if self.drift:
            lines += self._drift_in_words()
        return lines

    def _judged(self) -> str:
        if self.onto == "original" and self.quantize != "none":
            return "as asked, on the original base, which is not the one it was trained on"
        return "good, with a reservation below" if self.hints else "good"

    def _drift_in_words(self) -> list[str]:
        """How far both possible merges of a quantized training are from what was trained, as shares of the tuning."""
        bases = {
            "dequantised": f"the base as its {self.quantize} codes decode",
            "original": "the original base",
        }
        told = [
            f"{'merged' if name == self.onto else 'it would be, merged'} onto {bases[name]}, "
            f"{_percent(drift / self.effect_kl if self.effect_kl > 0 else 0.0)} (KL {drift:.1e})"
            for name, drift in sorted(self.drift.items(), key=lambda entry: entry[0] != self.onto)
        ]
        return [
            f"  The adapter was trained on {self.quantize} weights. Distance to that model, beside the tuning's own effect: "
            f"{'; '.join(told)}."
        ]

    def facts(self) -> dict[str, str]:
        """The figures, for the model card."""
        facts = {
            "Base": f"{self.base} (content {self.base_digest[:12]})",
            "Adapter": f"{self.kind} (weights {self.adapter_sha256[:12]})",
            "Weights": f"{self.dtype}, {self.n_targets_changed} of {self.n_tensors} tensors changed",
            "Largest logit difference": f"{self.max_logit_difference:.2e}",
            "Mean KL": f"{self.mean_kl:.2e}",
        }
        if self.noise_floor_kl is None:
            facts["Largest logit difference"] += f" (at most {FP32_TOLERANCE:.0e})"
        else:
            facts["Mean KL"] += (
                f" (at most {NOISE_FACTOR:g} × {self.noise_floor_kl:.2e}, the noise of bf16 itself)"
            )
            facts["Mean KL of the rounded weights"] = f"{self.weights_kl:.2e}"
        facts["Mean KL of the tuning"] = f"{self.effect_kl:.2e}"
        facts["Identical greedy tokens"] = f"{self.greedy_identical} of {self.greedy_tokens}"
        facts["Weight change kept"] = f"{1 - self.delta_lost:.1%}"
        if self.drift:
            facts["Trained on"] = f"{self.quantize} weights, merged onto the {self.onto} base"
            for onto, drift in self.drift.items():
                facts[f"KL from the trained model, {onto} base"] = f"{drift:.2e}"
        return facts


def _percent(share: float) -> str:
    """Never '100 %' or '0 %' of what is not all or nothing."""
    if 0.9995 <= share < 1:
        return "more than 99.9 %"
    return "less than 0.1 %" if 0 < share < 0.001 else f"{share:.1%}".replace("%", " %").replace(".0 %", " %")


def _of(part: int, whole: int) -> str:
    return f"all {whole}" if part == whole else f"{part} of {whole}"


def measure(
    models: Models,
    folder: Path,
    probe: Probe,
    stored: StoredWeights,
    base: StoredWeights,
    *,
    dtype: str,
    quantization: ModelSection | None,
    onto: str,
    progress: Begin,
) -> MergeProof:
    """Compare, judge, and return the record; UserError when the merged model is not the adapter model.

    `base` are the weights merged onto, `stored` those on disk; they differ after quantized training.
    """
    against_codes = quantization is not None and onto == "dequantised"
    advance = progress("comparing", 3 + 2 * (dtype == "bf16") + 2 * (quantization is not None), "models")
    if against_codes:
        assert quantization is not None
        answers = _answers_of_quantized(models, stored, quantization, probe, dtype)
    else:
        answers = _answers_of_adapter(models, base, probe, dtype)
    advance(1 + (dtype == "bf16"))
    merged = _ask(models.merged(folder, dtype), answers)
    advance(1)
    compared = distance(answers.own, merged)
    tolerance = 2 * FP32_TOLERANCE if dtype == "fp32" else 0.0
    identical, n_greedy = greedy_agreement(answers.own, merged, probe.n_new, tolerance)
    noise = distance(answers.fp32, answers.own).mean_kl if dtype == "bf16" else None
    check_gate(dtype=dtype, merged=compared, noise_kl=noise, identical=identical, n_greedy=n_greedy)
    n_positions = merged.shape[0] * merged.shape[1]
    answers.own = answers.fp32  # a set of logits is large: none is kept longer than needed
    if dtype == "bf16":
        del merged
        merged = _ask(models.merged(folder, "fp32"), answers)
        advance(1)
    effect = distance(answers.fp32, _ask_base(models, base, answers))
    advance(1)
    proof = MergeProof(
        **_identity(models, dtype, quantization, onto),
        n_prompts=probe.prompts.shape[0],
        n_positions=n_positions,
        max_logit_difference=compared.max_difference,
        mean_kl=compared.mean_kl,
        noise_floor_kl=noise,
        weights_kl=distance(answers.fp32, merged).mean_kl,
        effect_kl=effect.mean_kl,
        greedy_tokens=n_greedy,
        greedy_identical=identical,
        n_decoded_layers=answers.n_decoded_layers,
    )
    if quantization is not None:
        proof.drift = _drift(models, stored, quantization, probe, answers, merged, onto)
        advance(2)
    return proof


def _identity(models: Models, dtype: str, quantization: ModelSection | None, onto: str) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "kind": models.adapter.kind,
        "base": models.source.id,
        "base_digest": models.source.digest,
        "adapter_sha256": models.adapter.sha256,
        "quantize": quantization.quantize if quantization else "none",
        "onto": onto if quantization else "original",
    }


@dataclass(slots=True)
class _Answers:
    """The reference's continuation and logits: in fp32, and in the written type (`own`, the same for fp32)."""

    sequence: torch.Tensor
    keep: torch.Tensor
    fp32: torch.Tensor
    own: torch.Tensor
    n_decoded_layers: int = 0


def _ask(opened: AbstractContextManager[Any], answers: _Answers) -> torch.Tensor:
    """Logits of one model on the reference's sequence. A function of its own, so that the model is gone afterwards."""
    with opened as model:
        return logits_at(model, answers.sequence, answers.keep)


def _ask_base(models: Models, base: StoredWeights, answers: _Answers) -> torch.Tensor:
    """The base's logits; tokens that the adapter brought, and the continuation may hold, are the base's last one to it."""
    rows = models.layout.shapes[f"{models.layout.input_embedding}.weight"][0]
    with models.plain_base(base, "fp32") as model:
        return logits_at(model, answers.sequence.clamp(max=rows - 1), answers.keep)


def _answers_of_adapter(models: Models, base: StoredWeights, probe: Probe, dtype: str) -> _Answers:
    answers = _continued(models, base, probe)
    if dtype == "bf16":
        answers.own = _ask(models.with_adapter(base, "bf16"), answers)
    return answers


def _continued(models: Models, base: StoredWeights, probe: Probe) -> _Answers:
    with models.with_adapter(base, "fp32") as model:
        sequence, keep = continue_greedily(model, probe), _keep(probe, models)
        fp32 = logits_at(model, sequence, keep)
    return _Answers(sequence, keep, fp32, fp32)


def _answers_of_quantized(
    models: Models, stored: StoredWeights, section: ModelSection, probe: Probe, dtype: str
) -> _Answers:
    with models.quantized(section) as quantized:
        n_layers = quantized.check_decoded(stored, section)
        model = quantized.compute_in(torch.float32)
        sequence = continue_greedily(model, probe)
        keep = _keep(probe, models)
        fp32 = logits_at(model, sequence, keep)
        if dtype == "fp32":
            return _Answers(sequence, keep, fp32, fp32, n_layers)
        own = logits_at(quantized.compute_in(torch.bfloat16), sequence, keep)
        return _Answers(sequence, keep, fp32, own, n_layers)


def _drift(
    models: Models,
    stored: StoredWeights,
    section: ModelSection,
    probe: Probe,
    answers: _Answers,
    merged: torch.Tensor,
    onto: str,
) -> dict[str, float]:
    """KL from the trained model: of what was written, and of the adapter on the other base, all computed in fp32."""
    if onto == "dequantised" and models.needs_codes:
        return {"dequantised": distance(answers.fp32, merged).mean_kl}
    if onto == "dequantised":
        other = _ask(models.with_adapter(stored, "fp32"), answers)
        found = {"dequantised": merged, "original": other}
        return {name: distance(answers.fp32, logits).mean_kl for name, logits in found.items()}
    trained = _trained(models, section, answers)
    decoded = DequantisedWeights(
        stored.files, stored.layout, section, quantized_parameters(model_skeleton(models.source), section)
    )
    found = {"dequantised": _ask(models.with_adapter(decoded, "fp32"), answers), "original": merged}
    return {name: distance(trained, logits).mean_kl for name, logits in found.items()}


def _trained(models: Models, section: ModelSection, answers: _Answers) -> torch.Tensor:
    with models.quantized(section) as quantized:
        return logits_at(quantized.compute_in(torch.float32), answers.sequence, answers.keep)


def _keep(probe: Probe, models: Models) -> torch.Tensor:
    layout = models.layout
    rows = models.plan.n_vocabulary or layout.shapes[f"{layout.input_embedding}.weight"][0]
    return probe.keep(rows)
