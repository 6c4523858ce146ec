"""Tokenizers and weights of a resolved base model, loaded without a network, without pickle and without remote code."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.errors import UserError
from finetune.model.attention import register_document_attention
from finetune.model.memory import leave_weight_files, no_holes
from finetune.model.quantization import (
    check_row_lengths,
    disable_cpu_repacking,
    keep_int8_scales,
    quantization_config,
)
from finetune.model.reward import MISSING_SCORE, SCORE_HEAD, quiet_loading, start_score
from finetune.model.source import ModelSource, read_config, require_commit

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool | str = False) -> Any:
    """The model's own tokenizer, checked against its embedding.

    Raises UserError when a token id has no row in the embedding (the first such token would crash or corrupt training
    hours later), when there is no end-of-turn token, and when the files cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.path, local_files_only=True, **_remote_code(trust_remote_code)
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"the tokenizer in {source.path} cannot be loaded: {_first_line(error)}",
            where="model.id",
            fix="save the model's tokenizer into the folder again: tokenizer.save_pretrained(folder)",
        ) from error
    check_vocabulary(tokenizer, embedding_rows(read_config(source)), where=source.id)
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has no end-of-sequence token, so no answer could ever end",
            where=source.id,
            fix="set eos_token in its tokenizer_config.json",
        )
    return tokenizer


def check_vocabulary(tokenizer: Any, n_embedding_rows: int, *, where: str = "") -> None:
    """Refuse a tokenizer whose largest id has no embedding row (added tokens without a resize)."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    outside = sorted((index, token) for token, index in vocabulary.items() if index >= n_embedding_rows)
    if outside:
        index, token = outside[0]
        raise UserError(
            f"the vocabulary is larger than the embedding: {len(outside)} tokens from id {index} ('{token}') on have no "
            f"row among its {n_embedding_rows}",
            where=where,
            why="tokens were added to the tokenizer without resizing the model",
            fix=f"model.resize_token_embeddings({outside[-1][0] + 1}) and save both, or use the original tokenizer",
        )


def check_context(
    source: ModelSource, n_tokens: int, *, in_front: int = 0, where: str = "data.max_tokens"
) -> None:
    """Refuse rows that with `in_front` virtual tokens are longer than the positions the model was built for."""
    config = read_config(source)
    limit = config.get(
        "max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings")
    )
    if isinstance(limit, int) and n_tokens + in_front > limit:
        behind = f" behind {in_front} virtual ones" if in_front else ""
        raise UserError(
            f"{n_tokens} tokens{behind} do not fit the model's context of {limit}",
            where=where,
            why="positions beyond it were never trained and some models crash on them",
            fix=f"set {where} to at most {limit - in_front}, or choose a model with a longer context",
        )


def embedding_rows(config: dict[str, Any]) -> int:
    """Rows of the input embedding by config.json; multimodal configurations hold it in `text_config`."""
    rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(rows, int):
        raise UserError("config.json holds no vocab_size", fix="name the folder of a causal language model")
    return rows


def load_model(
    source: ModelSource,
    *,
    dtype: str = "bf16",
    quantize: str = "none",
    double_quantization: bool = True,
    attention: str = "sdpa",
    trust_remote_code: bool | str = False,
    device: str | None = None,
    score_seed: int | None = None,
) -> Any:
    """The base model with weights of `dtype`, in eval mode, nothing frozen and no adapter.

    `quantize` is none, nf4, fp4 or int8; the head, tied or not, is never quantized. `attention` is 'document' (packed
    rows, see attention.py), 'auto' (the same: it is plain SDPA where nothing is packed), 'sdpa' or 'eager'; a model that
    knows 'eager' alone gets it (see `knows_sdpa`). Weights are mapped from the file and placed tensor by tensor, so the
    peak is one model, not two. `device` defaults to this process's GPU, else the CPU. With `score_seed` it is a reward
    model (see reward.py), whose head starts from that seed unless the folder holds one. Raises UserError before any
    weight is read where the configuration suffices to tell.
    """
    place = device or default_device()
    config = read_config(source)
    check_causal_lm(source, config, trust_remote_code)
    if quantize != "none":
        if "quantization_config" in config:
            raise UserError(
                f"{source.id} is quantized already ({config['quantization_config'].get('quant_method')})",
                where="model.quantize",
                fix="set model.quantize: none, or start from the unquantized model",
            )
        check_row_lengths(model_skeleton(source, trust_remote_code), quantize, device=place)
    implementation = register_document_attention() if attention in ("document", "auto") else attention
    if not knows_sdpa(source):
        implementation = "eager"
    options: dict[str, Any] = {
        "dtype": DTYPES[dtype],
        "attn_implementation": implementation,
        "use_safetensors": True,
        "local_files_only": True,
        "device_map": {"": place},
        **_remote_code(trust_remote_code),
    }
    bnb = quantization_config(quantize, dtype=DTYPES[dtype], double_quantization=double_quantization)
    if bnb is not None:
        bnb.llm_int8_skip_modules = None if score_seed is None else [SCORE_HEAD]
        options["quantization_config"] = bnb
    with no_holes():
        model = _read_weights(source, options, score_seed)
        if bnb is not None:
            leave_weight_files(model)
    disable_cpu_repacking(model)
    keep_int8_scales(model)
    return model.eval()


def _read_weights(source: ModelSource, options: dict[str, Any], score_seed: int | None) -> Any:
    """The model with every tensor that its configuration asks for; only the head of a reward model may be new."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    scores = score_seed is not None
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    if scores:
        options = {**options, "num_labels": 1}
    try:
        with quiet_loading() if scores else nullcontext():  # that the head is new is no news
            model, report = kind.from_pretrained(
                source.path, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )  # what does not fit is told below
    except (OSError, ValueError) as error:
        raise UserError(
            f"{source.id} cannot be loaded: {_first_line(error)}",
            where="model.id",
            fix="check that the folder was saved by transformers for a causal language model",
        ) from error
    if score_seed is not None and MISSING_SCORE in report["missing_keys"]:
        report["missing_keys"] = set(report["missing_keys"]) - {MISSING_SCORE}
        start_score(model, score_seed)
    _check_complete(source, report)
    return model


