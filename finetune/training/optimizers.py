"""Optimizers by the names a recipe uses. The mathematics is torch's, bitsandbytes' and pytorch_optimizer's.

One entry a name: its class, the arguments that make it decay weights the decoupled way, and where it runs. What is common
to all is done here: which tensors decay, LoRA+'s rates, and arguments from the recipe checked against the class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from finetune.errors import UserError, did_you_mean
from finetune.model.load import default_device
from finetune.recipe.train_section import OptimizerName, TrainSection
from finetune.training.chained_optimizer import ChainedOptimizer

# Names of tensors that scale or shift: pulling them to zero would switch their unit off.
_NEVER_DECAYED = ("bias", "norm", "ln_", "magnitude", "vera_lambda", "ia3_l")
_EMBEDDINGS = ("embed", "wte", "wpe", "lm_head", "token_adapter", "prompt_encoder")
# SOAP keeps two square matrices a side; above this a side keeps none, which for LoRA leaves the side of the rank.
_SOAP_MAX_DIMENSION = 1024
_GIVEN = {"self", "params", "model", "lr", "weight_decay", "kwargs", "args", "maximize"}


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """`load` imports the class; `options` are its arguments here; `needs_cuda` says why it does without elsewhere not."""

    load: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_cuda: str = ""
    instead_on_cpu: OptimizerName = "adamw_fused"


def _torch(name: str) -> Callable[[], Any]:
    return lambda: getattr(torch.optim, name)


def _bitsandbytes(name: str) -> Callable[[], Any]:
    def load() -> Any:
        import bitsandbytes.optim as bnb

        return getattr(bnb, name)

    return load


def _pytorch_optimizer(name: str) -> Callable[[], Any]:
    def load() -> Any:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)

    return load


_PAGED = "paged state moves between the GPU and the host, and there is no GPU"
OPTIMIZERS: dict[OptimizerName, OptimizerEntry] = {
    "adamw_fused": OptimizerEntry(_torch("AdamW"), {"fused": True}),
    "adamw": OptimizerEntry(_torch("AdamW")),
    "adamw_8bit": OptimizerEntry(_bitsandbytes("AdamW8bit")),
    "adamw_paged": OptimizerEntry(_bitsandbytes("PagedAdamW"), needs_cuda=_PAGED, instead_on_cpu="adamw"),
    "adamw_paged_8bit": OptimizerEntry(
        _bitsandbytes("PagedAdamW8bit"), needs_cuda=_PAGED, instead_on_cpu="adamw_8bit"
    ),
    "ademamix": OptimizerEntry(_pytorch_optimizer("AdEMAMix"), {"weight_decouple": True}),
    "ademamix_8bit": OptimizerEntry(_bitsandbytes("AdEMAMix8bit")),
    "sgd": OptimizerEntry(_torch("SGD")),
    "momentum": OptimizerEntry(_pytorch_optimizer("SGDW"), {"momentum": 0.9, "weight_decouple": True}),
    "adafactor": OptimizerEntry(_torch("Adafactor")),
    "lion": OptimizerEntry(_pytorch_optimizer("Lion"), {"weight_decouple": True}),
    "lion_8bit": OptimizerEntry(_bitsandbytes("Lion8bit")),
    "lion_paged": OptimizerEntry(_bitsandbytes("PagedLion"), needs_cuda=_PAGED, instead_on_cpu="lion"),
    "muon": OptimizerEntry(_torch("Muon"), {"adjust_lr_fn": "match_rms_adamw"}),
    "soap": OptimizerEntry(_pytorch_optimizer("SOAP"), {"max_precondition_dim": _SOAP_MAX_DIMENSION}),
    "adam_mini": OptimizerEntry(_pytorch_optimizer("AdamMini")),
    "schedule_free_adamw": OptimizerEntry(_pytorch_optimizer("ScheduleFreeAdamW")),
    "schedule_free_sgd": OptimizerEntry(_pytorch_optimizer("ScheduleFreeSGD")),
}


def check_optimizer(settings: TrainSection, *, on_cuda: bool | None = None) -> None:
    """Refuse, before a weight is loaded, an optimizer this machine cannot run and options its class does not take.

    Values are tried on a toy layer and two steps of it, so that an optimizer's own complaint comes at once and not after
    loading, or after the first batch.
    """
    entry = OPTIMIZERS[settings.optimizer]
    on_cuda = torch.cuda.is_available() if on_cuda is None else on_cuda
    if entry.needs_cuda and not on_cuda:
        raise UserError(
            f"optimizer {settings.optimizer} needs CUDA",
            where="train.optimizer",
            why=entry.needs_cuda,
            fix=f"set train.optimizer: {entry.instead_on_cpu}",
        )
    known = {name for name in inspect.signature(entry.load().__init__).parameters if name not in _GIVEN}
    for name in settings.optimizer_options:
        if name not in known:
            raise UserError(
                f"optimizer {settings.optimizer} takes no '{name}'",
                where="train.optimizer_options",
                fix=did_you_mean(name, known),
            )
    here = torch.cuda.is_available()
    try:
        toy = _Toy().to(default_device())
        optimizer = build_optimizer(toy, settings)
        if on_cuda == here:  # otherwise it is another machine that is asked about
            _step_twice(toy, optimizer)
    except (LookupError, ArithmeticError, AssertionError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"optimizer {settings.optimizer} refuses its options: {str(error) or type(error).__name__}",
            where="train.optimizer_options",
            fix="give values that the optimizer's documentation allows",
        ) from error


def _step_twice(toy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in toy.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        optimizer.step()


class _Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(4, 4, bias=True, device="cpu")


def build_optimizer(model: nn.Module, settings: TrainSection) -> torch.optim.Optimizer:
    """The recipe's optimizer over the trainable parameters of `model`.

    Weight decay acts on matrices only, never on biases, norms and vectors that scale. With `lora_plus_ratio` the
    matrices B have that many times the rate (Hayou et al. 2024, arXiv:2402.12354).
    """
    entry = OPTIMIZERS[settings.optimizer]
    options = {
        **entry.options,
        **{key: _as_argument(value) for key, value in settings.optimizer_options.items()},
    }
    options["lr"] = settings.learning_rate
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if settings.optimizer == "adam_mini":
        return _adam_mini(entry.load(), model, settings, options)
    if settings.optimizer == "muon":
        inner = [(name, p) for name, p in named if is_inner_matrix(name, p)]
        rest = [(name, p) for name, p in named if not is_inner_matrix(name, p)]
        parts: list[torch.optim.Optimizer] = []
        if inner:
            parts.append(entry.load()(_groups(inner, settings), **options))
        if rest:
            parts.append(torch.optim.AdamW(_groups(rest, settings), lr=settings.learning_rate, fused=True))
        return ChainedOptimizer(parts)
    if settings.optimizer.endswith("8bit"):
        _keep_embeddings_in_32_bits(model)
    optimizer: torch.optim.Optimizer = entry.load()(_groups(named, settings), **options)
    return optimizer


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay acts on a tensor: a matrix that is no norm, bias or scale."""
    return parameter.dim() >= 2 and not any(part in name.lower() for part in _NEVER_DECAYED)


