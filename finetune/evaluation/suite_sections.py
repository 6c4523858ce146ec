"""The parts of a suite's schema: examples, decoding, metrics, slices, early stopping. Each is frozen and closed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from finetune.recipe.schema import Count, Section


class ZeroShotSection(Section):
    """The untuned model, told what to do."""

    system: str | None = Field(None, description="System message; none: the item's own messages as they are.")


class FewShotSection(Section):
    """The untuned model, told and shown: the honest opponent of a tuned one."""

    k: Count = Field(8, description="Examples shown, as turns before the question.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(17, description="Seed of the draw.")
    system: str | None = Field(None, description="System message; none: that of zero_shot.")
    split: str = Field("train", description="Split of the items' dataset that the examples are drawn from.")
    jsonl: str | None = Field(
        None, description="JSONL of examples, as an items file, relative to the suite; none: the split."
    )
    spread_by: str | None = Field(None, description="Tag whose values the examples spread over, e.g. intent.")


class DecodingSection(Section):
    """How answers are made: greedily, or sampled, several times an item if wished."""

    max_new_tokens: Count = Field(128, description="Longest answer; a longer one ends with `length`.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Texts that end the answer and are cut off; end of turn always does.",
    )
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = Field(
        0.0, description="0: greedy, the most likely token each time; above 0: sampled."
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="Sample from the fewest tokens that together are this likely."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        17, description="Of sampling; each answer has a generator of its own, from seed, item and repeat."
    )
    repeats: Count = Field(1, description="Answers to each item; scores are averaged per item first.")

    @model_validator(mode="after")
    def _sampling_fits(self) -> DecodingSection:
        if self.temperature == 0.0 and self.repeats > 1:
            raise ValueError(
                f"repeats: {self.repeats} greedy answers to one item are the same answer; "
                "set temperature above 0, or repeats to 1"
            )
        if self.temperature == 0.0 and self.top_p < 1.0:
            raise ValueError(
                "top_p: greedy decoding does not sample; set temperature above 0, or leave top_p out"
            )
        return self

    @property
    def is_sampled(self) -> bool:
        return self.temperature > 0.0

    def of_one_answer(self) -> dict[str, Any]:
        """What decides a single answer: how many there are does not, nor does the seed of what is not sampled."""
        left_out = {"repeats"} if self.is_sampled else {"repeats", "temperature", "top_p", "seed"}
        return self.model_dump(mode="json", exclude=left_out)


class ScorerSection(Section):
    """One metric."""

    scorer: str = Field(description="Name of a scorer.")
    metric: str | None = Field(None, description="Name of the metric; none: the scorer's.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="The scorer's parameters.")

    @property
    def name(self) -> str:
        return self.metric or self.scorer


class SlicesSection(Section):
    """Parts of the items that are looked at by themselves, declared before the run."""

    by: list[str] = Field(
        default_factory=list,
        description="Tags of the items; also `source` and `length` (thirds by question length).",
    )
    min_items: Count = Field(
        8, description="Values with fewer items are pooled into one slice: alone they could show nothing."
    )
    correction: Literal["holm", "bh"] = Field(
        "holm", description="How p-values are corrected for the number of slices."
    )


class StopEarlySection(Section):
    """Ask the tuned model block by block and stop when the items seen are enough, with the promise of 1 - confidence kept.

    Declared here, before any run, because the verdict then comes from the e-process alone: choosing between it and
    the test of a fixed number of items after a look at the answers would be a second chance of a false verdict.
    """

    block_items: Count = Field(25, description="Items answered between two looks; whole clusters.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(17, description="Of the order of the clusters.")
