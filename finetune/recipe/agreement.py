"""Rules that hold between the sections of a recipe."""

from __future__ import annotations

from finetune.recipe.adapter_section import LOW_RANK, VIRTUAL_TOKENS, AdapterSection
from finetune.recipe.constraints import refused
from finetune.recipe.model_section import ModelSection
from finetune.recipe.preference_section import PREFERENCE_METHODS, REFERENCE_METHODS
from finetune.recipe.train_section import TrainSection


def check_sections_agree(model: ModelSection, adapter: AdapterSection, train: TrainSection) -> None:
    """Raise, at the key to change, where what one section asks for cannot be with what another one does."""
    _check_quantized(model, adapter)
    if adapter.kind in VIRTUAL_TOKENS and train.packing:
        raise refused(
            "train.packing",
            f"the virtual tokens of adapter.kind {adapter.kind} stand before one row; a pack holds several",
            fix="set train.packing: false",
        )
    if model.new_tokens and adapter.kind not in (*LOW_RANK, "none"):
        raise refused(
            "model.new_tokens",
            f"adapter.kind {adapter.kind} cannot train rows of the embedding, so new tokens would stay untrained",
            fix="use adapter.kind: lora, dora or none",
        )
    if train.lora_plus_ratio is not None and adapter.kind not in LOW_RANK:
        raise refused(
            "train.lora_plus_ratio",
            f"adapter.kind {adapter.kind} has no matrices A and B",
            fix="use adapter.kind: lora or dora, or leave it out",
        )
    if train.fp8 and model.quantize != "none":
        raise refused(
            "train.fp8",
            f"weights in {model.quantize} are not multiplied in 8-bit floats",
            fix="set model.quantize: none, or train.fp8: false",
        )


def _check_quantized(model: ModelSection, adapter: AdapterSection) -> None:
    if adapter.kind in ("none", "bitfit") and model.quantize != "none":
        raise refused(
            "adapter.kind",
            f"quantized weights ({model.quantize}) cannot be tuned in full",
            fix="use adapter.kind: lora, or model.quantize: none",
        )
    if adapter.init in ("pissa", "olora") and model.quantize != "none":
        raise refused(
            "adapter.init",
            f"{adapter.init} splits the weight itself, and the codes of {model.quantize} weights cannot be split",
            why="quantizing what is left would train on another base than the one on disk",
            fix="use init: loftq or default, or model.quantize: none",
        )
    if adapter.init == "loftq" and model.quantize not in ("nf4", "fp4"):
        raise refused(
            "adapter.init",
            "loftq starts from the error of 4-bit weights, and the weights are not in 4 bits",
            fix="set model.quantize: nf4, or use another init",
        )


def check_preference_agrees(
    adapter: AdapterSection, train: TrainSection, *, long_rows: str, train_on: str
) -> None:
    """Raise where a preference method cannot be with what another section asks for."""
    if train.method not in PREFERENCE_METHODS:
        return
    if adapter.dropout or train.model_dropout:
        key = "adapter.dropout" if adapter.dropout else "train.model_dropout"
        raise refused(
            key,
            f"{train.method} compares log-probabilities"
            + (" with those of a reference without dropout" if train.method in REFERENCE_METHODS else "")
            + "; dropout would change both answers at random",
            fix=f"set {key}: 0",
        )
    if adapter.kind in VIRTUAL_TOKENS:
        raise refused(
            "adapter.kind",
            f"the virtual tokens of {adapter.kind} stand before one row; a pair holds two answers",
            fix="use adapter.kind: lora",
        )
    if train.method == "reward" and (adapter.start is not None or adapter.kind == "bitfit"):
        key = "start" if adapter.start is not None else "kind"
        raise refused(
            f"adapter.{key}",
            "a saved adapter is one of a model that predicts tokens, and a reward model has another head"
            if key == "start"
            else "bitfit trains biases alone, and the head of a reward model is new",
            fix="merge the adapter and set model.id to the result"
            if key == "start"
            else "use adapter.kind: lora",
        )
    if adapter.kind == "none" and train.preference.reference == "base":
        raise refused(
            "train.preference.reference",
            "without an adapter there is no base that could be told from the trained weights",
            fix="set reference: start, which is the same here",
        )
    _check_keys_of_sft(train, long_rows=long_rows, train_on=train_on)


def _check_keys_of_sft(train: TrainSection, *, long_rows: str, train_on: str) -> None:
    """Keys that only supervised fine-tuning reads would be ignored in silence."""
    if not train.loss.is_plain or train.loss.neftune_alpha:
        raise refused(
            "train.loss", f"it is the loss of sft; {train.method} has its own", fix="leave out train.loss"
        )
    if train_on != "all":
        raise refused(
            "data.train_on",
            f"{train.method} learns from the answers that are compared, and from no turn of the prompt",
            fix="leave out data.train_on",
        )
    if train.auto:
        raise refused(
            "train.auto",
            f"the batching of {train.method} is not searched, only that of sft",
            fix="set train.auto: false and give micro_batch_size and gradient_accumulation_steps",
        )
    if long_rows == "split":
        raise refused(
            "data.long_rows",
            f"rows of {train.method} have one prompt and cannot be split",
            fix="use truncate_prompt or drop",
        )
