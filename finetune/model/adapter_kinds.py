"""The kinds of adapters a recipe can name, in PEFT's terms: one entry a kind, from the section to PEFT's configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from finetune.model.adapter_targets import (
    named_by,
    saved_module_names,
    selected_modules,
    sizes_and_ranks,
    suffixes_that_select,
)
from finetune.recipe.adapter_section import AdapterKind, AdapterSection

# Starts whose first matrices stay beside the trained ones, so that the base is never changed (adapter_starts.py).
DOUBLED_STARTS = ("pissa", "olora")
_MAX_PROJECTION_KEY = 2**31
_EVA_RHO = 2.0  # of the paper (Paischer et al. 2024, arXiv:2410.07170): a layer gets at most twice the rank


@dataclass(frozen=True, slots=True)
class Attachment:
    """What PEFT's configuration is made from: the model, the section, the seed, and ids of trained embedding rows."""

    model: nn.Module
    section: AdapterSection
    seed: int
    token_rows: Sequence[int] = ()

    def targets(self) -> list[str]:
        """Names that PEFT turns into exactly the modules the section selects."""
        selected = selected_modules(self.model, self.section)
        wanted = [name for names in selected.values() for name in names]
        return suffixes_that_select(self.model, wanted, selected)

    def saved_modules(self) -> list[str] | None:
        """Full names: PEFT compares the ends of names, so that 'head' would also select 'lm_head'."""
        return saved_module_names(self.model, self.section.modules_to_save) or None


def peft_config(attachment: Attachment) -> Any:
    """PEFT's configuration for the section's kind. Raises UserError for names that match nothing."""
    return _BUILDERS[attachment.section.kind](attachment)


def _low_rank(attachment: Attachment) -> Any:
    """LoRA and DoRA. With a doubled start the rank is doubled and alpha raised so that the scale stays alpha / rank."""
    from peft import LoraConfig

    section = attachment.section
    doubled = section.init in DOUBLED_STARTS
    ranks = 2 if doubled else 1
    alphas = (math.sqrt(2.0) if section.rslora else 2.0) if doubled else 1.0
    options: dict[str, Any] = {}
    if section.init == "eva":
        from peft import EvaConfig

        rho, _ = eva_search(attachment.model, section)
        options = {"init_lora_weights": "eva", "eva_config": EvaConfig(rho=rho)}
    return LoraConfig(
        r=ranks * section.rank,
        lora_alpha=alphas * section.alpha,
        lora_dropout=section.dropout,
        use_dora=section.kind == "dora",
        use_rslora=section.rslora,
        rank_pattern={name: ranks * rank for name, rank in section.rank_pattern.items()},
        alpha_pattern={name: alphas * alpha for name, alpha in section.alpha_pattern.items()},
        target_modules=attachment.targets(),
        modules_to_save=attachment.saved_modules(),
        trainable_token_indices=_token_indices(attachment),
        bias="none",
        task_type="CAUSAL_LM",
        **options,
    )


def eva_search(model: nn.Module, section: AdapterSection) -> tuple[float, int]:
    """(rho, tokens): how many times its rank EVA may give a layer, and how many tokens a batch that it reads needs at least.

    PEFT decomposes every batch into twice as many directions as a layer may get, of which it needs as many inputs and tokens;
    of a smaller batch it says that it skips it, and goes on asking for batches without end.
    """
    layers = sizes_and_ranks(model, section).values()
    rho = min(_EVA_RHO, *((n_in // 2) / rank for n_in, _, rank in layers))
    return rho, 2 * max(round(rank * rho) for _, _, rank in layers)


def _token_indices(attachment: Attachment) -> dict[str, list[int]] | None:
    """Embedding (and untied head) by full name -> rows that are trained."""
    rows = list(attachment.token_rows)
    if not rows:
        return None
    model: Any = attachment.model
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    wanted = [model.get_input_embeddings(), *([] if tied else [model.get_output_embeddings()])]
    return {name: rows for name, module in model.named_modules() if any(module is one for one in wanted)}


def _vera(attachment: Attachment) -> Any:
    from peft import VeraConfig

    section = attachment.section
    return VeraConfig(
        r=section.rank,
        target_modules=attachment.targets(),
        projection_prng_key=attachment.seed % _MAX_PROJECTION_KEY,
        save_projection=True,  # drawn again, they would depend on the version of torch
        vera_dropout=section.dropout,
        modules_to_save=attachment.saved_modules(),
        bias="none",
        task_type="CAUSAL_LM",
    )


def _ia3(attachment: Attachment) -> Any:
    from peft import IA3Config

    targets = attachment.targets()
    return IA3Config(
        target_modules=targets,
        feedforward_modules=[name for name in targets if _reads_mlp_middle(name, attachment.model)],
        modules_to_save=attachment.saved_modules(),
        task_type="CAUSAL_LM",
    )


def _reads_mlp_middle(name: str, model: Any) -> bool:
    """Whether IA3 scales the module's input: the matrix that leads out of the MLP, by PEFT's table of architectures."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as TABLE

    known = TABLE.get(str(model.config.model_type), ["down_proj", "mlp.c_proj", "fc2", "dense_4h_to_h"])
    return any(named_by(entry, [name]) for entry in known)


def _prompt(attachment: Attachment) -> Any:
    from peft import PromptTuningConfig

    return PromptTuningConfig(num_virtual_tokens=attachment.section.virtual_tokens, task_type="CAUSAL_LM")


def _prefix(attachment: Attachment) -> Any:
    from peft import PrefixTuningConfig

    return PrefixTuningConfig(num_virtual_tokens=attachment.section.virtual_tokens, task_type="CAUSAL_LM")


def _bitfit(attachment: Attachment) -> Any:
    """Biases alone: PEFT has no such kind, but its LoRA saves and loads trained biases of the base.

    The one LoRA pair it insists on has rank 1, sits on the first layer's smallest matrix, is zero, and stays so.
    """
    from peft import LoraConfig

    linear = {
        name: module.in_features + module.out_features
        for name, module in attachment.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    carriers = [name for names in _every_linear(attachment).values() for name in names]
    carrier = min(carriers, key=lambda name: (linear.get(name, 1 << 40), name))
    return LoraConfig(r=1, lora_alpha=1, target_modules=[carrier], bias="all", task_type="CAUSAL_LM")


def _every_linear(attachment: Attachment) -> Mapping[str, list[str]]:
    return selected_modules(attachment.model, AdapterSection())


_BUILDERS: dict[AdapterKind, Callable[[Attachment], Any]] = {
    "lora": _low_rank,
    "dora": _low_rank,
    "vera": _vera,
    "ia3": _ia3,
    "prompt": _prompt,
    "prefix": _prefix,
    "bitfit": _bitfit,
}
