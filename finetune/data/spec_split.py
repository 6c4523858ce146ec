"""The sections of a dataset spec that decide which side a row falls on, what may not be on two sides, and how many rows
of a side are used."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.data.rows import Side
from finetune.recipe.section import Count, Section, Share

Threshold = Annotated[float, Field(gt=0.0, le=1.0)]
RunLength = Annotated[int, Field(ge=2, le=64)]


def _default_shares() -> dict[Side, float]:
    return {"train": 0.8, "validation": 0.05, "test": 0.15}


class GuardSection(Section):
    """What may not be on two sides, besides groups and prompts: the evaluation side keeps it, the train row is dropped."""

    near_duplicates: Threshold | None = Field(
        0.7,
        description="Jaccard similarity of two questions (word 3-grams, verified) from which they are the same; "
        "null: off.",
    )
    any_ngram: RunLength | None = Field(
        13,
        description="Words in a row shared with one question that are a leak, wherever they are; null: off.",
    )
    ngram: RunLength | None = Field(8, description="Words in a row that count towards `coverage`; null: off.")
    coverage: Threshold = Field(
        0.5, description="Share of a question's words inside shared runs of `ngram` words that is a leak."
    )
    files: list[str] = Field(
        default_factory=list,
        description="Questions of other evaluations (JSONL or text, relative to the spec): train rows that repeat "
        "them are dropped.",
    )

    @property
    def counts_ngrams(self) -> bool:
        return self.ngram is not None or self.any_ngram is not None

    @property
    def is_on(self) -> bool:
        return self.near_duplicates is not None or self.counts_ngrams


class SplitSection(Section):
    """Which side a group falls on."""

    salt: str = Field("1", description="Change it to draw another split.")
    shares: dict[Side, Share] = Field(
        default_factory=_default_shares,
        description="Share of the groups on each side; they add up to 1.",
    )
    stratify_by: str | None = Field(
        None,
        description="Tag within which the shares are exact. None: by salted hash, so growth never moves a row.",
    )
    unique_by: str | list[str] | None = Field(
        None, description="Tags whose values may not be on two sides; the evaluation side keeps them."
    )
    unite_by: str | list[str] | None = Field(
        None,
        description="Tags that tie groups together: groups that share a value fall on one side as a whole.",
    )
    frozen_from: str | None = Field(
        None,
        description="`assignment.json` of an earlier build, relative to the spec: its groups keep their sides.",
    )
    pinned: str | None = Field(
        None, description="File of rows that are the `regressions` side, as they are; relative to the spec."
    )
    guard: GuardSection = Field(default_factory=GuardSection)

    @model_validator(mode="after")
    def _shares_add_up(self) -> SplitSection:
        total = sum(self.shares.values())
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"shares: add up to {total:g}, not to 1")
        if not self.shares.get("train"):
            raise ValueError("shares: train needs a share above 0")
        return self

    @property
    def unique_tags(self) -> list[str]:
        """`unique_by` as a list."""
        return _as_list(self.unique_by)

    @property
    def unite_tags(self) -> list[str]:
        """`unite_by` as a list."""
        return _as_list(self.unite_by)

    @property
    def is_drawn(self) -> bool:
        """Whether a group's side depends on the other groups, so that it has to be written down to stay."""
        return self.stratify_by is not None or self.unite_by is not None or self.frozen_from is not None


class SelectSection(Section):
    """How many rows of each side are used, and how evenly."""

    rows: dict[Side, Count] = Field(default_factory=dict, description="Most rows of a side.")
    rows_per_group: dict[Side, Count] = Field(default_factory=dict, description="Most rows of one group.")
    balance_by: str | None = Field(None, description="Tag whose values are balanced when `rows` is binding.")
    balance_power: Share = Field(
        1.0, description="Rows of a value grow with its groups to this power: 0 all alike, 1 proportional."
    )
    mix_by: Literal["rows", "tokens"] = Field(
        "rows",
        description="What the weights of several sources are shares of; tokens are estimated from words.",
    )
    max_repeats: Count = Field(
        1, description="How often a train row may be used to reach its source's weight; 1: never repeated."
    )


def _as_list(value: str | list[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)
