"""Ways to cut one optimizer step into forward passes: pack length, micro-batch, accumulation, checkpointing.

The tokens (or rows, without packing) of a step stay as the recipe says; only how many go through the model at once, and what
is recomputed, changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from finetune.plan.fits import Changes, with_changes
from finetune.recipe.schema import Recipe

Checkpointing = bool | Literal["selective"]
# Least recomputation first: as long as memory allows, it is the fastest.
_CHECKPOINTING: tuple[Checkpointing, ...] = (False, "selective", True)


@dataclass(frozen=True, slots=True)
class Batching:
    """One way. With packing `micro_batch_size` is 1: packs laid end to end are one longer pack."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    pack_tokens: int
    gradient_checkpointing: Checkpointing

    @property
    def changes(self) -> Changes:
        return {
            "train.micro_batch_size": self.micro_batch_size,
            "train.gradient_accumulation_steps": self.gradient_accumulation_steps,
            "train.pack_tokens": self.pack_tokens,
            "train.gradient_checkpointing": self.gradient_checkpointing,
        }

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe that trains this way."""
        return with_changes(recipe, self.changes)


def batchings(recipe: Recipe, longest_row_tokens: int) -> list[Batching]:
    """Every way to halve the recipe's step down to its longest row, each with and without recomputation.

    Largest forward passes without recomputation first. The recipe's own way is always among them, as it is written.
    """
    found = [
        Batching(micro, accumulation, pack, checkpointing)
        for checkpointing in _CHECKPOINTING
        for micro, accumulation, pack in _cuts(recipe, longest_row_tokens)
    ]
    own = own_batching(recipe)
    return found if own in found else [*found, own]


def own_batching(recipe: Recipe) -> Batching:
    """The way that the recipe spells out."""
    train = recipe.train
    return Batching(
        train.micro_batch_size,
        train.gradient_accumulation_steps,
        train.pack_tokens,
        train.gradient_checkpointing,
    )


def _cuts(recipe: Recipe, longest_row_tokens: int) -> Iterator[tuple[int, int, int]]:
    """(micro-batch, accumulation, pack length) with the recipe's product of the three, by halves."""
    train = recipe.train
    at_once = train.micro_batch_size * train.gradient_accumulation_steps
    if not train.packing:
        micro = at_once
        while True:
            yield micro, at_once // micro, train.pack_tokens
            if micro % 2:
                return
            micro //= 2
    pack, accumulation = at_once * train.pack_tokens, 1
    while True:
        yield 1, accumulation, pack
        if pack % 2 or pack // 2 < longest_row_tokens:
            return
        pack //= 2
        accumulation *= 2
