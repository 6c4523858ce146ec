"""Two models with different tokenizers as distributions over the same outcomes, at boundaries that both tokenisations share.

Both are asked the same there: what comes next? Outcomes that both can name are

- the text that does come, up to the next shared boundary: on each side the product of its tokens' probabilities;
- every token that both tokenizers have, but for the two that this text begins with;
- all else, as one: tokens that only one of them has, and another way on behind a first token of the text.

Of a teacher's top k the tokens that are not kept fall to the last outcome, and so does the text where a token of it is
not kept. Where one side has nothing left for the last outcome, it is left out for both.

Shapes: c student targets · m teacher targets · g groups · V, U vocabularies of student and teacher · k kept tokens (U: all).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from finetune.distil.targets import TeacherTargets


class Next(NamedTuple):
    """What the teacher says comes next at every boundary: log-probabilities `named` [g, k] of tokens `ids` [g, k] (None: of all
    tokens in turn, k = U) and of all others, `tail` [g]; of the text that does come, `text` [g], and of its tokens behind the
    first, `further` [g]. `is_known` [g]: whether those of the text are."""

    ids: Tensor | None
    named: Tensor
    tail: Tensor
    text: Tensor
    further: Tensor
    is_known: Tensor


def what_comes_next(
    teacher: TeacherTargets,
    own_ids: Tensor,
    groups: Tensor,
    temperature: float,
    n_teacher: int,
    dtype: torch.dtype,
) -> Next:
    """Read `teacher`, m targets whose own tokens are own_ids [m], at groups [g, 2] of them."""
    assert teacher.logits is not None, "a part has its logits made"
    scaled = teacher.logits.to(dtype) / temperature
    if teacher.ids is None:
        log_p, ids = torch.log_softmax(scaled[:, :n_teacher], dim=1), None
        chosen, is_kept = log_p.gather(1, own_ids[:, None])[:, 0], torch.ones_like(own_ids, dtype=torch.bool)
    else:
        assert teacher.logsumexp is not None
        ids = teacher.ids
        whole = ids.shape[1] == n_teacher
        log_p = torch.log_softmax(scaled, dim=1) if whole else scaled - teacher.logsumexp.to(dtype)[:, None]
        is_own = ids == own_ids[:, None]
        chosen, is_kept = torch.where(is_own, log_p, 0.0).sum(dim=1), is_own.any(dim=1)
    first = groups[:, 0]
    text, further = of_text(chosen, groups)
    unknown, _ = of_text((~is_kept).to(dtype), groups)
    named = log_p[first]
    if named.shape[1] == n_teacher:
        tail = torch.full_like(text, nothing(dtype))
    else:
        assert teacher.logsumexp is not None
        covered = torch.logsumexp(named, dim=1).clamp(max=0.0)
        tail = (-torch.expm1(covered)).clamp(min=torch.finfo(teacher.logsumexp.dtype).eps).log()
    return Next(None if ids is None else ids[first], named, tail, text, further, unknown == 0)


def common_outcomes(
    student: Tensor, own_ids: Tensor, groups: Tensor, said: Next, teacher_first: Tensor, to_student: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [g, outcomes] of teacher and student over the same outcomes; each row sums to 1.

    student [c, V] are the student's, own_ids [c] its targets' tokens, groups [g, 2] of them; teacher_first [g] is the teacher's
    first token of each group, to_student [U] the student's id of a teacher's token (-1: it has none).
    """
    filler = nothing(student.dtype)
    chosen = student.gather(1, own_ids[:, None])[:, 0]
    text, further = of_text(chosen, groups)
    first, at_boundary = own_ids[groups[:, 0]], student[groups[:, 0]]
    read = _all_tokens if said.ids is None else _kept_tokens
    named, teacher_named, apart, teacher_rest = read(at_boundary, first, said, teacher_first, to_student)

    # The first token of the text is no outcome of its own: what it is besides the text is another way on.
    apart = torch.where(said.is_known[:, None], apart.scatter(1, first[:, None], True), apart)
    rest = torch.logsumexp(torch.where(apart, filler, at_boundary), dim=1)
    rest = torch.where(said.is_known, torch.logaddexp(rest, otherwise(chosen[groups[:, 0]], further)), rest)
    other = otherwise(said.text - said.further, said.further)
    teacher_rest = torch.where(said.is_known, torch.logaddexp(teacher_rest, other), teacher_rest)
    has_rest = (rest > filler / 2) & (teacher_rest > filler / 2)

    def together(text: Tensor, named: Tensor, rest: Tensor) -> Tensor:
        text = torch.where(said.is_known, text, filler)[:, None]
        rest = torch.where(has_rest, rest, filler)[:, None]
        return torch.log_softmax(torch.cat([text, named, rest], dim=1), dim=1)

    return together(said.text, teacher_named, teacher_rest), together(text, named, rest)


