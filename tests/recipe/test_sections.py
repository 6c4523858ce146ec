"""Rules between the keys of a recipe: what cannot be together is refused at the key to change, with a remedy."""

from __future__ import annotations

import pytest

from finetune.errors import UserError
from finetune.recipe.resolve import load_recipe

from .conftest import Write

REFUSED = {
    ("adapter.kind=ia3", "adapter.init=pissa"): ("adapter.init", "means nothing to adapter.kind ia3"),
    ("adapter.freeze=[norm]",): ("adapter.freeze", "it is for none"),
    ("adapter.layers=[0, 0]",): ("adapter.layers", "named twice"),
    ("adapter.layers=[]",): ("adapter.layers", "nothing would train"),
    ("adapter.kind=bitfit", "model.quantize=nf4"): ("adapter.kind", "cannot be tuned in full"),
    ("adapter.init=olora", "model.quantize=int8"): ("adapter.init", "cannot be split"),
    ("adapter.init=loftq",): ("adapter.init", "not in 4 bits"),
    ("adapter.kind=prompt",): ("train.packing", "a pack holds several"),
    ("adapter.kind=vera", "model.new_tokens=[<a>]"): ("model.new_tokens", "would stay untrained"),
    ("adapter.kind=none", "train.lora_plus_ratio=16"): ("train.lora_plus_ratio", "no matrices A and B"),
    ("train.fp8=true", "model.quantize=nf4"): ("train.fp8", "8-bit floats"),
    ("train.optimizer=schedule_free_adamw",): ("train.schedule", "averages the weights itself"),
    ("train.result=best",): ("train.result", "no validation"),
    ("train.early_stopping=2",): ("train.early_stopping", "no validation"),
    ("train.schedule=wsd", "train.warmup_share=0.9"): ("train.decay_share", "longer than the run"),
    ("train.batch_ramp.steps=5",): ("train.batch_ramp.start_accumulation", "nothing grows"),
    ("train.batch_ramp.start_accumulation=1",): ("train.batch_ramp.steps", "one of them"),
    ("train.loss.kind=dft", "train.loss.label_smoothing=0.1"): (
        "train.loss.label_smoothing",
        "no single one",
    ),
    ("train.loss.turn_weights=[0, 0]",): ("train.loss.turn_weights", "nothing is learnt"),
}


@pytest.mark.parametrize("overrides", REFUSED, ids=lambda given: given[0].replace("=", "-"))
def test_what_cannot_be_together_is_refused(write: Write, overrides: tuple[str, ...]) -> None:
    key, said = REFUSED[overrides]
    with pytest.raises(UserError) as caught:
        load_recipe(write(), list(overrides))
    (fault,) = caught.value.faults
    assert key in fault.what
    assert said in fault.what
    assert fault.fix


@pytest.mark.parametrize(
    "overrides",
    [
        ["adapter.kind=prompt", "train.packing=false"],
        ["adapter.kind=none", "adapter.freeze=[embed_tokens]", "adapter.layers=[-1]"],
        ["adapter.init=loftq", "model.quantize=nf4"],
        ["adapter.rank_pattern.down_proj=64"],
        ["train.optimizer=schedule_free_adamw", "train.schedule=constant"],
        ["train.optimizer_options.betas=[0.9, 0.95]", "train.optimizer_options.eps=1e-6"],
        ["train.early_stopping=2", "train.validate_every_steps=10"],
        ["train.gradient_checkpointing=selective"],
        ["train.gradient_checkpointing=true"],
    ],
    ids=lambda given: given[-1].replace("=", "-"),
)
def test_what_belongs_together_is_taken(write: Write, overrides: list[str]) -> None:
    recipe = load_recipe(write(), overrides)
    assert load_recipe(write(name="again.yaml"), overrides).train == recipe.train


def test_numbers_of_optimizer_options_stay_numbers(write: Write) -> None:
    recipe = load_recipe(write(), ["train.optimizer_options={betas: [0.9, .95], eps: 1e-6, nesterov: true}"])
    assert recipe.train.optimizer_options == {"betas": [0.9, 0.95], "eps": 1e-6, "nesterov": True}
    kinds = {name: type(value) for name, value in recipe.train.optimizer_options.items()}
    assert kinds == {"betas": list, "eps": float, "nesterov": bool}
