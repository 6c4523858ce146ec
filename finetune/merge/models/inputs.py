"""The models of a merge: found, opened by header, and refused when they cannot be merged with one another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.digest import digest_file, digest_json
from finetune.errors import Fault, UserError
from finetune.merge.layout import equal_tensors
from finetune.merge.shards import TensorEntry, TensorFiles, open_model
from finetune.model.source import locate_model, read_model_json

_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.(?:weight|bias)$")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight$")
_COMPUTED = re.compile(r"\.(?:rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias)$")
"""Buffers that old checkpoints carry and that models compute themselves."""
_SAME = (
    "model_type", "architectures", "hidden_size", "n_embd", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "num_experts_per_tok",
)  # fmt: skip
_BETTER_SAME = ("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "sliding_window")
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True, slots=True)
class MergeModel:
    """One model. `entries` maps its tensors, without superfluous copies of tied ones, in the order of its files."""

    id: str
    folder: Path
    revision: str | None
    config: dict[str, Any]
    files: TensorFiles
    entries: dict[str, TensorEntry]

    @property
    def text_config(self) -> dict[str, Any]:
        """Where the language model's sizes stand; multimodal configurations nest them."""
        nested: dict[str, Any] = self.config.get("text_config") or self.config
        return nested

    @property
    def n_layers(self) -> int:
        for key in LAYER_KEYS:
            if isinstance(self.text_config.get(key), int):
                return int(self.text_config[key])
        raise UserError(
            f"config.json of {self.id} holds no number of layers ({', '.join(LAYER_KEYS)})",
            where=str(self.folder / "config.json"),
        )

    @property
    def embedding(self) -> str | None:
        return next((name for name in self.entries if _EMBEDDING.search(name)), None)

    def identity(self) -> str:
        """A digest of what the folder holds without reading the weights: sizes and times of the files, and headers."""
        files = sorted({entry.file for entry in self.entries.values()})
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        tensors = [(e.name, str(e.dtype), e.shape, e.offset) for e in self.entries.values()]
        beside = {
            name: digest_file(self.folder / name)
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
            if (self.folder / name).is_file()
        }
        return digest_json([self.revision, stats, tensors, beside])


def is_vocabulary(name: str) -> bool:
    """Whether the tensor has one row a token: input embedding, output head, bias of the head."""
    return bool(_EMBEDDING.search(name) or _HEAD.search(name))


def is_embedding(name: str) -> bool:
    return bool(_EMBEDDING.search(name))


def open_models(names: Sequence[str]) -> list[MergeModel]:
    """Open every model by its headers. Raises UserError with the faults of all of them at once."""
    models: list[MergeModel] = []
    faults: list[Fault] = []
    for name in names:
        try:
            models.append(_open(name))
        except UserError as error:
            faults += [Fault(f.what, f.where or name, f.why, f.fix) for f in error.faults]
    if faults:
        for model in models:
            model.files.close()
        raise UserError(faults)
    return models


def _open(name: str) -> MergeModel:
    given, _, revision = name.partition("@")
    folder, found = (
        locate_model(name, where=name)
        if Path(name).expanduser().exists() or not revision
        else locate_model(given, revision, where=name, revision_where=name)
    )
    config = read_model_json(folder / "config.json")
    if "quantization_config" in config:
        raise UserError(
            f"{name} is stored quantized ({config['quantization_config'].get('quant_method')})",
            where=str(folder / "config.json"),
            why="codes cannot be averaged",
            fix="name the unquantized model",
        )
    files = open_model(folder)
    entries = {key: entry for key, entry in files.entries.items() if not _COMPUTED.search(key)}
    # A tied head that was written out all the same: the same bytes as the embedding, loaded from there.
    table = next((key for key in entries if _EMBEDDING.search(key)), None)
    for head in [key for key in entries if _HEAD.search(key) and key.endswith(".weight")]:
        tied = config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings"))
        if table is not None and tied and equal_tensors(files, head, table):
            del entries[head]
    return MergeModel(name, folder, found, config, files, entries)


def check_architectures(models: Sequence[MergeModel], base: MergeModel) -> list[str]:
    """Refuse models of another architecture than `base`; returns remarks on settings that differ and may be meant to."""
    faults: list[Fault] = []
    remarks: list[str] = []
    for model in models:
        differing: dict[str, tuple[Any, Any]] = {}
        for key in (*_SAME, *_BETTER_SAME):
            mine, theirs = (m.text_config.get(key, m.config.get(key)) for m in (base, model))
            if (
                mine is not None and theirs is not None and mine != theirs
            ):  # one that is left out has its default
                differing[key] = mine, theirs
        wrong = {key: values for key, values in differing.items() if key in _SAME}
        if wrong:
            listed = ", ".join(f"{key} {mine} and {theirs}" for key, (mine, theirs) in wrong.items())
            faults.append(
                Fault(
                    f"{base.id} and {model.id} have other architectures: {listed}",
                    str(model.folder / "config.json"),
                    "their tensors mean different things even where the shapes agree",
                    "merge models that were tuned from one base",
                )
            )
        elif differing:
            remarks.append(
                f"{model.id} differs from {base.id} in {', '.join(differing)}; the result has {base.id}'s"
            )
    if faults:
        raise UserError(faults)
    return remarks


def check_tensors(models: Sequence[MergeModel], base: MergeModel, aligned: bool) -> None:
    """Refuse missing, extra and unequal tensors, all named. `aligned`: rows of the vocabulary are matched by token."""
    faults: list[Fault] = []
    for model in models:
        missing = [name for name in base.entries if name not in model.entries and not _borrowed(model, name)]
        extra = [name for name in model.entries if name not in base.entries]
        unequal = [
            name
            for name, entry in base.entries.items()
            if name in model.entries
            and not _fits(entry, model.entries[name], aligned and is_vocabulary(name))
        ]
        if missing or extra:
            parts = [f"lacks {_listed(missing)}"] * bool(missing) + [f"has also {_listed(extra)}"] * bool(
                extra
            )
            faults.append(
                Fault(
                    f"{model.id} {' and '.join(parts)}, compared with {base.id}",
                    str(model.folder),
                    "a tensor that not all models have cannot be merged, and dropping it would break the result",
                    "save the models in the same way, or check that they have the same base",
                )
            )
        if unequal:
            shapes = ", ".join(
                f"{name} {list(base.entries[name].shape)} and {list(model.entries[name].shape)}"
                for name in unequal[:3]
            )
            more = f" and {len(unequal) - 3} more" if len(unequal) > 3 else ""
            only_rows = all(is_vocabulary(name) for name in unequal)
            faults.append(
                Fault(
                    f"{base.id} and {model.id} have tensors of other shapes: {shapes}{more}",
                    str(model.folder),
                    "their vocabularies have other sizes" if only_rows else "they are models of other sizes",
                    "align the rows by token: tokenizer: {source: union}, or source: base"
                    if only_rows
                    else "merge models of one size",
                )
            )
    if faults:
        raise UserError(faults)


def source_name(model: MergeModel, name: str) -> str:
    """The tensor of a model that plays the part of `name`: with a tied head, the embedding."""
    return name if name in model.entries else (_borrowed(model, name) or name)


def _borrowed(model: MergeModel, name: str) -> str | None:
    return model.embedding if _HEAD.search(name) and name.endswith(".weight") else None


def _fits(mine: TensorEntry, theirs: TensorEntry, any_rows: bool) -> bool:
    if any_rows:
        return mine.shape[1:] == theirs.shape[1:]
    return mine.shape == theirs.shape


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more tensors" if len(names) > 3 else shown