def is_inner_matrix(name: str, parameter: torch.Tensor) -> bool:
    """What Muon takes (Jordan et al. 2024): matrices between embedding and head, adapters' A and B included."""
    return parameter.dim() == 2 and decays(name, parameter) and not any(part in name for part in _EMBEDDINGS)


def rate_factor(name: str, settings: TrainSection) -> float:
    """How many times the learning rate a tensor has: LoRA+'s ratio for the matrices B, else 1."""
    return settings.lora_plus_ratio or 1.0 if ".lora_B." in name else 1.0


def _groups(named: Iterable[tuple[str, nn.Parameter]], settings: TrainSection) -> list[dict[str, Any]]:
    """Parameter groups by decay and rate, in order of first appearance; empty ones are left out."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        decay = settings.weight_decay if decays(name, parameter) else 0.0
        groups.setdefault((decay, rate_factor(name, settings)), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr": settings.learning_rate * factor}
        for (decay, factor), parameters in groups.items()
    ]


def _adam_mini(
    cls: Any, model: nn.Module, settings: TrainSection, options: dict[str, Any]
) -> torch.optim.Optimizer:
    """Adam-mini (Zhang et al. 2024, arXiv:2406.16793) blocks by head, so it is told the model's heads."""
    config: Any = getattr(model, "config", None)
    if config is not None:
        config = config.get_text_config()
        heads = int(getattr(config, "num_attention_heads", None) or 1)  # 1: of layers without attention
        options = {
            "num_embeds": int(config.hidden_size),
            "num_heads": heads,
            "num_query_groups": int(getattr(config, "num_key_value_heads", None) or heads),
            **options,
        }
    optimizer: torch.optim.Optimizer = cls(model, weight_decay=settings.weight_decay, **options)
    for group in optimizer.param_groups:
        (parameter,) = group["params"]
        group["weight_decay"] = settings.weight_decay if decays(group["name"], parameter) else 0.0
        group["lr"] = settings.learning_rate * rate_factor(group["name"], settings)
    return optimizer


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """8-bit states of embeddings are unstable (Dettmers et al. 2022, arXiv:2110.02861, section 2.3)."""
    import bitsandbytes as bnb

    manager = bnb.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.requires_grad:
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def _as_argument(value: Any) -> Any:
    """Lists of a recipe are tuples to an optimizer; whole numbers stay whole."""
    if isinstance(value, list):
        return tuple(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
