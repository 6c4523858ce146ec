"""Does it fit, and if not, which keys of the recipe to change: the cheapest changes first.

Changes that leave the result as it is come first, then those of precision, then those of what is trained, and last those
that lose rows; within each group the price in speed decides. Prices are usual factors on the time of a step, not
measurements of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from finetune.plan.memory import Forecast
from finetune.plan.time import CHECKPOINTING_SLOWDOWN, DORA_SLOWDOWN, QUANTIZED_SLOWDOWN
from finetune.recipe.schema import Recipe

Changes = dict[str, str | int | float | bool]
Reforecast = Callable[[Recipe], Forecast]

# What a change costs besides time, from nothing to data.
NOTHING, PRECISION, TRAINED_PART, ROWS = range(4)
SACRIFICES = ("same result", "another precision", "trains something else", "loses rows")

MAX_CHANGES = 3
MAX_SUGGESTIONS = 5
_SMALLER_BATCH_SLOWDOWN = 1.05
_SMALLEST_RANK = 8
_SMALLEST_ROW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A set of recipe keys to change together. `slowdown` multiplies the time of the training (below 1: faster)."""

    changes: Changes
    total_bytes: int
    fits: bool
    slowdown: float
    sacrifice: int
    note: str

    @property
    def same_result(self) -> bool:
        return self.sacrifice == NOTHING

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"sacrifice": SACRIFICES[self.sacrifice], "same_result": self.same_result}


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a forecast fits a memory, and how to make it fit."""

    fits: bool
    needed_bytes: int
    memory_bytes: int
    suggestions: tuple[Suggestion, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "needed_bytes": self.needed_bytes,
            "memory_bytes": self.memory_bytes,
            "suggestions": [suggestion.to_dict() for suggestion in self.suggestions],
        }


@dataclass(frozen=True, slots=True)
class _Move:
    """One change, worked out on the recipe it is applied to."""

    changes: Changes
    slowdown: float
    sacrifice: int
    note: str


def fits(forecast: Forecast, memory_bytes: int, recipe: Recipe, reforecast: Reforecast) -> Fit:
    """Compare a forecast with a memory; when it does not fit, try up to three changes of `recipe` together.

    `reforecast` gives the forecast of a changed recipe. A set of changes is suggested only if no part of it suffices. When
    nothing suffices, the one suggestion takes every change that helps, with `fits` False: how far it still is.
    """
    if forecast.total_bytes <= memory_bytes:
        return Fit(True, forecast.total_bytes, memory_bytes, ())
    found: list[Suggestion] = []
    makers = list(_MAKERS)
    for size in range(1, MAX_CHANGES + 1):
        for chosen in combinations(makers, size):
            for suggestion in _tried(recipe, chosen, memory_bytes, reforecast):
                if suggestion.fits and not any(_is_part(known, suggestion) for known in found):
                    found.append(suggestion)
    if not found:
        found = _everything(recipe, memory_bytes, reforecast)
    ranked = sorted(found, key=lambda s: (s.sacrifice, s.slowdown, len(s.changes), -s.total_bytes))
    return Fit(False, forecast.total_bytes, memory_bytes, tuple(ranked[:MAX_SUGGESTIONS]))


def with_changes(recipe: Recipe, changes: Changes) -> Recipe:
    """The recipe with dotted keys replaced, as `--set` does."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in changes.items():
        section, _, key = dotted.partition(".")
        sections.setdefault(section, {})[key] = value
    update = {
        section: getattr(recipe, section).model_copy(update=values) for section, values in sections.items()
    }
    return recipe.model_copy(update=update)


def _tried(
    recipe: Recipe, chosen: tuple[_Maker, ...], memory_bytes: int, reforecast: Reforecast
) -> Iterator[Suggestion]:
    """The chosen kinds of change, one behind the other: weakest first, until one fits."""
    moves_of_first = chosen[0](recipe)
    for first in moves_of_first:
        suggestion = _combined(recipe, first, chosen[1:], memory_bytes, reforecast)
        if suggestion is not None:
            yield suggestion
            if suggestion.fits:
                return


