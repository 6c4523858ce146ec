"""Answers written while the training runs, to look at; they change nothing of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from finetune.recipe.section import Count, Section


class SamplesSection(Section):
    """Answers to fixed prompts, written every so many steps: in events.jsonl, in `finetune watch`, in the report."""

    every_steps: Count = Field(
        description="Optimizer steps between them; also before the first and after the last step."
    )
    prompts: Count | Annotated[list[str], Field(min_length=1)] = Field(
        4,
        description="How many prompts of the validation rows (without any: of the train rows), or your own, as a list.",
    )
    max_new_tokens: Count = Field(64, description="Longest answer, in tokens.")
