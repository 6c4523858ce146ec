"""The learning rate against what is usual for the method, the trained part and the size of the model."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.doctor.finding import Finding, ok, skipped, warning
from finetune.recipe.schema import Recipe
from finetune.units import format_count

_SMALL, _MEDIUM = 1_000_000_000, 14_000_000_000
# Optimizers whose step has Adam's size: about the rate itself, whatever the gradient.
_ADAM_LIKE = ("adam", "ademamix", "soap", "schedule_free_adamw", "muon")


@dataclass(frozen=True, slots=True)
class UsualRate:
    """Peak rates that are in use. `source` says where they come from."""

    low: float
    high: float
    source: str


def _by_size(
    n_parameters: int, small: tuple[float, float], medium: tuple[float, float], large: tuple[float, float]
) -> tuple[float, float]:
    if n_parameters <= _SMALL:
        return small
    return medium if n_parameters <= _MEDIUM else large


def usual_rate(method: str, kind: str, n_parameters: int) -> UsualRate:
    """The usual range for a method (`train.method`), a kind of adapter and a number of parameters of the base.

    A low-rank adapter takes about ten times the rate of full tuning, whatever the method.
    """
    learns_answers = method in ("sft", "distil")
    if kind == "ia3":
        return UsualRate(1e-3, 3e-2, "IA3 uses 3e-3 (Liu et al. 2022, arXiv:2205.05638)")
    if kind == "vera":
        return UsualRate(1e-3, 3e-2, "ten times LoRA's and more (Kopiczko et al. 2024, arXiv:2310.11454)")
    if kind in ("prompt", "prefix"):
        return UsualRate(1e-3, 3e-1, "prompt tuning uses up to 0.3 (Lester et al. 2021, arXiv:2104.08691)")
    if kind == "bitfit":
        return UsualRate(
            1e-4,
            3e-3,
            "biases take more than full tuning, 1e-4 to 1e-3 (Ben Zaken et al. 2022, arXiv:2106.10199)",
        )
    if kind in ("lora", "dora"):
        if learns_answers:
            low, high = _by_size(n_parameters, (5e-5, 3e-3), (2e-5, 1e-3), (1e-5, 4e-4))
            source = "QLoRA uses 2e-4 up to 13B and 1e-4 above (Dettmers et al. 2023, arXiv:2305.14314), LoRA about ten times full tuning's"
        else:
            low, high = _by_size(n_parameters, (1e-6, 1e-3), (1e-6, 1e-4), (5e-7, 5e-5))
            source = "ten times what DPO uses on all weights, 5e-7 to 1e-6 (Rafailov et al. 2023, arXiv:2305.18290; Tunstall et al. 2023, arXiv:2310.16944)"
        return UsualRate(low, high, source)
    if learns_answers:
        low, high = _by_size(n_parameters, (5e-6, 1e-3), (1e-6, 5e-5), (5e-7, 2e-5))
        return UsualRate(
            low,
            high,
            "Llama 2 uses 2e-5 (Touvron et al. 2023, arXiv:2307.09288), Tulu 3 5e-6 at 8B and 2e-6 at 70B (arXiv:2411.15124)",
        )
    low, high = _by_size(n_parameters, (1e-7, 5e-5), (1e-7, 1e-5), (5e-8, 5e-6))
    return UsualRate(
        low,
        high,
        "DPO uses 5e-7 to 1e-6 (Rafailov et al. 2023, arXiv:2305.18290), Tulu 3 5e-7 at 8B (arXiv:2411.15124)",
    )


def ranges_are_known(optimizer: str) -> bool:
    """Whether the usual ranges hold for `train.optimizer`: those of Adam's kin do not for SGD or Adafactor."""
    return any(like in optimizer for like in _ADAM_LIKE)


def check_rate(recipe: Recipe, n_parameters: int) -> Finding:
    """A rate outside of the usual range is told, with the range; it may be right all the same."""
    name, train = "learning rate", recipe.train
    if not ranges_are_known(train.optimizer):
        return skipped(name, f"ranges are known for Adam's kin, not for {train.optimizer}")
    usual = usual_rate(train.method, recipe.adapter.kind, n_parameters)
    what = f"{train.method} of {'all weights' if recipe.adapter.kind == 'none' else recipe.adapter.kind}"
    said = f"{train.learning_rate:g}; usual for {what} at {format_count(n_parameters)} parameters: {usual.low:g} to {usual.high:g} ({usual.source})"
    if usual.low <= train.learning_rate <= usual.high:
        return ok(name, said)
    nearest = usual.low if train.learning_rate < usual.low else usual.high
    effect = "little is learnt" if train.learning_rate < usual.low else "the training may diverge, or forget"
    return warning(
        name,
        f"{said}: {effect}",
        f"start from train.learning_rate: {nearest:g}, if this one is not the result of a search",
        where="train.learning_rate",
    )
