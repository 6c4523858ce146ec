"""One account of how the answers of a data set agree: their forms, contradictions, boilerplate, refusals, empty ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.curate.answers import Repeated, find_repeated, is_empty, is_refusal
from finetune.data.curate.consistency import Mix, measure_consistency
from finetune.data.curate.contradictions import Contradiction, find_contradictions
from finetune.data.fold import fold_turns
from finetune.data.rows import Row
from finetune.data.texts import calls_of
from finetune.errors import UserError, did_you_mean

_SHOWN_GROUPS = 20
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Account:
    """Row numbers count the rows that have an answer, which are `rows`; running text has none."""

    rows: Sequence[Row]
    mixes: list[Mix]
    contradictions: list[Contradiction]
    repeated: list[Repeated]
    refusals: list[int]
    empty: list[int]

    @property
    def warnings(self) -> list[Mix]:
        """The aspects in which a minority is large enough to spoil a model."""
        return [mix for mix in self.mixes if mix.warned]

    def to_dict(self) -> dict[str, Any]:
        """With the ids and the answers of the rows that are shown, cut to 300 characters."""
        return {
            "rows": len(self.rows),
            "warnings": len(self.warnings),
            "mixes": [self._mix(mix) for mix in self.mixes],
            "contradictions": {
                "groups": len(self.contradictions),
                "rows": sum(len(one.rows) for one in self.contradictions),
                "first": [self._contradiction(one) for one in self.contradictions[:_SHOWN_GROUPS]],
            },
            "repeated": [one.to_dict() | {"rows": self._ids(one.rows)} for one in self.repeated],
            "refusals": {"n": len(self.refusals), "rows": self._ids(self.refusals[:_SHOWN_GROUPS])},
            "empty": {"n": len(self.empty), "rows": self._ids(self.empty[:_SHOWN_GROUPS])},
        }

    def answer(self, row: int) -> str:
        """The answer of a row as it is shown: on one line, cut to 300 characters."""
        return shown(self.rows[row].answer)

    def _ids(self, rows: Sequence[int]) -> list[str]:
        return [self.rows[row].id for row in rows]

    def _mix(self, mix: Mix) -> dict[str, Any]:
        piles = [
            pile.to_dict()
            | {"rows": [{"id": self.rows[row].id, "answer": self.answer(row)} for row in pile.rows]}
            for pile in mix.piles
        ]
        return mix.to_dict() | {"piles": piles}

    def _contradiction(self, one: Contradiction) -> dict[str, Any]:
        answers = [{"rows": self._ids(rows), "answer": self.answer(rows[0])} for rows in one.answers]
        return {"prompt": shown(fold_turns(self.rows[one.rows[0]].prompt)), "answers": answers}


def shown(text: str) -> str:
    """A text on one line, cut to 300 characters."""
    line = " ".join(text.replace("\x00", " ").replace("\x01", " ").split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"


def account_for_answers(rows: Sequence[Row], *, by: str | None = None, seed: int = 17) -> Account:
    """The account of rows of any kind; those without an answer (text, tokens) are left out.

    `by` names a tag: forms are then compared within each of its values only. Raises UserError when no row has an answer
    or no row has the tag.
    """
    answered = [row for row in rows if row.kind not in ("text", "tokens") and not calls_of(row)]
    if not answered:
        raise UserError(
            f"none of {len(rows)} rows has an answer in words",
            fix="look at rows with answers: a chat or a pair",
        )
    if by is not None and not any(by in row.tags for row in answered):
        known = {tag for row in answered for tag in row.tags}
        raise UserError(
            f"no row has the tag '{by}'", where="--by", fix=did_you_mean(by, known or {"no tags at all"})
        )
    answers = [row.answer for row in answered]
    return Account(
        answered,
        measure_consistency(
            answers, within=[row.tags.get(by, "") for row in answered] if by else None, seed=seed
        ),
        find_contradictions([fold_turns(row.prompt) for row in answered], answers),
        find_repeated(answers),
        [row for row, answer in enumerate(answers) if is_refusal(answer)],
        [row for row, answer in enumerate(answers) if is_empty(answer)],
    )
