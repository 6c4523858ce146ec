"""Interpolation on spheres: SLERP, its variant with weights and rows, and the mean of many directions."""

from __future__ import annotations

import math

import torch

from finetune.merge.methods.chunk import Blend, Chunk, Chunks, Settings
from finetune.merge.methods.gram import combination, gram, inputs

_MERGEKIT_LINEAR = 0.9995
_SMALLEST_SINE = 1e-6


def slerp(chunks: Chunks, settings: Settings) -> Blend:
    """SLERP (Shoemake 1985) between the base (t = 0) and one model (t = 1), a tensor as one vector.

    With θ the angle and sₐ = sin((1−t)θ)/sin θ, s_b = sin(tθ)/sin θ:
    paper     n · (sₐ a/‖a‖ + s_b b/‖b‖), n = (1−t)‖a‖ + t‖b‖: the direction moves on the sphere, the norm on a line
    mergekit  sₐ a + s_b b, and (1−t) a + t b where |cos θ| > 0.9995
    Both are the same for equal norms. Only the first is bounded for nearly opposite tensors of unequal norms. Where
    there is no angle (a zero tensor, exactly opposite ones) both interpolate linearly.
    """
    table = gram(chunks, _with_base)
    t = settings.t
    b, a = (float(norm) for norm in table.diagonal().sqrt())
    if settings.dialect == "mergekit":
        # Zero tensors count as of norm one there, and so are orthogonal to everything.
        cosine = float(table[0, 1]) / ((a if a > 1e-8 else 1.0) * (b if b > 1e-8 else 1.0))
        if abs(cosine) > _MERGEKIT_LINEAR:
            return combination((t, 1 - t), _with_base)
        theta = math.acos(cosine)
        sine = math.sin(theta)
        return combination((math.sin(t * theta) / sine, math.sin((1 - t) * theta) / sine), _with_base)
    of_a, of_b = _on_sphere(a, b, float(table[0, 1]), t)
    return combination((of_b, of_a), _with_base)


def _with_base(chunk: Chunk) -> list[torch.Tensor]:
    """The model first: its memory is overwritten."""
    assert chunk.base is not None
    return [chunk.tensors[0], chunk.base]


def _on_sphere(a: float, b: float, dot: float, t: float) -> tuple[float, float]:
    """Coefficients of two vectors of norms a, b: directions on the sphere, norms on a line."""
    if a == 0 or b == 0:
        return 1 - t, t
    theta = math.acos(max(-1.0, min(1.0, dot / (a * b))))
    sine = math.sin(theta)
    if sine < _SMALLEST_SINE:
        return 1 - t, t
    norm = (1 - t) * a + t * b
    return norm * math.sin((1 - t) * theta) / (sine * a), norm * math.sin(t * theta) / (sine * b)


def nuslerp(chunks: Chunks, settings: Settings) -> Blend:
    """SLERP between two models with weights, t = w₂/(w₁+w₂); of their deltas, added to the base, where there is a base.

    A tensor is one vector; with `nuslerp_flatten: false` each row is one (each column with `nuslerp_row_wise: true`, as
    mergekit names it). The dialects differ as for `slerp`, except that mergekit's falls back to the line only for exactly
    colinear vectors: from inputs of norms 1 and 2 at 178.5° it makes one of norm 38.
    """
    total = sum(settings.weight)
    t = 0.5 if abs(total) < 1e-6 else settings.weight[1] / total
    if len(chunks.shape) < 2 or settings.nuslerp_flatten:
        table = gram(chunks, _pair)
        a, b = float(table[0, 0].sqrt()), float(table[1, 1].sqrt())
        coefficients: tuple[float | torch.Tensor, float | torch.Tensor]
        if settings.dialect == "mergekit":
            one, two = _coefficients(table[0, 0], table[1, 1], table[0, 1], t, settings)
            coefficients = float(one), float(two)
        else:
            coefficients = _on_sphere(a, b, float(table[0, 1]), t)
        return lambda chunk: _mix(chunk, *coefficients)
    if settings.nuslerp_row_wise:
        sums = None
        for part in chunks.map(lambda chunk: _sums(_pair(chunk), 0)):
            sums = part if sums is None else sums + part
        assert sums is not None
        by_column = [c.float() for c in _coefficients(sums[0], sums[1], sums[2], t, settings)]
        return lambda chunk: _mix(chunk, *by_column)

    def by_row(chunk: Chunk) -> torch.Tensor:
        aa, bb, ab = _sums(_pair(chunk), -1)
        one, two = _coefficients(aa, bb, ab, t, settings)
        return _blended(chunk, chunk.tensors, one.float(), two.float())

    return by_row


def _pair(chunk: Chunk) -> list[torch.Tensor]:
    return chunk.tensors if chunk.base is None else chunk.deltas()


