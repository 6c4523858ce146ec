"""The recipe: one frozen, closed schema. Every key has a type, a default, a unit where it has one, and a sentence.

The reference page in docs/ is generated from these descriptions; nothing else describes a key.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from finetune.recipe.adapter_section import AdapterSection
from finetune.recipe.agreement import check_preference_agrees, check_sections_agree
from finetune.recipe.constraints import refused
from finetune.recipe.distil_section import DistilSection, check_distil_agrees
from finetune.recipe.model_section import ModelSection
from finetune.recipe.preference_section import PREFERENCE_METHODS
from finetune.recipe.section import Count, Section, Share
from finetune.recipe.train_section import TrainSection

Override = str | int | float | bool | list[str] | None


class DataSection(Section):
    """The rows to learn from."""

    spec: str = Field(description="Dataset spec: a name under data/ or a path.")
    max_tokens: Count = Field(1024, description="Longest row after the chat template, in tokens.")
    long_rows: Literal["error", "drop", "truncate_prompt", "split"] = Field(
        "error", description="What happens to a longer row; an answer is never cut."
    )
    train_on: Literal["all", "last", "each"] = Field(
        "all", description="Assistant turns that carry loss; `each`: all, every one in a row of its own."
    )
    max_train_rows: Count | None = Field(None, description="Use only the first rows of the seeded order.")
    max_validation_rows: Count | None = Field(None, description="Validation rows used for the loss curve.")


BaselineArm = Literal["zero_shot", "few_shot", "start"]


def _both_baselines() -> list[BaselineArm]:
    return ["zero_shot", "few_shot"]


Price = Annotated[float, Field(ge=0.0)]


class PricesSection(Section):
    """What answers cost, in any one currency: your own hardware by the hour, or tokens by the million."""

    per_hour: Price | None = Field(
        None, description="Price of the machine for an hour; then the time of an answer is what it costs."
    )
    input_per_million: Price | None = Field(None, description="Price of a million prompt tokens.")
    output_per_million: Price | None = Field(
        None, description="Price of a million output tokens; none: as for prompt tokens."
    )
    baseline_input_per_million: Price | None = Field(
        None,
        description="Prompt tokens of the baseline, where it is priced otherwise; none: as the tuned model.",
    )
    baseline_output_per_million: Price | None = Field(
        None, description="Output tokens of the baseline; none: as its prompt tokens."
    )
    tuning: Price = Field(
        0.0, description="Price of the tuning besides the machine's hours: data, people, a service."
    )
    serving_per_month: Price = Field(0.0, description="Fixed price of keeping the tuned model in service.")
    months: Annotated[float, Field(gt=0)] = Field(
        12.0, description="How long the tuned model will be used; the tuning is paid off over this time."
    )

    @model_validator(mode="after")
    def _one_kind_of_price(self) -> PricesSection:
        if self.per_hour is not None and self.input_per_million is not None:
            raise refused(
                "input_per_million",
                "an answer is priced by the machine's hours or by its tokens, not by both",
                fix="leave out per_hour or input_per_million",
            )
        for side in ("", "baseline_"):
            output = f"{side}output_per_million"
            if getattr(self, output) is not None and getattr(self, f"{side}input_per_million") is None:
                raise refused(
                    output,
                    "output tokens have a price, prompt tokens have none",
                    fix=f"add {side}input_per_million",
                )
        return self


class EvalSection(Section):
    """How the tuning is judged. Fixed before training; a recipe without a suite is refused."""

    suites: Annotated[list[str], Field(min_length=1)] = Field(
        description="Suites: names under eval/, paths, or lm_eval:TASK; the first decides the verdict."
    )
    baselines: Annotated[list[BaselineArm], Field(min_length=1)] = Field(
        default_factory=_both_baselines,
        description="Arms of the model before this training, run and stored first. `start`: asked exactly as the tuned one, for a "
        "run that goes on from another one.",
    )
    against: BaselineArm = Field("few_shot", description="The baseline that the verdict is taken against.")
    batch_size: Count = Field(32, description="Sequences decoded together; changes speed, not results.")
    dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Compute type of evaluation, the same for every arm."
    )
    max_items: Count | None = Field(
        None, description="Use only the first items of each suite (for a smoke run)."
    )
    correction: Literal["holm", "bh", "all-must-pass"] = Field(
        "holm",
        description="Where several task suites claim an improvement: `holm` or `bh` corrects their p-values for their number; "
        "`all-must-pass` claims one only if every task suite improves, which needs no correction.",
    )
    prices: PricesSection = Field(default_factory=PricesSection)

    @model_validator(mode="after")
    def _against_is_run(self) -> EvalSection:
        if self.against not in self.baselines:
            raise refused(
                "against",
                f"'{self.against}' is not among the baselines that are run ({', '.join(self.baselines)})",
                fix="add it to eval.baselines, or choose one of them",
            )
        return self


class Recipe(Section):
    """One YAML that fixes a run."""

    recipe: Literal[1] = Field(1, description="Version of this schema.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="Name of the run; the file's stem by default."
    )
    description: str = Field("", description="One sentence for the report.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(17, description="Seed of every generator.")
    model: ModelSection
    adapter: AdapterSection = Field(default_factory=AdapterSection)
    data: DataSection
    train: TrainSection = Field(default_factory=TrainSection)
    distil: DistilSection | None = Field(None, description="Who teaches; with `train.method: distil`.")
    eval: EvalSection
    profile: str | None = Field(None, description="Name of an entry of `profiles` to apply.")
    profiles: dict[str, dict[str, Override]] = Field(
        default_factory=dict, description="Named sets of dotted overrides, e.g. a smoke run."
    )

    @property
    def learns_preferences(self) -> bool:
        """Whether answers are compared or judged; those to one prompt then lie in one row."""
        return self.train.method in PREFERENCE_METHODS

    @property
    def attention(self) -> Literal["document", "sdpa", "eager"]:
        """`model.attention` with `auto` resolved: documents that lie in one row are attended one by one."""
        if self.model.attention != "auto":
            return self.model.attention
        one_row = self.train.packing or self.learns_preferences
        return "document" if one_row else "sdpa"

    @property
    def shares_prefixes(self) -> bool:
        """Whether packs compute common beginnings of their rows once, on models whose layers allow it."""
        train = self.train
        random = self.adapter.dropout or train.model_dropout or train.loss.neftune_alpha
        return bool(
            train.share_prefixes
            and train.packing
            and train.method == "sft"
            and self.attention == "document"
            and not random
        )

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        check_sections_agree(self.model, self.adapter, self.train)
        check_preference_agrees(
            self.adapter, self.train, long_rows=self.data.long_rows, train_on=self.data.train_on
        )
        check_distil_agrees(self.model, self.adapter, self.train, self.distil, long_rows=self.data.long_rows)
        return self


class RecipeFile(Recipe):
    """One YAML that fixes a run, or that says in what a run differs from another one."""

    model_config = ConfigDict(title="Recipe")

    extends: str | None = Field(
        None, description="Recipe to start from: a path from this file, or a shipped name."
    )

    def resolved(self) -> Recipe:
        """The recipe alone, validated as it is, once what it extends has been read."""
        content = {name: getattr(self, name) for name in Recipe.model_fields}
        return Recipe.model_construct(self.model_fields_set - {"extends"}, **content)


__all__ = [
    "AdapterSection",
    "Count",
    "DataSection",
    "DistilSection",
    "EvalSection",
    "ModelSection",
    "PricesSection",
    "Recipe",
    "RecipeFile",
    "Section",
    "Share",
    "TrainSection",
]
