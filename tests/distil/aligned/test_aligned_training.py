"""A student learns from a teacher with another tokenizer, live and from its cache, whatever the batching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.rows import Row
from finetune.data.tokenise import tokenise_rows
from finetune.distil.aligned.teaching import AlignedRows, AlignedTeaching, align_rows
from finetune.distil.cache.layout import CacheIdentity, rows_digest
from finetune.distil.cache.read import TeacherCache
from finetune.distil.cache.write import ModelSaying, cache_teacher, coding_of
from finetune.distil.targets import TeacherTargets
from finetune.errors import UserError
from finetune.telemetry.events import read_events

WORDS = ["the kitchen light", "20°C", "日本 🙂", "set", "Küche 🙂🙂", "degrees", "naïve", "the the the"]


@pytest.fixture
def source_rows() -> list[Row]:
    return [
        Row(
            id=f"row-{number}",
            messages=({"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": answer}),
            group=str(number),
            source="test",
            tags={},
        )
        for number, answer in enumerate(WORDS)
    ]


@pytest.fixture
def aligned(source_rows: list[Row], tiny_tokenizer: Any, merging_tokenizer: Any) -> AlignedRows:
    rows = tokenise_rows(source_rows, tiny_tokenizer, max_tokens=256).rows
    return align_rows(rows, source_rows, tiny_tokenizer, merging_tokenizer)


@pytest.fixture
def other_teacher(make_tiny_model: Callable[..., Any], merging_tokenizer: Any) -> Any:
    """Another vocabulary, and more rows in its embedding than its tokenizer has tokens."""
    model = make_tiny_model(seed=5, layers=2, vocab_size=len(merging_tokenizer) + 7)
    model.get_input_embeddings().weight.data *= 3
    return model.requires_grad_(False)


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def test_live_teacher_and_whole_cache_give_the_same_training(
    train: Any, make_recipe: Any, source_rows: Any, aligned: AlignedRows, other_teacher: Any, tiny_model: Any,
    tiny_tokenizer: Any, tmp_path: Path,
) -> None:  # fmt: skip
    rows = tokenise_rows(source_rows, tiny_tokenizer, max_tokens=256).rows
    recipe = make_recipe({"distil.alignment": "text", "train.epochs": 3, "train.pack_tokens": 128})
    identity = CacheIdentity("t", "k", rows_digest(aligned.teacher_rows))
    coding = coding_of(k=aligned.shared.n_teacher, vocabulary=aligned.shared.n_teacher, dtype="fp32")
    folder = tmp_path / "cache"
    cache_teacher(ModelSaying(other_teacher), aligned.teacher_rows, folder, identity=identity, coding=coding)
    cache = TeacherCache.open(folder, aligned.teacher_rows, identity)
    found = {}
    for name, teaching in (
        ("live", AlignedTeaching.live(aligned, other_teacher)),
        ("cached", AlignedTeaching.cached(aligned, cache, 1.0)),
    ):
        _, run_folder, _ = train(recipe, tiny_model, teaching, rows, name=name, n_vocabulary=259)
        found[name] = losses(run_folder)
    assert found["live"] == pytest.approx(found["cached"], rel=1e-4)
    assert found["live"][-1] < 0.8 * found["live"][0]


def test_what_a_teacher_is_sure_of_is_learnt_in_the_students_own_tokens(
    train: Any, make_recipe: Any, source_rows: Any, aligned: AlignedRows, tiny_model: Any, tiny_tokenizer: Any,
    target_logits: Any,
) -> None:  # fmt: skip
    rows = tokenise_rows(source_rows, tiny_tokenizer, max_tokens=256).rows

    def said(places: Any, device: Any) -> TeacherTargets:
        own = torch.tensor([token for place in places for token in aligned.aligned[place].teacher_ids])
        return TeacherTargets.full(8.0 * torch.nn.functional.one_hot(own, aligned.shared.n_teacher).float())

    recipe = make_recipe({"distil.alignment": "text", "train.epochs": 40, "train.pack_tokens": 1024})
    _, _, trained = train(recipe, tiny_model, AlignedTeaching(aligned, said), rows, n_vocabulary=259)

    def nll(model: Any) -> float:
        logits, answers = target_logits(model, rows)
        return float(torch.nn.functional.cross_entropy(logits, answers))

    assert nll(trained.eval()) < 0.5 * nll(tiny_model)


def test_packing_and_accumulation_change_nothing(
    train: Any, make_recipe: Any, source_rows: Any, aligned: AlignedRows, other_teacher: Any, tiny_model: Any,
    tiny_tokenizer: Any,
) -> None:  # fmt: skip
    rows = tokenise_rows(source_rows, tiny_tokenizer, max_tokens=256).rows
    first = {}
    for name, changes in {
        "whole": {
            "train.packing": False,
            "train.micro_batch_size": 8,
            "train.gradient_accumulation_steps": 1,
        },
        "parts": {
            "train.packing": False,
            "train.micro_batch_size": 2,
            "train.gradient_accumulation_steps": 4,
        },
        "packed": {
            "train.pack_tokens": 1024,
            "train.micro_batch_size": 1,
            "train.gradient_accumulation_steps": 1,
        },
    }.items():
        recipe = make_recipe({"distil.alignment": "text", "train.max_steps": 1} | changes)
        teaching = AlignedTeaching.live(aligned, other_teacher)
        _, folder, model = train(recipe, tiny_model, teaching, rows, name=name, n_vocabulary=259)
        first[name] = (losses(folder)[0], model.get_input_embeddings().weight.detach().clone())
    for name in ("parts", "packed"):
        assert first[name][0] == pytest.approx(first["whole"][0], rel=1e-5)
        assert torch.allclose(first[name][1], first["whole"][1], atol=1e-5)


def test_rows_without_targets_left_ask_the_teacher_nothing(aligned: AlignedRows, other_teacher: Any) -> None:
    inputs = {"rows": [], "labels": torch.full((1, 4), -100)}
    assert len(AlignedTeaching.live(aligned, other_teacher).targets(inputs)) == 0


def test_facts_count_every_target_once(aligned: AlignedRows) -> None:
    facts = aligned.facts()
    assert facts["targets"] == facts["targets_one_to_one"] + facts["targets_in_groups"]
    assert 0 < facts["targets_one_to_one"] < facts["targets"] and facts["boundaries"] < facts["targets"]
    assert facts["shared_tokens"] == 257 and facts["student_tokens"] == 259  # bytes and the end of turn
    assert aligned.longest_tokens == max(len(row.input_ids) for row in aligned.teacher_rows)


def test_rows_of_tokens_are_refused(tiny_tokenizer: Any, merging_tokenizer: Any) -> None:
    row = Row(
        id="t",
        messages=(),
        group="",
        source="s",
        tags={},
        kind="tokens",
        input_ids=(1, 5, 6),
        labels=(-100, 5, 6),
    )
    rows = tokenise_rows([row], tiny_tokenizer, max_tokens=256).rows
    with pytest.raises(UserError, match="rows of tokens have no text"):
        align_rows(rows, [row], tiny_tokenizer, merging_tokenizer)
