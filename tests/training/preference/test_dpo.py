"""DPO is what its definition says: reference, loss, gradient, packing, accumulation, validation."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.pair_tokens import AnsweredPrompt
from finetune.errors import UserError
from finetune.paths import read_json
from finetune.telemetry.events import read_events
from finetune.training.answers import Answers

LN_2 = math.log(2)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def apart(left: torch.Tensor, right: torch.Tensor) -> float:
    """Relative distance of two gradients."""
    return float((left - right).norm() / right.norm())


def plain_trl(
    tmp_path: Path, model: Any, base: Any, tokenizer: Any, rows: Sequence[AnsweredPrompt], **settings: Any
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of TRL's own trainer on one batch of all rows, tokenised as ours are; `base` is the reference."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Tokenised(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
            return dataset

    columns = [
        {"prompt_ids": row.prompt, "chosen_ids": row.chosen.ids, "rejected_ids": row.rejected.ids}
        for row in rows
    ]
    arguments = DPOConfig(
        output_dir=str(tmp_path / "trl"),
        bf16=False,
        use_cpu=True,
        report_to="none",
        max_length=None,
        **settings,
    )
    trainer = Tokenised(
        model=model,
        ref_model=base,
        args=arguments,
        train_dataset=Dataset.from_list(columns),
        processing_class=tokenizer,
    )
    batch = trainer._prepare_inputs(trainer.data_collator(columns))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(gradients)


ALONE = [
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop",
]  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "settings"),
    [
        *(([name], {"label_smoothing": 1e-3} if name == "exo_pair" else {}) for name in ALONE),
        (["robust"], {"label_smoothing": 0.2}),
        (["aot"], {"label_smoothing": 0.2}),
        (["sigmoid", "bco_pair", "sft"], {"loss_weights": [0.8, 0.2, 1.0]}),
        (["discopop"], {"discopop_tau": 0.1, "beta": 0.5}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_loss_and_gradient_are_those_of_trl(
    dpo_recipe: Any,
    first_step: Any,
    moved_model: Any,
    make_tiny_model: Any,
    make_pairs: Any,
    tiny_tokenizer: Any,
    tmp_path: Path,
    losses: list[str],
    settings: dict[str, Any],
) -> None:
    rows = make_pairs(6)
    recipe = dpo_recipe(losses=losses, reference="base", train__pack_tokens=4096, **settings)
    model = moved_model(recipe)
    theirs = moved_model(recipe)
    base = copy.deepcopy(theirs).unload()
    options = {"loss_type": losses, "beta": 0.1} | settings
    expected, expected_gradient = plain_trl(tmp_path, theirs, base, tiny_tokenizer, rows, **options)
    loss, gradient, means = first_step(recipe, rows=rows, model=model)
    assert loss == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert apart(gradient, expected_gradient) < 1e-5
    assert abs(means["reward_margin"]) > 1e-2  # the reference is another model, or this would compare nothing


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("packing", [True, False])
def test_one_row_for_both_answers_gives_what_rows_of_their_own_give(
    dpo_recipe: Any, first_step: Any, moved_model: Any, make_pairs: Any, answer_logps: Any,
    share_prompts: bool, packing: bool,
) -> None:  # fmt: skip
    rows = make_pairs(6)
    recipe = dpo_recipe(
        reference="base",
        share_prompts=share_prompts,
        train__packing=packing,
        train__pack_tokens=4096,
        train__micro_batch_size=1 if packing else 6,
    )
    model = moved_model(recipe)
    tuned = answer_logps(model, rows)
    with model.disable_adapter():
        base = answer_logps(model, rows)
    margin = 0.1 * ((tuned - base)[:, 0] - (tuned - base)[:, 1])
    loss, _, means = first_step(recipe, rows=rows, model=model)
    assert loss == pytest.approx(float(torch.nn.functional.softplus(-margin).mean()), abs=1e-5)
    assert means["reward_margin"] == pytest.approx(float(margin.mean()), abs=1e-5)
    assert means["logp_chosen"] == pytest.approx(float(tuned[:, 0].mean()), abs=1e-4)
    assert means["reward_accuracy"] == float((margin > 0).float().mean())


def test_shared_prompts_give_the_gradient_of_separate_ones(
    dpo_recipe: Any, first_step: Any, moved_model: Any, make_pairs: Any
) -> None:
    gradients = []
    for share_prompts in (True, False):
        recipe = dpo_recipe(reference="base", share_prompts=share_prompts, train__pack_tokens=4096)
        gradients.append(first_step(recipe, model=moved_model(recipe))[1])
    assert apart(gradients[0], gradients[1]) < 1e-5


@pytest.mark.parametrize(
    "adapter",
    [
        {"adapter__kind": "lora"},
        {"adapter__kind": "dora"},
        {"adapter__kind": "vera"},
        {"adapter__kind": "ia3"},
        {"adapter__kind": "none"},
        {"adapter__rslora": True},
        {"adapter__init": "pissa"},
        {"adapter__init": "olora"},
        {"adapter__init": "gaussian"},
        {"adapter__init": "orthogonal"},
        {"adapter__init": "eva"},
        {"adapter__kind": "dora", "adapter__init": "pissa"},
        {"adapter__layers": [-1]},
        {"adapter__rank_pattern": {"down_proj": 16}},
        {"adapter__kind": "none", "adapter__layers": [-1]},
        {"adapter__modules_to_save": ["lm_head"]},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_before_the_first_step_the_loss_is_ln_2(
    dpo_recipe: Any, first_step: Any, adapter: dict[str, Any]
) -> None:
    loss, gradient, means = first_step(dpo_recipe(**adapter))
    assert loss == pytest.approx(LN_2, abs=1e-6)
    assert means["reward_margin"] == 0.0
    assert float(gradient.norm()) > 0


def test_a_model_with_dropout_of_its_own_starts_at_ln_2_and_keeps_its_configuration(
    dpo_recipe: Any, train_pairs: Any, adapted_model: Any
) -> None:
    """GPT-2 and others drop a tenth of what they compute while they train; the reference is computed without."""
    from finetune.training.memory_saving import set_model_dropout

    recipe = dpo_recipe(adapter__kind="none", train__max_steps=1, train__learning_rate=1e-4)
    model = adapted_model(recipe)
    set_model_dropout(model, 0.3)
    said: list[str] = []
    _, folder, _ = train_pairs(recipe, model=model, said=said)
    losses = [event["loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]
    assert losses == [pytest.approx(math.log(2), abs=1e-6)]
    assert any("dropout is off" in line for line in said)
    saved = [read_json(place / "config.json") for place in (folder / "model", folder / "checkpoints/step-1")]
    assert [config["attention_dropout"] for config in saved] == [0.3, 0.3]


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_that_is_trained_on_is_its_own_reference(
    dpo_recipe: Any, first_step: Any, moved_model: Any, make_pairs: Any, answer_logps: Any, kind: str
) -> None:
    recipe = dpo_recipe(adapter__kind=kind)
    model, rows = moved_model(recipe), make_pairs(6)
    tuned = answer_logps(model, rows)
    with model.disable_adapter():
        assert (
            tuned - answer_logps(model, rows)
        ).abs().max() > 0.1  # against the bare base there would be a margin
    loss, _, means = first_step(recipe, model=model, rows=rows)
    assert loss == pytest.approx(LN_2, abs=1e-6)
    assert means["reward_margin"] == 0.0
    assert list(model.peft_config) == ["default"]  # and there is no second adapter


def test_four_bit_weights_are_their_own_reference(
    dpo_recipe: Any, first_step: Any, tiny_model_folder: Path
) -> None:
    from finetune.model.adapters import attach_adapter
    from finetune.model.load import load_model
    from finetune.model.source import resolve_model

    recipe = dpo_recipe(model__quantize="nf4", model__dtype="bf16")
    base = load_model(
        resolve_model(str(tiny_model_folder)), dtype="bf16", quantize="nf4", attention="document"
    )
    loss, gradient, _ = first_step(recipe, model=attach_adapter(base, recipe.adapter, seed=1))
    assert loss == pytest.approx(LN_2, abs=1e-6)
    assert float(gradient.norm()) > 0


def test_biases_new_tokens_and_codes_are_their_own_reference_too(
    dpo_recipe: Any, first_step: Any, make_tiny_model: Any, tiny_model_folder: Path
) -> None:
    """Starts that a copy of the adapter by name would miss: biases of the base, rows of the embedding, loftq's codes."""
    from finetune.model.adapters import attach_adapter
    from finetune.model.load import load_model
    from finetune.model.new_tokens import NewTokens
    from finetune.model.source import resolve_model
    from finetune.training.trained_part import add_trained_part

    biased = make_tiny_model()
    biased.config.attention_bias = True
    biased = type(biased)(biased.config)
    source = resolve_model(str(tiny_model_folder))
    coded = load_model(source, dtype="fp32", quantize="nf4", attention="document")
    bitfit, rows = dpo_recipe(adapter__kind="bitfit"), dpo_recipe()
    loftq = dpo_recipe(adapter__init="loftq", model__quantize="nf4")
    models = [
        (bitfit, attach_adapter(biased.eval(), bitfit.adapter, seed=1)),
        (rows, add_trained_part(make_tiny_model(), rows, new_tokens=NewTokens((259,), ((5, 6),)))),
        (loftq, attach_adapter(coded, loftq.adapter, seed=1, source=source)),
    ]
    for recipe, model in models:
        model.get_base_model().set_attn_implementation("document")
        loss, gradient, means = first_step(recipe, model=model)
        assert loss == pytest.approx(LN_2, abs=1e-6)
        assert abs(means["reward_margin"]) < 1e-5
        assert float(gradient.norm()) > 0


