"""Several adapters of one base into one adapter: an exact sum, or TIES, DARE and a smaller rank with their error told.

All work on true deltas. A rank-stabilised adapter keeps its own scale; a DoRA adapter's delta, (m/‖W + sBA‖ − 1) W and
all, has full rank, so it needs the base and a method that ends in a truncation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.merge.adapter_file import AdapterFile, open_adapter
from finetune.merge.adapter_write import write_adapter
from finetune.merge.base_weights import StoredWeights
from finetune.merge.deltas import true_delta
from finetune.merge.execute import refuse_broken_adapter
from finetune.merge.layout import Layout, read_layout
from finetune.merge.low_rank import Factors, concatenate, truncate, truncate_factors
from finetune.merge.shards import open_model
from finetune.merge.sparse import drop_and_rescale, ties
from finetune.model.load import model_skeleton
from finetune.model.source import ModelSource

Method = Literal["sum", "svd", "ties", "dare", "dare_ties"]
METHODS: tuple[Method, ...] = ("sum", "svd", "ties", "dare", "dare_ties")


@dataclass(slots=True)
class Combination:
    """What a combination did. `error` is ‖result − wanted‖ / ‖wanted‖ over all layers: what the rank could not hold."""

    method: str
    weights: list[float]
    rank: int
    error: float
    n_modules: int
    adapters: list[str] = field(default_factory=list)
    density: float | None = None
    seed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def combine_adapters(
    base: ModelSource,
    folders: Sequence[Path],
    out: Path,
    *,
    weights: Sequence[float] | None = None,
    method: Method = "sum",
    rank: int | None = None,
    density: float = 0.5,
    seed: int = 0,
) -> Combination:
    """Write the combination of adapters of `base` as one plain LoRA to `out`; weights default to 1 each.

    `sum` is exact, its rank the sum of ranks; `svd` truncates that sum to `rank`; `ties`, `dare` and `dare_ties` sparsify
    the deltas with `density` first, then truncate. Raises UserError when the adapters do not belong to this base, when
    they carry more than low-rank updates, or when an exact sum is asked of DoRA.
    """
    given = list(weights) if weights is not None else [1.0] * len(folders)
    _check_request(folders, given, method, rank, density)
    with _opened(base, folders) as (adapters, stored, layout):
        if method == "sum" and any(adapter.config.get("use_dora") for adapter in adapters):
            raise UserError(
                "an exact sum of DoRA adapters does not exist: a DoRA update rescales the base's rows and has full rank",
                why="several DoRA adapters active at once are not their sum either, so merging them one by one would differ",
                fix="combine them with --method svd --rank R, which prints the error",
            )
        combined: dict[str, Factors] = {}
        total = lost = 0.0
        for module in sorted({module for adapter in adapters for module in adapter.low_rank}):
            holders = [(a, w) for a, w in zip(adapters, given, strict=True) if module in a.low_rank]
            factors, squares, error = _combine(module, holders, stored, layout, method, rank, density, seed)
            combined[module] = factors
            total, lost = total + squares, lost + error
        write_adapter(out, combined, layout, template=adapters[0].config, base=base)
    return Combination(
        method=method,
        weights=given,
        rank=max(factors.rank for factors in combined.values()),
        error=math.sqrt(lost / total) if total else 0.0,
        n_modules=len(combined),
        adapters=[adapter.sha256 for adapter in adapters],
        density=density if method in ("ties", "dare", "dare_ties") else None,
        seed=seed if method in ("dare", "dare_ties") else None,
    )


def _check_request(
    folders: Sequence[Path], weights: Sequence[float], method: str, rank: int | None, density: float
) -> None:
    if len(folders) < 2:
        raise UserError("one adapter alone needs no combining", fix="name two adapters or more")
    if len(weights) != len(folders):
        raise UserError(
            f"{len(weights)} weights for {len(folders)} adapters", where="--weights", fix="give one each"
        )
    if not all(math.isfinite(weight) for weight in weights) or not any(weights):
        raise UserError(
            f"the weights {', '.join(f'{weight:g}' for weight in weights)} combine to nothing",
            where="--weights",
            fix="give finite numbers, at least one of them not zero, e.g. --weights 0.6,0.4",
        )
    if method not in METHODS:
        raise UserError(f"unknown method '{method}'", where="--method", fix=f"one of {', '.join(METHODS)}")
    if method == "sum" and rank is not None:
        raise UserError(
            "an exact sum has the sum of the ranks", where="--rank", fix="add --method svd to choose a rank"
        )
    if method != "sum" and (rank is None or rank < 1):
        raise UserError(f"the method {method} needs a rank", where="--rank", fix="e.g. --rank 32")
    if not 0 < density <= 1:
        raise UserError(
            f"a density of {density:g} keeps no weight or more than all",
            where="--density",
            fix="0 < density ≤ 1",
        )


@contextmanager
def _opened(
    base: ModelSource, folders: Sequence[Path]
) -> Iterator[tuple[list[AdapterFile], StoredWeights, Layout]]:
    """The adapters, checked against the base and against carrying anything but low-rank updates."""
    with ExitStack() as stack:
        files = stack.enter_context(open_model(base.folder))
        layout = read_layout(model_skeleton(base), files)
        adapters = []
        for folder in folders:
            adapter = open_adapter(folder)
            stack.enter_context(adapter.files)
            refuse_broken_adapter(adapter)
            _refuse_more_than_low_rank(adapter)
            _refuse_other_shapes(adapter, layout)
            adapters.append(adapter)
        yield adapters, StoredWeights(files, layout), layout


def _refuse_more_than_low_rank(adapter: AdapterFile) -> None:
    if adapter.config["peft_type"] != "LORA":
        raise UserError(
            f"{adapter.folder} is a {adapter.kind} adapter; only LoRA and DoRA adapters are combined",
            fix="merge this adapter into the base first, and tune or combine from there",
        )
    biases = [module for module, parts in adapter.low_rank.items() if "lora_B.bias" in parts]
    extra = sorted([*adapter.token_rows, *adapter.replaced, *adapter.base_values, *biases])
    if extra:
        raise UserError(
            f"{adapter.folder} carries {len(extra)} trained modules, token rows or biases besides low-rank updates, e.g. "
            f"{extra[0]}",
            why="they are values, not differences, and have no sum",
            fix="merge this adapter into the base first, and tune or combine from there",
        )


def _refuse_other_shapes(adapter: AdapterFile, layout: Layout) -> None:
    wrong = []
    for module in adapter.low_rank:
        shape = layout.shapes.get(f"{module}.weight")
        if (
            module not in layout.kinds
            or adapter.update(module, transposed=_transposed(layout, module)).shape != shape
        ):
            wrong.append(module)
    if wrong:
        raise UserError(
            f"{adapter.folder} belongs to another base: {len(wrong)} of its {len(adapter.low_rank)} modules do not exist "
            f"here or have another shape, e.g. {wrong[0]}",
            fix="name the base that all adapters were trained on with --base",
        )


def _transposed(layout: Layout, module: str) -> bool:
    return layout.kinds.get(module) in ("conv1d", "embedding")


def _combine(
    module: str,
    holders: Sequence[tuple[AdapterFile, float]],
    stored: StoredWeights,
    layout: Layout,
    method: Method,
    rank: int | None,
    density: float,
    seed: int,
) -> tuple[Factors, float, float]:
    """Factors of one module, and the squared norms of what was wanted and of what the rank left out."""
    weights = [weight for _, weight in holders]
    plain = not any(adapter.config.get("use_dora") for adapter, _ in holders)
    if plain and method in ("sum", "svd"):
        exact = concatenate([_factors(adapter, module) for adapter, _ in holders], weights)
        if method == "sum":
            return exact, float((exact.b @ exact.a).square().sum(dtype=torch.float64)), 0.0
        assert rank is not None
        truncation = truncate_factors(exact, rank)
    else:
        assert rank is not None
        truncation = truncate(_wanted(module, holders, stored, layout, method, density, seed), rank)
    return truncation.factors, truncation.total_squares, truncation.error_squares


def _factors(adapter: AdapterFile, module: str) -> Factors:
    update = adapter.update(module, transposed=False)
    return Factors(update.a, update.b * update.scaling)


def _wanted(
    module: str,
    holders: Sequence[tuple[AdapterFile, float]],
    stored: StoredWeights,
    layout: Layout,
    method: Method,
    density: float,
    seed: int,
) -> torch.Tensor:
    """The delta [out, in] that the method asks for, before any truncation."""
    transposed = _transposed(layout, module)
    deltas = []
    for adapter, _ in holders:
        base = stored.rows(f"{module}.weight").float()
        delta = true_delta(base, adapter.update(module, transposed=transposed))
        delta = delta.T if transposed else delta
        if method.startswith("dare"):
            # Seeded by what is drawn for, so that neither the order of adapters nor that of tensors matters.
            number = int(digest_json([seed, adapter.sha256, module])[:15], 16)
            delta = drop_and_rescale(delta, density, torch.Generator().manual_seed(number))
        deltas.append(delta)
    weights = torch.tensor([weight for _, weight in holders])
    if method in ("ties", "dare_ties"):
        return ties(torch.stack(deltas), weights, density if method == "ties" else 1.0)
    return sum((w * delta for w, delta in zip(weights, deltas, strict=True)), torch.zeros_like(deltas[0]))
