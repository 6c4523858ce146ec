"""Prompts with their answers as one row of tokens, in which a prompt is computed once and its answers do not see each other.

A row is [prompt answer | answer | prompt answer | answer …]; the second answer of a prompt takes positions right behind
the prompt and sees the prompt and itself (`model/documents.py`). The token that predicts the first token of every answer
is the last one of the prompt. An answer's last token is only ever predicted, so it is not in the row.

Shapes: T tokens of the row, S segments, A answers, M targets (all answers), L targets of the longest answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from finetune.data.packing import pack
from finetune.data.pair_tokens import AnsweredPrompt
from finetune.data.row_tokens import IGNORED
from finetune.model.documents import branch_mask, find_segments
from finetune.model.reward import scored_place


@dataclass
class Pack:
    """Examples that share a row, and the reference's log-probability of each of their answers, once it is known."""

    examples: list[AnsweredPrompt]
    reference: list[float] | None = None


class Packs(Dataset[Pack]):
    """Packs as the trainer reads them."""

    def __init__(self, packs: Sequence[Pack]) -> None:
        self.packs = list(packs)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Pack:
        return self.packs[index]


def row_tokens(example: AnsweredPrompt, *, share_prompts: bool) -> int:
    """Tokens that an example takes in a row."""
    n_prompts = 1 if share_prompts else len(example.answers)
    return n_prompts * len(example.prompt) + sum(len(answer.ids) for answer in example.answers)


def make_packs(
    examples: Sequence[AnsweredPrompt], *, packing: bool, pack_tokens: int, share_prompts: bool
) -> list[Pack]:
    """Examples in packs of at most `pack_tokens`, as even as they go; one in each without `packing`.

    Raises UserError when an example does not fit into a pack.
    """
    if not packing:
        return [Pack([example]) for example in examples]
    lengths = [row_tokens(example, share_prompts=share_prompts) for example in examples]
    return [Pack([examples[index] for index in members]) for members in pack(lengths, pack_tokens)]


class _Row:
    """A row being laid out. `pad_id`: see `scored_place`."""

    def __init__(self, pad_id: int | None) -> None:
        self.pad_id = pad_id
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.segments: list[tuple[int, int, int, int]] = []
        self.sources: list[int] = []
        self.targets: list[int] = []
        self.lengths: list[int] = []  # targets of each answer
        self.last: list[int] = []  # place in the row at which each answer is scored as a whole

    def add(self, example: AnsweredPrompt, *, share_prompts: bool, whole_answers: bool) -> None:
        start = len(self.ids)
        for number, answer in enumerate(example.answers):
            own = answer.ids if whole_answers else answer.ids[:-1]
            fresh = number == 0 or not share_prompts
            if fresh:
                start = len(self.ids)
                self._extend(example.prompt, 0)
            first = len(self.ids)  # place of the answer's first token
            self._extend(own, len(example.prompt))
            if fresh:
                self.segments.append((start, len(self.ids), start, start))
            elif own:
                self.segments.append((first, len(self.ids), start, start + len(example.prompt)))
            self._predict(answer.labels, start + len(example.prompt) - 1, first)
            self.last.append(first + scored_place(own, self.pad_id))

    def _extend(self, ids: list[int], position: int) -> None:
        self.ids += ids
        self.positions += range(position, position + len(ids))

    def _predict(self, labels: list[int], prompt_end: int, first: int) -> None:
        """Every target of an answer, and the place it is predicted from: the one before it."""
        before = [prompt_end, *range(first, first + len(labels) - 1)]
        wanted = [(source, label) for source, label in zip(before, labels, strict=True) if label != IGNORED]
        self.sources += [source for source, _ in wanted]
        self.targets += [label for _, label in wanted]
        self.lengths.append(len(wanted))


@dataclass(frozen=True)
class BranchCollator:
    """Lays the examples of one micro-batch into one row [1, T].

    `whole_answers`: keep each answer's last token; `pad_id`: the padding token of a model that scores whole texts.

    Returns input_ids and position_ids [1, T], branches [S, 4], sources and targets [M], answer_lengths and last_places
    [A], row_ids, and where known reference [A] and wanted [examples].
    """

    share_prompts: bool
    whole_answers: bool = False
    pad_id: int | None = None

    def __call__(self, packs: Sequence[Pack]) -> dict[str, Any]:
        row = _Row(self.pad_id)
        examples = [example for members in packs for example in members.examples]
        for example in examples:
            row.add(example, share_prompts=self.share_prompts, whole_answers=self.whole_answers)
        batch: dict[str, Any] = {
            "input_ids": torch.tensor([row.ids]),
            "position_ids": torch.tensor([row.positions]),
            "branches": torch.tensor(row.segments),
            "sources": torch.tensor(row.sources),
            "targets": torch.tensor(row.targets),
            "answer_lengths": torch.tensor(row.lengths),
            "last_places": torch.tensor(row.last),
            "row_ids": [example.row_id for example in examples],
        }
        references = [members.reference for members in packs]
        if all(reference is not None for reference in references):
            batch["reference"] = torch.tensor([value for known in references for value in known or []])
        if all(example.wanted is not None for example in examples):
            batch["wanted"] = torch.tensor([bool(example.wanted) for example in examples])
        return batch


def model_inputs(batch: dict[str, Any], attention: str, dtype: torch.dtype) -> dict[str, Any]:
    """What of a batch the model's forward pass takes. Attention other than `document` is given a mask [1, 1, T, T] where
    answers share a prompt; where none do, transformers finds the segments by their positions and keeps windows in them,
    which a mask of our own would replace.
    """
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    if attention == "document":
        return inputs | {"branches": batch["branches"]}
    n_tokens = inputs["input_ids"].shape[1]
    segments = find_segments(1, n_tokens, None, None, batch["branches"])
    if not any(segment.prefix_length for segment in segments):
        return inputs
    return inputs | {"attention_mask": branch_mask(segments, n_tokens, dtype).to(inputs["input_ids"].device)}


def by_answer(values: Tensor, lengths: Tensor) -> Tensor:
    """[M] values of targets -> [A, L], padded with zeros: sums over the last axis are those of each answer."""
    counts: list[int] = lengths.tolist()
    padded = values.new_zeros(len(counts), max(counts, default=0))
    inside = torch.arange(padded.shape[1], device=values.device)[None, :] < lengths[:, None]
    return padded.masked_scatter(inside, values)


def attention_work(branches: Tensor) -> int:
    """Sum of squared lengths that gives the operations of this attention (`telemetry/flops.py`)."""
    return sum(
        (stop - start) ** 2 + 2 * (stop - start) * (prefix_stop - prefix_start)
        for start, stop, prefix_start, prefix_stop in branches.tolist()
    )
