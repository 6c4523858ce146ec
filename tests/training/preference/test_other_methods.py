"""ORPO, CPO, SimPO and KTO: the first step against their formulas, computed here by hand."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from finetune.digest import digest_folder
from finetune.telemetry.events import read_events
from finetune.training.answers import Answers
from finetune.training.kto_trainer import ExactKtoTrainer
from finetune.training.mismatched import with_mismatched_answers
from finetune.training.reference_free import ExactOrpoTrainer


@pytest.fixture
def pairs(make_pairs: Any, dpo_recipe: Any, moved_model: Any, answer_logps: Any) -> Any:
    """Rows, [rows, 2] log-probabilities under a model that `model()` makes anew, and [rows, 2] numbers of targets."""

    class Pairs:
        rows = make_pairs(6)
        lengths = torch.tensor([[answer.n_targets for answer in row.answers] for row in rows]).float()

        @staticmethod
        def model() -> Any:
            return moved_model(dpo_recipe())

    Pairs.logps = answer_logps(Pairs.model(), Pairs.rows)  # type: ignore[attr-defined]
    return Pairs


def chosen_nll(pairs: Any) -> torch.Tensor:
    """Mean over all targets of chosen answers."""
    return -pairs.logps[:, 0].sum() / pairs.lengths[:, 0].sum()


def test_orpo_is_the_nll_of_the_answer_and_a_weighted_odds_ratio(
    dpo_recipe: Any, first_step: Any, pairs: Any
) -> None:
    mean = pairs.logps / pairs.lengths
    log_odds = mean - torch.log1p(-mean.exp())
    expected = chosen_nll(pairs) - 0.25 * logsigmoid(log_odds[:, 0] - log_odds[:, 1]).mean()
    recipe = dpo_recipe("orpo", beta=0.25, train__pack_tokens=4096)
    loss, gradient, means = first_step(recipe, rows=pairs.rows, model=pairs.model())
    assert loss == pytest.approx(float(expected), abs=1e-5)
    assert means["reward_chosen"] == pytest.approx(0.25 * float(mean[:, 0].mean()), abs=1e-5)
    assert float(gradient.norm()) > 0


@pytest.mark.parametrize(
    ("losses", "settings"),
    [
        (["sigmoid"], {}),
        (["sigmoid"], {"label_smoothing": 0.2}),
        (["hinge"], {}),
        (["ipo"], {"nll_weight": 0.0}),
    ],
)
def test_cpo_is_the_pair_loss_and_the_nll_of_the_answer(
    dpo_recipe: Any, first_step: Any, pairs: Any, losses: list[str], settings: dict[str, Any]
) -> None:
    beta, smoothing = 0.1, settings.get("label_smoothing", 0.0)
    gap = pairs.logps[:, 0] - pairs.logps[:, 1]
    per_token = pairs.logps / pairs.lengths
    expected = {
        "sigmoid": -(1 - smoothing) * logsigmoid(beta * gap) - smoothing * logsigmoid(-beta * gap),
        "hinge": (1 - beta * gap).clamp(min=0),
        "ipo": (per_token[:, 0] - per_token[:, 1] - 1 / (2 * beta)) ** 2,
    }[losses[0]].mean() + settings.get("nll_weight", 1.0) * chosen_nll(pairs)
    recipe = dpo_recipe("cpo", losses=losses, train__pack_tokens=4096, **settings)
    loss, _, means = first_step(recipe, rows=pairs.rows, model=pairs.model())
    assert loss == pytest.approx(float(expected), rel=1e-5)
    better = per_token[:, 0] > per_token[:, 1] if losses == ["ipo"] else gap > 0
    assert means["reward_accuracy"] == pytest.approx(float(better.float().mean()))


@pytest.mark.parametrize("nll_weight", [None, 0.5])
def test_simpo_asks_for_a_margin_of_the_mean_log_probability(
    dpo_recipe: Any, first_step: Any, pairs: Any, nll_weight: float | None
) -> None:
    beta, gamma = 2.0, 1.0
    mean = pairs.logps / pairs.lengths
    expected = -logsigmoid(beta * (mean[:, 0] - mean[:, 1]) - gamma).mean() + (nll_weight or 0) * chosen_nll(
        pairs
    )
    recipe = dpo_recipe("simpo", beta=beta, simpo_gamma=gamma, nll_weight=nll_weight, train__pack_tokens=4096)
    loss, _, _ = first_step(recipe, rows=pairs.rows, model=pairs.model())
    assert loss == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("method", ["orpo", "cpo"])
def test_accumulated_micro_batches_equal_one_batch(
    dpo_recipe: Any, first_step: Any, pairs: Any, method: str
) -> None:
    found = []
    for micro, accumulation in ((3, 1), (1, 3)):
        recipe = dpo_recipe(
            method,
            train__packing=False,
            train__micro_batch_size=micro,
            train__gradient_accumulation_steps=accumulation,
        )
        found.append(first_step(recipe, rows=pairs.rows[:3], model=pairs.model()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert float((found[1][1] - found[0][1]).norm() / found[0][1].norm()) < 1e-5


@pytest.fixture
def judged(make_pairs: Any) -> Any:
    return make_pairs(4, unit="judged")


@pytest.mark.parametrize(
    ("losses", "weights"), [(["kto"], (1.0, 1.0)), (["kto"], (2.0, 0.5)), (["apo_zero_unpaired"], (1.0, 1.0))]
)
def test_kto_measures_every_answer_from_the_divergence(
    dpo_recipe: Any, first_step: Any, moved_model: Any, answer_logps: Any, judged: Any,
    losses: list[str], weights: tuple[float, float],
) -> None:  # fmt: skip
    beta = 0.1
    recipe = dpo_recipe(
        "kto",
        losses=losses,
        reference="base",
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        train__pack_tokens=4096,
    )
    model, rows = moved_model(recipe), with_mismatched_answers(judged)
    tuned = answer_logps(model, rows)
    with model.disable_adapter():
        ratio = tuned - answer_logps(model, rows)
    divergence = ratio[:, 1].mean().clamp(min=0) if losses == ["kto"] else torch.zeros(())
    wanted = torch.tensor([row.wanted for row in rows])
    sign = torch.where(wanted, 1.0, -1.0)
    weight = torch.where(wanted, *weights)
    expected = (weight * (1 - torch.sigmoid(beta * sign * (ratio[:, 0] - divergence)))).mean()
    loss, gradient, means = first_step(recipe, rows=judged, model=model)
    assert loss == pytest.approx(float(expected), abs=1e-5)
    assert means["reward_chosen"] == pytest.approx(beta * float(ratio[wanted, 0].mean()), abs=1e-5)
    assert means["reward_rejected"] == pytest.approx(beta * float(ratio[~wanted, 0].mean()), abs=1e-5)
    assert float(gradient.norm()) > 0


def test_the_divergence_of_kto_has_no_gradient(
    dpo_recipe: Any, first_step: Any, moved_model: Any, judged: Any
) -> None:
    """Twice the same rows: with the estimate and without it the gradient has another scale, and the same direction."""
    recipe = dpo_recipe("kto", reference="start", train__pack_tokens=4096)
    with_estimate = first_step(recipe, rows=judged, model=moved_model(recipe))
    without = dpo_recipe("kto", losses=["apo_zero_unpaired"], train__pack_tokens=4096)
    alone = first_step(without, rows=judged, model=moved_model(without))
    assert with_estimate[0] == pytest.approx(0.5, abs=1e-6) == pytest.approx(alone[0], abs=1e-6)
    assert float((with_estimate[1] - alone[1]).norm() / alone[1].norm()) < 1e-5


def test_mismatched_answers_are_those_of_other_prompts(judged: Any) -> None:
    for row, own in zip(with_mismatched_answers(judged), judged, strict=True):
        assert row.answers[0] == own.chosen
        other = next(one for one in judged if one.chosen == row.answers[1] and one.prompt != own.prompt)
        assert other.prompt != own.prompt


@pytest.mark.parametrize("method", ["kto", "orpo", "cpo", "simpo"])
def test_every_method_learns_and_resumes_to_the_same_bytes(
    dpo_recipe: Any, train_pairs: Any, make_pairs: Any, dies_at: Any, method: str
) -> None:
    unit = "judged" if method == "kto" else "pair"
    recipe, rows = dpo_recipe(method, train__epochs=6), make_pairs(6, unit=unit)
    result, whole, _ = train_pairs(recipe, name="whole", rows=rows, validation=rows)
    steps = [event for event in read_events(whole / "events.jsonl") if event["event"] == "step"]
    assert result.validation_loss < steps[0]["loss"]
    assert result.validation["reward_margin"] > steps[0].get("reward_margin", 0.0)
    dies_at(3, lambda: train_pairs(recipe, name="killed", rows=rows, validation=rows))
    _, killed, _ = train_pairs(recipe, name="killed", rows=rows, validation=rows)
    assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")


@pytest.mark.parametrize("wanted", [None, True, False])
def test_the_divergence_of_a_step_is_that_of_all_its_micro_batches(
    dpo_recipe: Any, first_step: Any, moved_model: Any, judged: Any, wanted: bool | None
) -> None:
    rows = [row for row in judged if wanted in (None, row.wanted)][:3]
    found = []
    for micro, accumulation in ((3, 1), (1, 3)):
        recipe = dpo_recipe(
            "kto",
            reference="base",
            train__packing=False,
            train__micro_batch_size=micro,
            train__gradient_accumulation_steps=accumulation,
        )
        found.append(first_step(recipe, rows=rows, model=moved_model(recipe, -0.3)))
    (whole, whole_gradient, means), (parts, gradient, means_of_parts) = found
    assert means["kl"] > 0.5
    assert parts == pytest.approx(whole, rel=1e-6)
    assert means_of_parts == pytest.approx(means, rel=1e-5)
    assert float((gradient - whole_gradient).norm() / whole_gradient.norm()) < 1e-5


@pytest.mark.parametrize("batching", [{"train__pack_tokens": 4096}, {"train__packing": False}])
def test_the_divergence_of_a_validation_is_that_of_all_its_rows(
    dpo_recipe: Any,
    train_pairs: Any,
    moved_model: Any,
    answer_logps: Any,
    judged: Any,
    batching: dict[str, Any],
) -> None:
    """Whatever lies in one batch: two validations, and two machines, can be compared."""
    recipe = dpo_recipe("kto", reference="base", train__max_steps=1, train__learning_rate=1e-9, **batching)
    model, rows = moved_model(recipe, -0.3), with_mismatched_answers(judged)
    tuned = answer_logps(model, rows)
    with model.disable_adapter():
        ratio = tuned - answer_logps(model, rows)
    divergence = ratio[:, 1].mean().clamp(min=0)
    sign = torch.where(torch.tensor([row.wanted for row in rows]), 1.0, -1.0)
    expected = (1 - torch.sigmoid(0.1 * sign * (ratio[:, 0] - divergence))).mean()
    assert float(divergence) > 1
    result, _, _ = train_pairs(recipe, rows=judged[:1], validation=judged, model=model)
    assert result.validation_loss == pytest.approx(float(expected), abs=1e-5)


def trainer_of(kind: type, **attributes: Any) -> Any:
    """What the loss alone needs of a trainer."""
    trainer: Any = object.__new__(kind)
    plain = {"model": SimpleNamespace(training=True), "aux_loss_enabled": False, "args": SimpleNamespace()}
    counted = {"_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1}
    vars(trainer).update(plain | counted | attributes)
    return trainer


@pytest.mark.parametrize(("idle", "divergence"), [(False, (6.0 + 4.0) / (3 + 1)), (True, 6.0 / 3)])
def test_a_pack_that_is_only_computed_along_has_no_part_in_the_divergence(
    idle: bool, divergence: float
) -> None:
    """The other rank has three gaps, of 6 nats together; this one has one of 4."""
    other_rank = torch.tensor([6.0, 3.0], dtype=torch.float64)
    accelerator = SimpleNamespace(device="cpu", reduce=lambda sums, reduction: sums + other_rank)
    trainer = trainer_of(
        ExactKtoTrainer, accelerator=accelerator, _idle=idle, _known=None, _starts_at_reference=False,
        calculate_KL=True, precompute_ref_logps=True, loss_type="kto", beta=0.1, desirable_weight=1.0,
        undesirable_weight=1.0,
    )  # fmt: skip
    batch = {"reference": torch.tensor([-1.0, -5.0]), "wanted": torch.tensor([True])}
    answers = Answers(torch.tensor([[-0.5, -0.5], [-1.0, 0.0]]), torch.tensor([2, 1]))
    losses = trainer.losses(answers, batch)
    assert float(losses.example_sum) == pytest.approx(
        float(1 - torch.sigmoid(torch.tensor(-0.1 * divergence)))
    )


@pytest.mark.parametrize("logps", [(0.0, -3.0), (-3.0, 0.0), (0.0, 0.0), (-1e-8, -3.0)])
def test_an_answer_that_is_certain_has_finite_odds(logps: tuple[float, float]) -> None:
    """A short answer that is learnt by heart: its probability is 1 in fp32."""
    by_target = torch.tensor([[one] for one in logps], requires_grad=True)
    accelerator = SimpleNamespace(device="cpu")
    trainer = trainer_of(ExactOrpoTrainer, accelerator=accelerator, beta=0.1, nll_weight=1.0)
    losses = trainer.losses(Answers(by_target, torch.tensor([1, 1])), {})
    (gradient,) = torch.autograd.grad(losses.example_sum, by_target)
    assert losses.example_sum.isfinite() and gradient.isfinite().all()
    assert float(gradient[0]) <= 0.0 <= float(gradient[1])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("cpo", {"losses": ["hinge"], "nll_weight": 0.0, "beta": 10.0}),
        ("kto", {"undesirable_weight": 0.0}),
    ],
)
def test_a_step_that_asks_for_nothing_is_no_cut_graph(
    dpo_recipe: Any, train_pairs: Any, make_pairs: Any, method: str, settings: dict[str, Any]
) -> None:
    """A margin that is there already, or only answers that weigh nothing: the gradient is rightly zero."""
    if method == "kto":
        rows = [row for row in make_pairs(4, unit="judged") if not row.wanted][:1]
    else:
        (first, *_) = make_pairs(1)
        good, bad = sorted(first.answers, key=lambda answer: len(answer.ids))  # fewer tokens are likelier
        rows = [replace(first, answers=(good, bad))]
    result, folder, _ = train_pairs(dpo_recipe(method, train__max_steps=2, **settings), rows=rows)
    assert result.steps == 2
    steps = [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]
    assert [step["grad_norm"] for step in steps] == [0.0, 0.0]
