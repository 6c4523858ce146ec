"""What a preference recipe may say: every key has an effect, or it is refused where it stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finetune.errors import Fault
from finetune.recipe.preference_section import PreferenceSection
from finetune.recipe.resolve import load_recipe

Faults = Callable[..., list[Fault]]
VALID = """\
model:
  id: builtin:smollm2-135m-instruct
data:
  spec: home_intents
eval:
  suites: [home_intents]
"""


def only(found: list[Fault]) -> str:
    (fault,) = found
    return f"{fault.what} {fault.fix}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("method=dpo preference.beta=0", "'train.preference.beta' must be greater than 0"),
        ("method=dpo preference.beta=-1", "'train.preference.beta' must be greater than 0"),
        ("method=dpo preference.label_smoothing=0.5", "must be less than 0.5"),
        ("method=dpo preference.label_smoothing=-0.1", "must be at least 0"),
        ("method=dpo preference.losses=[cdpo]", "cdpo"),
        (
            "method=dpo preference.losses=[hinge] preference.label_smoothing=0.1",
            "dpo with hinge does not use it",
        ),
        (
            "method=dpo preference.losses=[sigmoid,ipo] preference.label_smoothing=0.1",
            "dpo with ipo does not use it",
        ),
        ("method=dpo preference.losses=[exo_pair]", "exo_pair needs it above 0"),
        ("method=dpo preference.losses=[kto]", "dpo has no loss 'kto'"),
        ("method=dpo preference.losses=[sft]", "sft alone prefers nothing"),
        ("method=dpo preference.losses=[sigmoid,sigmoid]", "a loss is named twice"),
        ("method=dpo preference.loss_weights=[0]", "no answer is preferred"),
        (
            "method=dpo preference.losses=[sigmoid,sft] preference.loss_weights=[0,1]",
            "no answer is preferred",
        ),
        (
            "method=kto preference.desirable_weight=0 preference.undesirable_weight=0",
            "neither wanted nor unwanted answers weigh anything",
        ),
        ("method=dpo preference.loss_weights=[1,2]", "2 weights for 1 losses"),
        ("method=dpo preference.losses=[aot] gradient_accumulation_steps=2", "aot sorts the pairs"),
        ("method=dpo preference.simpo_gamma=1", "it means nothing to train.method dpo"),
        ("method=kto preference.label_smoothing=0.1", "it means nothing to train.method kto"),
        ("method=orpo preference.losses=[sigmoid]", "it means nothing to train.method orpo"),
        (
            "method=cpo preference.losses=[hinge] preference.label_smoothing=0.1",
            "cpo with hinge does not use it",
        ),
        ("method=simpo preference.reference=base", "it means nothing to train.method simpo"),
        ("preference.beta=0.5", "it means nothing to train.method sft"),
        ("method=dpo loss.label_smoothing=0.1", "it is the loss of sft"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(faults: Faults, settings: str, message: str) -> None:
    overrides = [f"train.{setting}" for setting in settings.split()]
    assert message in only(faults(VALID, *overrides))


def test_settings_of_other_sections_that_do_not_fit(faults: Faults) -> None:
    assert "without dropout" in only(faults(VALID, "train.method=dpo", "adapter.dropout=0.1"))
    assert "no turn of the prompt" in only(faults(VALID, "train.method=dpo", "data.train_on=last"))
    assert "cannot be split" in only(faults(VALID, "train.method=dpo", "data.long_rows=split"))
    assert "only that of sft" in only(faults(VALID, "train.method=dpo", "train.auto=true"))
    found = faults(VALID, "train.method=dpo", "adapter.kind=prompt", "train.packing=false")
    assert "stand before one row" in only(found)
    found = faults(VALID, "train.method=dpo", "adapter.kind=none", "train.preference.reference=base")
    assert "no base that could be told" in only(found)


@pytest.mark.parametrize(
    ("method", "losses", "nll_weight"),
    [
        ("dpo", ("sigmoid",), 0.0),
        ("kto", ("kto",), 0.0),
        ("cpo", ("sigmoid",), 1.0),
        ("simpo", (), 0.0),
        ("orpo", (), 1.0),
    ],
)
def test_every_method_has_a_loss_of_its_own(
    write: Callable[..., object], method: str, losses: tuple[str, ...], nll_weight: float
) -> None:
    train = load_recipe(write(), [f"train.method={method}"]).train  # type: ignore[arg-type]
    assert train.preference.losses_of(train.method) == losses
    assert train.preference.nll_weight_of(train.method) == nll_weight


def test_the_weight_of_sft_among_the_losses_of_dpo_is_that_of_the_answers() -> None:
    section = PreferenceSection(losses=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 0.5])
    assert section.nll_weight_of("dpo") == 0.5
