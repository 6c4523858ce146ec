"""Adapters through PEFT, with the silent failures closed: targets that match nothing, adapters half loaded or of another
base, trainables in half precision, gradients that never arrive.

`attach_adapter` starts one, `save_adapter` and `load_adapter` are in adapter_files.py.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from finetune.errors import Fault, UserError, did_you_mean
from finetune.recipe.schema import AdapterSection

ALL_LINEAR = "all-linear"


def target_module_names(model: nn.Module, targets: str | list[str]) -> dict[str, list[str]]:
    """Target -> qualified names of the linear layers it selects. Works on a skeleton without weights.

    A target selects the modules whose name is it or ends in '.' and it. 'all-linear' is every linear layer but the
    output head. Raises UserError with all faults: targets that select nothing (with the nearest name), that select
    something that is not a linear layer, or the head, whose logits the training loss never builds.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = dict(model.named_modules())
    linear = {name: module for name, module in modules.items() if _is_linear(module) and module is not head}
    if isinstance(targets, str):
        if targets != ALL_LINEAR:
            targets = [targets]
        elif not linear:
            raise UserError("the model has no linear layer to adapt", where="adapter.target_modules")
        else:
            selected: dict[str, list[str]] = {}
            for name in linear:
                selected.setdefault(name.rpartition(".")[2], []).append(name)
            return selected
    known = sorted({name.rpartition(".")[2] for name in linear})
    faults: list[Fault] = []
    chosen: dict[str, list[str]] = {}
    for target in targets:
        names = [name for name in modules if name == target or name.endswith(f".{target}")]
        wrong = [name for name in names if name not in linear]
        if not names:
            faults.append(
                Fault(
                    f"'{target}' matches no module of the model",
                    "adapter.target_modules",
                    "PEFT ignores such a name as long as another one matches",
                    did_you_mean(target, known),
                )
            )
        elif wrong:
            is_head = modules[wrong[0]] is head
            faults.append(
                Fault(
                    f"'{target}' selects {wrong[0]}, {'the output head' if is_head else 'which is not a linear layer'}",
                    "adapter.target_modules",
                    "the loss never builds the head's full output, so an adapter there would not be trained"
                    if is_head
                    else "",
                    f"choose among: {', '.join(known)}",
                )
            )
        else:
            chosen[target] = names
    if not targets:
        faults.append(Fault("no target modules are named", "adapter.target_modules", "", f"use {ALL_LINEAR}"))
    if faults:
        raise UserError(faults)
    return chosen


def attach_adapter(model: Any, section: AdapterSection, *, seed: int) -> Any:
    """A fresh LoRA or DoRA adapter on `model`, which is changed in place and frozen; returns the PeftModel.

    The update of a linear layer W [out, in] is (alpha / r) · B·A with A [r, in] uniform in ±1/√in and B [out, r] zero
    (Hu et al. 2021, PEFT's default), so that step 0 computes the base model. A is drawn on the CPU from a generator of
    its own, layer by layer in order of name: the same bytes on every device, and the global generator is not touched.
    For DoRA (Liu et al. 2024) the magnitudes are the row norms of W in fp32. Trainable parameters are fp32.
    """
    if section.kind == "none":
        raise UserError("adapter.kind is none: there is no adapter to attach", where="adapter.kind")
    refuse_second_adapter(model)
    selected = target_module_names(model, section.target_modules)
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        use_dora=section.kind == "dora",
        target_modules=_suffixes_that_select(model, selected),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        wrapped = get_peft_model(model, config)
    _initialise(wrapped, seed)
    trainables_to_fp32(wrapped)
    return wrapped


def refuse_second_adapter(model: Any) -> None:
    """Wrapping changes the base in place: a second adapter on it would train and be compared on top of the first."""
    if getattr(model, "peft_config", None):
        raise RuntimeError(
            "the model carries an adapter already; load the base again, or use base_only() to compare"
        )


def adapted_modules(model: nn.Module) -> dict[str, int]:
    """Short name -> how many layers carry an adapter, e.g. {'q_proj': 30}; what a run reports."""
    names = sorted(name.rpartition(".")[2] for name in _adapter_layers(model))
    return dict(Counter(names))


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
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        base.enable_input_require_grads()


def check_gradients_arrive(model: nn.Module) -> None:
    """After the first backward: raise when an adapter got no gradient. Experts that no token chose are exempt.

    At step 0 B is zero, so A's gradient is rightly zero and only its presence is checked.
    """
    cut = [
        name
        for name, parameter in trainable_parameters(model).items()
        if "expert" not in name
        and (parameter.grad is None or ("lora_A" not in name and not bool(parameter.grad.any())))
    ]
    if cut:
        total = len(trainable_parameters(model))
        raise RuntimeError(
            f"{len(cut)} of {total} trainable tensors received no gradient, e.g. {cut[0]}: the graph is cut, and "
            "training would report a loss while those layers stay as they are"
        )


@contextlib.contextmanager
def base_only(model: Any) -> Iterator[Any]:
    """The base model's own outputs, adapters switched off, without a second copy of the weights."""
    if hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            yield model
    else:
        yield model


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


def _is_linear(module: nn.Module) -> bool:
    """Plain and bitsandbytes linear layers, and GPT-2's transposed ones."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _suffixes_that_select(model: nn.Module, selected: Mapping[str, list[str]]) -> list[str]:
    """The shortest list PEFT turns into exactly `selected`: the targets, or full names where a target hits more."""
    wanted = {name for names in selected.values() for name in names}
    targets = sorted(selected)
    reached = {
        name
        for name, _ in model.named_modules()
        if any(name == target or name.endswith(f".{target}") for target in targets)
    }
    return targets if reached == wanted else sorted(wanted)


def _adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Qualified name -> PEFT LoRA layer."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def _initialise(model: nn.Module, seed: int, adapter: str = "default") -> None:
    from finetune.model.quantization import dequantised_weight

    generator = torch.Generator().manual_seed(seed)
    for _, layer in sorted(_adapter_layers(model).items()):
        down = layer.lora_A[adapter].weight
        bound = 1.0 / math.sqrt(down.shape[1])
        drawn = torch.empty(down.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        down.copy_(drawn)
        layer.lora_B[adapter].weight.zero_()
        if adapter in layer.lora_magnitude_vector:
            # PEFT takes the norm in the base's dtype: in bf16 a fresh adapter would already change the model.
            weight = dequantised_weight(layer.get_base_layer()).float()
            magnitude = layer.lora_magnitude_vector[adapter]
            # [out, in]; GPT-2's Conv1D holds its transpose
            magnitude.weight.data = torch.linalg.vector_norm(weight, dim=0 if layer.fan_in_fan_out else 1)
