"""Drawing the next token: the likeliest, or a sample from a generator that belongs to one answer alone.

Every sampled answer has its own stream of uniform numbers, seeded by what the answer is (the suite's seed, the item, the
repeat) and never by where it stands in a batch, so neither batch size nor order nor an interruption changes it. Both arms
of a comparison draw the same numbers for the same item, which takes noise out of their difference.

Shapes: n rows of a step · V vocabulary.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_NUCLEUS_FIRST_LOOK = (
    512  # tokens that hold top_p nearly always; the others are sorted only where they do not
)
_SERVER_SEED_BITS = 31  # servers take a signed 32-bit seed


# [n, V] logits, and each row's prompt by its place in the input -> n token ids.
Picker = Callable[[Tensor, Sequence[int]], list[int]]


def greedy(logits: Tensor, prompts: Sequence[int]) -> list[int]:
    """The likeliest token of every row."""
    return [int(token) for token in logits.argmax(dim=-1).tolist()]


def stream_name(seed: int, item: str, repeat: int) -> str:
    """What an answer's random numbers depend on, and nothing else."""
    return f"{seed}/{repeat}/{item}"


def server_seed(name: str) -> int:
    """The seed that a server is given for one answer, from its stream's name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> (64 - _SERVER_SEED_BITS)


class Sampler:
    """Draws from softmax(logits / temperature), cut to the fewest tokens that together hold `top_p` of it.

    streams: one name a prompt (see `stream_name`); token k of an answer uses the k-th number of its stream. A uniform
    number picks from the cumulative distribution in vocabulary order, in fp64: rounding in the logits moves the answer
    only when the number falls within that rounding of a boundary.
    """

    def __init__(self, streams: Sequence[str], *, temperature: float, top_p: float = 1.0) -> None:
        if not temperature > 0.0 or not 0.0 < top_p <= 1.0:
            raise ValueError(f"temperature {temperature} or top_p {top_p} is out of range")
        self._streams = [random.Random(name) for name in streams]
        self._temperature, self._top_p = temperature, top_p

    def __call__(self, logits: Tensor, prompts: Sequence[int]) -> list[int]:
        """[n, V] logits -> n token ids; uses one number of each row's stream."""
        weights = torch.softmax(logits.double() / self._temperature, dim=-1)  # [n, V]
        if self._top_p < 1.0:
            weights = torch.where(weights >= self._least_kept(weights), weights, 0.0)
        heights = weights.cumsum(dim=-1)
        drawn = torch.tensor(
            [[self._streams[prompt].random()] for prompt in prompts],
            dtype=torch.float64,
            device=weights.device,
        )
        # A height first exceeds the drawn one at a token of positive weight; u < 1 leaves one to find unless it rounds up.
        places = torch.searchsorted(heights, drawn * heights[:, -1:], right=True)[:, 0]
        last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
        return [int(token) for token in torch.minimum(places, last).tolist()]

    def _least_kept(self, weights: Tensor) -> Tensor:
        """[n, 1] weight of the last token of each row's nucleus; tokens of exactly that weight are all kept."""
        look = min(_NUCLEUS_FIRST_LOOK, weights.shape[-1])
        top = weights.topk(look, dim=-1).values
        least = _nucleus_edge(top, self._top_p)
        short = (top.sum(dim=-1) < self._top_p).nonzero()[:, 0]
        if len(short):
            least[short] = _nucleus_edge(weights[short].sort(dim=-1, descending=True).values, self._top_p)
        return least


def _nucleus_edge(falling: Tensor, top_p: float) -> Tensor:
    """[n, K] weights in falling order -> [n, 1] the weight at which their sum reaches `top_p`, or the last one."""
    before = falling.cumsum(dim=-1) - falling
    kept = (before < top_p).sum(dim=-1, keepdim=True)
    return falling.gather(1, kept - 1)
