"""The `source` section of a dataset spec: where the rows come from and what their keys mean."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from finetune.data.spec_generated import AnsweringModel, AnswerVerifier, KeepSection, SamplingSection
from finetune.errors import did_you_mean
from finetune.recipe.constraints import refused
from finetune.recipe.section import Count, Section, Share

Words = Annotated[list[str], Field(min_length=1)]


class WeighedSource(Section):
    """What every source has."""

    weight: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Share of the train rows, relative to the other sources of a list; none: all rows are used.",
    )
    licence: str | None = Field(
        None, description="SPDX name of this source's own licence; none: that of the spec."
    )
    origin: str | None = Field(
        None, description="Whose it is or where it can be had, for the card; it decides nothing."
    )


class HomeIntentsSource(WeighedSource):
    """Utterances sampled from the sentence templates of the `home-assistant-intents` package."""

    kind: Literal["home_intents"]
    language: str = Field("en", description="Language code of the package.")
    system: str | None = Field(None, description="System message of every row; none: no system message.")
    rows_per_template: Count = Field(4, description="Recognised utterances wanted from each template.")
    min_rows_per_intent: Count = Field(
        40, description="Intents with few templates draw more from each, up to this many in all."
    )
    optional_share: Share = Field(0.5, description="Chance that an optional part is spoken.")
    number_words_share: Share = Field(0.1, description="Chance that a number is spoken as words.")
    areas: Words = Field(description="Values of {area}.")
    floors: Words = Field(description="Values of {floor}.")
    names: dict[str, Words] = Field(description="Values of {name}, by the domain of the device.")
    phrases: dict[str, Words] = Field(
        default_factory=dict, description="Values of each open (wildcard) list, by list name."
    )


Format = Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "text"]
Shape = Literal[
    "auto",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "preference",
    "kto",
    "stepwise",
    "text",
    "tokens",
]

ROLES = ("user", "assistant", "system", "tool", "developer")
# Every key that one of the shapes reads; `shapes.RULES` says which shape reads which.
SHAPE_KEYS = frozenset(
    {
        *("messages", "conversations", "conversation", "tools", "functions", "system", "text"),
        *("instruction", "input", "output", "history", "prompt", "completion", "completions"),
        *("chosen", "rejected", "label", "labels", "input_ids", "attention_mask"),
    }
)
_DELIMITER_NAMES = ("auto", "tab", "\\t")
_NO_DELIMITER = frozenset('"\r\n\0')


class RowsSource(WeighedSource):
    """What every source of a user's own rows has in common: how a record of the file becomes a row."""

    format: Format = Field("auto", description="File format; `auto` looks at the content, then at the name.")
    shape: Shape = Field(
        "auto", description="What the keys mean; `auto` tells it from the keys of each row by itself."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Key of the shape: column of the file, `outer.inner`, or a text with {column} in it.",
    )
    json_columns: list[str] = Field(
        default_factory=list, description="Columns whose text is JSON (conversations in a CSV file)."
    )
    role_key: str | None = Field(None, description="Key of a turn that says who speaks; none: role or from.")
    content_key: str | None = Field(
        None, description="Key of a turn that holds the text; none: content or value."
    )
    roles: dict[str, str] = Field(
        default_factory=dict, description="Name of a role in the file: system, user, assistant or tool."
    )
    system: str | None = Field(None, description="System message put before rows that have none.")
    group_by: str | None = Field(
        None, description="Key whose rows stay on one side; none: the prompt, case and spaces folded."
    )
    tags: list[str] = Field(default_factory=list, description="Keys kept as tags of the row.")
    encoding: str = Field(
        "auto",
        description="Text encoding, e.g. `utf-16` or `cp1252`; `auto` takes UTF-8 or what the bytes show.",
    )
    delimiter: str = Field("auto", description="Character between the columns of CSV; `auto` finds it.")
    quoted: bool = Field(
        True, description="Whether double quotes enclose cells of CSV; false: they are text."
    )
    text_unit: Literal["paragraph", "line", "file"] = Field(
        "paragraph", description="What a row of plain text is; paragraphs end at blank lines."
    )
    max_reject_rate: Share = Field(0.01, description="The build fails when more rows than this are faulty.")

    @model_validator(mode="after")
    def _names_are_known(self) -> RowsSource:
        for key in self.columns.keys() - SHAPE_KEYS:
            raise refused(
                "columns",
                f"no shape has the key '{key}'",
                fix=did_you_mean(key, SHAPE_KEYS) + "; key: column",
            )
        for name, role in self.roles.items():
            if role not in ROLES:
                raise refused(
                    "roles", f"'{name}' stands for the role '{role}'", fix=did_you_mean(role, ROLES)
                )
        if self.delimiter not in _DELIMITER_NAMES and (
            len(self.delimiter) != 1 or self.delimiter in _NO_DELIMITER
        ):
            raise refused(
                "delimiter",
                f"{self.delimiter!r} cannot part columns",
                fix="one character such as ';', or tab, or auto",
            )
        return self


