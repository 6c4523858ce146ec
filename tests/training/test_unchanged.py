"""Whatever watches a training leaves the bytes of its weights alone: every option of telemetry by itself, in SFT and in DPO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.pipeline.live_diagnosis import LiveDiagnosis
from finetune.telemetry.events import read_events

COMMON: dict[str, Any] = {
    # Dropout, so that every draw of a random number shows in the weights.
    "adapter": {"rank": 8, "alpha": 16, "dropout": 0.1},
    "train__epochs": 2,
    "train__max_steps": 6,
    "train__pack_tokens": 128,
    "train__model_dropout": 0.1,
}
SAMPLES = {"every_steps": 2, "prompts": 2, "max_new_tokens": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "samples": {"train__samples": SAMPLES},
    "own prompts": {"train__samples": {**SAMPLES, "prompts": ["Who?"]}},
    "validation": {"train__validate_every_steps": 2},
    "checkpoints": {"train__checkpoint_every_steps": 2, "train__pin_checkpoints": [4]},
    "a watch for divergence that may rewind": {"train__on_divergence": "rewind"},
}


def weights_of(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def kinds_of(folder: Path) -> Counter[str]:
    return Counter(event["event"] for event in read_events(folder / "events.jsonl"))


@pytest.fixture
def sft(make_recipe: Any, train: Any, make_rows: Any) -> Callable[..., Path]:
    """sft(name, **options): the run folder of a training with these keys; rows are the same every time."""

    def run(name: str, callbacks: Any = (), **options: Any) -> Path:
        recipe = make_recipe(**{**COMMON, "train__checkpoint_every_steps": 100, **options})
        return train(recipe, name=name, validation=make_rows(3), callbacks=callbacks)[1]  # type: ignore[no-any-return]

    return run


@pytest.fixture
def dpo(make_recipe: Any, tmp_path: Path, tiny_tokenizer: Any, adapted_model: Any, monkeypatch: Any) -> Any:
    """The same for pairs, whose method refuses dropout."""
    from finetune.data.pair_tokens import tokenise_preferences
    from finetune.data.rows import Row
    from finetune.training.preference import train_preference

    monkeypatch.setattr("finetune.training.session.measure_peak_flops", lambda dtype, device: 1e12)
    rows = [
        Row(
            f"row-{index}",
            ({"role": "user", "content": f"{index}?"},),
            str(index),
            "test",
            kind="preference",
            chosen=({"role": "assistant", "content": "good" * (1 + index % 3)},),
            rejected=({"role": "assistant", "content": "bad"},),
        )
        for index in range(6)
    ]
    pairs = tokenise_preferences(rows, tiny_tokenizer, unit="pair", max_tokens=256).rows

    still = {"adapter": {"rank": 8, "alpha": 16}, "train__model_dropout": None, "train__method": "dpo"}

    def run(name: str, **options: Any) -> Path:
        recipe = make_recipe(**{**COMMON, "train__checkpoint_every_steps": 100, **still, **options})
        folder = tmp_path / name
        folder.mkdir()
        train_preference(
            recipe,
            adapted_model(recipe),
            tiny_tokenizer,
            pairs,
            pairs[:2],
            run_folder=folder,
            owner="o" * 64,
            references=tmp_path / "references",
            say=lambda line: None,
        )
        return folder

    return run


def test_no_option_of_telemetry_changes_a_byte(sft: Callable[..., Path]) -> None:
    plain = sft("plain")
    told = {"validation": "validation", "checkpoints": "checkpoint"}
    for name, options in OPTIONS.items():
        watched = sft(name, **options)
        assert weights_of(watched) == weights_of(plain), name
        kind = told.get(name, "sample" if "train__samples" in options else "start")
        assert kinds_of(watched)[kind] > kinds_of(plain)[kind] or kind == "start", name


def test_the_diagnosis_of_a_run_that_goes_on_changes_no_byte(
    sft: Callable[..., Path], tmp_path: Path
) -> None:
    options = {"train__max_steps": 12, "train__epochs": 10, "train__learning_rate": 1e-13}
    said: list[str] = []
    watched = sft("live", (LiveDiagnosis(tmp_path / "live" / "events.jsonl", said.append),), **options)
    assert said and "finding" in kinds_of(watched)
    assert weights_of(watched) == weights_of(sft("alone", **options))


def test_rewards_margins_and_the_kl_of_pairs_change_no_byte(dpo: Callable[..., Path]) -> None:
    plain = dpo("plain")
    watched = dpo("watched", train__samples=SAMPLES, train__validate_every_steps=2)
    assert weights_of(watched) == weights_of(plain)
    events = read_events(watched / "events.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    for step in steps:
        assert step["reward_margin"] == pytest.approx(
            step["reward_chosen"] - step["reward_rejected"], abs=1e-5
        )
        assert 0.0 <= step["reward_accuracy"] <= 1.0
    divergences = [event["kl_to_base"] for event in events if event["event"] == "sample"]
    assert divergences[:2] == [0.0, 0.0] and all(value > 0 for value in divergences[-2:])
