"""Giving memory back to the operating system: between two large models, and while weights come and go as one is made."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from finetune.plan.heap import MAPPED_FROM_BYTES

if TYPE_CHECKING:
    from torch import nn

# Of glibc's mallopt(3). Blocks from the threshold on are mapped one by one, and unmapped when they are freed.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SMALL_BLOCK = 1 << 17
_LARGE_BUFFER = 1 << 20
# Each mapped block costs calls of the system and a fault a page; below this size that is more than it saves.
_SMALLEST_MAPPED = 1 << 16
_thresholds: list[int] = []  # of the blocks that are entered, the innermost last
# Where glibc's own, moving threshold ends as soon as a tensor of that size is freed.
_LARGEST_HEAP_BLOCK = 1 << 25


def release_memory() -> None:
    """Collect reference cycles and return freed heap pages; without it glibc keeps what the last model used."""
    gc.collect()
    trim = _from_libc("malloc_trim")
    if trim is not None:
        trim(0)


@contextmanager
def no_holes() -> Iterator[None]:
    """While a model is made: weights in passing leave no holes in the heap, which small tensors that stay would keep open.

    Quantizing a model, and the norms that DoRA starts from, left 360 to 530 MB of such holes in a process with a model of
    135 million parameters.
    """
    with _mapped_from(_SMALL_BLOCK):
        yield


def keep_freed_memory() -> None:
    """Let glibc reuse what is freed, up to 64 MB, instead of returning it: buffers of a megabyte, allocated and freed in a
    loop, otherwise cost more in page faults than in arithmetic. These are the limits that its own adaptation ends at, so
    that nothing needs to be undone; `release_memory` returns what is left.
    """
    mallopt = _from_libc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_HEAP_BLOCK)


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """For the time of a block every freed buffer of a megabyte or more goes back to the operating system at once.

    Growing caches of keys and values are freed and made anew at every token, a little larger each time; kept in the heap,
    their holes grow with the number of layers: 425 MB beside four layers of 2,048 units, 273 MB so. It costs page faults.
    """
    with _mapped_from(_LARGE_BUFFER):
        yield


@contextmanager
def mapped_activations(device_type: str, block_bytes: int = MAPPED_FROM_BYTES) -> Iterator[None]:
    """For the time of a training on a CPU every block of half a megabyte or more is mapped by itself; of `block_bytes` or
    more where a batch is short, whose hidden states (tokens x width) would else lie in the heap: one pack of 436 tokens
    among packs of 512 left 181 MB of holes for the rest of a run.

    What a layer keeps for its backward pass lies among what it only needs in passing, and packs of ever other lengths fit
    none of the holes before them: 166 MB of holes beside 130 MB of activations after forty steps. Mapped, what is freed is
    gone. In one process, 1,202 tokens of the embedded model a step: 149 MB less at the peak for 1 to 2 % more time, which
    are page faults; with every block mapped from 256 kB on, 17 MB less still for 3 %.
    """
    if device_type != "cpu":
        yield
        return
    with _mapped_from(min(max(block_bytes, _SMALLEST_MAPPED), MAPPED_FROM_BYTES)):
        yield


@contextmanager
def _mapped_from(n_bytes: int) -> Iterator[None]:
    """While this lasts blocks of `n_bytes` and more are mapped one by one; afterwards it is as before, in the outermost
    block: freed memory is kept."""
    mallopt = _from_libc("mallopt")
    _thresholds.append(n_bytes)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, n_bytes)
    try:
        yield
    finally:
        _thresholds.pop()
        if not _thresholds:
            keep_freed_memory()
        elif mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _thresholds[-1])


def leave_weight_files(model: nn.Module) -> None:
    """Copy what a quantized model on a CPU still reads from mapped files: embedding, head and norms.

    One such view keeps every page of its file in this process, those of the matrices too that were quantized from it. Tied
    tensors stay tied, for they are one parameter.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.is_floating_point():
            tensor.data = tensor.data.clone()


def _from_libc(name: str) -> Any:
    """A function of glibc; None on other systems and with other C libraries."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