@pytest.mark.parametrize("losses", [["sigmoid"], ["sigmoid", "sft"], ["ipo"]])
def test_accumulated_micro_batches_equal_one_batch(
    dpo_recipe: Any, first_step: Any, moved_model: Any, make_pairs: Any, losses: list[str]
) -> None:
    rows = make_pairs(3)  # of uneven length
    found = []
    for micro, accumulation in ((3, 1), (1, 3), (2, 2)):
        recipe = dpo_recipe(
            losses=losses,
            reference="base",
            train__packing=False,
            train__micro_batch_size=micro,
            train__gradient_accumulation_steps=accumulation,
        )
        found.append(first_step(recipe, model=moved_model(recipe), rows=rows))
    for loss, gradient, _ in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert apart(gradient, found[0][1]) < 1e-5


def test_validation_does_not_depend_on_batch_or_packing(
    dpo_recipe: Any, train_pairs: Any, make_pairs: Any
) -> None:
    found = []
    for number, changes in enumerate(
        (
            {"train__packing": False, "train__micro_batch_size": 1},
            {"train__packing": False, "train__micro_batch_size": 4},
            {"train__pack_tokens": 200},
            {"train__pack_tokens": 4096},
        )
    ):
        recipe = dpo_recipe(losses=["sigmoid", "sft"], train__learning_rate=1e-12, train__epochs=1, **changes)
        result, _, _ = train_pairs(recipe, name=f"run{number}", validation=make_pairs(5))
        found.append(
            [result.validation_loss, result.validation["logp_chosen"], result.validation["examples"]]
        )
    for values in found[1:]:
        assert values == pytest.approx(found[0], abs=1e-5)


