"""What happened to each tensor: angles and conflicts between the models, change of norm, and what the written type lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from finetune.merge.execute import Change
from finetune.merge.methods.chunk import Chunk


@dataclass(slots=True)
class TensorDiagnosis:
    """Sums over the chunks of one tensor. Vectors are deltas where there is a base, the tensors themselves otherwise.

    cosine         mean over pairs of vectors of their cosine
    sign_conflict  share of the elements that any vector changes where two vectors have opposite signs
    norm_change    norm of the result over the weighted mean of the inputs' norms
    change         of the result against the base (the first input without one); see `execute.Change`
    """

    products: torch.Tensor | None = None
    n_conflicts: int = 0
    n_touched: int = 0
    inputs_squares: list[float] = field(default_factory=list)
    merged_squares: float = 0.0
    change: Change = field(default_factory=Change)

    def add(self, other: TensorDiagnosis) -> None:
        """Put the sums of another chunk on top."""
        assert other.products is not None
        self.products = other.products if self.products is None else self.products + other.products
        self.n_conflicts += other.n_conflicts
        self.n_touched += other.n_touched
        mine = self.inputs_squares or [0.0] * len(other.inputs_squares)
        self.inputs_squares = [a + b for a, b in zip(mine, other.inputs_squares, strict=True)]
        self.merged_squares += other.merged_squares
        for name in ("n_elements", "n_moved", "n_moved_written", "delta_squares", "error_squares"):
            setattr(self.change, name, getattr(self.change, name) + getattr(other.change, name))

    @property
    def cosine(self) -> float | None:
        """None for fewer than two vectors, or when one is zero."""
        assert self.products is not None
        k = len(self.products)
        norms = self.products.diagonal().sqrt()
        if k < 2 or bool((norms == 0).any()):
            return None
        pairs = [float(self.products[i, j] / (norms[i] * norms[j])) for i in range(k) for j in range(i)]
        return sum(pairs) / len(pairs)

    def to_dict(self) -> dict[str, float | int | None]:
        """Figures of one tensor, as they stand in diagnostics.json."""
        mean_norm = sum(math.sqrt(square) for square in self.inputs_squares) / max(
            len(self.inputs_squares), 1
        )
        moved = self.change.n_moved
        lost = self.change.error_squares / self.change.delta_squares if self.change.delta_squares else 0.0
        return {
            "n_elements": self.change.n_elements,
            "cosine": self.cosine,
            "sign_conflict": self.n_conflicts / self.n_touched if self.n_touched else 0.0,
            "norm_change": math.sqrt(self.merged_squares) / mean_norm if mean_norm else None,
            "delta_norm": math.sqrt(self.change.delta_squares),
            "moved_share": moved / max(self.change.n_elements, 1),
            "survives_share": self.change.n_moved_written / moved if moved else None,
            "delta_error": math.sqrt(lost),
        }


def look_at(chunk: Chunk) -> tuple[TensorDiagnosis, torch.Tensor]:
    """What the inputs of one chunk show, before a method overwrites them, and the values that changes are taken from."""
    start = chunk.base if chunk.base is not None else chunk.tensors[0].clone()
    vectors = [tensor - chunk.base if chunk.base is not None else tensor for tensor in chunk.tensors]
    flat = torch.stack([vector.reshape(-1) for vector in vectors])
    positive, negative = (flat > 0).any(0), (flat < 0).any(0)
    inputs = chunk.tensors if chunk.base is None else [chunk.base, *chunk.tensors]
    diagnosis = TensorDiagnosis(
        products=(flat @ flat.T).double(),
        n_conflicts=int((positive & negative).sum()),
        n_touched=int((positive | negative).sum()),
        inputs_squares=[float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in inputs],
    )
    return diagnosis, start


def look_back(diagnosis: TensorDiagnosis, start: torch.Tensor, merged: torch.Tensor) -> None:
    """What the result shows; bf16 stands for the written type, whatever it is, so that figures can be compared."""
    diagnosis.merged_squares = float(torch.linalg.vector_norm(merged)) ** 2
    diagnosis.change.add(start, merged, merged.to(torch.bfloat16))
