"""What a merge method sees: one tensor of every model, in chunks, and its settings.

A method is a function `(chunks, settings) -> blend`. It may first go over the chunks to measure what it needs of the
whole tensor (norms, thresholds), and returns the function that turns one chunk into merged values. So a method never
holds a tensor, and the same code runs on tensors in memory and on files.

Shapes: a chunk holds rows [r, ...] of a tensor [n, ...]; values are fp32, and so is every sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch

Dialect = Literal["paper", "mergekit", "peft"]
Result = TypeVar("Result")


@dataclass(slots=True)
class Chunk:
    """Rows of one tensor from every model. `offset` counts the tensor's elements before this chunk.

    `base` is what deltas start from and must not be written to; `tensors` are fresh copies that a method may overwrite.
    """

    offset: int
    base: torch.Tensor | None
    tensors: list[torch.Tensor]

    def deltas(self) -> list[torch.Tensor]:
        """The tensors minus the base, in the tensors' own memory."""
        assert self.base is not None
        return [tensor.sub_(self.base) for tensor in self.tensors]


class Chunks(Protocol):
    """One tensor of every model. `map` applies `work` to every chunk, perhaps on several threads, and yields in order."""

    shape: tuple[int, ...]
    n_inputs: int

    def map(self, work: Callable[[Chunk], Result]) -> Iterator[Result]: ...


Blend = Callable[[Chunk], torch.Tensor]
"""Merged values of one chunk, fp32 [r, ...]. It may overwrite the chunk's tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a recipe may say about one tensor. Tuples hold one value an input, the base left out.

    `weight`, `density`, `gamma`, `epsilon`, `scale` and the rest are explained at the methods that read them. None means
    the method's default in this dialect. `streams` seed the draws of each input; `thresholds` are magnitudes measured
    over whole models.
    """

    dialect: Dialect = "paper"
    weight: tuple[float, ...] = ()
    density: tuple[float, ...] = ()
    gamma: tuple[float, ...] = ()
    epsilon: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    lambda_: float = 1.0
    normalize: bool | None = None
    rescale: bool | None = None
    t: float = 0.5
    select_topk: float = 1.0
    filter_wise: bool = False
    nuslerp_row_wise: bool = False
    nuslerp_flatten: bool = True
    max_iter: int | None = None
    tol: float | None = None
    streams: tuple[int, ...] = ()
    thresholds: tuple[float, ...] | None = None


Method = Callable[[Chunks, Settings], Blend]


class MemoryChunks:
    """Tensors in memory, cut into chunks of `rows` rows: for tests, notebooks and small tensors."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], base: torch.Tensor | None = None, rows: int | None = None
    ) -> None:
        self.tensors, self.base = [tensor.float() for tensor in tensors], base
        self.shape = tuple(tensors[0].shape)
        self.n_inputs = len(tensors)
        self.rows = rows or max(self.shape[0] if self.shape else 1, 1)

    def map(self, work: Callable[[Chunk], Result]) -> Iterator[Result]:
        n_rows = self.shape[0] if self.shape else 1
        row = self.tensors[0].numel() // max(n_rows, 1)
        for start in range(0, n_rows, self.rows):
            cut = [self._rows(tensor, start) for tensor in self.tensors]
            base = None if self.base is None else self._rows(self.base.float(), start)
            yield work(Chunk(start * row, base, cut))

    def _rows(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        return tensor[start : start + self.rows].clone() if tensor.dim() else tensor.clone()


def merge_tensors(
    method: Method,
    tensors: Sequence[torch.Tensor],
    settings: Settings,
    *,
    base: torch.Tensor | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """One method on whole tensors in memory, in chunks of `rows` rows; fp32 [n, ...]."""
    chunks = MemoryChunks(tensors, base, rows)
    parts = list(chunks.map(method(chunks, settings)))
    return torch.cat(parts) if parts[0].dim() else parts[0]
