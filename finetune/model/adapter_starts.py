"""How an adapter's trained parameters start. The base weights are read, never written.

Every draw comes from a generator of its own, layer by layer in order of name: the same bytes on every device, and the
global generator is left where it was. A [r, in], B [out, r], s = alpha / r (rsLoRA: alpha / √r).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import UserError
from finetune.model.adapter_kinds import DOUBLED_STARTS
from finetune.model.quantization import dequantised_weight
from finetune.model.source import ModelSource
from finetune.recipe.adapter_section import VIRTUAL_TOKENS, AdapterSection

# Above this the full SVD of a matrix takes minutes; the randomised one of PEFT then finds the leading components.
_FULL_SVD_COLUMNS = 2048
_SVD_ITERATIONS = 16
_PREFIX_SPREAD = 0.02
_EVA_PASSES = 200  # PEFT goes on until it settles, which takes a few


@torch.no_grad()
def start_adapter(
    model: Any,
    section: AdapterSection,
    *,
    seed: int,
    source: ModelSource | None = None,
    batches: Sequence[Mapping[str, Tensor]] | None = None,
    adapter: str = "default",
) -> None:
    """Fill the parameters of a fresh adapter. `source` is the base on disk, for loftq; `batches` model inputs, for eva."""
    if section.kind in VIRTUAL_TOKENS:
        _start_virtual_tokens(model, section, seed, adapter)
        return
    if section.kind not in ("lora", "dora"):
        return  # VeRA, IA3 and biases start as PEFT starts them, without a random number
    generator = torch.Generator().manual_seed(seed)
    layers = lora_layers(model)
    if section.init == "eva":
        _start_eva(model, seed, batches, adapter)
        layers = lora_layers(model)
    originals = _stored_weights(source, layers) if section.init == "loftq" else {}
    for name, layer in sorted(layers.items()):
        a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        weight = dequantised_weight(layer.get_base_layer()).float()
        weight = weight.T if layer.fan_in_fan_out else weight
        if section.init == "eva":
            pass
        elif section.init in DOUBLED_STARTS:
            first_a, first_b = _peft_start(
                weight, section.init, layer.scaling[adapter], a.shape[0] // 2, generator
            )
            a.copy_(torch.cat([first_a, first_a]))
            b.copy_(torch.cat([first_b, -first_b], dim=1))
        elif section.init == "orthogonal":
            first_a, first_b = _peft_start(
                weight, section.init, layer.scaling[adapter], a.shape[0], generator
            )
            a.copy_(first_a)
            b.copy_(first_b)
        elif section.init == "loftq":
            first_a, first_b = _residual_start(
                originals[name].float() - weight, layer.scaling[adapter], a.shape[0]
            )
            a.copy_(first_a)
            b.copy_(first_b)
        else:
            a.copy_(_random_a(a, section.init, generator))
            b.zero_()
        if adapter in layer.lora_magnitude_vector:
            # PEFT takes the norm in the base's dtype: in bf16 a fresh adapter would already change the model.
            update = layer.scaling[adapter] * (b.float() @ a.float()).to(weight.device)
            layer.lora_magnitude_vector[adapter].weight.data = torch.linalg.vector_norm(
                weight + update, dim=1
            )


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Qualified name -> PEFT LoRA layer."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _random_a(a: Tensor, init: str, generator: torch.Generator) -> Tensor:
    """Uniform in ±1/√in (Hu et al. 2021, PEFT's default), or normal with deviation 1/r."""
    drawn = torch.empty(a.shape, dtype=torch.float32)
    if init == "gaussian":
        return drawn.normal_(0.0, 1.0 / a.shape[0], generator=generator)
    bound = 1.0 / math.sqrt(a.shape[1])
    return drawn.uniform_(-bound, bound, generator=generator)


def _peft_start(
    weight: Tensor, init: str, scaling: float, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(A, B) as PEFT starts them on a layer of its own over a copy of `weight` [out, in], which PEFT then changes."""
    from peft import LoraConfig
    from peft.tuners.lora.layer import Linear

    n_out, n_in = weight.shape
    method = init
    if init == "pissa" and min(n_out, n_in) > _FULL_SVD_COLUMNS:
        method = f"pissa_niter_{_SVD_ITERATIONS}"
    config = LoraConfig(r=rank, init_lora_weights=method)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        scratch = nn.Linear(n_in, n_out, bias=False, device=weight.device)
        scratch.weight.data = weight.clone()
        layer: Any = Linear(scratch, "start", config=config, r=rank, lora_alpha=scaling * rank)
    return layer.lora_A["start"].weight.detach().float(), layer.lora_B["start"].weight.detach().float()


def _residual_start(residual: Tensor, scaling: float, rank: int) -> tuple[Tensor, Tensor]:
    """(A, B) with s·B·A the best rank-r approximation of `residual` [out, in] (Li et al. 2023, arXiv:2310.08659).

    One round of the paper's alternation: the codes stay those of the base on disk, so that the adapter fits any loading
    of it in the same 4 bits.
    """
    u, values, vh = torch.linalg.svd(residual, full_matrices=False)
    root = (values[:rank] / scaling).sqrt()
    return root.unsqueeze(1) * vh[:rank], u[:, :rank] * root


def _stored_weights(source: ModelSource | None, layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """Adapter layer -> its weight as stored, before quantization."""
    from safetensors import safe_open

    if source is None:
        raise ValueError("init loftq reads the weights before quantization: pass the source of the base")
    wanted = {name.removeprefix("base_model.model.") + ".weight": name for name in layers}
    found: dict[str, Tensor] = {}
    for path in sorted(source.folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            names = file.keys()
            for key in names:
                for candidate in (key, f"model.{key}", key.removeprefix("model.")):
                    if candidate in wanted:
                        found[wanted[candidate]] = file.get_tensor(key)
    missing = sorted(set(layers) - set(found))
    if missing:
        raise UserError(
            f"{source.id} stores no weight for {missing[0]} ({len(missing)} of {len(layers)} layers)",
            where="adapter.init",
            why="loftq compares the weights on disk with the quantized ones, and transformers rearranges these while loading",
            fix="use another init",
        )
    return found


def _start_eva(model: Any, seed: int, batches: Sequence[Mapping[str, Tensor]] | None, adapter: str) -> None:
    """Leading directions of each layer's inputs (Paischer et al. 2024, arXiv:2410.07170), ranks shared out by variance."""
    from peft import initialize_lora_eva_weights

    if not batches:
        raise ValueError("init eva reads activations on train rows: pass batches")
    before = model.training
    inputs = [dict(batch) for batch in batches]
    read = itertools.count()

    def settle_in_time(*_: Any) -> None:
        if next(read) > _EVA_PASSES * len(inputs):
            raise UserError(
                f"the directions that init eva looks for did not settle in {_EVA_PASSES} passes over the rows it reads",
                where="adapter.init",
                why="so many directions are asked for that the last of them matter little, and every batch orders them anew",
                fix="lower adapter.rank, or use another init",
            )

    counted = model.register_forward_pre_hook(settle_in_time)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            initialize_lora_eva_weights(
                model, copy.copy(inputs), adapter_name=adapter, show_progress_bar=False
            )
    finally:
        counted.remove()
    model.train(before)
    for layer in lora_layers(model).values():
        layer.lora_B[adapter].weight.zero_()


def _start_virtual_tokens(model: Any, section: AdapterSection, seed: int, adapter: str) -> None:
    """Prompts start as embeddings of tokens drawn from the vocabulary (Lester et al. 2021, arXiv:2104.08691).

    Prefixes have no such natural start; they begin small, so that step 0 is close to the base.
    """
    generator = torch.Generator().manual_seed(seed)
    started = model.prompt_encoder[adapter].embedding.weight
    if section.kind == "prefix":
        started.copy_(torch.empty(started.shape).normal_(0.0, _PREFIX_SPREAD, generator=generator))
        return
    table = model.get_input_embeddings().weight
    rows = torch.randint(len(table), (len(started),), generator=generator)
    started.copy_(table[rows.to(table.device)].float())
