"""States of optimizer, schedule, scaler and random generators on disk: tensors as safetensors, the rest as JSON. No pickle.

A state is any nesting of dicts, lists, tuples, tensors, numpy arrays, numbers, text, truth values and None. It comes back equal:
types, tuples, integer keys, the bits of every tensor and float, and the order in which a matrix lies in memory, on which the
rounding of later products depends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import UserError

_TAG = "\x00"  # begins the key of an encoded value; no state has such a key


def save_state(path: Path, state: Any) -> None:
    """Write `<path>.json` and, when there is a tensor, `<path>.safetensors`. Raises TypeError for other objects."""
    tensors: dict[str, torch.Tensor] = {}
    encoded = _encode(state, tensors)
    path.with_suffix(".json").write_text(json.dumps(encoded), encoding="utf-8")
    if tensors:
        _separate(tensors)
        save_file(tensors, str(path.with_suffix(".safetensors")))


def _separate(tensors: dict[str, torch.Tensor]) -> None:
    """Give tensors that share memory, as the code books of 8-bit optimizers do, their own: safetensors refuses them.

    The others are written from where they are; copies of all would be the whole optimizer a second time.
    """
    taken: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        if memory in taken:
            tensors[name] = tensor.clone()
        taken.add(memory)


def load_state(path: Path) -> Any:
    """What `save_state(path, …)` wrote, tensors on the CPU. Raises UserError when it is not there or not readable."""
    try:
        encoded = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        weights = path.with_suffix(".safetensors")
        tensors = load_file(str(weights)) if weights.is_file() else {}
        return _decode(encoded, tensors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"the state {path.name} cannot be read: {error}",
            where=str(path.parent),
            fix="delete that checkpoint; the same command then continues from the one before it",
        ) from error


def _encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, torch.Tensor):
        name = f"{len(tensors):06d}"
        order = sorted(range(value.dim()), key=lambda dimension: -value.stride()[dimension])
        if value.is_contiguous() or not value.permute(order).is_contiguous():
            order = list(range(value.dim()))
        tensors[name] = value.detach().to("cpu").permute(order).contiguous()
        return {f"{_TAG}tensor": [name, order]}
    if isinstance(value, np.ndarray):
        return {f"{_TAG}array": _encode(torch.from_numpy(value), tensors)}
    if isinstance(value, np.generic):
        return _encode(value.item(), tensors)
    if isinstance(value, tuple):
        return {f"{_TAG}tuple": [_encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_encode(item, tensors) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith(_TAG) for key in value):
            return {key: _encode(item, tensors) for key, item in value.items()}
        return {
            f"{_TAG}pairs": [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]
        }
    raise TypeError(f"a state holds a {type(value).__name__}, which is neither a tensor nor plain data")


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (key, inner), *_ = value.items()
        if key == f"{_TAG}tensor":
            name, order = inner
            return tensors[name].permute([order.index(dimension) for dimension in range(len(order))])
        if key == f"{_TAG}array":
            return _decode(inner, tensors).numpy()
        if key == f"{_TAG}tuple":
            return tuple(_decode(item, tensors) for item in inner)
        if key == f"{_TAG}pairs":
            return {_decode(k, tensors): _decode(item, tensors) for k, item in inner}
    return {key: _decode(item, tensors) for key, item in value.items()}
