"""Floating-point work is counted once per matrix: frozen, trainable and head."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from finetune.telemetry.flops import measure_peak_flops, step_work


def test_matrices_are_counted_once_with_and_without_an_adapter(tiny_model: Any) -> None:
    per_layer = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3  # q, o; k, v; gate, up, down
    for parameter in tiny_model.parameters():
        parameter.requires_grad = False
    plain = step_work(tiny_model)
    assert plain.frozen_parameters == 2 * per_layer
    assert plain.trainable_parameters == 0
    assert plain.head_parameters == 259 * 64 and not plain.head_is_trainable

    adapted = step_work(get_peft_model(tiny_model, LoraConfig(r=4, target_modules="all-linear")))
    assert adapted.frozen_parameters == 2 * per_layer
    adapter = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert adapted.trainable_parameters == 2 * adapter


def test_work_follows_the_definition(tiny_model: Any) -> None:
    work = step_work(tiny_model)
    n = work.trainable_parameters
    assert work.frozen_parameters == 0 and work.head_is_trainable
    assert work.flops(10, 4, 0) == 10 * 6 * n + 4 * 6 * work.head_parameters
    assert work.flops(10, 4, 100) - work.flops(10, 4, 0) == 6 * (2 * 4 * 16) * 100


def test_the_peak_is_a_positive_rate() -> None:
    assert measure_peak_flops(torch.float32, torch.device("cpu")) > 1e8


def test_measuring_the_peak_draws_nothing_that_training_would() -> None:
    """It is measured once a process: a first training would else have other dropout than the next ones."""
    measure_peak_flops.cache_clear()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measure_peak_flops(torch.float32, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
