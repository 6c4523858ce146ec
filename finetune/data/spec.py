"""The dataset spec: one frozen, closed schema. Keys, defaults and meaning; data/README.md shows an example."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.data.rows import Side
from finetune.data.spec_source import Source
from finetune.recipe.schema import Count, Section, Share


def _default_shares() -> dict[Side, float]:
    return {"train": 0.8, "validation": 0.05, "test": 0.15}


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
    unique_by: str | None = Field(
        None, description="Tag whose values may not be on two sides; the evaluation side keeps them."
    )

    @model_validator(mode="after")
    def _shares_add_up(self) -> SplitSection:
        total = sum(self.shares.values())
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"shares: add up to {total:g}, not to 1")
        if not self.shares.get("train"):
            raise ValueError("shares: train needs a share above 0")
        return self


class SelectSection(Section):
    """How many rows of each side are used, and how evenly."""

    rows: dict[Side, Count] = Field(default_factory=dict, description="Most rows of a side.")
    rows_per_group: dict[Side, Count] = Field(default_factory=dict, description="Most rows of one group.")
    balance_by: str | None = Field(None, description="Tag whose values are balanced when `rows` is binding.")
    balance_power: Share = Field(
        1.0, description="Rows of a value grow with its groups to this power: 0 all alike, 1 proportional."
    )


class DatasetSpec(Section):
    """One YAML that fixes a dataset build."""

    dataset: Literal[1] = Field(1, description="Version of this schema.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="Name of the dataset."
    )
    description: str = Field("", description="One sentence.")
    licence: str = Field("unknown", description="SPDX name, kept in the manifest.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(17, description="Seed of every draw.")
    source: Source
    split: SplitSection = Field(default_factory=SplitSection)
    select: SelectSection = Field(default_factory=SelectSection)