def _combined(
    recipe: Recipe,
    first: _Move,
    others: tuple[_Maker, ...],
    memory_bytes: int,
    reforecast: Reforecast,
) -> Suggestion | None:
    moves, current = [first], with_changes(recipe, first.changes)
    for maker in others:
        options = maker(current)
        if not options:
            return None
        # The weakest that fits, else the strongest.
        chosen = options[-1]
        for option in options:
            if reforecast(with_changes(current, option.changes)).total_bytes <= memory_bytes:
                chosen = option
                break
        moves.append(chosen)
        current = with_changes(current, chosen.changes)
    changes: Changes = {}
    for move in moves:
        changes |= move.changes
    total = reforecast(current).total_bytes
    return Suggestion(
        changes=changes,
        total_bytes=total,
        fits=total <= memory_bytes,
        slowdown=round(math.prod(move.slowdown for move in moves), 2),
        sacrifice=max(move.sacrifice for move in moves),
        note="; ".join(dict.fromkeys(move.note for move in moves)),
    )


def _everything(recipe: Recipe, memory_bytes: int, reforecast: Reforecast) -> list[Suggestion]:
    """Every change that helps, at full strength."""
    current, kept = recipe, []
    for maker in _MAKERS:
        options = maker(current)
        if not options:
            continue
        changed = with_changes(current, options[-1].changes)
        if reforecast(changed).total_bytes < reforecast(current).total_bytes:
            current = changed
            kept.append(options[-1])
    if not kept:
        return []
    changes: Changes = {}
    for move in kept:
        changes |= move.changes
    total = reforecast(current).total_bytes
    return [
        Suggestion(
            changes,
            total,
            total <= memory_bytes,
            round(math.prod(move.slowdown for move in kept), 2),
            max(move.sacrifice for move in kept),
            "; ".join(dict.fromkeys(move.note for move in kept)),
        )
    ]


def _is_part(known: Suggestion, candidate: Suggestion) -> bool:
    """Whether a known suggestion changes a subset of the candidate's keys: then the candidate asks for too much."""
    return set(known.changes) <= set(candidate.changes)


def _smaller_micro_batch(recipe: Recipe) -> list[_Move]:
    """Fewer packs at once and more accumulation: the same step, so the same result."""
    size, accumulation = recipe.train.micro_batch_size, recipe.train.gradient_accumulation_steps
    moves = []
    smaller = size
    while smaller % 2 == 0:
        smaller //= 2
        moves.append(
            _Move(
                {
                    "train.micro_batch_size": smaller,
                    "train.gradient_accumulation_steps": accumulation * size // smaller,
                },
                round(_SMALLER_BATCH_SLOWDOWN ** len(f"{size // smaller:b}") / _SMALLER_BATCH_SLOWDOWN, 3),
                NOTHING,
                "the same step in smaller parts",
            )
        )
    return moves


def _shorter_packs(recipe: Recipe) -> list[_Move]:
    """Packs of fewer rows and more accumulation; a pack must still hold the longest row."""
    pack, accumulation = recipe.train.pack_tokens, recipe.train.gradient_accumulation_steps
    moves = []
    if recipe.train.packing:
        factor = 2
        while pack % factor == 0 and pack // factor >= max(recipe.data.max_tokens, _SMALLEST_ROW_TOKENS):
            moves.append(
                _Move(
                    {
                        "train.pack_tokens": pack // factor,
                        "train.gradient_accumulation_steps": accumulation * factor,
                    },
                    round(_SMALLER_BATCH_SLOWDOWN ** int(math.log2(factor)), 3),
                    NOTHING,
                    "the same tokens a step in shorter packs",
                )
            )
            factor *= 2
    return moves


def _fused_attention(recipe: Recipe) -> list[_Move]:
    if recipe.model.attention in ("auto", "document") or not (
        recipe.train.packing or recipe.model.attention == "eager"
    ):
        return []
    return [_Move({"model.attention": "auto"}, 0.9, NOTHING, "attention without a stored probability matrix")]


