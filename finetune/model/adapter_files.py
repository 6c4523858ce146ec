"""Adapters on disk: written whole or not at all, read strictly.

PEFT loads what fits and stays silent or warns about the rest: with a renamed prefix the "tuned" model is the base, with
a missing `lora_alpha` the update is scaled by a default. Here every tensor must be there, have its place and its shape.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from finetune.digest import digest_file, digest_json
from finetune.errors import UserError
from finetune.model.adapters import refuse_second_adapter, trainables_to_fp32
from finetune.model.quantization import codes_of
from finetune.model.source import ADAPTER_CONFIG, ModelSource, read_config, read_model_json
from finetune.model.virtual_tokens import align_virtual_tokens
from finetune.paths import disk_faults, read_json, write_json

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ORIGIN_FILE = "base_model.json"  # which base the adapter was trained on, by content; PEFT ignores it
# Where the adapter was made says nothing about what it computes.
_PLACE_KEYS = ("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version")
# An embedding or head as PEFT saves it whole: itself, or inside one of the wrappers it may have.
_EMBEDDING = re.compile(
    r".*\b(embed_tokens|lm_head|wte|embed_in|embed_out)(\.token_adapter)?(\.(base_layer|original_module|modules_to_save))?"
    r"\.weight"
)
# PEFT's kinds that are read here, and the keys without which their tensors mean nothing.
NEEDED_KEYS: dict[str, tuple[str, ...]] = {
    "LORA": ("lora_alpha", "r", "target_modules"),
    "VERA": ("r", "target_modules"),
    "IA3": ("target_modules",),
    "PROMPT_TUNING": ("num_virtual_tokens",),
    "PREFIX_TUNING": ("num_virtual_tokens", "num_layers", "token_dim"),
}
# PEFT puts a form beside an adapter in which nothing is filled in but the base's place on this machine. `finetune export`
# writes a card that says what is known.
EMPTY_CARD = "README.md"
_TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"


def save_adapter(
    model: Any,
    folder: Path,
    *,
    tokenizer: Any | None = None,
    source: ModelSource | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the adapter of a PeftModel in PEFT's own format; the folder appears complete or not at all.

    The embedding is saved along when the vocabulary was resized after loading, and also when the base cannot be
    consulted (a model built in memory): without its new rows such an adapter could never be used again. With `source`
    the base's digest is noted. Lists in the configuration are sorted, so that equal adapters are equal bytes. `weights`
    are the adapter's tensors by their names in the model, where the model itself holds only a part of each.
    """
    with disk_faults(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.part-"))
        try:
            model.save_pretrained(
                str(part),
                safe_serialization=True,
                save_embedding_layers=_was_resized(model, source),
                state_dict=weights,
            )
            (part / EMPTY_CARD).unlink(missing_ok=True)
            _sort_configuration(part / ADAPTER_CONFIG)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(part))
            origin = _origin(model, source)
            if origin:
                write_json(part / ORIGIN_FILE, origin)
            part.chmod(0o755)
            _replace(folder, part)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def _origin(model: Any, source: ModelSource | None) -> dict[str, Any]:
    """What the adapter belongs to besides its shapes: the base by content, and its codes where the adapter needs them."""
    origin: dict[str, Any] = {}
    if source is not None:
        rows = _embedding_rows(model)
        origin = {
            "id": source.id,
            "revision": source.revision,
            "digest": source.digest,
            "embedding_rows": rows,
        }
    if getattr(model, "start_codes", None) is not None:
        origin["codes"] = model.start_codes
    return origin


def _replace(folder: Path, part: Path) -> None:
    """Put `part` in the place of `folder`; whatever was there is only deleted afterwards."""
    if folder.exists():
        old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old-"))
        folder.rename(old / folder.name)
        part.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        part.rename(folder)


