"""Contradictions: the same question with different answers. A model that learns from both learns to guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.curate.exact import first_of_equal, groups_of_equal, text_digests
from finetune.data.curate.tokens import Texts
from finetune.data.fold import fold_text


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Rows that ask the same, parted by what they answer; the most frequent answer stands first."""

    answers: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """All rows of the group, in order."""
        return tuple(sorted(row for rows in self.answers for row in rows))

    def to_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows), "answers": [list(rows) for rows in self.answers]}


@dataclass(frozen=True, slots=True)
class _Folded:
    texts: Texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int, /) -> str:
        return fold_text(self.texts[index])


def find_contradictions(prompts: Texts, answers: Texts) -> list[Contradiction]:
    """Groups of rows with the same prompt and two or more answers; the group with most rows stands first.

    Prompts and answers are the same when they differ in case, compatibility forms or white space only. Rows without a
    prompt (running text) contradict nothing. Whether several answers are wanted, as in creative tasks, is for the reader
    of the list to say. Memory is 48 bytes a row.
    """
    asked = text_digests(_Folded(prompts))
    same_answer = first_of_equal(text_digests(_Folded(answers)))
    nothing = text_digests([""])[0]
    found = []
    for rows in groups_of_equal(asked):
        firsts, which = np.unique(same_answer[rows], return_inverse=True)
        if len(firsts) < 2 or (asked[rows[0]] == nothing).all():
            continue
        piles = [tuple(rows[which == answer].tolist()) for answer in range(len(firsts))]
        found.append(Contradiction(tuple(sorted(piles, key=lambda pile: (-len(pile), pile)))))
    return found