class FilesSource(RowsSource):
    """Rows in files of the user's own; `kind: jsonl` is short for `kind: files` with `format: jsonl`."""

    kind: Literal["files", "jsonl"]
    files: Words = Field(
        description="Files, folders and globs, relative to the spec; compression is recognised by content."
    )

    @model_validator(mode="before")
    @classmethod
    def _format_of_kind(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("kind") == "jsonl":
            return {"format": "jsonl", **given}
        return given


class HubSource(RowsSource):
    """Rows of a dataset on the Hugging Face hub, fixed to one revision."""

    kind: Literal["hub"]
    id: str = Field(description="`owner/name` of the dataset.")
    revision: str = Field(description="Commit or tag, so that the rows can never change.")
    name: str | None = Field(None, description="Configuration; none: the default one, or the only one.")
    split: str = Field("train", description="Split of the dataset that is read.")


class GeneratedSource(RowsSource):
    """Rows that `finetune data generate` makes: a model's answers to the prompts of a dataset, sorted by a verifier."""

    kind: Literal["generated"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="Folder under runs/generated that holds the answers and the rows made of them."
    )
    prompts: str = Field(description="Dataset spec whose train rows are the prompts; no other side is asked.")
    max_prompts: Count | None = Field(None, description="Use only the first prompts of the seeded order.")
    model: AnsweringModel
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    verifier: AnswerVerifier
    write: Literal["pairs", "chat"] = Field(
        "pairs", description="`pairs`: passed is chosen, failed is rejected. `chat`: rows of what passed."
    )
    keep: KeepSection = Field(default_factory=KeepSection)
    report_by: list[str] = Field(
        default_factory=list, description="Tags by whose values the pass rate is reported."
    )
    group_by: str | None = Field(
        "group", description="Key whose rows stay on one side: the prompt's own group."
    )

    @model_validator(mode="after")
    def _fits_what_is_written(self) -> GeneratedSource:
        if self.write == "chat":
            return self
        if self.sampling.answers < 2:
            raise refused(
                "sampling.answers",
                "a pair needs two answers to a prompt",
                fix="set it to 2 or more, or write: chat",
            )
        if not self.keep.filter:
            raise refused(
                "keep.filter", "a pair is what passed and what failed", fix="leave it on, or set write: chat"
            )
        return self

    def settings(self) -> dict[str, Any]:
        """Everything that decides the generated rows; how they are read afterwards does not, nor under which terms."""
        decisive = {"prompts", "max_prompts", "model", "sampling", "verifier", "write", "keep"}
        return self.model_dump(mode="json", include=decisive, exclude={"model": {"licence"}})


Source = Annotated[HomeIntentsSource | FilesSource | HubSource | GeneratedSource, Field(discriminator="kind")]
