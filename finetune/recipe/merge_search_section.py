"""The search over merges: one frozen, closed schema. Which models, which merges of them, and how a winner is chosen."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.recipe.constraints import refused
from finetune.recipe.section import Count, Section

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]
BASE = "base"
"""What the untuned model is called beside the parents."""


class ParentSection(Section):
    """One model that the merges are made of."""

    name: Name = Field(description="What tables call it.")
    recipe: str | None = Field(
        None, description="A training recipe: its run is taken, and made first where there is none."
    )
    model: str | None = Field(
        None, description="A run, an adapter's folder, a model's folder, builtin:NAME or a hub id."
    )

    @model_validator(mode="after")
    def _one_origin(self) -> ParentSection:
        if (self.recipe is None) == (self.model is None):
            raise ValueError("give one of recipe and model")
        if self.name == BASE:
            raise ValueError(f"name: '{BASE}' is what the untuned model is called; choose another name")
        return self


class CandidateSection(Section):
    """Merges by one merge recipe: one for each list of weights and each value of the grid."""

    merge: str = Field(
        description="A merge recipe by shipped name (merge/ties) or path; its models are the parents."
    )
    weights: list[list[float]] | None = Field(
        None, description="Lists of one weight a parent, in their order; none: as the merge recipe says."
    )
    over: dict[str, list[float]] = Field(
        default_factory=dict,
        description="Dotted key of the merge recipe: values to try, e.g. parameters.lambda.",
    )


class ChooseSection(Section):
    """How the winner is found, on the validation side alone."""

    best: list[str] = Field(
        default_factory=list,
        description="Suites whose primary metric, averaged, must be best; none: the suites with role task.",
    )
    lose_at_most: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="Suite: how much worse than the best parent a merge may be there, in its primary metric's unit.",
    )


class ClaimSection(Section):
    """One thing that the winner has to show on test."""

    suite: str = Field(description="Name of a suite.")
    against: str = Field(description="Name of a parent, or base.")
    require: Literal["improvement", "no-regression"] = Field(
        "no-regression", description="A gain, or that a loss beyond the margin is excluded."
    )
    margin: Annotated[float, Field(ge=0)] | None = Field(None, description="None: that of the suite.")


class MergeSearch(Section):
    """One YAML that fixes a search over merges."""

    merge_search: Literal[1] = Field(description="Version of this schema.")
    name: Name = Field(description="Name; part of the folder's.")
    description: str = Field("", description="One sentence.")
    base: str = Field(
        description="The model that all parents were tuned from: builtin:NAME, a folder or a hub id."
    )
    parents: Annotated[list[ParentSection], Field(min_length=1)] = Field(
        description="The models that are merged."
    )
    candidates: Annotated[list[CandidateSection], Field(min_length=1)] = Field(
        description="Which merges are tried."
    )
    suites: Annotated[list[str], Field(min_length=1)] = Field(
        description="What every model is asked: tasks, and what must not be lost (roles regression, forgetting)."
    )
    arm: Literal["tuned", "zero_shot", "few_shot"] = Field(
        "tuned",
        description="How parents and merges are asked: `tuned` as they were trained; the base gets its best prompt.",
    )
    dtype: Literal["bf16", "fp16", "fp32"] | None = Field(
        None, description="Type of the merged weights; none: the base's. They are summed in fp32."
    )
    eval_dtype: Literal["bf16", "fp32"] = Field("fp32", description="Type that answers are computed in.")
    batch_size: Count = Field(32, description="Rows answered at a time.")
    max_items: Count | None = Field(None, description="Only the first items of each side, for a trial.")
    choose: ChooseSection = Field(default_factory=ChooseSection)
    confirm: list[ClaimSection] = Field(
        default_factory=list,
        description="Claims that decide the verdict on test; none: in no suite worse than its best parent.",
    )

    @model_validator(mode="after")
    def _names_fit(self) -> MergeSearch:
        names = [parent.name for parent in self.parents]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise refused(
                "parents", f"two parents are called '{repeated}'", fix="give each a name of its own"
            )
        known = [*names, BASE]
        for claim in self.confirm:
            if claim.against not in known:
                raise refused(
                    "confirm",
                    f"'{claim.against}' is neither a parent nor the base",
                    fix=f"one of: {', '.join(known)}",
                )
        return self
