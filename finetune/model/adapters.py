"""Adapters through PEFT, with the silent failures closed: targets that match nothing, adapters half loaded or of another
base, trainables in half precision, gradients that never arrive.

`attach_adapter` starts one, `save_adapter` and `load_adapter` are in adapter_files.py.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import UserError
from finetune.model import adapter_targets
from finetune.model.adapter_kinds import DOUBLED_STARTS, Attachment, peft_config
from finetune.model.adapter_starts import lora_layers, start_adapter
from finetune.model.adapter_targets import check_adapter
from finetune.model.held_start import HeldHalves
from finetune.model.memory import no_holes
from finetune.model.quantization import codes_of
from finetune.model.reward import SCORE_HEAD, is_reward_model
from finetune.model.source import ModelSource
from finetune.model.virtual_tokens import align_virtual_tokens
from finetune.recipe.schema import AdapterSection

ALL_LINEAR = adapter_targets.ALL_LINEAR
target_module_names = adapter_targets.target_module_names
# Trained tensors whose first gradient may rightly be zero, because they are multiplied by zeros at the start, or because
# no token of the batch reads them.
_MAY_BE_ZERO = ("lora_A", "vera_lambda_d", "trainable_tokens_delta", "modules_to_save", ".bias")


def attach_adapter(
    model: Any,
    section: AdapterSection,
    *,
    seed: int,
    source: ModelSource | None = None,
    batches: Sequence[Mapping[str, torch.Tensor]] | None = None,
    token_rows: Sequence[int] = (),
) -> Any:
    """A fresh adapter of the section's kind on `model`, which is changed in place and frozen; returns the PeftModel.

    Step 0 computes the base model (with init loftq: the base before quantization, as nearly as the rank allows; with
    virtual tokens: the base behind a prompt). How each kind starts is in adapter_starts.py. Trainable parameters are
    fp32. `source` is the base on disk, which init loftq reads; `batches` are model inputs from train rows, which init eva
    reads; `token_rows` are rows of the embedding (and head) to train too. Raises UserError for names that match nothing.
    """
    if section.kind == "none":
        raise UserError("adapter.kind is none: there is no adapter to attach", where="adapter.kind")
    refuse_second_adapter(model)
    if is_reward_model(model):  # its head is new, and trained whole
        saved = [*section.modules_to_save, SCORE_HEAD]
        section = section.model_copy(update={"modules_to_save": saved})
    check_adapter(model, section)
    from peft import get_peft_model

    biases = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith(".bias")}
    config = peft_config(Attachment(model, section, seed, token_rows))
    if is_reward_model(model):
        config.task_type = "SEQ_CLS"
    with torch.random.fork_rng(devices=[]), no_holes():
        wrapped = get_peft_model(model, config)
    with no_holes():
        start_adapter(wrapped, section, seed=seed, source=source, batches=batches)
    saved_config = wrapped.peft_config["default"]
    if hasattr(saved_config, "init_lora_weights"):
        # What is saved is a plain adapter: loading must not start it anew, nor take a part out of the base.
        saved_config.init_lora_weights, saved_config.eva_config = True, None
    if section.kind == "bitfit":
        _train_biases_only(wrapped, biases)
    trainables_to_fp32(wrapped)
    align_virtual_tokens(wrapped)
    wrapped.start_codes = codes_of(wrapped) if section.init == "loftq" else None
    if section.init in DOUBLED_STARTS:
        wrapped.held_halves = HeldHalves(wrapped)
    return wrapped


@torch.no_grad()
def _train_biases_only(wrapped: Any, biases: dict[str, torch.Tensor]) -> None:
    for layer in lora_layers(wrapped).values():
        for pair in (layer.lora_A, layer.lora_B):
            pair["default"].weight.zero_().requires_grad_(False)
    wrapped.base_biases = biases


def refuse_second_adapter(model: Any) -> None:
    """Wrapping changes the base in place: a second adapter on it would train and be compared on top of the first."""
    if getattr(model, "peft_config", None):
        raise RuntimeError(
            "the model carries an adapter already; load the base again, or use base_only() to compare"
        )


def adapted_modules(model: nn.Module) -> dict[str, int]:
    """Short name -> how many layers carry an adapter, e.g. {'q_proj': 30}; what a run reports."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
    return dict(sorted(Counter(name.rpartition(".")[2] for name in layers).items()))


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Qualified name -> parameter, for those that an optimizer updates."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def count_trainable(model: nn.Module) -> int:
    """Number of trainable scalars."""
    return sum(parameter.numel() for parameter in trainable_parameters(model).values())


