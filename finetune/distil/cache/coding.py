"""How a teacher's top k is put into bytes: 258 for a target token at k = 64, a vocabulary up to 65,536 and one temperature.

Shapes: n target tokens · V vocabulary · k kept tokens · P = ceil(V / 65,536) pages of ids · t temperatures.

The most likely token comes first, the others by id. Of every id the low 16 bits are kept; the page (the bits above) of the
first, and how many of the others lie below each page, are one small number of mixed radix. Logits are kept as their
distance from the largest, which is 0 and left out: a softmax knows differences only, and fp16 is finest near 0, where the
probable tokens are. The normaliser of each temperature T, logsumexp(z / T) over all V logits less the largest one over T, is
fp32, and taken with the k logits as they are kept: so the k probabilities and that of all other tokens sum to 1 exactly,
and the mass of the others is not lost in the rounding of the k.

Rounding to fp16 changes a probability p by at most a factor of 1 ± |log(p / p_max)| 2⁻¹¹ at T = 1: 0.02 % of p at half
the largest one, 0.3 % of p a thousandth of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
_PAGE = 1 << 16
_MOST_CODE_BITS = 62  # of a page code, in int64


@dataclass(frozen=True, slots=True)
class Coding:
    """What decides the bytes: k, the vocabulary, the type of the logits and the temperatures.

    k is at most the vocabulary; both models' ids are below `vocabulary`.
    """

    k: int
    vocabulary: int
    dtype: str
    temperatures: tuple[float, ...]

    @property
    def n_pages(self) -> int:
        return -(-self.vocabulary // _PAGE)

    @property
    def code_bytes(self) -> int:
        """Bytes of the page code of a target; 0 where all ids have 16 bits."""
        if self.n_pages == 1 or self.wide_ids:
            return 0
        return math.ceil(self._code_bits / 8)

    @property
    def _code_bits(self) -> float:
        return math.log2(self.n_pages) + (self.n_pages - 1) * math.log2(self.k)

    @property
    def wide_ids(self) -> bool:
        """Whether ids take 32 bits: of so many tokens that their page code is no longer small."""
        return self.n_pages > 1 and self._code_bits > _MOST_CODE_BITS

    @property
    def bytes_per_target(self) -> int:
        """ids + page code + logits + normalisers."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes of a target token by tensor."""
        return {
            "ids": self.k * (4 if self.wide_ids else 2),
            "page_codes": self.code_bytes,
            "logits": (self.k - 1) * DTYPES[self.dtype].itemsize,
            "logsumexp": 4 * len(self.temperatures),
        }

    def formula(self) -> str:
        """The parts in words, for people."""
        id_bytes, logit_bytes = (4 if self.wide_ids else 2), DTYPES[self.dtype].itemsize
        pages = f" + {self.code_bytes} for pages of ids" if self.code_bytes else ""
        n = len(self.temperatures)
        return (
            f"{self.k} ids x {id_bytes}{pages} + {self.k - 1} logits x {logit_bytes} + {n} "
            f"normaliser{'s' if n > 1 else ''} x 4 = {self.bytes_per_target} bytes"
        )


@dataclass(frozen=True, slots=True)
class TopK:
    """n targets in memory: ids [n, k] (int64), gaps [n, k] from the largest logit, which is first (fp32, at most 0), and
    logsumexp [n, t] (fp32) of the logits over each temperature, less the largest."""

    ids: Tensor
    gaps: Tensor
    logsumexp: Tensor


def keep_top_k(logits: Tensor, coding: Coding) -> TopK:
    """The top k of logits [n, V], rounded as they are kept, with the normalisers of all V."""
    logits = logits.float()
    found, ids = logits.topk(coding.k, dim=1)
    greatest = found[:, :1]
    gaps = _rounded(found - greatest, coding)
    others = (logits - greatest).scatter_(1, ids, torch.finfo(torch.float32).min / 4)
    normalisers = []
    for temperature in coding.temperatures:
        of_top = torch.logsumexp(gaps / temperature, dim=1)
        if coding.k < coding.vocabulary:
            of_others = torch.logsumexp(others / temperature, dim=1)
            of_top = torch.logaddexp(of_top, of_others)
        normalisers.append(of_top)
    return in_order(ids, gaps, torch.stack(normalisers, dim=1))


def in_order(ids: Tensor, gaps: Tensor, logsumexp: Tensor) -> TopK:
    """A top k whose first token has the largest logit; the others are put in the order of their ids."""
    order = ids[:, 1:].argsort(dim=1)
    rest = ids[:, 1:].gather(1, order), gaps[:, 1:].gather(1, order)
    return TopK(torch.cat([ids[:, :1], rest[0]], dim=1), torch.cat([gaps[:, :1], rest[1]], dim=1), logsumexp)


def _rounded(gaps: Tensor, coding: Coding) -> Tensor:
    kept = DTYPES[coding.dtype]
    return gaps.clamp(min=torch.finfo(kept).min).to(kept).float()


def to_tensors(top: TopK, coding: Coding) -> dict[str, Tensor]:
    """The tensors that a shard holds, each [n, …]; `page_codes` only where ids need them."""
    tensors = {
        "logits": top.gaps[:, 1:].to(DTYPES[coding.dtype]).contiguous(),
        "logsumexp": top.logsumexp.float().contiguous(),
    }
    if coding.wide_ids:
        return tensors | {"ids": top.ids.to(torch.int32)}
    tensors["ids"] = (top.ids % _PAGE).to(torch.int32).to(torch.int16)  # keeps the low bits
    if coding.code_bytes:
        tensors["page_codes"] = _page_codes(top.ids, coding)
    return tensors


def _page_codes(ids: Tensor, coding: Coding) -> Tensor:
    """The page of the first id, then for each further page how many of the other k-1 ids lie below it: [n, bytes]."""
    code = ids[:, 0] // _PAGE
    for page in range(1, coding.n_pages):
        code = code * coding.k + (ids[:, 1:] < page * _PAGE).sum(dim=1)
    return torch.stack([(code >> (8 * byte)) & 255 for byte in range(coding.code_bytes)], dim=1).to(
        torch.uint8
    )


def from_tensors(tensors: dict[str, Tensor], coding: Coding) -> TopK:
    """The inverse of `to_tensors`, exact."""
    logits = tensors["logits"].float()
    gaps = torch.cat([logits.new_zeros(len(logits), 1), logits], dim=1)
    ids = tensors["ids"].long()
    if not coding.wide_ids:
        ids = ids & (_PAGE - 1)
        if coding.code_bytes:
            ids = ids + _PAGE * _pages(tensors["page_codes"], coding)
    return TopK(ids, gaps, tensors["logsumexp"])


def _pages(codes: Tensor, coding: Coding) -> Tensor:
    """The page of every id [n, k]."""
    code = sum(
        (codes[:, byte].long() << (8 * byte) for byte in range(coding.code_bytes)),
        torch.zeros(1, dtype=torch.long),
    )
    place = torch.arange(coding.k - 1)
    pages = torch.zeros(len(codes), coding.k, dtype=torch.long)
    for _ in range(coding.n_pages - 1):
        below, code = code % coding.k, code // coding.k
        pages[:, 1:] += place >= below[:, None]
    pages[:, 0] = code
    return pages


def temperatures_of(wanted: Sequence[float]) -> tuple[float, ...]:
    """Temperatures ascending, each once."""
    return tuple(sorted(set(map(float, wanted))))
