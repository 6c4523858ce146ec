"""The loss a recipe names, through the trainer: each against a computation by hand over the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.rows import Row
from finetune.data.tokenise import tokenise_rows
from finetune.telemetry.callback import StepTally
from finetune.telemetry.events import read_events
from finetune.training.embedding_noise import EmbeddingNoise
from finetune.training.head import IGNORED
from finetune.training.sft import count_steps, trainer_arguments, training_dataset
from finetune.training.sft_trainer import ExactSftTrainer
from finetune.training.turn_weights import row_weights

PACKED = {"train__pack_tokens": 1024}
PADDED = {"train__packing": False, "train__micro_batch_size": 8}
SPLIT = {"train__packing": False, "train__micro_batch_size": 3, "train__gradient_accumulation_steps": 3}
LAYOUTS = {"packed": PACKED, "padded": PADDED, "accumulated": SPLIT}


@pytest.fixture
def first_step(tmp_path: Path, tiny_tokenizer: Any, adapted_model: Any) -> Callable[..., Any]:
    """(what is minimised, its gradient, the trainer) of the first optimizer step, before clipping."""

    def run(recipe: Any, rows: Any) -> Any:
        train_set = training_dataset(rows, recipe.train)
        trainer = ExactSftTrainer(
            checkpoint_root=tmp_path / "checkpoints",
            owner="o",
            settings=recipe.train,
            tally=StepTally(),
            model=adapted_model(recipe),
            args=trainer_arguments(recipe, count_steps(len(train_set), recipe.train), tmp_path / "c"),
            train_dataset=train_set,
            processing_class=tiny_tokenizer,
        )
        found: dict[str, Any] = {}

        def capture(model: Any) -> float:
            found["gradient"] = torch.cat(
                [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            ).clone()
            means = trainer.tally.example_means()
            found["loss"] = means.get("objective", trainer.tally.loss)
            raise KeyboardInterrupt

        trainer._clip_grad_norm = capture  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        return found["loss"], found["gradient"], trainer

    return run


def by_hand(model: Any, rows: Any, loss: Any) -> tuple[float, torch.Tensor]:
    """Row by row from full logits: the weighted mean over targets of the loss that the section names, and its gradient."""
    total, weight_sum = torch.zeros(()), 0.0
    model.zero_grad()
    for row in rows:
        ids, labels = torch.tensor([row.input_ids]), torch.tensor(row.labels)
        logs = model(input_ids=ids).logits[0, :-1]
        wanted = labels[1:] != IGNORED
        logits, targets = logs[wanted], labels[1:][wanted]
        log_probabilities = logits.log_softmax(dim=1)
        own = log_probabilities.gather(1, targets[:, None]).squeeze(1)
        value = -own * (own.exp().detach() if loss.kind == "dft" else 1.0)
        value = (1 - loss.label_smoothing) * value - loss.label_smoothing * log_probabilities.mean(dim=1)
        value = value + loss.z_loss * logits.logsumexp(dim=1) ** 2
        weights = torch.ones(len(targets))
        if loss.turn_weights:
            weights = torch.tensor(row_weights(row, loss.turn_weights))[1:][wanted]
        total = total + (value * weights).sum()
        weight_sum += float(weights.sum())
    mean = total / weight_sum
    mean.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return float(mean), gradient


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"kind": "dft"},
        {"label_smoothing": 0.1},
        {"z_loss": 0.01},
        {"turn_weights": [0.25, 1.0]},
        {"turn_weights": [0.0, 2.0], "label_smoothing": 0.1, "z_loss": 0.01},
        {"kind": "dft", "turn_weights": [0.5, 1.0], "z_loss": 0.01},
    ],
    ids=str,
)
def test_loss_and_gradient_equal_those_computed_by_hand(
    loss: dict[str, Any], layout: dict[str, Any], make_recipe: Any, make_rows: Any, first_step: Any
) -> None:
    recipe = make_recipe(train__loss=loss, **layout)
    rows = make_rows(8, turns=3)
    value, gradient, trainer = first_step(recipe, rows)
    expected, expected_gradient = by_hand(trainer.model.eval(), rows, recipe.train.loss)
    assert value == pytest.approx(expected, abs=5e-6)
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-5


def test_full_tuning_with_a_trained_head_has_the_same_losses(
    make_recipe: Any, make_rows: Any, first_step: Any
) -> None:
    recipe = make_recipe(adapter__kind="none", train__loss={"kind": "dft", "z_loss": 0.01}, **PACKED)
    value, gradient, trainer = first_step(recipe, make_rows(6))
    expected, expected_gradient = by_hand(trainer.model.eval(), make_rows(6), recipe.train.loss)
    assert value == pytest.approx(expected, abs=5e-6)
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-5


def test_turn_weights_count_from_the_last_answer(make_rows: Any) -> None:
    (row,) = make_rows(1, turns=3)
    spans = row.spans()
    assert len(spans) == 3
    weights = row_weights(row, [0.2, 0.5, 1.0])
    assert [weights[first] for first, _ in spans] == [0.2, 0.5, 1.0]
    assert [row_weights(row, [0.5, 1.0])[first] for first, _ in spans] == [0.5, 0.5, 1.0]
    assert [row_weights(row, [3.0])[first] for first, _ in spans] == [3.0, 3.0, 3.0]
    outside = [weight for weight, label in zip(weights, row.labels, strict=True) if label == IGNORED]
    assert set(outside) == {0.0}


@pytest.mark.parametrize("turn_weights", [[], [0.25, 1.0]])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_weights_that_rows_give_their_answers_reach_the_gradient(
    layout: dict[str, Any], turn_weights: list[float], tiny_tokenizer: Any, make_recipe: Any, first_step: Any
) -> None:
    """`weight` of a turn multiplies what the recipe says of it; rows with and without weights mix."""

    def row(number: int, *weights: float | None) -> Row:
        turns: list[dict[str, Any]] = []
        for turn, weight in enumerate(weights):
            answer = {"role": "assistant", "content": f"answer {turn} to {number}" * (turn + 1)}
            turns += [{"role": "user", "content": f"question {turn}"}, answer]
            if weight is not None:
                answer["weight"] = weight
        return Row(f"r{number}", tuple(turns), str(number), "s")

    given = [row(0, 0.5, 2), row(1, None, None), row(2, 0.1), row(3, 0, 0.7, None)]
    rows = tokenise_rows(given, tiny_tokenizer, max_tokens=512).rows
    recipe = make_recipe(train__loss={"turn_weights": turn_weights}, **layout)
    value, gradient, trainer = first_step(recipe, rows)

    model = trainer.model.eval()
    model.zero_grad()
    total, weight_sum = torch.zeros(()), 0.0
    by_turn = turn_weights or [1.0]
    for one in rows:
        labels = torch.tensor(one.labels)[1:]
        logs = model(input_ids=torch.tensor([one.input_ids])).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(logs, labels, ignore_index=IGNORED, reduction="none")
        own = [w for w in weights_of(given[int(one.row_id[1:])]) if w]
        for back, ((first, last), weight) in enumerate(zip(one.spans()[::-1], own[::-1], strict=True), 1):
            weight *= by_turn[max(len(by_turn) - back, 0)]
            total = total + weight * nll[first - 1 : last - 1].sum()
            weight_sum += weight * (last - first)
    (total / weight_sum).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert value == pytest.approx(float(total.detach()) / weight_sum, abs=5e-6)
    assert (gradient - expected).norm() / expected.norm() < 1e-5


def test_only_the_proportions_of_turn_weights_count(
    make_recipe: Any, make_rows: Any, first_step: Callable[..., Any]
) -> None:
    """Also where the weights of a whole step sum up to less than 1."""
    rows = make_rows(3, turns=2)
    loss, gradient, _ = first_step(make_recipe(train__loss={"turn_weights": [0.25, 1.0]}, **PACKED), rows)
    small = {"turn_weights": [0.25 * 2.0**-14, 2.0**-14]}
    loss_of_small, gradient_of_small, _ = first_step(make_recipe(train__loss=small, **PACKED), rows)
    assert loss_of_small == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(gradient_of_small, gradient, rtol=1e-5, atol=1e-8)


def test_a_first_step_whose_answers_weigh_nothing_is_no_cut_graph(
    make_recipe: Any, make_rows: Any, train: Any
) -> None:
    recipe = make_recipe(train__loss={"turn_weights": [1.0, 0.0]}, train__max_steps=2, **PACKED)
    result, folder, _ = train(recipe, rows=make_rows(3))
    norms = [event["grad_norm"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]
    assert norms == [0.0, 0.0] and math.isfinite(result.train_loss)


def weights_of(row: Row) -> list[float]:
    weights = [turn.get("weight") for turn in row.messages if turn["role"] == "assistant"]
    return [1.0 if weight is None else float(weight) for weight in weights]


def test_the_reported_loss_stays_the_plain_one(make_recipe: Any, train: Any) -> None:
    plain = make_recipe(train__epochs=1, **PACKED)
    shaped = make_recipe(train__epochs=1, train__loss={"label_smoothing": 0.3, "z_loss": 0.1}, **PACKED)
    events = []
    for number, recipe in enumerate((plain, shaped)):
        _, folder, _ = train(recipe, name=f"run-{number}")
        events.append(next(e for e in read_events(folder / "events.jsonl") if e["event"] == "step"))
    assert events[0]["loss"] == pytest.approx(events[1]["loss"], abs=1e-6)
    assert "objective" not in events[0]
    assert events[1]["objective"] > events[1]["loss"] + 0.1


class TestNeftune:
    def test_noise_is_uniform_in_the_bound_of_each_row(self) -> None:
        """Two documents of 3 and 5 tokens in a pack, width 8: |noise| < alpha / √(L·8), and it fills that range."""
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(4, 8)
        noise = EmbeddingNoise(embedding, alpha=5.0)
        ids = torch.zeros(1, 8, dtype=torch.long)
        clean = embedding(ids)
        inputs = {"cu_seq_lens_q": torch.tensor([0, 3, 8], dtype=torch.int32)}
        samples = []
        for _ in range(300):
            noise.begin(inputs)
            samples.append((embedding(ids) - clean)[0])
            noise.end()
        drawn = torch.stack(samples)
        for part, length in ((drawn[:, :3], 3), (drawn[:, 3:], 5)):
            bound = 5.0 / math.sqrt(length * 8)
            assert float(part.abs().max()) <= bound
            assert float(part.abs().max()) > 0.98 * bound
            assert float(part.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
            assert float(part.mean()) == pytest.approx(0.0, abs=0.05 * bound)

    def test_the_noise_of_a_step_is_the_formula_applied_to_the_generators_numbers(self) -> None:
        embedding = torch.nn.Embedding(4, 8)
        noise = EmbeddingNoise(embedding, alpha=2.0)
        ids = torch.zeros(1, 4, dtype=torch.long)
        inputs = {"attention_mask": torch.tensor([[1, 1, 1, 0]])}
        noise.begin(inputs)
        torch.manual_seed(3)
        found = embedding(ids) - embedding.weight[ids]
        noise.end()
        torch.manual_seed(3)
        expected = (torch.rand(1, 4, 8) * 2 - 1) * 2.0 / math.sqrt(3 * 8)
        assert torch.allclose(found, expected, atol=1e-6)

    def test_validation_and_the_saved_weights_are_free_of_it(
        self, make_recipe: Any, make_rows: Any, train: Any
    ) -> None:
        rows = make_rows(4)
        recipe = make_recipe(
            train__epochs=1, train__learning_rate=1e-12, train__loss={"neftune_alpha": 50.0}, **PACKED
        )
        noisy, _, _ = train(recipe, rows=rows, validation=rows, name="noisy")
        plain, _, _ = train(
            make_recipe(train__epochs=1, train__learning_rate=1e-12, **PACKED),
            rows=rows,
            validation=rows,
            name="plain",
        )
        assert noisy.validation_loss == pytest.approx(plain.validation_loss, abs=1e-5)
        assert abs(noisy.train_loss - plain.train_loss) > 1e-3
