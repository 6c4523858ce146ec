"""The `curate` section of a dataset spec: what is looked for in rows, and what becomes of rows in which it is found."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.data.curate.language import LANGUAGES
from finetune.errors import did_you_mean
from finetune.recipe.constraints import refused
from finetune.recipe.section import Count, Section, Share

Threshold = Annotated[float, Field(gt=0.0, le=1.0)]
ReportOrDrop = Literal["off", "report", "drop"]


class NearSection(Section):
    """Rows that say nearly the same, question and answer together."""

    threshold: Threshold = Field(
        0.8, description="Jaccard similarity of the words (3-grams), verified for every pair."
    )
    action: Literal["report", "drop"] = Field("drop", description="`drop` keeps one row of those alike.")


class SemanticSection(Section):
    """Rows that say the same in other words, by embeddings of your own; up to 200,000 rows."""

    embedding: str = Field(
        description="`package.module:function`, `file.py:function` beside the spec, or `model2vec:FOLDER`."
    )
    threshold: Threshold = Field(0.95, description="Cosine similarity.")
    action: Literal["report", "drop"] = Field("drop", description="`drop` keeps one row of those alike.")


class JudgeSection(Section):
    """A model behind a server that speaks the protocol of OpenAI; it is asked for a score from 0 to 1, row by row."""

    server: Annotated[str, Field(pattern=r"^https?://")] = Field(
        description="URL up to the version, such as `http://localhost:8000/v1`."
    )
    model: str = Field(description="Its name on that server.")
    criterion: str = Field(description="What makes a row worth keeping, in words.")
    key_variable: str | None = Field(
        None, description="Environment variable that holds the key of the server; none: it needs no key."
    )


class VerifierSection(Section):
    """A judge of single rows: a function, a command or a model that answers true, false, a score, or an object."""

    name: str = Field(description="What rejected rows are counted under.")
    function: str | None = Field(
        None, description="`package.module:function`, or `file.py:function` beside the spec."
    )
    command: str | list[str] | None = Field(
        None, description="Reads a row as JSON on each line of its input and answers with a line each."
    )
    judge: JudgeSection | None = Field(None, description="A model that is asked.")
    threshold: float = Field(0.5, description="A row is kept from this score on.")
    max_failed_share: Share = Field(
        0.1, description="The build fails when the verifier has no answer to more rows than this."
    )
    seconds_per_row: Annotated[float, Field(gt=0)] = Field(
        30.0, description="Patience with a command or a model."
    )

    @model_validator(mode="after")
    def _one_of_three(self) -> VerifierSection:
        if sum(one is not None for one in (self.function, self.command, self.judge)) != 1:
            raise ValueError("give one of function, command and judge")
        return self


class CurateSection(Section):
    """Each step is off, reports what it finds in the manifest, or leaves rows out and counts them in the ledger."""

    exact_duplicates: ReportOrDrop = Field(
        "drop",
        description="Rows that say the same, character by character. `drop` keeps one; else train rows may repeat, and "
        "evaluation rows still may not.",
    )
    empty_answers: ReportOrDrop = Field("report", description="Answers without a letter, digit or symbol.")
    refusals: ReportOrDrop = Field("report", description="Answers that open with a refusal.")
    contradictions: ReportOrDrop = Field(
        "report", description="The same question with different answers; `drop` leaves out all of them."
    )
    personal_data: Literal["off", "report", "mask", "drop"] = Field(
        "off",
        description="Mail, phone, card and account numbers, keys and passwords; `mask` writes [EMAIL] …",
    )
    region: str | None = Field(
        None, description="ISO country code by whose plan phone numbers without country code are read."
    )
    languages: list[str] = Field(
        default_factory=list,
        description="ISO 639-1 codes; rows whose answer is clearly in another are dropped.",
    )
    verifiers: list[VerifierSection] = Field(
        default_factory=list, description="Rows that one of them rejects are dropped."
    )
    near_duplicates: NearSection | None = Field(None, description="Off unless given.")
    semantic_duplicates: SemanticSection | None = Field(None, description="Off unless given.")
    consistency: Literal["off", "forms", "languages"] = Field(
        "forms",
        description="Measure how many forms the answers have, and which texts stand in many of them; `languages` also "
        "tells the language of each.",
    )
    consistent_within: str | None = Field(
        None, description="Tag whose values are tasks of their own, each with its own form of answer."
    )
    sample_rows: Count = Field(5000, description="Rows that the forms are measured on, at most.")

    @model_validator(mode="after")
    def _codes_are_known(self) -> CurateSection:
        for code in self.languages:
            if code not in LANGUAGES:
                raise refused(
                    "languages", f"'{code}' is no language that is told", fix=did_you_mean(code, LANGUAGES)
                )
        if self.region is not None:
            from phonenumbers import (
                SUPPORTED_REGIONS,
            )  # loads the plans of all countries: only when asked for

            if self.region not in SUPPORTED_REGIONS:
                near = did_you_mean(self.region, SUPPORTED_REGIONS)
                raise refused("region", f"'{self.region}' is no ISO country code", fix=near)
        return self