def trainables_to_fp32(model: nn.Module) -> int:
    """Cast every trainable parameter to fp32 in place (references stay valid); returns how many were cast.

    TRL casts the adapters of a quantized model to bf16 when its trainer is built. In bf16 most updates at usual
    learning rates round to nothing, so call this after the trainer is built and before `train()`.
    """
    cast = 0
    for parameter in trainable_parameters(model).values():
        if parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
            cast += 1
    return cast


def prepare_for_training(
    model: Any, *, gradient_checkpointing: bool = False, use_reentrant: bool = False
) -> None:
    """Train mode, no cache, and gradients that reach every adapter, quantized base and checkpointing included.

    With a frozen embedding nothing before the first adapter requires a gradient, and reentrant checkpointing then drops
    the graph of every block without an error; the embedding's output is therefore made to require one. PEFT's
    prepare_model_for_kbit_training is not used: it casts all norms and embeddings to fp32, so that the model trained
    would not be the model evaluated.
    """
    model.train()
    model.config.use_cache = False
    if gradient_checkpointing:
        base = without_adapters(model)
        base.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        base.enable_input_require_grads()


def without_adapters(model: Any) -> Any:
    """The model that adapters are attached to; the model itself where there are none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class CutGraphError(RuntimeError):
    """No gradient reaches some of what trains: a fault of the model's code, not of a recipe."""


def check_gradients_arrive(
    model: nn.Module,
    gradient_of: Callable[[nn.Parameter], Tensor | None] | None = None,
    *,
    may_be_none: bool = False,
) -> bool:
    """After the first backward: raise when an adapter got no gradient. Experts that no token chose are exempt.

    At step 0 B is zero, so A's gradient is rightly zero and only its presence is checked; likewise for the others that
    are multiplied by zeros, and for rows and biases that may not matter to the first batch. `gradient_of` where it does
    not lie at the parameter. `may_be_none`: the loss of a batch can be flat; False is returned when every gradient is 0,
    which says nothing of the graph.
    """
    cut = []
    arrived = False
    for name, parameter in trainable_parameters(model).items():
        if "expert" in name:
            continue
        gradient = parameter.grad if gradient_of is None else gradient_of(parameter)
        moves = gradient is not None and bool(gradient.any())
        arrived |= moves
        if gradient is None or (not any(part in name for part in _MAY_BE_ZERO) and not moves):
            cut.append(name)
            may_be_none &= gradient is not None
    if cut and (arrived or not may_be_none):
        total = len(trainable_parameters(model))
        raise CutGraphError(
            f"{len(cut)} of {total} trainable tensors received no gradient, e.g. {cut[0]}: the graph is cut, and "
            "training would report a loss while those layers stay as they are"
        )
    return arrived


@contextlib.contextmanager
def base_only(model: Any) -> Iterator[Any]:
    """The base model's own outputs, adapters switched off, without a second copy of the weights.

    Trained biases are put back to the base's, which PEFT leaves as they were trained.
    """
    if not hasattr(model, "disable_adapter"):
        yield model
        return
    biases: dict[str, torch.Tensor] = getattr(model, "base_biases", {})
    parameters = dict(model.named_parameters())
    changed = {
        name: parameters[found] for name in biases if (found := _named_in(name, parameters)) is not None
    }
    trained = {name: parameter.data for name, parameter in changed.items()}
    try:
        for name, parameter in changed.items():
            parameter.data = biases[name].to(parameter)
        with model.disable_adapter():
            yield model
    finally:
        for name, parameter in changed.items():
            parameter.data = trained[name]


def adapter_effect(model: Any, inputs: Mapping[str, torch.Tensor]) -> float:
    """Largest change of a logit that the adapter makes on `inputs`; 0.0 means that it does nothing at all."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            tuned = model(**inputs).logits.float()
            with base_only(model):
                base = model(**inputs).logits.float()
    finally:
        model.train(was_training)
    return float((tuned - base).abs().max())


def adapter_active(model: Any, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether the adapter changes the logits; a trained one that does not was loaded wrongly or is disabled."""
    return adapter_effect(model, inputs) > 0.0


def _named_in(base_name: str, wrapped: Mapping[str, Any]) -> str | None:
    """The name that a parameter of the base has below an adapter's wrappers."""
    module, _, leaf = base_name.rpartition(".")
    candidates = (f"base_model.model.{base_name}", f"base_model.model.{module}.base_layer.{leaf}")
    return next((name for name in candidates if name in wrapped), None)