def _mix(chunk: Chunk, one: float | torch.Tensor, two: float | torch.Tensor) -> torch.Tensor:
    return _blended(chunk, _pair(chunk), one, two)


def _blended(
    chunk: Chunk, pair: list[torch.Tensor], one: float | torch.Tensor, two: float | torch.Tensor
) -> torch.Tensor:
    mixed = pair[0].mul_(one).add_(pair[1].mul_(two))
    return mixed if chunk.base is None else mixed.add_(chunk.base)


def _sums(pair: list[torch.Tensor], dim: int) -> torch.Tensor:
    """[3, ...] in fp64: ⟨a,a⟩, ⟨b,b⟩, ⟨a,b⟩ along `dim`, kept as an extent of one."""
    a, b = pair
    return torch.stack([(x * y).sum(dim, keepdim=True).double() for x, y in ((a, a), (b, b), (a, b))])


def _coefficients(
    aa: torch.Tensor, bb: torch.Tensor, ab: torch.Tensor, t: float, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_on_sphere`, or mergekit's nuslerp, for many pairs of vectors at once; fp64."""
    a, b = aa.sqrt(), bb.sqrt()
    if settings.dialect == "mergekit":
        cosine = (ab / (a.clamp(min=1e-7) * b.clamp(min=1e-7))).clamp(-1, 1)
        line = 1 - cosine.square() <= 1e-16
    else:
        cosine = (ab / (a * b).clamp(min=1e-300)).clamp(-1, 1)
        line = (1 - cosine.square() <= _SMALLEST_SINE**2) | (a == 0) | (b == 0)
    theta = torch.where(line, 1.0, cosine.acos())
    one, two = torch.sin((1 - t) * theta) / theta.sin(), torch.sin(t * theta) / theta.sin()
    if settings.dialect != "mergekit":
        norm = (1 - t) * a + t * b
        one, two = one * norm / a.clamp(min=1e-300), two * norm / b.clamp(min=1e-300)
    return torch.where(line, 1 - t, one), torch.where(line, t, two)


def karcher(chunks: Chunks, settings: Settings) -> Blend:
    """Karcher (Riemannian centre of mass) mean of directions (Karcher 1977; for models arXiv:2603.04972).

    With unit vectors uᵢ = θᵢ/‖θᵢ‖ and weights αᵢ (Σ αᵢ = 1): the m on the sphere with Σ αᵢ log_m(uᵢ) = 0, times Σ αᵢ ‖θᵢ‖.
    m always lies in the span of the uᵢ, so it is iterated as coefficients on their inner products, in fp64, and the
    tensors are read twice however many iterations there are. `mergekit` stops after 10 iterations or at 1e-5; `paper`
    after 100 or at 1e-12.
    """
    precise = settings.dialect != "mergekit"
    max_iter = settings.max_iter if settings.max_iter is not None else (100 if precise else 10)
    tol = settings.tol if settings.tol is not None else (1e-12 if precise else 1e-5)
    if chunks.n_inputs == 1:
        return combination((1.0,), inputs)
    table = gram(chunks, inputs)
    norms = table.diagonal().sqrt()
    weights = torch.tensor(settings.weight, dtype=torch.float64)
    weights = weights / weights.sum()
    valid = norms > tol
    if not valid.any():
        return combination([0.0] * len(norms), inputs)
    safe = torch.where(valid, norms, 1.0)
    mean = _mean_direction(
        table / safe.outer(safe), weights * valid / (weights * valid).sum(), valid, max_iter, tol
    )
    coefficients = (weights * norms).sum() * mean / safe
    return combination(coefficients.tolist(), inputs)


def _mean_direction(
    units: torch.Tensor, weights: torch.Tensor, valid: torch.Tensor, max_iter: int, tol: float
) -> torch.Tensor:
    """Coefficients [k] of the mean direction on unit vectors with inner products `units` [k, k]."""

    def length(c: torch.Tensor) -> float:
        return math.sqrt(max(float(c @ units @ c), 0.0))

    mean = weights.clone()
    size = length(mean)
    if size < tol:  # opposite directions cancel: start at the first
        mean = torch.zeros_like(weights)
        mean[int(valid.nonzero()[0])] = 1.0
    else:
        mean = mean / size
    for _ in range(max_iter):
        cosine = (units @ mean).clamp(-1, 1)
        theta = cosine.acos()
        used = valid & (theta >= tol) & (theta.sin() > 0)
        factor = torch.where(used, weights * theta / theta.sin().clamp(min=1e-300), 0.0)
        tangent = factor - (factor * cosine).sum() * mean
        step = length(tangent)
        if step < tol:
            break
        mean = math.cos(step) * mean + math.sin(step) * tangent / step
        size = length(mean)
        if size > tol:
            mean = mean / size
    return mean
