"""How a trainer writes and reads its checkpoints: whole, checksummed, owned by one recipe, tensors and plain data only."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import get_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from finetune.model.adapter_files import EMPTY_CARD
from finetune.recipe.train_section import TrainSection
from finetune.training.checkpoints import (
    checkpoint_step,
    contents_of,
    list_checkpoints,
    save_checkpoint,
    weight_files,
)
from finetune.training.memory_saving import dropout_of_config
from finetune.training.sharded_states import spread_optimizer_state, whole, whole_weights
from finetune.training.states import load_state, save_state
from finetune.training.zero import settle_zero, take_over_step, whole_optimizer_state
from finetune.training.zero import spread_optimizer_state as spread_zero_state
from finetune.training.zero import whole_weights as whole_zero_weights


class CheckpointingTrainer(Trainer):
    """In place of transformers' own checkpoints, which hold pickle.

    A checkpoint is the same whether its weights were spread over processes or not: any number of processes continues it.
    The states of random generators are those of each process, and are used when there are as many again.
    """

    optimizer: Any
    lr_scheduler: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    settings: TrainSection
    checkpoint_root: Path
    owner: str
    keep_also: set[int]
    product_dtype = torch.float32  # the recipe's
    parameter_groups: list[list[nn.Parameter]]  # of the optimizer as it was built
    own_dropout: Mapping[str, float]  # what the model's configuration said before training
    recent_steps_kept = 0  # checkpoints back to the newest one that is older than these steps are kept too

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """What is trained, gathered by all processes where it is spread over them; None where every process holds it."""
        if self.is_deepspeed_enabled:
            return whole_zero_weights(self.model)
        return whole_weights(self.model) if self.is_fsdp_enabled else None

    def check_norm(self, norm: float) -> None:
        """Called with the norm of the gradient when DeepSpeed has stepped with it."""

    def save_weights(
        self, folder: Path, weights: dict[str, torch.Tensor] | None = None, *, to_continue: bool = False
    ) -> None:
        """Adapter or model with its tokenizer, as safetensors and JSON; no pickle. `weights`: see `whole_weights`.

        `to_continue`: a whole model under the names it holds here, by which a checkpoint is read. Otherwise transformers
        gives some architectures (GPT-NeoX, Mixtral) those of their first release back, as other programs read them.
        """
        with dropout_of_config(self.model, self.own_dropout):
            if to_continue and not hasattr(self.model, "peft_config"):
                self.model.save_pretrained(str(folder), state_dict=weights, save_original_format=False)
                self.processing_class.save_pretrained(str(folder))
                return
            self._save(str(folder), state_dict=weights)
        for name in ("training_args.bin", EMPTY_CARD):
            (folder / name).unlink(missing_ok=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Every trained weight, or an UnusableCheckpointError: transformers and PEFT load what fits, and warn at most."""
        with contents_of(Path(resume_from_checkpoint)):
            state = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME))
            if state.global_step != checkpoint_step(Path(resume_from_checkpoint)):
                raise ValueError(f"its {TRAINER_STATE_NAME} is that of step {state.global_step}")
            self._require_all_weights(Path(resume_from_checkpoint))
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _require_all_weights(self, checkpoint: Path) -> None:
        """Names only: a tensor of another shape is an error by itself."""
        held = self.model.state_dict()
        wanted = (
            set(get_peft_model_state_dict(self.model, save_embedding_layers=False))
            if hasattr(self.model, "peft_config")
            else set(held)
        )
        found: set[str] = set()
        for path in weight_files(checkpoint):
            with safe_open(str(path), framework="pt") as file:
                found.update(file.keys())
        there = {
            held[name].data_ptr() for name in found if name in held
        }  # also under the other name of a tied weight
        lacking = [name for name in wanted - found if name not in held or held[name].data_ptr() not in there]
        if lacking:
            raise KeyError(f"{min(lacking)} ({len(lacking)} of {len(wanted)} weights)")

    def load_step(self, checkpoint: Path) -> None:
        """Put a checkpoint's weights, and with an averaging optimizer its state, into the model; nothing is trained."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if inner is None:
            inner = self.create_optimizer()
        if callable(getattr(inner, "eval", None)):
            with contents_of(checkpoint):
                inner.load_state_dict(load_state(checkpoint / "optimizer"))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        everyones = self._gather(self._own_random_state())
        weights = self.whole_weights()
        optimizer = self._whole_optimizer_state()
        if not self.args.should_save:
            return

        def fill(folder: Path) -> None:
            self.save_weights(folder, weights, to_continue=True)
            save_state(folder / "optimizer", optimizer)
            save_state(folder / "scheduler", self.lr_scheduler.state_dict())
            for number, own in enumerate(everyones):
                save_state(self._rng_path(folder, number), own)
            self._save_scaler(str(folder))
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

        save_checkpoint(
            self.checkpoint_root,
            self.state.global_step,
            fill,
            owner=self.owner,
            keep=self.settings.keep_checkpoints,
            keep_also=self.keep_also | self._recent(),
        )

    def _whole_optimizer_state(self) -> dict[str, Any]:
        if self.is_deepspeed_enabled:
            return whole_optimizer_state(self.optimizer.optimizer, self.parameter_groups)
        state: dict[str, Any] = self.optimizer.state_dict()
        return whole(state) if self.is_fsdp_enabled else state

    def _recent(self) -> set[int]:
        steps = [checkpoint_step(path) for path in list_checkpoints(self.checkpoint_root)]
        limit = self.state.global_step - self.recent_steps_kept
        good = [step for step in steps if step <= limit]
        return {step for step in steps if step >= max(good, default=0)} if self.recent_steps_kept else set()

    def _gather(self, states: dict[str, Any]) -> list[dict[str, Any]]:
        """The random states of all processes, in their order."""
        if self.args.world_size == 1:
            return [states]
        everyones: list[Any] = [None] * self.args.world_size
        torch.distributed.all_gather_object(everyones, states)
        return everyones

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            with self._as_if_unsharded():
                self._load_from_checkpoint(resume_from_checkpoint)
        if self.is_deepspeed_enabled:
            settle_zero(self.accelerator.deepspeed_plugin, self.product_dtype, self.settings.max_grad_norm)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if self.is_deepspeed_enabled:
            take_over_step(self.accelerator, self.optimizer, self.check_norm)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        return prepared

    @contextlib.contextmanager
    def _as_if_unsharded(self) -> Iterator[None]:
        before = self.is_fsdp_enabled, self.is_deepspeed_enabled
        self.is_fsdp_enabled = self.is_deepspeed_enabled = False
        try:
            yield
        finally:
            self.is_fsdp_enabled, self.is_deepspeed_enabled = before

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with contents_of(Path(checkpoint)):
            state = load_state(Path(checkpoint) / "optimizer")
            if self.is_deepspeed_enabled:
                spread_zero_state(self.optimizer.optimizer, self.parameter_groups, state)
            else:
                inner = getattr(self.optimizer, "optimizer", self.optimizer)
                if self.is_fsdp_enabled:
                    state = spread_optimizer_state(inner, state)
                groups = [group for part in state.get("parts", [state]) for group in part["param_groups"]]
                _require_keys(groups, inner.param_groups)
                self.optimizer.load_state_dict(state)
                _guard_first_step(inner, Path(checkpoint))
            schedule = load_state(Path(checkpoint) / "scheduler")
            _require_keys([schedule], [self.lr_scheduler.state_dict()])
            self.lr_scheduler.load_state_dict(schedule)

    def _rng_path(self, folder: Path, number: int) -> Path:
        return folder / (f"random-{number}" if self.args.world_size > 1 else "random")

    def _own_random_state(self) -> dict[str, Any]:
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.random.get_rng_state(),
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.random.get_rng_state(self.args.device)
        return states

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = self._rng_path(Path(checkpoint), self.args.process_index)
        following = Path(checkpoint) / f"random-{self.args.world_size}"
        if not path.with_suffix(".json").is_file() or following.with_suffix(".json").is_file():
            return  # saved by another number of processes: the draws of dropout start anew
        with contents_of(Path(checkpoint)):
            states = load_state(path)
            random.setstate(states["python"])
            np.random.set_state(states["numpy"])
            torch.random.set_rng_state(states["cpu"])
            if "cuda" in states and torch.cuda.is_available():
                torch.cuda.random.set_rng_state(states["cuda"], self.args.device)

    def _save_scaler(self, output_dir: str) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            save_state(Path(output_dir) / "scaler", scaler.state_dict())

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None:
            with contents_of(Path(checkpoint)):
                scaler.load_state_dict(load_state(Path(checkpoint) / "scaler"))


def _require_keys(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """What is not there would keep its first value, or be missed in the middle of a step."""
    for one, other in zip(found, wanted, strict=True):
        if lacking := sorted(set(other) - set(one)):
            raise KeyError(lacking[0])


def _guard_first_step(optimizer: Any, checkpoint: Path) -> None:
    """An optimizer looks at most of its state only when it steps."""
    step = optimizer.step

    @functools.wraps(step)
    def first(*args: Any, **kwargs: Any) -> Any:
        optimizer.step = step
        with contents_of(checkpoint):
            return step(*args, **kwargs)

    optimizer.step = first
