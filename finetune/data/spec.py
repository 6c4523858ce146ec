"""The dataset spec: one frozen, closed schema. Keys, defaults and meaning; data/README.md shows an example."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.data.spec_curate import CurateSection
from finetune.data.spec_source import Source
from finetune.data.spec_split import SelectSection, SplitSection
from finetune.recipe.section import Section


class DatasetSpec(Section):
    """One YAML that fixes a dataset build."""

    dataset: Literal[1] = Field(1, description="Version of this schema.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="Name of the dataset."
    )
    description: str = Field("", description="One sentence.")
    licence: str = Field(
        "unknown", description="SPDX name, kept in the manifest and the card; a source may state its own."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(17, description="Seed of every draw.")
    source: Source | Annotated[list[Source], Field(min_length=1)] = Field(
        description="Where the rows come from: one source, or a list whose members may have a `weight`."
    )
    marks: str | None = Field(
        None,
        description="File of keep, drop and fix marks that `finetune data review` writes, relative to the spec.",
    )
    curate: CurateSection = Field(default_factory=CurateSection)
    split: SplitSection = Field(default_factory=SplitSection)
    select: SelectSection = Field(default_factory=SelectSection)

    @model_validator(mode="after")
    def _all_weighted_or_none(self) -> DatasetSpec:
        weights = [source.weight for source in self.sources]
        if None in weights and any(weight is not None for weight in weights):
            raise ValueError("source: give every source a weight, or none")
        return self

    @property
    def sources(self) -> list[Source]:
        """`source` as a list."""
        return list(self.source) if isinstance(self.source, list) else [self.source]

    @property
    def weights(self) -> list[float] | None:
        """The weight of each source; None: all rows are used."""
        weights = [source.weight for source in self.sources if source.weight is not None]
        return weights or None
