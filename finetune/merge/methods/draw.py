"""Random numbers by position: element i of a stream is the same however the tensor is cut, on any number of threads.

A stream is a PCG64 generator seeded by (seed, tensor name, input); it is advanced to the position of the chunk instead
of being drawn up to it.
"""

from __future__ import annotations

import hashlib

import numpy
import torch

_SCALE = numpy.float32(2.0**-24)


def stream(seed: int, tensor: str, number: int) -> int:
    """The seed of the draws for one tensor of one input: a hash, so that it depends on no order of work."""
    text = f"{seed}\0{tensor}\0{number}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


def below(seed: int, offset: int, shape: torch.Size, probability: float) -> torch.Tensor:
    """A mask [shape], bool: element `offset + i` of the stream falls below `probability` (resolution 2⁻³²)."""
    limit = min(round(probability * 2**32), 2**32 - 1)
    if probability >= 1:
        return torch.ones(shape, dtype=torch.bool)
    drawn = _words(seed, offset, shape.numel()) < numpy.uint32(limit)
    return torch.from_numpy(drawn).reshape(shape)


def uniform(seed: int, offset: int, shape: torch.Size) -> torch.Tensor:
    """fp32 numbers [shape] in [0, 1), 24 bits each, from the same stream positions as `below`."""
    words = _words(seed, offset, shape.numel()) >> numpy.uint32(8)
    return torch.from_numpy(words.astype(numpy.float32) * _SCALE).reshape(shape)


def _words(seed: int, offset: int, n: int) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint32]]:
    """32-bit words [n]; each step of the generator gives two, the low half first."""
    generator = numpy.random.PCG64(seed)
    generator.advance(offset // 2)
    raw = numpy.asarray(generator.random_raw((offset % 2 + n + 1) // 2)).astype("<u8", copy=False)
    return raw.view("<u4")[offset % 2 : offset % 2 + n]
