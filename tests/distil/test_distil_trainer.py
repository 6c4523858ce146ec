"""What is minimised is the definition of the loss over the targets of the whole step, whatever the batches and packs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.digest import digest_folder
from finetune.distil.losses import divergence
from finetune.distil.student import cut_layers
from finetune.distil.targets import TeacherTargets
from finetune.distil.trainer import LiveTeaching, shared_vocabulary
from finetune.errors import UserError
from finetune.model.attention import register_document_attention
from finetune.telemetry.events import read_events

N_VOCABULARY = 259


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def live(teacher: Any, packing: bool = True, n_vocabulary: int = N_VOCABULARY) -> LiveTeaching:
    register_document_attention()
    teacher = copy.deepcopy(teacher)
    teacher.set_attn_implementation("document" if packing else "sdpa")
    return LiveTeaching(teacher, n_vocabulary)


@pytest.mark.parametrize(
    "changes",
    [
        {"train.gradient_accumulation_steps": 8},  # all packs in one step
        {"train.packing": False, "train.micro_batch_size": 4, "train.gradient_accumulation_steps": 2},
        {"train.pack_tokens": 64, "train.gradient_accumulation_steps": 8},
    ],
)
def test_the_first_step_is_the_definition(
    train: Any, make_recipe: Any, rows: Any, teacher: Any, target_logits: Any, changes: dict[str, Any]
) -> None:
    recipe = make_recipe(
        {
            "train.max_steps": 1,
            "distil.loss": {"kind": "jsd", "beta": 0.3, "temperature": 2.0, "answer_weight": 0.25},
            **changes,
        }
    )
    student = cut_layers(copy.deepcopy(teacher), [0, 2])
    _, folder, _ = train(recipe, student, live(teacher, recipe.train.packing), rows)
    ours, answers = target_logits(student, rows)
    theirs, _ = target_logits(teacher, rows)
    apart = divergence("jsd", ours, TeacherTargets.full(theirs), temperature=2.0, beta=0.3)
    nll = torch.nn.functional.cross_entropy(ours, answers)
    (step,) = steps_of(folder)
    assert step["divergence"] == pytest.approx(float(apart.mean()), rel=1e-4)
    assert step["nll"] == pytest.approx(float(nll), rel=1e-4)
    assert step["loss"] == pytest.approx(0.75 * float(apart.mean()) + 0.25 * float(nll), rel=1e-4)
    assert step["target_tokens"] == len(answers)


def test_a_student_that_is_its_teacher_has_no_loss_and_learns_nothing(
    train: Any, make_recipe: Any, rows: Any, teacher: Any
) -> None:
    recipe = make_recipe({"train.max_steps": 1})
    _, folder, trained = train(recipe, teacher, live(teacher), rows)
    (step,) = steps_of(folder)
    assert step["loss"] == pytest.approx(0.0, abs=1e-9)
    assert step["grad_norm"] < 1e-5
    assert trained.training is not None


def test_a_teacher_that_says_nan_is_the_one_that_is_blamed(
    train: Any, make_recipe: Any, rows: Any, teacher: Any
) -> None:
    broken = copy.deepcopy(teacher)
    broken.get_output_embeddings().weight.data[7] = torch.nan
    broken.get_input_embeddings().weight = torch.nn.Parameter(teacher.get_input_embeddings().weight.data)
    with pytest.raises(UserError, match="the teacher's logits are not finite") as told:
        train(
            make_recipe({"train.max_steps": 1}),
            cut_layers(copy.deepcopy(teacher), [0, 2]),
            live(broken),
            rows,
        )
    assert "train.learning_rate" not in told.value.faults[0].fix
    filler = torch.zeros(3, 5).index_fill(1, torch.tensor([4]), -torch.inf)
    assert TeacherTargets.full(filler).is_finite()  # tokens that a teacher does not have
    assert not TeacherTargets.full(torch.full((3, 5), -torch.inf)).is_finite()


def test_a_student_with_an_adapter_comes_closer(
    train: Any, make_recipe: Any, rows: Any, teacher: Any
) -> None:
    recipe = make_recipe(
        {"adapter": {"rank": 8, "alpha": 16}, "train.epochs": 8, "train.learning_rate": 1e-2}
    )
    student = cut_layers(copy.deepcopy(teacher), [0, 3])
    result, folder, _ = train(recipe, student, live(teacher), rows, validation=rows[:3])
    steps = steps_of(folder)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert result.validation_loss is not None
    assert result.output == "adapter"


def test_a_killed_training_ends_with_the_same_weights(
    train: Any, make_recipe: Any, rows: Any, teacher: Any
) -> None:
    student = cut_layers(copy.deepcopy(teacher), [0, 3])
    whole = make_recipe({"train.pack_tokens": 64, "train.epochs": 1.0})
    _, folder, _ = train(whole, student, live(teacher), rows, name="whole")

    class Killed(LiveTeaching):
        calls = 0

        def targets(self, inputs: dict[str, Any]) -> TeacherTargets:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().targets(inputs)

    killed = live(teacher)
    with pytest.raises(KeyboardInterrupt):
        train(whole, student, Killed(killed.teacher, N_VOCABULARY), rows, name="killed")
    said: list[str] = []
    _, again, _ = train(whole, student, live(teacher), rows, name="killed", said=said)
    assert any("continuing from checkpoint step-2" in line for line in said)
    assert digest_folder(again / "model") == digest_folder(folder / "model")


@pytest.mark.parametrize("teacher_rows", [N_VOCABULARY, 300])
def test_only_tokens_that_both_models_know_count(
    train: Any, make_recipe: Any, rows: Any, teacher_rows: int, make_tiny_model: Callable[..., Any]
) -> None:
    teacher = make_tiny_model(seed=5, vocab_size=teacher_rows).requires_grad_(False)
    student = copy.deepcopy(teacher)
    student.resize_token_embeddings(330, mean_resizing=False)
    student.get_input_embeddings().weight.data[N_VOCABULARY:] = 7.0  # padding with a loud opinion
    _, folder, _ = train(make_recipe({"train.max_steps": 1}), student, live(teacher), rows)
    (step,) = steps_of(folder)
    assert step["loss"] == pytest.approx(0.0, abs=1e-9)


def test_other_tokens_are_refused_even_when_there_are_as_many(
    make_tiny_tokenizer: Callable[..., Any],
) -> None:
    ours, theirs = make_tiny_tokenizer(), make_tiny_tokenizer()
    assert shared_vocabulary(ours, theirs) == N_VOCABULARY

    class Permuted:
        def get_vocab(self) -> dict[str, int]:
            return {token: (index + 1) % N_VOCABULARY for token, index in theirs.get_vocab().items()}

    with pytest.raises(UserError, match="different tokenizers: 259 tokens have other ids"):
        shared_vocabulary(ours, Permuted())


def test_a_student_that_bends_its_logits_is_told_what_to_do(
    train: Any, make_recipe: Any, rows: Any, teacher: Any
) -> None:
    student = copy.deepcopy(teacher)
    student.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="bends its logits"):
        train(make_recipe(), student, live(teacher), rows)


def test_a_teacher_that_bends_its_logits_teaches_what_it_says(
    train: Any, make_recipe: Any, rows: Any, teacher: Any, target_logits: Any
) -> None:
    student = cut_layers(copy.deepcopy(teacher), [0, 3])
    bent = copy.deepcopy(teacher)
    bent.config.logit_scale = 0.5  # what a model of such a kind has; here its forward pass is bent by hand
    plain = bent.lm_head.forward
    bent.lm_head.forward = lambda hidden: plain(hidden) * 0.5
    register_document_attention()
    bent.set_attn_implementation("document")
    recipe = make_recipe({"train.max_steps": 1, "train.gradient_accumulation_steps": 8})
    _, folder, _ = train(recipe, student, LiveTeaching(bent, N_VOCABULARY), rows)
    ours, _ = target_logits(student, rows)
    theirs, _ = target_logits(teacher, rows)
    expected = divergence("forward_kl", ours, TeacherTargets.full(theirs * 0.5)).mean()
    assert steps_of(folder)[0]["loss"] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("packing", [True, False])
def test_a_row_whose_targets_were_taken_out_is_not_asked_of_the_teacher(packing: bool) -> None:
    from finetune.distil.trainer import rows_with_targets

    labels = torch.tensor([[-100, 5, 5, -100, -100, -100, -100, 7]])
    batch: dict[str, Any] = {"rows": [4, 9, 2], "labels": labels, "cu_seq_lens_q": torch.tensor([0, 3, 6, 8])}
    if not packing:
        rows = torch.tensor([[-100, 5, 5], [-100, -100, -100], [-100, 7, -100]])
        batch = {"rows": [4, 9, 2], "labels": rows}
    assert rows_with_targets(batch) == [4, 2]


def test_the_step_names_the_row_that_is_furthest_from_the_teacher(
    train: Any, make_recipe: Any, rows: Any, teacher: Any, target_logits: Any
) -> None:
    recipe = make_recipe({"train.max_steps": 1, "train.gradient_accumulation_steps": 8})
    student = cut_layers(copy.deepcopy(teacher), [0, 2])
    _, folder, _ = train(recipe, student, live(teacher), rows)
    means = []
    for row in rows:
        (ours, _), (theirs, _) = target_logits(student, [row]), target_logits(teacher, [row])
        means.append(float(divergence("forward_kl", ours, TeacherTargets.full(theirs)).mean()))
    (step,) = steps_of(folder)
    assert step["worst_row"] == rows[means.index(max(means))].row_id
    assert step["worst_row_loss"] == pytest.approx(max(means), rel=1e-4)
