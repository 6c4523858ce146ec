"""Which layer a tensor belongs to, by its name, and how a model of other layers is put together from names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from finetune.errors import UserError
from finetune.merge.models.inputs import LAYER_KEYS, MergeModel

_NUMBERED = re.compile(r"^(.*?)\.(\d+)\.(.*)$")


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Stacks of layers: prefix -> number of layers, e.g. {'model.layers': 32}."""

    stacks: dict[str, int]

    def layer_of(self, name: str) -> tuple[str, int, str] | None:
        """(prefix, layer, rest) of a tensor inside a stack."""
        match = _NUMBERED.match(name)
        return (match[1], int(match[2]), match[3]) if match and match[1] in self.stacks else None

    def position(self, name: str) -> float:
        """0 in the first layer of its stack, 1 in the last and in a stack of one; 0 outside of layers."""
        found = self.layer_of(name)
        if found is None:
            return 0.0
        n = self.stacks[found[0]]
        return found[1] / (n - 1) if n > 1 else 1.0


def read_layers(names: Iterable[str]) -> LayerNames:
    """Every prefix whose numbers run from 0 without a gap is a stack of layers."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if match := _NUMBERED.match(name):
            numbers[match[1]].add(int(match[2]))
    return LayerNames(
        {prefix: len(found) for prefix, found in numbers.items() if found == set(range(len(found)))}
    )


def main_stack(model: MergeModel, layers: LayerNames) -> str:
    """The prefix of the language model's layers."""
    found = [prefix for prefix, n in layers.stacks.items() if n == model.n_layers]
    if len(found) != 1:
        raise UserError(
            f"{model.id} has {len(found)} stacks of {model.n_layers} layers; slices need exactly one",
            where=str(model.folder),
            fix="merge whole models with models: instead",
        )
    return found[0]


def with_layers(config: dict[str, Any], order: list[int]) -> dict[str, Any]:
    """`config` for a model whose layer i is the layer `order[i]` of the model that the configuration describes."""
    result = dict(config)
    if isinstance(config.get("text_config"), dict):
        result["text_config"] = with_layers(config["text_config"], order)
    n_before = next((config[key] for key in LAYER_KEYS if isinstance(config.get(key), int)), None)
    if n_before is None:
        return result
    for key in LAYER_KEYS:
        if key in config:
            result[key] = len(order)
    for key, value in config.items():
        # One entry a layer, e.g. layer_types: full and sliding attention in turn.
        if isinstance(value, list) and len(value) == n_before and n_before > 1 and max(order) < n_before:
            result[key] = [value[layer] for layer in order]
    return result
