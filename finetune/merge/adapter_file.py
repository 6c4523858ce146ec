"""A PEFT adapter folder, read strictly: what it changes, by module, and every reason why it cannot be merged.

The keys PEFT writes, after the prefix `base_model.model.`:
    <module>.lora_A.weight [r, in] · .lora_B.weight [out, r] · .lora_B.bias [out] · .lora_magnitude_vector [out]
    <module>.lora_embedding_A [r, tokens] · .lora_embedding_B [width, r]
    <module>.token_adapter.trainable_tokens_delta [n, width]   rows that replace the embedding's
    <module>.base_layer.<name> · .original_module.<name>        values of the base itself, saved along (resized, bias)
    <parameter>                                                 a module in modules_to_save, or again a value of the base
    <module>.vera_lambda_b [out] · .vera_lambda_d [r]           VeRA's scales, over `base_model.vera_A` [r, widest in] and
                                                                `base_model.vera_B` [widest out, r] that all modules share
    <module>.ia3_l [out, 1] or [1, in]                          IA3's scale of the module's output or input
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.merge.deltas import LowRankUpdate, lora_scaling
from finetune.merge.shards import TensorFiles
from finetune.model.adapter_files import ADAPTER_WEIGHTS, read_adapter_config
from finetune.model.source import ADAPTER_CONFIG

PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]|lora_magnitude_vector(?:\.weight)?"
    r"|vera_lambda_[bd]|ia3_l|token_adapter\.trainable_tokens_delta|(?:token_adapter\.)?base_layer\.(?P<own>[^.]+)"
    r"|original_module\.(?P<original>.+)|modules_to_save\.(?P<trained>.+))"
)
# Options whose effect is no change of weights, or of other weights than the base's, and the reason shown.
_UNMERGEABLE = {
    "alora_invocation_tokens": "it is active for some tokens only (activated LoRA)",
    "arrow_config": "it routes each token to another adapter (Arrow)",
    "layer_replication": "it repeats layers of the base",
    "target_parameters": "it adapts parameters inside fused modules (target_parameters)",
    "use_qalora": "it pools its input (QALoRA)",
    "use_bdlora": "its matrices are block-diagonal (BD-LoRA)",
    "kasa_config": "it rescales singular values (KaSA)",
    "monteclora_config": "it samples its weights (MonteCLoRA)",
    "megatron_config": "it was trained on Megatron's sharded layers",
}
# Initialisations that subtract the first adapter from the base: the trained model's base is not the base on disk.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MERGED_KINDS = ("LORA", "VERA", "IA3")
_VERA = ("vera_lambda_b", "vera_lambda_d")
_SHARED = ("base_model.vera_A", "base_model.vera_B")


@dataclass(slots=True)
class AdapterFile:
    """One adapter: its configuration, and which of its tensors act on which module or parameter (all by model name)."""

    folder: Path
    config: dict[str, Any]
    sha256: str
    files: TensorFiles
    low_rank: dict[str, dict[str, str]] = field(default_factory=dict)
    scales: dict[str, str] = field(default_factory=dict)
    widths: dict[str, int] = field(
        default_factory=dict
    )  # inputs of VeRA's modules, which its own tensors do not tell
    token_rows: dict[str, str] = field(default_factory=dict)
    base_values: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """What to call it on a page: LoRA, rsLoRA, DoRA, rsDoRA, VeRA, IA3."""
        if self.config["peft_type"] != "LORA":
            return {"VERA": "VeRA", "IA3": "IA3"}[self.config["peft_type"]]
        return ("rs" if self.config.get("use_rslora") else "") + (
            "DoRA" if self.config.get("use_dora") else "LoRA"
        )

    def value(self, tensor: str) -> torch.Tensor:
        """A tensor of the adapter in fp32."""
        return self.files.read(tensor).float()

    def update(self, module: str, *, transposed: bool) -> LowRankUpdate:
        """The low-rank update of a module's weight, in fp32; `transposed` for weights stored as [in, out] (deltas.py)."""
        parts = self.low_rank[module]
        if "vera_lambda_b" in parts:
            return self._vera_update(module, transposed)
        embedding = "lora_embedding_A" in parts
        a = self.value(parts["lora_embedding_A" if embedding else "lora_A.weight"])
        b = self.value(parts["lora_embedding_B" if embedding else "lora_B.weight"])
        magnitude = self.value(parts["lora_magnitude_vector"]) if "lora_magnitude_vector" in parts else None
        return LowRankUpdate(a, b, self.scaling(module, a.shape[0]), transposed, magnitude)

    def _vera_update(self, module: str, transposed: bool) -> LowRankUpdate:
        """ΔW = diag(b)·B·diag(d)·A, A and B cut to the module's width (Kopiczko et al. 2024, arXiv:2310.11454)."""
        b, d = (self.value(self.low_rank[module][part]) for part in _VERA)
        shared_a, shared_b = (self.value(name) for name in _SHARED)
        a = d.unsqueeze(1) * shared_a[:, : self.widths[module]]
        return LowRankUpdate(a, b.unsqueeze(1) * shared_b[: len(b)], 1.0, transposed)

    def update_shapes(self, module: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B of a module's update."""
        parts, entries = self.low_rank[module], self.files.entries
        if "vera_lambda_b" in parts:
            rank, n_out = entries[parts["vera_lambda_d"]].shape[0], entries[parts["vera_lambda_b"]].shape[0]
            return (rank, self.widths[module]), (n_out, rank)
        a = entries[parts.get("lora_A.weight") or parts["lora_embedding_A"]].shape
        return a, entries[parts.get("lora_B.weight") or parts["lora_embedding_B"]].shape

    def scaling(self, module: str, rank: int) -> float:
        """α/r (or α/√r) of one module, `alpha_pattern` applied the way PEFT matches it."""
        from peft.utils.other import get_pattern_key

        patterns = self.config.get("alpha_pattern") or {}
        alpha = patterns.get(get_pattern_key(patterns.keys(), module), self.config["lora_alpha"])
        return lora_scaling(alpha, rank, rank_stabilised=bool(self.config.get("use_rslora")))

    def token_indices(self, module: str) -> list[int]:
        """Rows of an embedding that `trainable_token_indices` names; a plain list means the input embedding.

        A tied head repeats the embedding's rows and is not named itself.
        """
        given = self.config.get("trainable_token_indices")
        if isinstance(given, dict):
            only = next(iter(given.values())) if len(given) == 1 else []
            return next((rows for name, rows in given.items() if module.endswith(name)), only)
        return list(given or [])


def is_adapter_folder(folder: Path) -> bool:
    """By content: a PEFT configuration lies in it. The folder's name means nothing."""
    return (folder / ADAPTER_CONFIG).is_file()


def open_adapter(folder: Path) -> AdapterFile:
    """Read configuration and headers of a PEFT adapter. Raises UserError for everything that must not be merged."""
    config = read_adapter_config(folder)
    _refuse_unmergeable(config, folder / ADAPTER_CONFIG)
    weights = folder / ADAPTER_WEIGHTS
    adapter = AdapterFile(folder, config, digest_file(weights), TensorFiles([weights]))
    if not adapter.files.entries:
        raise UserError(f"{weights} holds no tensors", fix="train and save the adapter again")
    saved = tuple(config.get("modules_to_save") or ())
    for key in adapter.files.entries:
        _sort_in(adapter, key, saved)
    _refuse_incomplete(adapter)
    return adapter


def _refuse_unmergeable(config: dict[str, Any], path: Path) -> None:
    if config["peft_type"] not in _MERGED_KINDS:
        raise UserError(
            "this adapter cannot be merged into plain weights: it puts virtual tokens in front of every row",
            where=f"{path}: peft_type {config['peft_type']}",
            fix="serve it unmerged, with PEFT",
        )
    if config.get("task_type") == "SEQ_CLS":
        raise UserError(
            "this adapter belongs to a reward model or classifier, and what is merged here are models that write",
            where=f"{path}: task_type SEQ_CLS",
            why="its head scores a text, and no language model has a place for it",
            fix="load the base with AutoModelForSequenceClassification (num_labels=1) and the adapter with PEFT; "
            "merge_and_unload() merges the two there",
        )
    for key, reason in _UNMERGEABLE.items():
        if config.get(key):
            raise UserError(
                f"this adapter cannot be merged into plain weights: {reason}",
                where=f"{path}: {key}",
                fix="serve it unmerged, with PEFT",
            )
    for key in ("lora_alpha", "r") if config["peft_type"] == "LORA" else ():
        if isinstance(config[key], bool) or not isinstance(config[key], (int, float)) or config[key] <= 0:
            raise UserError(
                f"`{key}` of the adapter's configuration is {config[key]!r}, which scales nothing",
                where=str(path),
                fix="restore the file that was saved with the weights",
            )
    initialisation = str(config.get("init_lora_weights", "")).lower()
    if initialisation.startswith(_CHANGES_BASE):
        raise UserError(
            f"this adapter belongs to a changed base: init_lora_weights is '{initialisation}'",
            where=str(path),
            why="that initialisation takes the first adapter out of the base weights, which this folder does not hold",
            fix="save it as a plain LoRA with path_initial_model_for_weight_conversion of PEFT's save_pretrained",
        )


def _sort_in(adapter: AdapterFile, key: str, saved: tuple[str, ...]) -> None:
    """Put one tensor of the file where it acts."""
    name = key.removeprefix(PREFIX)
    if key in _SHARED:
        return
    if not key.startswith(PREFIX):
        adapter.unknown.append(key)
        return
    match = _PART.fullmatch(name)
    if match is None:
        modules = name.rpartition(".")[0].split(".")
        whole = any(entry in modules or name.startswith(entry + ".") for entry in saved)
        (adapter.replaced if whole else adapter.base_values)[name] = key
        return
    module, part = match["module"], match["part"]
    if own := match["own"] or match["original"]:
        adapter.base_values[f"{module}.{own}"] = key
    elif match["trained"]:
        adapter.replaced[f"{module}.{match['trained']}"] = key
    elif part == "ia3_l":
        adapter.scales[module] = key
    elif part.startswith("token_adapter"):
        adapter.token_rows[module] = key
    else:
        adapter.low_rank.setdefault(module, {})[part.replace("vector.weight", "vector")] = key


def _refuse_incomplete(adapter: AdapterFile) -> None:
    """Each module needs A and B, and a magnitude exactly when the configuration says DoRA."""
    if adapter.unknown:
        raise UserError(
            f"{len(adapter.unknown)} of the {len(adapter.files.entries)} tensors do not begin with '{PREFIX}', e.g. "
            f"{adapter.unknown[0]}",
            where=str(adapter.folder / ADAPTER_WEIGHTS),
            why="PEFT would load none of them, warn, and answer like the untuned base",
            fix="save the adapter with PEFT's save_pretrained, or rename its tensors",
        )
    dora = bool(adapter.config.get("use_dora"))
    lacking, extra = [], []
    for module, parts in adapter.low_rank.items():
        pair = ("lora_embedding_A", "lora_embedding_B") if any("embedding" in part for part in parts) else ()
        pair = _VERA if adapter.config["peft_type"] == "VERA" else pair
        needed = {*(pair or ("lora_A.weight", "lora_B.weight")), *(["lora_magnitude_vector"] if dora else [])}
        lacking += [f"{module}.{part}" for part in sorted(needed - parts.keys())]
        extra += [f"{module}.{part}" for part in sorted(parts.keys() - needed - {"lora_B.bias"})]
    if lacking or extra:
        raise UserError(
            f"the adapter's tensors are incomplete: {len(lacking)} missing, {len(extra)} unexpected, e.g. "
            f"{(lacking + extra)[0]}",
            where=str(adapter.folder / ADAPTER_WEIGHTS),
            why=f"{ADAPTER_CONFIG} says use_dora: {str(dora).lower()}",
            fix="copy the adapter again, or restore its configuration",
        )
    if adapter.config["peft_type"] == "VERA" and not set(_SHARED) <= set(adapter.files.entries):
        raise UserError(
            "the adapter lacks the matrices that all its modules share",
            where=str(adapter.folder / ADAPTER_WEIGHTS),
            why="VeRA draws them at random; drawn again, they need not be the same",
            fix="save the adapter with save_projection: true",
        )
    if not (adapter.low_rank or adapter.scales or adapter.token_rows or adapter.replaced):
        raise UserError(f"{adapter.folder} adapts nothing: it holds no low-rank pair and no trained module")
