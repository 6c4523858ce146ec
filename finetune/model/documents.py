"""Where the documents of a packed batch begin and end, and which of transformers' masks say no more than that.

A document may go on from a *prefix*: tokens elsewhere in the same row that it sees besides its own, as when two answers
share one prompt and do not see each other.

Shapes: B rows, T tokens in a row, S segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_MEMORY = "_finetune_documents"  # attribute of a tensor that holds what was read from it, see `_remembered`


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `first_row` up to `last_row` (excluded), tokens `start` up to `stop` (excluded): one attention call.

    Its tokens also see tokens `prefix_start` up to `prefix_stop` of the same rows, all of which come before `start`.
    """

    first_row: int
    last_row: int
    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0

    @property
    def prefix_length(self) -> int:
        return self.prefix_stop - self.prefix_start

    def visible(self, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [stop - start, prefix + stop - start]: all of the prefix, and its own tokens causally."""
        n_own = self.stop - self.start
        mask = torch.zeros(n_own, self.prefix_length + n_own, dtype=dtype)
        mask[:, self.prefix_length :] = torch.full((n_own, n_own), -torch.inf, dtype=dtype).triu(1)
        return mask


def find_segments(
    n_rows: int,
    n_tokens: int,
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
    branches: torch.Tensor | None = None,
) -> tuple[Segment, ...]:
    """The documents of a batch [B, T], row by row and from left to right.

    `branches` [S, 4] are the segments of a single row with their prefixes: start, stop, prefix start, prefix stop.
    `cu_seq_lens` are cumulative lengths over the rows laid end to end; without them a document starts where
    `position_ids` [B or 1, T] do not go up by one. Without either the batch is one segment, hence one batched call.
    """
    read: Callable[[torch.Tensor, int, int], tuple[Segment, ...]] = _from_offsets
    known = cu_seq_lens
    if branches is not None:
        known, read = branches, _from_branches
    if known is None:
        if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] != n_tokens:
            return (Segment(0, n_rows, 0, n_tokens),)
        known, read = position_ids, _from_positions
    tensor = known
    segments: tuple[Segment, ...] = _remembered(
        tensor, (n_rows, n_tokens), lambda: read(tensor, n_rows, n_tokens)
    )
    return segments


def cut_mask(
    mask: torch.Tensor, segments: tuple[Segment, ...], n_rows: int, position_ids: torch.Tensor | None
) -> torch.Tensor:
    """`mask` [B or 1, 1 or heads, T, T], boolean or additive, without the pairs of different documents.

    Left padding also makes positions start anew, at the first real token; a row only counts as packed when a document
    starts right after another real token. Where none does, the mask is returned as it is.
    """
    if len(segments) <= 1 or mask.ndim != 4 or mask.shape[-1] != mask.shape[-2]:
        return mask
    if position_ids is None:
        return _cut(mask, segments, n_rows)
    # The mask is remembered beside its answer: while it lives, no other mask can have its id.
    _, result = _remembered(position_ids, id(mask), lambda: (mask, _cut(mask, segments, n_rows)))
    cut: torch.Tensor = result
    return cut


def is_plain_causal(mask_function: Any) -> bool:
    """Whether a mask function of transformers means 'causal' or 'causal inside each packed document' and no more.

    transformers composes closures; they are recognised by their qualified names, and anything else is not plain.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function is causal_mask_function:
        return True
    parts = _closed_over(mask_function, "and_masks.<locals>.and_mask", "mask_functions")
    if parts is None or len(parts) != 2:
        return False
    inner = _closed_over(parts[0], "remap_positions_for_packed_sequence.<locals>.inner_mask", "mask_function")
    packed = getattr(parts[1], "__qualname__", "") == "packed_sequence_mask_function.<locals>.inner_mask"
    return packed and inner is causal_mask_function


def _from_offsets(cu_seq_lens: torch.Tensor, n_rows: int, n_tokens: int) -> tuple[Segment, ...]:
    """Segments from cumulative lengths [0, l1, l1 + l2, ...] over the rows laid end to end."""
    offsets: list[int] = cu_seq_lens.tolist()
    rising = all(left <= right for left, right in itertools.pairwise(offsets))
    if not rising or offsets[0] != 0 or offsets[-1] != n_rows * n_tokens:
        raise ValueError(
            f"cu_seq_lens_q from {offsets[0]} to {offsets[-1]} does not cover {n_rows} rows of {n_tokens} tokens"
        )
    segments: list[Segment] = []
    for begin, end in itertools.pairwise(offsets):
        while begin < end:  # a document never crosses a row
            row = begin // n_tokens
            stop = min(end, (row + 1) * n_tokens)
            segments.append(Segment(row, row + 1, begin - row * n_tokens, stop - row * n_tokens))
            begin = stop
    return tuple(segments)


def _from_branches(branches: torch.Tensor, n_rows: int, n_tokens: int) -> tuple[Segment, ...]:
    """Segments [S, 4] of one row. They cover it, and every prefix lies before its segment."""
    segments = tuple(Segment(0, 1, *(int(place) for place in four)) for four in branches.tolist())
    ends = [0, *(segment.stop for segment in segments)]
    whole = n_rows == 1 and ends[-1] == n_tokens
    meets = all(segment.start == end for segment, end in zip(segments, ends, strict=False))
    before = all(0 <= s.prefix_start <= s.prefix_stop <= s.start < s.stop for s in segments)
    if not (whole and meets and before):
        raise ValueError(f"branches {branches.tolist()} do not cover {n_rows} rows of {n_tokens} tokens")
    return segments


def branch_mask(segments: tuple[Segment, ...], n_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [1, 1, T, T] of one row of branches, for attention that is not told about segments."""
    mask = torch.full((n_tokens, n_tokens), torch.finfo(dtype).min, dtype=dtype)
    for segment in segments:
        own = segment.visible(dtype).clamp(min=torch.finfo(dtype).min)
        rows = slice(segment.start, segment.stop)
        mask[rows, segment.prefix_start : segment.prefix_stop] = own[:, : segment.prefix_length]
        mask[rows, rows] = own[:, segment.prefix_length :]
    return mask[None, None]


def attends_to_everything(config: Any) -> bool:
    """Whether every layer of a model attends to all earlier tokens by dot products alone: no window, no soft cap."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    softcap = getattr(text, "attn_logit_softcapping", None)
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    return kinds == {"full_attention"} and softcap is None and window is None


def _from_positions(position_ids: torch.Tensor, n_rows: int, n_tokens: int) -> tuple[Segment, ...]:
    """Segments from positions [B or 1, T]; rows with the same boundaries share their segments."""
    resets: list[list[bool]] = (position_ids.diff(dim=1) != 1).tolist()
    shared = all(marks == resets[0] for marks in resets)
    segments: list[Segment] = []
    for row, marks in enumerate(resets[:1] if shared else resets):
        rows = (0, n_rows) if shared else (row, row + 1)
        starts = [0, *(index + 1 for index, reset in enumerate(marks) if reset), n_tokens]
        segments.extend(Segment(*rows, start, stop) for start, stop in itertools.pairwise(starts))
    return tuple(segments)


def _cut(mask: torch.Tensor, segments: tuple[Segment, ...], n_rows: int) -> torch.Tensor:
    document = torch.empty(n_rows, mask.shape[-1], dtype=torch.long)
    for index, segment in enumerate(segments):
        document[segment.first_row : segment.last_row, segment.start : segment.stop] = index
    document = document.to(mask.device)
    sees_itself = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    real = sees_itself if mask.dtype == torch.bool else sees_itself >= 0
    starts = document[:, 1:] != document[:, :-1]
    if not bool((starts & real[:, 1:] & real[:, :-1]).any()):
        return mask
    same = document[:, None, :, None] == document[:, None, None, :]
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, torch.finfo(mask.dtype).min)


def _remembered(tensor: torch.Tensor, what: Any, answer: Callable[[], Any]) -> Any:
    """`answer()`, once a forward pass: every layer is handed the same tensor, and reading it costs a device sync.

    The answer lives on the tensor and is dropped when the tensor is changed in place.
    """
    version, memory = getattr(tensor, _MEMORY, (tensor._version, {}))
    if version != tensor._version:
        memory = {}
    if what not in memory:
        memory[what] = answer()
        setattr(tensor, _MEMORY, (tensor._version, memory))
    return memory[what]


def _closed_over(function: Any, qualified_name: str, variable: str) -> Any:
    """The value of a closed-over variable of `function` when it has that qualified name, else None."""
    if getattr(function, "__qualname__", "") != qualified_name:
        return None
    names = function.__code__.co_freevars
    return function.__closure__[names.index(variable)].cell_contents if variable in names else None
