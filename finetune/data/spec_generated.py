"""The parts of a dataset spec that say how rows are generated: who answers, how, who judges, and which answers are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.data.spec_curate import JudgeSection
from finetune.recipe.constraints import refused
from finetune.recipe.section import Count, Section, Share

# By the share of a prompt's answers that pass: none, up to a third, up to two thirds, less than all, all.
Difficulty = Literal["never", "hard", "medium", "easy", "always"]
DIFFICULTIES: tuple[Difficulty, ...] = ("never", "hard", "medium", "easy", "always")


class AnsweringModel(Section):
    """Who answers the prompts: the model that a run has tuned, or a base model."""

    run: str | None = Field(
        None,
        description="`runs/<id>`, or `runs/<recipe name>` for that recipe's newest finished run: its tuned model.",
    )
    id: str | None = Field(None, description="A base model, as `model.id` of a recipe; in place of `run`.")
    revision: str | None = Field(None, description="Commit or tag of a hub id.")
    dtype: Literal["bf16", "fp32"] = Field("fp32", description="Compute type of a base model.")
    licence: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="What the model's terms allow to be done with its answers, e.g. `Apache-2.0`; none: unknown, and the dataset's card "
        "warns.",
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> AnsweringModel:
        if (self.run is None) == (self.id is None):
            raise refused("run", "give either run or id", fix="run: runs/<recipe name>")
        return self


class SamplingSection(Section):
    """How answers are drawn. Each has a generator of its own, from the seed, the prompt and its number."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(17, description="Of sampling and of what is kept.")
    answers: Count = Field(4, description="Answers to each prompt; pairs need two or more.")
    temperature: Annotated[float, Field(gt=0, le=10)] = Field(1.0, description="Of the distribution.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Sample from the fewest tokens that together are this likely."
    )
    max_new_tokens: Count = Field(256, description="Longest answer; a longer one is cut, and fails.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Texts that end the answer and are cut off; end of turn always does.",
    )


class HassilVerifier(Section):
    """An answer passes when its JSON names the intent and exactly the slots that hassil hears in the utterance."""

    kind: Literal["hassil"]


class FunctionVerifier(Section):
    """A Python function that is given a row as stored, with the answer as its last turn, and says whether it passes."""

    kind: Literal["function"]
    function: str = Field(description="`package.module:function`, or `file.py:function` beside the spec.")
    threshold: float = Field(0.5, description="Where the function gives a score: passed from this on.")


class CommandVerifierSection(Section):
    """A program that reads a row as JSON on each line of its input and answers with a line each."""

    kind: Literal["command"]
    command: str | list[str] = Field(description="The program and its arguments.")
    threshold: float = Field(0.5, description="Where the command gives a score: passed from this on.")
    seconds_per_row: Annotated[float, Field(gt=0)] = Field(30.0, description="Patience with one answer.")


class JudgeVerifierSection(JudgeSection):
    """A model behind a server that scores each answer by a criterion in words; it sees the prompt's own answer as `reference`."""

    kind: Literal["judge"]
    threshold: float = Field(0.5, description="Passed from this score on.")
    seconds_per_row: Annotated[float, Field(gt=0)] = Field(30.0, description="Patience with one reply.")


AnswerVerifier = Annotated[
    HassilVerifier | FunctionVerifier | CommandVerifierSection | JudgeVerifierSection,
    Field(discriminator="kind"),
]


class KeepSection(Section):
    """Which of the answers become rows."""

    rows_per_prompt: Count = Field(1, description="Most rows of one prompt; all differ.")
    filter: bool = Field(
        True,
        description="Keep what passes. Off, with `write: chat`: every answer may become a row and the verdicts are only counted, to "
        "find out whether the filter helps.",
    )
    prefer: Literal["first", "shortest"] = Field(
        "first",
        description="Which of a prompt's answers come first where it has more than `rows_per_prompt`: those drawn first, or the "
        "shortest, which teaches shorter reasoning.",
    )
    format_failures: Literal["keep", "drop"] = Field(
        "keep",
        description="Rejected answers that fail for their form (the verifier's reason begins with `format`): `drop` leaves only "
        "answers that are wrong in content.",
    )
    reference_as_chosen: bool = Field(
        False,
        description="Where no answer passes, the prompt's own answer in its dataset is the chosen one, so that the hardest prompts "
        "stay.",
    )
    difficulty: dict[Difficulty, Share] = Field(
        default_factory=dict,
        description="Share of the prompts kept, by how many of their answers pass: `never`, `hard` (up to a third), `medium` (up to "
        "two thirds), `easy`, `always`; 1 where it is not named.",
    )
    max_failed_share: Share = Field(
        0.1, description="Generation fails when the verifier has no answer to more answers than this."
    )