def _kept_tokens(
    at_boundary: Tensor, first: Tensor, said: Next, teacher_first: Tensor, to_student: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a teacher's top k: named log-probabilities [g, k] of student and teacher, the student's columns [g, V] that are
    among them, and the teacher's rest [g], without another way on."""
    assert said.ids is not None
    filler, n_student = nothing(at_boundary.dtype), at_boundary.shape[1]
    columns = to_student[said.ids]
    begins_text = said.ids == teacher_first[:, None]
    ruled_out = (columns < 0) | (columns == first[:, None]) | begins_text
    named = torch.where(ruled_out, filler, at_boundary.gather(1, columns.clamp(min=0)))
    apart = torch.zeros(len(first), n_student + 1, dtype=torch.bool, device=at_boundary.device)
    apart.scatter_(1, torch.where(ruled_out, n_student, columns), True)
    in_rest = ruled_out & ~(begins_text & said.is_known[:, None])
    others = torch.cat([torch.where(in_rest, said.named, filler), said.tail[:, None]], dim=1)
    return (
        named,
        torch.where(ruled_out, filler, said.named),
        apart[:, :n_student],
        torch.logsumexp(others, dim=1),
    )


def _all_tokens(
    at_boundary: Tensor, first: Tensor, said: Next, teacher_first: Tensor, to_student: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of all tokens, in the order of the student's vocabulary [g, V]: its own log-probabilities stay where they are."""
    filler = nothing(at_boundary.dtype)
    is_shared = to_student >= 0
    theirs, ours = is_shared.nonzero()[:, 0], to_student[is_shared]
    in_our_order = torch.full_like(at_boundary, filler, requires_grad=False)
    in_our_order.index_copy_(1, ours, said.named.index_select(1, theirs))
    begins = to_student[teacher_first]  # -1: the student lacks the token
    is_named = torch.zeros_like(at_boundary, dtype=torch.bool).index_fill_(1, ours, True)
    is_named.scatter_(1, first[:, None], False)
    is_named.scatter_(1, torch.where(begins < 0, first, begins)[:, None], False)
    outside = said.named.masked_fill(is_shared, filler).scatter(1, teacher_first[:, None], filler)
    of_first = in_our_order.gather(1, first[:, None])[:, 0]
    of_first = torch.where(begins == first, filler, of_first)  # then it begins the text for both
    rest = torch.logaddexp(torch.logsumexp(outside, dim=1), of_first)
    return (
        torch.where(is_named, at_boundary, filler),
        torch.where(is_named, in_our_order, filler),
        is_named,
        rest,
    )


def sorted_distance(student: Tensor, groups: Tensor, said: Next) -> Tensor:
    """Σ |p₍ᵢ₎ - q₍ᵢ₎| [g] over both sides' probabilities in descending order, whatever their tokens. Behind a teacher's top k
    the sums of all further ones are compared. student [c, V] are log-probabilities."""
    p = said.named.sort(dim=1, descending=True).values.exp()
    q = student[groups[:, 0]].sort(dim=1, descending=True).values.exp()
    width = p.shape[1]
    if bool((said.tail > nothing(student.dtype) / 2).any()):
        p = torch.cat([p, said.tail.exp()[:, None]], dim=1)
        q = torch.cat([q[:, :width], q[:, width:].sum(dim=1, keepdim=True)], dim=1)
    short = p.shape[1] - q.shape[1]
    p = torch.nn.functional.pad(p, (0, max(0, -short)))
    q = torch.nn.functional.pad(q, (0, max(0, short)))
    return (p - q).abs().sum(dim=1)


def of_text(chosen: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [g] of chosen [n] over the targets of each group, groups [g, 2], and over those behind the first."""
    lengths = groups[:, 1] - groups[:, 0]
    group = torch.repeat_interleave(torch.arange(len(groups), device=groups.device), lengths)
    before = torch.cumsum(lengths, dim=0) - lengths
    inside = torch.arange(len(group), device=groups.device) - before[group]
    values = chosen[groups[group, 0] + inside]
    none = chosen.new_zeros(len(groups))
    return none.index_add(0, group, values), none.index_add(0, group, torch.where(inside > 0, values, 0.0))


def otherwise(first: Tensor, further: Tensor) -> Tensor:
    """log of p(first token) (1 - Π p(further tokens)): another way on behind the first; nothing where there are no further."""
    can = further < 0
    rest = torch.where(can, further, -1.0)
    return torch.where(can, first + torch.log(-torch.expm1(rest)), nothing(first.dtype))


def nothing(dtype: torch.dtype) -> float:
    """The log-probability of an outcome that is not there: finite, so that differences and gradients are."""
    return torch.finfo(dtype).min / 4
