"""Feeds the doctor's trials with the model of a recipe: short trainings of it on its own rows, then invariants in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from finetune.data.pair_tokens import PreferenceSplit
from finetune.data.tokenise import TokenisedSplit
from finetune.doctor.environment import check_disk
from finetune.doctor.finding import Finding, attempt, examine, faults_in
from finetune.doctor.invariants import choose_rows, disturb, quick_invariants
from finetune.doctor.memory import read_room
from finetune.doctor.trained import check_trained, check_weights
from finetune.doctor.trials import Trials, not_tried
from finetune.model.adapter_files import load_adapter
from finetune.model.adapters import count_trainable
from finetune.model.memory import release_memory
from finetune.model.source import resolve_model
from finetune.paths import runs_root
from finetune.pipeline.inputs import RunInputs
from finetune.pipeline.material import Material, Say
from finetune.pipeline.methods import train_by_method
from finetune.pipeline.trainable import load_base, load_to_train
from finetune.recipe.schema import Recipe
from finetune.training.mismatched import as_trained

TRIALS = (
    "weights",
    "trained part",
    "gradients",
    "longest batch",
    "resume",
    "examples by heart",
    "save and reload",
    "accumulation",
    "packing",
)
_GROUP = "training"
_QUICK_ROWS, _QUICK_TOKENS = 3, 128
_FP32_BYTES, _FP32_SHARE = 4, 0.5  # weights in fp32 may take half of the memory


def try_training(material: Material, say: Say) -> Iterator[Finding]:
    """Short trainings of the recipe's own model and rows, then the invariants in fp32. A trial that fails does not keep the
    others from theirs; a model that cannot be loaded, or whose weights are damaged, does."""
    inputs = material.inputs
    say("doctor: the model, one step on the longest batch")
    loaded, found = attempt(
        _GROUP,
        "weights",
        lambda: load_to_train(inputs, new_tokens=material.new, rows=material.split.rows),
    )
    if loaded is not None:
        found = list(examine(_GROUP, "weights", partial(check_weights, loaded)))
    yield from found
    if faults_in(found):
        yield from left_out(TRIALS[1:], "without sound weights nothing can be tried")
        return
    rows: Sequence[Any] = material.split.rows
    if isinstance(material.split, PreferenceSplit):
        rows = as_trained(material.split.rows, inputs.recipe.train)
    trials = Trials(
        _trainable_alone(inputs.recipe),
        loaded,
        rows,
        _training_of(material),
        material.n_parameters,
    )
    del loaded  # so that the trials can let it go
    try:
        yield from _of_model(trials, material, say)
    finally:
        trials.model = None
        trials.close()
    release_memory()
    yield from _quick(material, say)


def _of_model(trials: Trials, material: Material, say: Say) -> Iterator[Finding]:
    inputs, keep = material.inputs, material.inputs.recipe.train.keep_checkpoints
    forecast = material.forecasts.training if material.forecasts is not None else None
    n_trained = forecast.n_trainable if forecast is not None else None
    yield from examine(_GROUP, "trained part", lambda: check_trained(trials.recipe, trials.model, n_trained))
    if n_trained is None:  # of a model without a forecast it is known only now
        n_counted = count_trainable(trials.model)
        yield from examine("environment", "disk", lambda: check_disk(runs_root(), n_counted, keep))
    room, total = read_room(), forecast.total_bytes if forecast is not None else None
    probed = list(examine(_GROUP, "longest batch", lambda: trials.probe(total, room)))
    yield from probed
    if any(one.check == "gradients" for one in faults_in(probed)):
        yield from left_out(TRIALS[4:], "without gradients nothing is learnt")
        return
    say("doctor: a training that is interrupted")
    yield from examine(_GROUP, "resume", trials.resume)
    say("doctor: eight examples by heart")
    yield from examine(_GROUP, "examples by heart", trials.overfit)
    yield from examine(_GROUP, "save and reload", lambda: trials.reload(lambda at: _saved(inputs, at)))


def _training_of(material: Material) -> Callable[..., Any]:
    """Trains a few rows by the recipe's own method."""

    def train(
        settled: Recipe, trained: Any, chosen: Sequence[Any], folder: Path, callbacks: Sequence[Any]
    ) -> Any:
        split: Any = material.split
        empty, given = (replace(split, rows=list(part)) for part in ((), chosen))
        return train_by_method(
            settled,
            trained,
            material.tokenizer,
            given,
            empty,
            run_folder=folder,
            owner="doctor",
            say=lambda line: None,
            source=material.inputs.source,
            callbacks=callbacks,
        )

    return train


def _trainable_alone(recipe: Recipe) -> Recipe:
    """Distillation without its teacher: the student learns the answers."""
    if recipe.train.method != "distil":
        return recipe
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"method": "sft"})})


def _saved(inputs: RunInputs, folder: Path) -> Any:
    """What a training wrote into a run folder, as it is loaded for use."""
    if inputs.recipe.adapter.kind != "none":
        return load_adapter(load_base(inputs), folder / "adapter", source=inputs.source)
    return load_base(replace(inputs, source=resolve_model(str(folder / "model"))))


def _quick(material: Material, say: Say) -> Iterator[Finding]:
    """Accumulation and packing, exact in fp32, where the weights fit in it and the method learns answers."""
    inputs, names = material.inputs, ("accumulation", "packing")
    if not isinstance(material.split, TokenisedSplit):
        yield from left_out(names, f"measured for train.method sft, not for {inputs.recipe.train.method}")
        return
    room = read_room()
    if _FP32_BYTES * material.n_parameters > _FP32_SHARE * room.available_bytes:
        yield from left_out(names, "the weights in fp32 would take more than half of the memory")
        return
    say("doctor: accumulation and packing, in fp32")
    chosen = choose_rows(material.split.rows, _QUICK_ROWS, max_tokens=_QUICK_TOKENS)
    recipe = _trainable_alone(inputs.recipe)

    def measure() -> Iterator[Finding]:
        model = load_to_train(
            inputs, new_tokens=material.new, rows=material.split.rows, dtype="fp32", attention="sdpa"
        )
        disturb(model, recipe.seed)
        yield from quick_invariants(recipe, model, material.tokenizer, chosen)

    yield from examine(_GROUP, "accumulation and packing", measure)


def left_out(names: Sequence[str], reason: str) -> Iterator[Finding]:
    """Trials that are not made, and why."""
    return (replace(one, group=_GROUP) for one in not_tried(names, reason))
