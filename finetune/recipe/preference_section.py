"""What preference methods compare and how: the part of `train` that SFT does not read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from finetune.recipe.constraints import refused
from finetune.recipe.section import Section, Share

Method = Literal["sft", "distil", "dpo", "kto", "orpo", "cpo", "simpo", "reward"]
PAIR_METHODS: tuple[Method, ...] = ("dpo", "orpo", "cpo", "simpo", "reward")
PREFERENCE_METHODS: tuple[Method, ...] = (*PAIR_METHODS, "kto")
REFERENCE_METHODS: tuple[Method, ...] = ("dpo", "kto")

LossName = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "kto", "apo_zero_unpaired",
]  # fmt: skip
SORTING_LOSSES: tuple[LossName, ...] = ("aot", "aot_unpaired")
_UNPAIRED: tuple[LossName, ...] = ("kto", "apo_zero_unpaired")
# Losses that each method has, the first one by default; orpo, simpo and reward have one without a name.
LOSSES_OF: dict[Method, tuple[LossName, ...]] = {
    "dpo": (
        "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
        "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
    ),
    "kto": _UNPAIRED,
    "cpo": ("sigmoid", "hinge", "ipo"),
}  # fmt: skip
_SMOOTHED: dict[Method, tuple[LossName, ...]] = {
    "dpo": ("sigmoid", "robust", "exo_pair", *SORTING_LOSSES),
    "cpo": ("sigmoid",),
}
# Which methods a key means something to; one that is set for another method is refused, not ignored.
_MEANT_FOR: dict[str, tuple[Method, ...]] = {
    "losses": ("dpo", "kto", "cpo"),
    "loss_weights": ("dpo",),
    "beta": ("dpo", "kto", "orpo", "cpo", "simpo"),
    "label_smoothing": ("dpo", "cpo", "simpo"),
    "discopop_tau": ("dpo",),
    "reference": REFERENCE_METHODS,
    "nll_weight": ("cpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "center_rewards": ("reward",),
    "share_prompts": PREFERENCE_METHODS,
    "max_identical_share": PAIR_METHODS,
}
Weight = Annotated[float, Field(ge=0)]


class PreferenceSection(Section):
    """Learning from which of two answers is better, or from whether one is wanted."""

    losses: list[LossName] = Field(
        default_factory=list,
        description="Losses by TRL's names, summed with `loss_weights`. None: `sigmoid` for dpo and cpo, `kto` for kto. kto takes "
        "`kto` or `apo_zero_unpaired`, cpo `sigmoid`, `hinge` or `ipo`; the others have one loss of their own.",
    )
    loss_weights: list[Weight] = Field(
        default_factory=list, description="Weight of each loss; none: all weigh 1."
    )
    beta: Annotated[float, Field(gt=0)] = Field(
        0.1,
        description="How close the model stays to the reference (dpo, kto), or the weight of the odds ratio (orpo) and the scale of "
        "log-probabilities (cpo, simpo). 0 would leave nothing to learn.",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0,
        description="Share of the pairs assumed to be the wrong way round (conservative DPO, robust, EXO, AOT; cpo and simpo).",
    )
    discopop_tau: Annotated[float, Field(gt=0)] = Field(0.05, description="Temperature of `discopop`.")
    reference: Literal["start", "base"] = Field(
        "start",
        description="What the model is compared with. `start`: a frozen copy of what training starts from, adapter included; "
        "`base`: the base model without any adapter.",
    )
    nll_weight: Weight | None = Field(
        None,
        description="Weight of the chosen answers' own negative log-likelihood; none: 1 for cpo, 0 for simpo.",
    )
    simpo_gamma: Weight = Field(
        0.5, description="Margin of log-probability a token that simpo asks for, times beta."
    )
    desirable_weight: Weight = Field(1.0, description="Weight of wanted answers in kto.")
    undesirable_weight: Weight = Field(1.0, description="Weight of unwanted answers in kto.")
    center_rewards: Weight | None = Field(
        None,
        description="Weight of the squared sum of a pair's rewards, which keeps them around 0; none: off.",
    )
    share_prompts: bool = Field(
        True,
        description="Compute a prompt once for all its answers, which do not see each other. Off: every answer has its own copy.",
    )
    max_identical_share: Share = Field(
        0.01, description="Pairs with twice the same answer are dropped; more of them than this are an error."
    )

    def losses_of(self, method: Method) -> tuple[LossName, ...]:
        """The losses that are summed, defaults resolved."""
        return tuple(self.losses) or LOSSES_OF.get(method, ())[:1]

    def weights_of(self, method: Method) -> tuple[float, ...]:
        """One weight for each of `losses_of`."""
        return tuple(self.loss_weights) or (1.0,) * len(self.losses_of(method))

    def answers_of(self, method: Method) -> int:
        """Answers that lie in a row for one example: two of a pair, and KTO's own beside one of another prompt, by which its
        loss estimates the divergence."""
        return 2 if method in PAIR_METHODS or self.losses_of(method) == ("kto",) else 1

    def nll_weight_of(self, method: Method) -> float:
        """Weight of the chosen answers' negative log-likelihood per token."""
        if method == "orpo":
            return 1.0
        if method == "dpo":
            pairs = zip(self.losses_of(method), self.weights_of(method), strict=True)
            return sum(weight for name, weight in pairs if name == "sft")
        return (1.0 if method == "cpo" else 0.0) if self.nll_weight is None else self.nll_weight


