"""The reference's log-probabilities: computed once, before the first step, and kept on disk under their own digest.

The reference is what training starts from, whatever the kind of adapter and wherever it comes from, so the model itself
computes them while it still is that. No second model or adapter is held, and a sweep over beta or the learning rate
reads what its first run computed.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.model.adapters import base_only
from finetune.model.source import ModelSource
from finetune.paths import disk_faults, write_atomic
from finetune.telemetry.progress import Progress
from finetune.training.answer_trainer import AnswerTrainer
from finetune.training.branches import Pack, Packs

_FORMAT = 1


def add_reference(
    trainer: AnswerTrainer,
    *,
    model_key: dict[str, Any],
    base: bool,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Give every pack of the trainer its reference log-probabilities; call before `train()`.

    `model_key`: what decides the weights below the trained ones (see `weights_key`); `base`: switch the adapter off.
    Several processes share the packs of a side.
    """
    for name, packs in (("train", trainer.train_dataset), ("validation", trainer.eval_dataset)):
        if packs is None:
            continue
        key = reference_key(trainer, packs, model_key=model_key, base=base)
        path = folder / f"{key[:20]}.safetensors"
        if not path.is_file():
            say(f"reference: log-probabilities of the {name} answers, kept in {path}")
            _compute(trainer, packs, path, base=base, label=f"reference, {name}")
        _attach(packs, path)


def reference_key(trainer: AnswerTrainer, packs: Packs, *, model_key: dict[str, Any], base: bool) -> str:
    """Digest of everything that decides the log-probabilities, the packs' composition included."""
    return digest_json(
        {
            "format": _FORMAT,
            "model": model_key,
            "trained": None if base else trained_digest(trainer.model),
            "attention": trainer.attention,
            "dtype": str(trainer.compute_dtype),
            "collator": repr(trainer.data_collator),
            "packs": [[example.content() for example in members.examples] for members in packs.packs],
        }
    )


def weights_key(source: ModelSource | None, model: nn.Module, quantize: str, double: bool) -> dict[str, Any]:
    """What decides the frozen weights: the base's digest and its quantization; without a source, the weights themselves."""
    digest = (
        source.digest if source is not None else _digest(model, lambda parameter: not parameter.requires_grad)
    )
    return {"base": digest, "quantize": quantize, "double": double and quantize in ("nf4", "fp4")}


def trained_digest(model: nn.Module) -> str:
    """SHA-256 over the trainable parameters as they are now."""
    return _digest(model, lambda parameter: parameter.requires_grad)


def _digest(model: nn.Module, wanted: Callable[[nn.Parameter], bool]) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if wanted(parameter):
            found.update(name.encode())
            found.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _compute(trainer: AnswerTrainer, packs: Packs, path: Path, *, base: bool, label: str) -> None:
    """Every process scores its share; the first one writes the file, and all wait for it."""
    model, accelerator = trainer.model, trainer.accelerator
    rank, n_ranks = accelerator.process_index, accelerator.num_processes
    lengths = [sum(len(example.answers) for example in members.examples) for members in packs.packs]
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    scores = torch.zeros(offsets[-1], dtype=torch.float64)
    was_training = model.training
    model.eval()
    with (
        torch.no_grad(),
        base_only(model) if base else contextlib.nullcontext(),
        Progress(label, len(range(rank, len(packs), n_ranks)), "packs") as progress,
    ):
        for index in range(rank, len(packs), n_ranks):
            scores[offsets[index] : offsets[index + 1]] = _score(trainer, packs.packs[index])
            progress.advance()
    model.train(was_training)
    if n_ranks > 1:
        scores = accelerator.reduce(scores.to(accelerator.device), reduction="sum").cpu()
    if accelerator.is_main_process:
        from safetensors.torch import save

        write_atomic(path, save({"log_probabilities": scores.float()}))
    accelerator.wait_for_everyone()


def _score(trainer: AnswerTrainer, members: Pack) -> torch.Tensor:
    batch = trainer._prepare_inputs(trainer.data_collator([Pack(members.examples)]))
    with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
        return trainer.score(trainer.model, batch).logps.double().cpu()


def _attach(packs: Packs, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with disk_faults(path):
            values: list[float] = load_file(str(path))["log_probabilities"].tolist()
    except (SafetensorError, KeyError) as error:
        raise UserError(
            f"the reference log-probabilities in {path} cannot be read: {error}",
            fix="delete the file and run again",
        ) from error
    needed = sum(len(example.answers) for members in packs.packs for example in members.examples)
    if len(values) != needed:
        raise UserError(
            f"{path} holds {len(values)} log-probabilities, {needed} are needed",
            fix="delete the file and run again",
        )
    start = 0
    for members in packs.packs:
        stop = start + sum(len(example.answers) for example in members.examples)
        members.reference = values[start:stop]
        start = stop