def load_adapter(
    model: Any,
    folder: Path,
    *,
    source: ModelSource | None = None,
    trainable: bool = False,
    codes: Mapping[str, Any] | None = None,
) -> Any:
    """Put a saved adapter on `model` (changed in place) and return the PeftModel; refuse whatever does not fit exactly.

    Raises UserError when the folder is no adapter, holds pickle, lacks what its kind needs, has missing, unexpected or
    misshapen tensors (counted), or was trained on another base (`source` is the base at hand) or on other 4-bit codes
    (`codes` are those of `model`'s weights where they were decoded already); `model` is then as it was. An adapter that
    carries a larger embedding resizes the model first. `trainable` continues its training.
    """
    from peft import get_peft_model, set_peft_model_state_dict

    configuration = read_adapter_config(folder)
    check_base(folder, source)
    _check_codes(folder, codes or codes_of(model))
    tensors = _read_tensors(folder / ADAPTER_WEIGHTS)
    rows_before = model.get_input_embeddings().weight.shape[0]
    n_rows = next((len(value) for key, value in tensors.items() if _EMBEDDING.fullmatch(key)), rows_before)
    config = peft_configuration(folder, trainable=trainable)
    refuse_second_adapter(model)
    needed_gradient = [parameter for parameter in model.parameters() if parameter.requires_grad]
    biases = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith(".bias")}
    if n_rows != rows_before:
        model.resize_token_embeddings(n_rows, mean_resizing=False)  # filled from the adapter below
    try:
        with torch.random.fork_rng(devices=[]):
            wrapped = get_peft_model(model, config)
    except ValueError as error:
        _unwrap(model, needed_gradient, rows_before)
        raise UserError(
            f"no module of the base matches the adapter's targets {sorted(configuration['target_modules'])}",
            where=str(folder),
            why="the adapter was trained on another architecture",
            fix="load the base model that the adapter names",
        ) from error
    try:
        _check_tensors(wrapped, tensors, folder)
    except UserError:
        if hasattr(wrapped, "unload"):
            wrapped.unload()
        _unwrap(model, needed_gradient, rows_before)
        raise
    set_peft_model_state_dict(wrapped, tensors)
    if not trainable:
        for parameter in wrapped.parameters():  # biases trained along are the base's own and keep its type
            parameter.requires_grad_(False)
    if getattr(config, "bias", "none") != "none":
        wrapped.base_biases = biases
    trainables_to_fp32(wrapped)
    align_virtual_tokens(wrapped)
    wrapped.eval()
    return wrapped


def _read_tensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(str(path)))
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"the adapter's weights cannot be read: {error}",
            where=str(path),
            fix="copy the file again, or train again",
        ) from None


def peft_configuration(folder: Path, *, trainable: bool = False) -> Any:
    """PEFT's configuration object of a checked adapter folder."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = read_json(folder / ADAPTER_CONFIG)["peft_type"]
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind].from_pretrained(str(folder))
    config.inference_mode = not trainable
    return config


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json, checked: a kind known here, with every key that decides what its tensors compute."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{folder} holds no {ADAPTER_CONFIG}, so it is not an adapter",
            fix="name the folder that save_pretrained of PEFT wrote, e.g. runs/<id>/adapter",
        )
    configuration = read_model_json(folder / ADAPTER_CONFIG)
    where = str(folder / ADAPTER_CONFIG)
    kind = configuration.get("peft_type")
    if kind not in NEEDED_KEYS:
        raise UserError(
            f"an adapter of type {kind} is not supported",
            where=where,
            fix=f"use one of {', '.join(NEEDED_KEYS)}",
        )
    absent = [key for key in NEEDED_KEYS[kind] if configuration.get(key) in (None, [], "")]
    if absent:
        raise UserError(
            f"the adapter's configuration lacks {', '.join(absent)}",
            where=where,
            why="PEFT would fill in a default and compute something else, without a word",
            fix="restore the file that was saved with the weights",
        )
    _require_safetensors(folder)
    return configuration


def _require_safetensors(folder: Path) -> None:
    if (folder / ADAPTER_WEIGHTS).is_file():
        return
    pickle = folder / "adapter_model.bin"
    raise UserError(
        f"{pickle} is a pickle file and is refused"
        if pickle.is_file()
        else f"{folder} holds no {ADAPTER_WEIGHTS}",
        where=str(folder),
        why="reading a pickle file runs whatever code it contains" if pickle.is_file() else "",
        fix="convert the adapter to safetensors on a machine you can afford to lose"
        if pickle.is_file()
        else "copy the adapter again, or save it again from its checkpoint",
    )


def adapter_digest(folder: Path) -> str:
    """SHA-256 over the adapter's tensors and the configuration that decides what they compute, wherever it was made."""
    configuration = read_adapter_config(folder)
    counted = {
        key: value for key, value in configuration.items() if value is not None and key not in _PLACE_KEYS
    }
    if isinstance(counted.get("target_modules"), list):
        counted["target_modules"] = sorted(counted["target_modules"])
    return digest_json({"config": counted, "weights": digest_file(folder / ADAPTER_WEIGHTS)})


def _was_resized(model: Any, source: ModelSource | None) -> bool:
    """Whether the embedding has other rows than the base on disk; True when there is no base to look at."""
    rows = _embedding_rows(model)
    path = source.path if source is not None else str(model.config._name_or_path or "")
    config = Path(path) / "config.json"
    if not path or not config.is_file():
        return True
    base = read_config(source) if source is not None else read_json(config)
    known = base.get("vocab_size") or base.get("text_config", {}).get("vocab_size")
    return bool(known != rows)


def _embedding_rows(model: Any) -> int:
    """Also of a weight that DeepSpeed's ZeRO-3 spread, whose own shape is empty."""
    weight = model.get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def _sort_configuration(path: Path) -> None:
    """PEFT writes sets in hash order, which differs from process to process."""
    configuration = read_json(path)
    for key, value in configuration.items():
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            configuration[key] = sorted(value)
    write_json(path, dict(sorted(configuration.items())))


