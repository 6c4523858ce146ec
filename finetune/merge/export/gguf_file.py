"""Write a model folder as one GGUF file, tensor by tensor, and prove that what is read back answers alike.

The tensors of Llama-like models have fixed names there, and the rows of the query and key projections of `llama` are
interleaved for its rotary embedding (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Matrices are f16 or Q8_0
(blocks of 32 with one f16 scale), vectors f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
import torch

from finetune.errors import UserError
from finetune.merge.export.gguf_tokenizer import GgufTokenizer, read_gguf_tokenizer
from finetune.merge.place import file_in_place, refuse_small_disk
from finetune.merge.proof import continue_greedily, distance, greedy_agreement, logits_at, make_probe
from finetune.merge.shards import TensorFiles, open_model
from finetune.model.embedded import without_progress_bars
from finetune.model.source import read_model_json

GgufType = Literal["f16", "q8_0"]
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_BLOCK = 32
_QWEN3_HEAD = 128
_EMBEDDING = "model.embed_tokens.weight"
_LARGEST_F16 = 65504.0
F16_TOLERANCE = (
    0.02  # of logits, in standard deviations of theirs; f16 has three more bits than bf16: mostly unchanged
)
Q8_TOLERANCE_KL = 0.05  # mean, in nats; measured values are near 1e-3
Matrix = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class GgufProof:
    """The file read back by transformers beside the model it was made of: fixed prompts, fp32 arithmetic."""

    path: str
    type: str
    n_bytes: int
    max_logit_difference: float
    mean_kl: float
    greedy_identical: int
    greedy_tokens: int
    has_chat_template: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For the screen."""
        places = (
            f"all {self.greedy_tokens}"
            if self.greedy_identical == self.greedy_tokens
            else f"{self.greedy_identical} of {self.greedy_tokens}"
        )
        return [
            f"The file is good: read back by transformers, it would say the same next token as the model in {places} places",
            f"(largest logit difference {self.max_logit_difference:.1e}, mean KL {self.mean_kl:.1e} nats).",
            f"{self.path}: {self.type}, {self.n_bytes / 1e6:,.1f} MB"
            + ("" if self.has_chat_template else ", no chat template"),
        ]


def export_gguf(folder: Path, out: Path, *, type: GgufType = "f16", name: str | None = None) -> GgufProof:
    """Write `folder` (config.json, safetensors, tokenizer) to the file `out`, which must not exist.

    Raises UserError for an architecture or a tokenizer that cannot be written so that it means the same, for a weight that
    f16 cannot hold, a full disk, and when what is read back does not answer like the model; nothing is left then.
    """
    if out.suffix != ".gguf":
        raise UserError(
            f"{out} does not end in .gguf", where="--out", fix="name the file, e.g. out/model-f16.gguf"
        )
    if out.exists():
        raise UserError(f"{out} is there already", where="--out", fix="choose another name, or delete it")
    config = _config(folder)
    with open_model(folder) as tensors:
        refuse_small_disk(out, _n_bytes(tensors, type))
        if _EMBEDDING not in tensors.entries:
            raise UserError(
                f"{folder} holds no tensor {_EMBEDDING}",
                fix="load it with transformers and save it again, which gives its tensors their usual names",
            )
        rows = tensors.entries[_EMBEDDING].shape[0]
        tokenizer = read_gguf_tokenizer(folder, rows)
        with file_in_place(out) as aside:
            _write(tensors, config, tokenizer, aside, type, name or folder.name)
            return _prove(folder, aside, out, type, tokenizer)