def knows_sdpa(source: ModelSource) -> bool:
    """Whether torch's fused attention computes what this model's own does. It has no soft caps (Gemma 2) and no sinks
    (GPT-OSS): such models are left to transformers' `eager`. Code that comes with the model is trusted to say so itself.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if read_config(source).get("model_type") not in CONFIG_MAPPING_NAMES:
        return True
    config = AutoConfig.from_pretrained(source.path, local_files_only=True)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return kind is None or bool(kind._supports_sdpa)


def check_attention(source: ModelSource, attention: str) -> None:
    """Refuse an attention asked for by name that computes something else than this model's own."""
    if attention in ("document", "sdpa") and not knows_sdpa(source):
        raise UserError(
            f"{source.id} cannot be computed with {attention} attention",
            where="model.attention",
            why="its attention has parts that torch's fused kernels leave out, such as soft caps or sinks",
            fix="set model.attention: auto, which takes eager for this model",
        )


def model_skeleton(source: ModelSource, trust_remote_code: bool | str = False) -> nn.Module:
    """The model's modules with shapes but without storage (meta device): names and shapes can be checked in a second."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    given = _remote_code(trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(source.path, local_files_only=True, **given)
        with torch.device("meta"):
            skeleton: nn.Module = AutoModelForCausalLM.from_config(config, **given)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(
            f"no model can be built from config.json: {' '.join(str(error).split())}",
            where=str(source.folder / "config.json"),
            fix="copy or download the model again, or undo what was changed in that file",
        ) from error
    return skeleton


def default_device() -> str:
    """This process's GPU when there is one (by local rank), else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def _remote_code(trust_remote_code: bool | str) -> dict[str, Any]:
    """Off, or pinned: only a full commit hash may switch remote code on."""
    if trust_remote_code is False or trust_remote_code == "":
        return {"trust_remote_code": False}
    return {"trust_remote_code": True, "code_revision": require_commit(trust_remote_code)}


def check_causal_lm(source: ModelSource, config: dict[str, Any], trust_remote_code: bool | str) -> None:
    """Refuse what is no causal language model known here, and one that brings its own code unless that is pinned."""
    _remote_code(trust_remote_code)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = str(config.get("model_type", ""))
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if "auto_map" in config:
        if trust_remote_code:
            return
        raise UserError(
            f"{source.id} brings its own code, and remote code is off",
            where="model.trust_remote_code",
            fix="read the code, then set model.trust_remote_code to the commit you read; or choose another model",
        )
    raise UserError(
        f"{source.id} is of type '{model_type}', which is not a causal language model known here",
        where="model.id",
        fix="choose a text generation model",
    )


def _check_complete(source: ModelSource, report: dict[str, Any]) -> None:
    """transformers fills missing tensors with random values and only warns; that is never what a tuning run wants."""
    missing, mismatched = sorted(report["missing_keys"]), sorted(map(str, report["mismatched_keys"]))
    if missing or mismatched:
        raise UserError(
            f"the weights of {source.id} do not fit its config.json: {len(missing)} tensors missing, {len(mismatched)} of "
            f"another shape, e.g. {(missing + mismatched)[0]}",
            where=str(Path(source.path) / "config.json"),
            fix="copy or download the model again",
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