def read_origin(folder: Path) -> dict[str, Any]:
    """What an adapter notes of its base; nothing for one that was made elsewhere. Raises UserError when it is damaged."""
    path = folder / ORIGIN_FILE
    return read_model_json(path) if path.is_file() else {}


def check_base(folder: Path, source: ModelSource | None, *, key: str = "model.id") -> None:
    """Raise UserError when the adapter in `folder` notes a base of other content than `source`; reads no tensor. `key` of the
    recipe names the base."""
    if source is None:
        return
    origin = read_origin(folder)
    if origin.get("digest", source.digest) != source.digest:
        raise UserError(
            f"the adapter was trained on {origin.get('id')} (content {str(origin.get('digest'))[:12]}), not on "
            f"{source.id} (content {source.digest[:12]})",
            where=str(folder / ORIGIN_FILE),
            why="the shapes may agree, but the update belongs to other weights",
            fix=f"set {key} to {origin.get('id')} with the revision it had, or train again on this base",
        )


def check_fits(skeleton: Any, folder: Path, source: ModelSource) -> None:
    """`check_base`, then that every tensor of the adapter is finite and has its place in `skeleton`, a model without storage,
    which is spent by it. Raises UserError.

    An adapter that brings a larger embedding is checked when it is loaded.
    """
    check_base(folder, source)
    read_adapter_config(folder)
    tensors = _read_tensors(folder / ADAPTER_WEIGHTS)
    broken = next((key for key, value in sorted(tensors.items()) if not bool(value.isfinite().all())), None)
    if broken is not None:
        raise UserError(
            f"{broken} of the adapter holds values that are not finite",
            where=str(folder / ADAPTER_WEIGHTS),
            why="its training diverged, or the file was damaged",
            fix="take an earlier checkpoint of that run, or train it again with a lower train.learning_rate",
        )
    if not any(_EMBEDDING.fullmatch(key) for key in tensors):
        with warnings.catch_warnings():  # that nothing is copied into a model without storage is meant
            warnings.filterwarnings("ignore", "for .*copying from a non-meta parameter", UserWarning)
            load_adapter(skeleton, folder, codes=read_origin(folder).get("codes"))


def _check_codes(folder: Path, codes: Mapping[str, Any] | None) -> None:
    wanted = read_origin(folder).get("codes")
    if wanted is None or wanted == codes:
        return
    raise UserError(
        f"the adapter belongs to weights in {_told(wanted)}, these are in {_told(codes)}",
        where=str(folder / ORIGIN_FILE),
        why="it starts from the error of its own codes (init loftq), which others do not have",
        fix=f"load the base with model.quantize: {wanted['quantize']} and model.double_quantization: "
        f"{str(wanted['double_quantization']).lower()}",
    )


def _told(codes: Mapping[str, Any] | None) -> str:
    if codes is None:
        return "full precision"
    return f"{codes['quantize']} {'with' if codes['double_quantization'] else 'without'} double quantization"


def _check_tensors(wrapped: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Every tensor of the file has a place of its shape, and every place has a tensor."""
    from peft import get_peft_model_state_dict

    expected = {
        key: tuple(tensor.shape)
        for key, tensor in get_peft_model_state_dict(wrapped, save_embedding_layers=False).items()
    }
    found = {
        key: tuple(tensor.shape)
        for key, tensor in tensors.items()
        if key in expected or not (_EMBEDDING.fullmatch(key) or _repeats_tied_rows(key, tensors, expected))
    }
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    misshapen = sorted(key for key in expected.keys() & found.keys() if expected[key] != found[key])
    if missing or unexpected or misshapen:
        parts = [
            f"{len(keys)} {what} (e.g. {keys[0]})"
            for keys, what in (
                (missing, "missing"),
                (unexpected, "unexpected"),
                (misshapen, "of another shape"),
            )
            if keys
        ]
        raise UserError(
            f"the adapter does not fit this base: of {len(expected)} tensors {', '.join(parts)}",
            where=str(folder / ADAPTER_WEIGHTS),
            why="it was trained on another base, or its files were edited; PEFT would load the part that fits",
            fix="load the base model it was trained on, or restore the adapter's files",
        )


def _repeats_tied_rows(key: str, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, Any]) -> bool:
    """Trained token rows of a tied head: when the whole head is saved, PEFT writes the embedding's rows once more."""
    if not key.endswith(_TOKEN_ROWS):
        return False
    return any(torch.equal(tensors[key], tensors[own]) for own in expected if own.endswith(_TOKEN_ROWS))


def _unwrap(model: Any, needed_gradient: list[torch.nn.Parameter], n_rows: int) -> None:
    """Take back what wrapping did to the base model besides its modules; `n_rows` are the embedding's it had."""
    if model.get_input_embeddings().weight.shape[0] != n_rows:
        model.resize_token_embeddings(n_rows, mean_resizing=False)
    if hasattr(model, "peft_config"):
        del model.peft_config
    for parameter in needed_gradient:
        parameter.requires_grad_(True)