def _n_bytes(tensors: TensorFiles, type: GgufType) -> int:
    """About what the weights take in the file."""
    per_element = 2.0 if type == "f16" else (_BLOCK + 2) / _BLOCK
    return int(sum(entry.n_elements for entry in tensors.entries.values()) * per_element)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder} is no model folder", fix="merge the adapter first: finetune merge adapter RUN --out …"
        )
    config = read_model_json(path)
    if "quantization_config" in config:
        raise UserError(
            f"{folder} is stored quantized, and its codes are not those of GGUF",
            fix="export the unquantized model; --type q8_0 quantizes it",
        )
    if config.get("model_type") not in _ARCHITECTURES:
        raise UserError(
            f"models of type '{config.get('model_type')}' are not exported to GGUF here",
            fix=f"known: {', '.join(_ARCHITECTURES)}; llama.cpp's own script reads the folder, too",
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(
            "this model scales its rotary embedding, which is not exported to GGUF here",
            fix="convert it with llama.cpp's own script; the folder is what it reads",
        )
    if config["model_type"] == "qwen3" and config.get("head_dim", _QWEN3_HEAD) != _QWEN3_HEAD:
        raise UserError(
            f"transformers reads qwen3 files with {_QWEN3_HEAD} numbers a head only, and this model has {config['head_dim']}",
            why="a file that cannot be read back cannot be compared with the model",
            fix="convert it with llama.cpp's own script; the folder is what it reads",
        )
    return config


def _write(
    tensors: TensorFiles,
    config: dict[str, Any],
    tokenizer: GgufTokenizer,
    path: Path,
    type: GgufType,
    name: str,
) -> None:
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[config["model_type"]])
    try:
        _write_metadata(writer, config, tokenizer, type, name)
        placed = list(_placed(tensors, config))
        for target, source in placed:
            shape = tensors.entries[source].shape
            kind = _kind(shape, type)
            n_bytes = (
                int(np.prod(shape)) * 4 if kind is gguf.GGMLQuantizationType.F32 else int(np.prod(shape)) * 2
            )
            if kind is gguf.GGMLQuantizationType.Q8_0:
                encoded = (*shape[:-1], shape[-1] // _BLOCK * (_BLOCK + 2))
                writer.add_tensor_info(target, encoded, np.dtype(np.uint8), int(np.prod(encoded)), kind)
            else:
                dtype = np.dtype(np.float32 if kind is gguf.GGMLQuantizationType.F32 else np.float16)
                writer.add_tensor_info(target, shape, dtype, n_bytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for target, source in placed:
            writer.write_tensor_data(_encoded(tensors.read(source), target, config, type))
    finally:
        writer.close()


def _write_metadata(
    writer: Any, config: dict[str, Any], tokenizer: GgufTokenizer, type: GgufType, name: str
) -> None:
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if type == "f16" else gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(len(tokenizer.tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(list(tokenizer.tokens))
    writer.add_token_types(list(tokenizer.types))
    if tokenizer.merges:  # the format has no empty lists
        writer.add_token_merges(list(tokenizer.merges))
    writer.add_add_bos_token(tokenizer.add_bos)
    for key, index in tokenizer.special_ids.items():
        getattr(writer, f"add_{key}_token_id")(index)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _placed(tensors: TensorFiles, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(name in the file, name here) of every tensor. Raises UserError for one that has no place."""
    architecture = _ARCHITECTURES[config["model_type"]]
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    tied = config.get("tie_word_embeddings", False)
    unknown = []
    for source in tensors.entries:
        if tied and source == "lm_head.weight":
            continue
        target = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if target is None:
            unknown.append(source)
        else:
            yield target, source
    if unknown:
        raise UserError(
            f"{len(unknown)} tensors have no place in a GGUF file: {', '.join(unknown[:3])}",
            fix="merge the adapter into its base first, and export the merged folder",
        )


def _kind(shape: tuple[int, ...], type: GgufType) -> Any:
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    fits = type == "q8_0" and shape[-1] % _BLOCK == 0
    return gguf.GGMLQuantizationType.Q8_0 if fits else gguf.GGMLQuantizationType.F16


def _encoded(tensor: torch.Tensor, target: str, config: dict[str, Any], type: GgufType) -> Matrix:
    values: Matrix = tensor.float().numpy()
    if _ARCHITECTURES[config["model_type"]] == "llama":
        values = _interleaved(values, target, config)
    kind = _kind(values.shape, type)
    largest = float(np.abs(values).max(initial=0.0))
    single = kind is gguf.GGMLQuantizationType.F32
    if single and np.isfinite(largest):
        return values.astype(np.float32)
    if single or not largest <= _LARGEST_F16:
        raise UserError(
            f"{target} holds {largest:.3g}, which {'a model' if single else 'f16'} cannot hold",
            fix="look for NaN or infinity in the merged model",
        )
    if kind is gguf.GGMLQuantizationType.Q8_0:
        quantized: Matrix = gguf.quants.quantize(values, kind)
        return quantized
    return values.astype(np.float16)


def _interleaved(values: Matrix, target: str, config: dict[str, Any]) -> Matrix:
    """Rows of q and k [heads · 2 · half, …]: halves of a head side by side here, in turn there."""
    heads = config["num_attention_heads"]
    if ".attn_k." in target:
        heads = config.get("num_key_value_heads") or heads
    elif ".attn_q." not in target:
        return values
    half = values.shape[0] // heads // 2
    turned: Matrix = values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return turned


def _prove(folder: Path, aside: Path, out: Path, type: GgufType, tokenizer: GgufTokenizer) -> GgufProof:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reader = AutoTokenizer.from_pretrained(folder)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    probe = make_probe(reader, len(tokenizer.tokens))
    sequence = continue_greedily(before, probe)
    keep = probe.keep(len(tokenizer.tokens))
    reference = logits_at(before, sequence, keep)
    del before
    with without_progress_bars():
        after = AutoModelForCausalLM.from_pretrained(
            aside.parent, gguf_file=aside.name, dtype=torch.float32
        ).eval()
    answered = logits_at(after, sequence, keep)
    found = distance(reference, answered)
    same, n_greedy = greedy_agreement(reference, answered, probe.n_new, 0.0)
    tolerance = F16_TOLERANCE * float(reference.std())
    good = found.max_difference <= tolerance if type == "f16" else found.mean_kl <= Q8_TOLERANCE_KL
    if not good:
        raise UserError(
            f"the GGUF file does not answer like {folder}: largest logit difference {found.max_difference:.2e}, "
            f"mean KL {found.mean_kl:.2e}",
            why="nothing was kept",
            fix="try --type f16; if that differs, too, this model cannot be exported here",
        )
    return GgufProof(
        str(out), type, aside.stat().st_size, found.max_difference, found.mean_kl, same, n_greedy,
        tokenizer.chat_template is not None,
    )  # fmt: skip