def _checkpointing(recipe: Recipe) -> list[_Move]:
    if recipe.train.gradient_checkpointing:
        return []
    return [
        _Move(
            {"train.gradient_checkpointing": True},
            CHECKPOINTING_SLOWDOWN,
            NOTHING,
            "activations are computed twice instead of kept",
        )
    ]


def _bf16(recipe: Recipe) -> list[_Move]:
    if recipe.model.dtype == "bf16":
        return []
    return [_Move({"model.dtype": "bf16"}, 0.6, PRECISION, "computes in bf16, trained weights stay fp32")]


def _plain_lora(recipe: Recipe) -> list[_Move]:
    if recipe.adapter.kind == "dora":
        return [
            _Move(
                {"adapter.kind": "lora"}, round(1 / DORA_SLOWDOWN, 2), TRAINED_PART, "LoRA without magnitudes"
            )
        ]
    if recipe.adapter.kind == "none":
        return [
            _Move({"adapter.kind": "lora"}, 0.75, TRAINED_PART, "trains an adapter instead of all weights")
        ]
    return []


def _quantized(recipe: Recipe) -> list[_Move]:
    if recipe.model.quantize != "none" or recipe.adapter.kind == "none":
        return []
    return [
        _Move(
            {"model.quantize": "nf4"}, QUANTIZED_SLOWDOWN, PRECISION, "the frozen weights in 4 bits (QLoRA)"
        )
    ]


def _smaller_rank(recipe: Recipe) -> list[_Move]:
    """The scale alpha / rank is kept."""
    section = recipe.adapter
    moves = []
    rank = section.rank
    while section.kind != "none" and rank // 2 >= _SMALLEST_RANK:
        rank //= 2
        moves.append(
            _Move(
                {"adapter.rank": rank, "adapter.alpha": section.alpha * rank / section.rank},
                1.0,
                TRAINED_PART,
                "an adapter of fewer parameters",
            )
        )
    return moves


def _shorter_rows(recipe: Recipe) -> list[_Move]:
    """Rows above the limit are dropped, and counted in the ledger."""
    moves = []
    limit = recipe.data.max_tokens
    while limit // 2 >= _SMALLEST_ROW_TOKENS:
        limit //= 2
        changes: Changes = {"data.max_tokens": limit, "data.long_rows": "drop"}
        if recipe.train.packing:
            changes["train.pack_tokens"] = min(recipe.train.pack_tokens, limit)
        moves.append(_Move(changes, 1.0, ROWS, f"rows longer than {limit} tokens are dropped"))
    return moves


def _teacher_from_cache(recipe: Recipe) -> list[_Move]:
    """The teacher runs before the training, and its top k is read from a disk."""
    section = recipe.distil
    if section is None or section.way != "logits" or section.targets != "live":
        return []
    return [
        _Move(
            {"distil.targets": "cache"},
            0.7,
            PRECISION,
            f"the teacher runs once, before the training; the loss sees its top {section.cache.k} and the rest as one",
        )
    ]


def _smaller_eval_batch(recipe: Recipe) -> list[_Move]:
    moves = []
    size = recipe.eval.batch_size
    while size > 1:
        size //= 2
        moves.append(
            _Move({"eval.batch_size": size}, 1.0, NOTHING, "fewer answers written at once: slower evaluation")
        )
    return moves


def _bf16_eval(recipe: Recipe) -> list[_Move]:
    if recipe.eval.dtype == "bf16":
        return []
    return [_Move({"eval.dtype": "bf16"}, 1.0, PRECISION, "every arm of the evaluation computes in bf16")]


_Maker = Callable[[Recipe], list[_Move]]
_MAKERS: tuple[_Maker, ...] = (
    _smaller_eval_batch,
    _fused_attention,
    _smaller_micro_batch,
    _shorter_packs,
    _checkpointing,
    _teacher_from_cache,
    _bf16_eval,
    _bf16,
    _plain_lora,
    _quantized,
    _smaller_rank,
    _shorter_rows,
)