@pytest.fixture
def trainer(dpo_recipe: Any, train_pairs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """trainer(**preference): a DPO trainer whose `losses` can be asked about made-up answers."""
    from finetune.training.session import Session

    def build(**preference: Any) -> Any:
        built = []

        def stop(session: Session) -> Any:
            built.append(session.trainer)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Session, "run", stop)
            with pytest.raises(KeyboardInterrupt):
                train_pairs(dpo_recipe(**preference))
        built[0].model.eval()
        return built[0]

    return build


@pytest.mark.parametrize(("smoothing", "expected"), [(0.2, [0.638139, 0.724397, 0.678460]), (0.2, None)])
def test_label_smoothing_is_that_of_conservative_dpo(
    trainer: Any, smoothing: float, expected: list[float] | None
) -> None:
    differences = [2.0, -1.0, 0.5] if expected else [0.0]
    found = []
    for difference in differences:
        by_target = torch.tensor([[difference - 3.0], [-3.0]])
        answers = Answers(by_target, torch.ones(2, dtype=torch.long))
        losses = trainer(beta=0.1, label_smoothing=smoothing).losses(
            answers, {"reference": torch.full((2,), -3.0)}
        )
        found.append(float(losses.example_sum))
    assert found == pytest.approx(expected or [LN_2], abs=1e-6)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_reference_of_another_start_stops_the_run(
    dpo_recipe: Any, train_pairs: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    from finetune.training import reference

    monkeypatch.setattr(
        reference, "_score", lambda trainer, members: torch.tensor([-9.0, -9.0] * len(members.examples))
    )
    with pytest.raises(UserError, match="off the reference") as caught:
        train_pairs(dpo_recipe(method))
    assert "references" in caught.value.faults[0].fix