def check_preference(method: Method, section: PreferenceSection, accumulation: int) -> None:
    """Raise, at the key to change, where the section does not fit the method."""
    for key, methods in _MEANT_FOR.items():
        default = type(section).model_fields[key].get_default(call_default_factory=True)
        if method not in methods and getattr(section, key) != default:
            raise refused(
                f"preference.{key}",
                f"it means nothing to train.method {method}; it is for {', '.join(methods)}",
                fix=f"leave out preference.{key}, or choose another method",
            )
    if method in PREFERENCE_METHODS:
        _check_losses(method, section, accumulation)


def _check_losses(method: Method, section: PreferenceSection, accumulation: int) -> None:
    known, losses = LOSSES_OF.get(method, ()), section.losses_of(method)
    for name in losses:
        if name not in known:
            raise refused(
                "preference.losses",
                f"{method} has no loss '{name}'",
                fix=f"one of: {', '.join(known)}",
            )
    if len(set(losses)) != len(losses) or (method != "dpo" and len(losses) > 1):
        raise refused(
            "preference.losses", "a loss is named twice" if method == "dpo" else f"{method} takes one loss",
            fix="name each loss once" if method == "dpo" else "name one",
        )  # fmt: skip
    if losses == ("sft",):
        raise refused(
            "preference.losses", "sft alone prefers nothing", fix="add another loss, or use method: sft"
        )
    if section.loss_weights and len(section.loss_weights) != len(losses):
        raise refused(
            "preference.loss_weights",
            f"{len(section.loss_weights)} weights for {len(losses)} losses",
            fix="give one weight for each loss",
        )
    _check_something_weighs(method, section)
    if accumulation > 1 and (sorting := [name for name in losses if name in SORTING_LOSSES]):
        raise refused(
            "preference.losses",
            f"{sorting[0]} sorts the pairs of one forward pass, so accumulation would change the loss",
            fix="set train.gradient_accumulation_steps: 1 and a larger pack or micro-batch",
        )
    _check_smoothing(method, section, losses)


def _check_something_weighs(method: Method, section: PreferenceSection) -> None:
    """A loss without weight has no gradient, and training would end at its first step."""
    compared = [
        weight
        for name, weight in zip(section.losses_of(method), section.weights_of(method), strict=True)
        if name != "sft"
    ]
    if compared and not any(compared):
        raise refused(
            "preference.loss_weights",
            "no loss that compares the answers has a weight, so no answer is preferred",
            fix="give one of them a weight above 0",
        )
    if method == "kto" and not (section.desirable_weight or section.undesirable_weight):
        raise refused(
            "preference.desirable_weight",
            "neither wanted nor unwanted answers weigh anything, so nothing is learnt",
            fix="give one of the two a weight above 0",
        )


def _check_smoothing(method: Method, section: PreferenceSection, losses: tuple[LossName, ...]) -> None:
    if "exo_pair" in losses and section.label_smoothing == 0.0:
        raise refused(
            "preference.label_smoothing", "exo_pair needs it above 0", fix="set label_smoothing: 1e-3"
        )
    smoothed = _SMOOTHED.get(method, ())
    without = [name for name in losses if name not in smoothed and name != "sft"]
    if section.label_smoothing and method in LOSSES_OF and without:
        raise refused(
            "preference.label_smoothing",
            f"{method} with {without[0]} does not use it",
            fix=f"leave it out, or use a loss that does: {', '.join(smoothed) or 'none of this method'}",
        )
