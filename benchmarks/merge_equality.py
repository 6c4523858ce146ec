"""Method by method, ours in the dialect `mergekit` against the installed mergekit, on small fp32 tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from finetune.merge.methods.chunk import Settings, merge_tensors
from finetune.merge.methods.draw import below, stream, uniform
from finetune.merge.methods.registry import METHODS

SHAPE = (64, 48)
GOAL = 1e-6


def equality_rows() -> list[list[str]]:
    """[method, largest difference over largest value, goal], the worst of several settings each."""
    worst: dict[str, float] = {}
    for method, tensors, base, shared, per_model in _cases():
        error = difference(method, tensors, base, shared, per_model)
        worst[method] = max(worst.get(method, 0.0), error)
    return [[method, f"{error:.1e}", f"≤ {GOAL:.0e}"] for method, error in worst.items()]


def _cases() -> Iterator[tuple[str, list[torch.Tensor], torch.Tensor | None, dict[str, Any], dict[str, Any]]]:
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(SHAPE, generator=draw)
    tuned = [base + 0.1 * torch.randn(SHAPE, generator=draw) for _ in range(3)]
    other = [torch.randn(SHAPE, generator=draw) for _ in range(3)]
    weight = {"weight": (0.5, 0.3, 0.7)}
    yield "linear", tuned, None, {}, weight
    yield "linear", tuned, None, {"normalize": False}, weight
    yield "passthrough", tuned[:1], None, {}, {"scale": (2.5,)}
    for t in (0.0, 0.3, 1.0):
        yield "slerp", other[1:2], other[0], {"t": t}, {}
        yield "slerp", tuned[:1], base, {"t": t}, {}
    for flags in ({}, {"nuslerp_flatten": False}, {"nuslerp_flatten": False, "nuslerp_row_wise": True}):
        yield "nuslerp", other[:2], None, flags, {"weight": (0.4, 0.6)}
        yield "nuslerp", tuned[:2], base, flags, {"weight": (0.4, 0.6)}
    yield "karcher", other, None, {}, {}
    yield "model_stock", tuned, base, {}, {}
    yield "model_stock", tuned, base, {"filter_wise": True}, {}
    for share in (1.0, 0.3):
        yield "sce", tuned, base, {"select_topk": share}, {}
    yield "task_arithmetic", tuned, base, {"lambda": 0.7}, weight
    yield "task_arithmetic", tuned, base, {"normalize": True}, weight
    for density in ((0.5, 0.5, 0.5), (0.2, 0.9, 0.6)):
        sparse = {**weight, "density": density}
        yield "ties", tuned, base, {}, sparse
        yield "ties", tuned, base, {"normalize": False, "rescale": True}, sparse
        yield "breadcrumbs", tuned, base, {}, {**sparse, "gamma": (0.01, 0.05, 0.1)}
        yield "breadcrumbs_ties", tuned, base, {}, sparse
        yield "dare_linear", tuned, base, {}, sparse
        yield "dare_ties", tuned, base, {}, sparse
    for method in ("della", "della_linear"):
        yield method, tuned, base, {}, {**weight, "density": (0.5, 0.4, 0.6)}


def difference(
    method: str,
    tensors: list[torch.Tensor],
    base: torch.Tensor | None,
    shared: dict[str, Any],
    per_model: dict[str, tuple[float, ...]],
) -> float:
    """Largest difference between the two results over the largest value of mergekit's."""
    k = len(tensors)
    streams = tuple(stream(1, "w", i) for i in range(k))
    fields = {"weight": (1.0,) * k, "density": (1.0,) * k, "gamma": (0.01,) * k, "epsilon": (0.15,) * k}
    named = {("lambda_" if key == "lambda" else key): value for key, value in shared.items()}
    settings = Settings(dialect="mergekit", streams=streams, **{**fields, **per_model, **named})
    ours = merge_tensors(METHODS[method], tensors, settings, base=base, rows=7)
    draws = iter(streams)

    def same_draws(probability: torch.Tensor) -> torch.Tensor:
        seed, flat = next(draws), probability.flatten()
        if bool((flat == flat[0]).all()):
            return below(seed, 0, probability.shape, float(flat[0])).float()
        return (uniform(seed, 0, probability.shape) < probability).float()

    with mock.patch("torch.bernoulli", same_draws):
        theirs = mergekit_result(method, tensors, base, shared, per_model)
    return float((ours - theirs).abs().max() / theirs.abs().max())


def mergekit_result(
    method: str,
    tensors: list[torch.Tensor],
    base: torch.Tensor | None,
    shared: dict[str, Any],
    per_model: dict[str, tuple[float, ...]],
) -> torch.Tensor:
    from mergekit.common import ModelReference
    from mergekit.merge_methods import base as api
    from mergekit.merge_methods import registry

    def reference(name: str) -> ModelReference:
        return ModelReference.model_validate({"model": {"path": name}})

    entries = [api.TensorEntry(id=reference(f"m{i}"), tensor=t, is_base=False) for i, t in enumerate(tensors)]
    own = [entry.id for entry in entries]
    if base is not None:
        entries.insert(0, api.TensorEntry(id=reference("base"), tensor=base, is_base=True))
    group = api.TensorGroup(entries=tuple(entries), metadata=api.TensorMetadata(name="w"))
    merge = registry.get(method)
    values: dict[str, Any] = {}
    for parameter in merge.spec.parameters:
        if parameter.scope == api.ParameterScope.SHARED:
            values[parameter.name] = shared.get(parameter.name, parameter.default)
        else:
            given = per_model.get(parameter.name, (parameter.default,) * len(own))
            values[parameter.name] = api.PerInputValues(list(zip(own, given, strict=True)))
    result: torch.Tensor = merge._execute_resolved((group,), [values])[0]
    return result


if __name__ == "__main__":
    for row in equality_rows():
        print(*row)
