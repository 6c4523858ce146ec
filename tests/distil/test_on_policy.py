"""The student learns from what it says itself: sampled from the seed, judged by the teacher, continued after a kill."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch

from finetune.digest import digest_folder
from finetune.distil.on_policy import prompt_of, sample_answers
from finetune.distil.student import cut_layers
from finetune.distil.targets import TeacherTargets
from finetune.distil.trainer import LiveTeaching
from finetune.errors import UserError
from finetune.model.attention import register_document_attention
from finetune.recipe.distil_section import OnPolicySection
from finetune.telemetry.events import read_events
from finetune.training.sharding import refuse_spread_weights

EOS = 2
SAMPLING = {"share": 1.0, "max_new_tokens": 6}


class Watched(LiveTeaching):
    """A live teacher that keeps the batches it is asked about, and can be interrupted at one."""

    def __init__(self, teacher: Any, kill_at: int | None = None) -> None:
        register_document_attention()
        teacher = copy.deepcopy(teacher)
        teacher.set_attn_implementation("document")
        super().__init__(teacher, 259)
        self.batches: list[dict[str, Any]] = []
        self.kill_at = kill_at

    def targets(self, inputs: dict[str, Any]) -> TeacherTargets:
        self.batches.append({name: inputs[name] for name in ("input_ids", "labels", "rows")})
        if len(self.batches) == self.kill_at:
            raise KeyboardInterrupt
        return super().targets(inputs)


def recipe_of(make_recipe: Any, **sampling: Any) -> Any:
    distil = {
        "teacher": {"id": "tiny"},
        "way": "on_policy",
        "targets": "live",
        "loss": {"kind": "reverse_kl"},
    }
    changes = {"distil": distil | {"on_policy": SAMPLING | sampling}, "train.pack_tokens": 64}
    return make_recipe(changes)


def test_answers_are_sampled_behind_the_prompt_and_end_at_the_end(teacher: Any, rows: Any) -> None:
    prompts = [prompt_of(row) for row in rows[:3]]
    assert all(row.input_ids[: len(prompt)] == prompt for row, prompt in zip(rows, prompts, strict=False))
    assert all(rows[i].labels[len(prompts[i])] != -100 for i in range(3))
    section = OnPolicySection(max_new_tokens=40, temperature=2.0)
    state = torch.random.get_rng_state()
    first = sample_answers(teacher, prompts, section, [EOS], seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sample_answers(teacher, prompts, section, [EOS], seed=3) == first
    assert sample_answers(teacher, prompts, section, [EOS], seed=4) != first
    for answer in first:
        assert EOS not in answer[:-1]
        assert answer[-1] == EOS or len(answer) == 40


def test_a_sample_is_what_the_student_says_alone(teacher: Any, rows: Any) -> None:
    section = OnPolicySection(max_new_tokens=5, temperature=0.01)  # all but greedy
    prompts = [prompt_of(row) for row in rows[:3]]
    together = sample_answers(teacher, prompts, section, [EOS], seed=3)
    alone = [sample_answers(teacher, [prompt], section, [EOS], seed=3)[0] for prompt in prompts]
    assert together == alone


def test_batches_hold_the_students_answers_and_the_teacher_judges_those(
    train: Any, make_recipe: Any, rows: Any, teacher: Any
) -> None:
    student = cut_layers(copy.deepcopy(teacher), [0, 3])
    watched = Watched(teacher)
    _, folder, _ = train(recipe_of(make_recipe), student, watched, rows)
    steps = [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]
    assert all(event["loss"] >= 0 for event in steps)
    targets = 0
    for batch in watched.batches:
        ids, labels = batch["input_ids"].flatten().tolist(), batch["labels"].flatten().tolist()
        expected_start = [token for row in batch["rows"][:1] for token in prompt_of(rows[row])]
        assert ids[: len(expected_start)] == expected_start
        assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
        targets += sum(label != -100 for label in labels)
        assert sum(label != -100 for label in labels) <= 6 * len(batch["rows"])
    assert steps[-1]["target_tokens"] == targets


def test_a_share_of_the_batches_keeps_the_answers_of_the_dataset(
    train: Any, make_recipe: Any, rows: Any, teacher: Any
) -> None:
    student = cut_layers(copy.deepcopy(teacher), [0, 3])
    watched = Watched(teacher)
    train(recipe_of(make_recipe, share=0.5), student, watched, rows)
    of_dataset = [
        batch["input_ids"].flatten().tolist()
        == [token for row in batch["rows"] for token in rows[row].input_ids]
        for batch in watched.batches
    ]
    assert {True, False} == set(of_dataset)


def test_a_killed_run_samples_what_a_whole_one_does(
    train: Any, make_recipe: Any, rows: Any, teacher: Any
) -> None:
    student, recipe = cut_layers(copy.deepcopy(teacher), [0, 3]), recipe_of(make_recipe)
    _, whole, _ = train(recipe, student, Watched(teacher), rows, name="whole")
    with pytest.raises(KeyboardInterrupt):
        train(recipe, student, Watched(teacher, kill_at=4), rows, name="killed")
    _, again, _ = train(recipe, student, Watched(teacher), rows, name="killed")
    assert digest_folder(again / "model") == digest_folder(whole / "model")


@pytest.mark.parametrize("spread", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_a_student_whose_weights_are_spread_cannot_answer(spread: str) -> None:
    trainer = types.SimpleNamespace(**{"is_fsdp_enabled": False, "is_deepspeed_enabled": False, spread: True})
    with pytest.raises(UserError, match="no process holds the whole model") as told:
        refuse_spread_weights(trainer, where="distil.way", fix="start it with DDP")
    assert told.value.faults[0].where == "distil.way"
