"""What a teacher says about every target token: all its logits, its top k with their normaliser, or states to make them from.

Shapes: n target tokens · V vocabulary · k kept tokens · D hidden size of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TeacherTargets:
    """A teacher's distributions over the next token, one for each of n targets; made by `full`, `top_k` or `live`.

    full: `logits` [n, V]. top_k: `ids` [n, k] (all different), their `logits` [n, k] at temperature 1, and `logsumexp` [n]
    of all V logits divided by the temperature that the loss is taken at. live: `hidden` [n, D] and `head` [V, D], whose
    product are the logits; they are made for one chunk of targets at a time.
    """

    logits: Tensor | None = None
    ids: Tensor | None = None
    logsumexp: Tensor | None = None
    hidden: Tensor | None = None
    head: Tensor | None = None
    head_bias: Tensor | None = None

    @staticmethod
    def full(logits: Tensor) -> TeacherTargets:
        """All logits [n, V]."""
        return TeacherTargets(logits=logits.detach())

    @staticmethod
    def top_k(ids: Tensor, logits: Tensor, logsumexp: Tensor) -> TeacherTargets:
        """ids [n, k], logits [n, k], logsumexp [n] at the loss's temperature, over the whole vocabulary."""
        if ids.shape != logits.shape or logsumexp.shape != ids.shape[:1]:
            raise ValueError(f"ids {ids.shape}, logits {logits.shape}, logsumexp {logsumexp.shape}")
        return TeacherTargets(logits=logits.detach(), ids=ids.detach().long(), logsumexp=logsumexp.detach())

    @staticmethod
    def live(hidden: Tensor, head: Tensor, head_bias: Tensor | None = None) -> TeacherTargets:
        """The teacher's last hidden states [n, D] at the places that predict the targets, and its head [V, D]."""
        bias = None if head_bias is None else head_bias.detach()
        return TeacherTargets(hidden=hidden.detach(), head=head.detach(), head_bias=bias)

    def __len__(self) -> int:
        rows = self.hidden if self.logits is None else self.logits
        assert rows is not None
        return len(rows)

    @property
    def is_top_k(self) -> bool:
        return self.ids is not None

    def cuts(self, chunk_tokens: int) -> list[int]:
        """Where chunks of at most so many targets begin, and the end."""
        return [*range(0, len(self), chunk_tokens), len(self)]

    def part(self, start: int, stop: int) -> TeacherTargets:
        """Targets start..stop; of a live teacher with their logits made."""
        if self.logits is not None:
            return TeacherTargets(
                self.logits[start:stop],
                None if self.ids is None else self.ids[start:stop],
                None if self.logsumexp is None else self.logsumexp[start:stop],
            )
        assert self.hidden is not None and self.head is not None
        hidden = self.hidden[start:stop].to(self.head.dtype)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            return TeacherTargets(torch.nn.functional.linear(hidden, self.head, self.head_bias))

    def is_finite(self, chunk_tokens: int = 64) -> bool:
        """Whether every target has a distribution: no NaN, no +inf, and not -inf at all tokens. Made chunk by chunk."""
        for start, stop in pairwise(self.cuts(chunk_tokens)):
            logits = self.part(start, stop).logits
            assert logits is not None
            if not torch.logsumexp(logits.float(), dim=1).isfinite().all():
                return False
        return True

    def to(self, device: torch.device | str) -> TeacherTargets:
        """The same on another device."""
        names = self.__dataclass_fields__
        moved = {
            name: None if (value := getattr(self, name)) is None else value.to(device, non_blocking=True)
            for name in names
        }
        return TeacherTargets(**moved)
