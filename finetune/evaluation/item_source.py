"""Where the items of a suite come from, and how the columns of a foreign file become items. No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from finetune.recipe.schema import Section

DATASET_SPLITS = ("train", "validation", "test", "regressions")
_MOVING = ("main", "master", "HEAD")


class ItemsSection(Section):
    """Where the items come from: a split of a dataset build, a JSONL file, a dataset of the hub, or an lm-eval task.

    With `prompt` or `reference`, the lines or rows may have any columns, and the keys from `prompt` to `check` say how
    an item is made of them. A template names columns as Jinja does, `{{ question }}`; a text without braces is the name
    of a column, whose text is taken as it is.
    """

    spec: str | None = Field(None, description="Dataset spec: a name under data/ or a path.")
    jsonl: str | None = Field(None, description="JSONL file, relative to the suite.")
    hub: str | None = Field(
        None, description="Dataset of the Hugging Face hub (`owner/name`), or a local folder."
    )
    lm_eval: str | None = Field(None, description="Task or group of the lm-evaluation-harness, by name.")
    include_path: str | None = Field(
        None, description="With `lm_eval`: a folder of task files of your own, relative to the suite."
    )
    num_fewshot: Annotated[int, Field(ge=0)] | None = Field(
        None, description="With `lm_eval`: examples in the prompt; none: as the task says."
    )
    split: str = Field("test", description="Split of the dataset that is asked.")
    revision: str | None = Field(None, description="Commit or tag of the hub's dataset; required with `hub`.")
    name: str | None = Field(None, description="Configuration of the hub's dataset, where it has several.")
    prompt: str | None = Field(None, description="Template or column of the question, as one user turn.")
    reference: str | None = Field(None, description="Template or column of the right answer, or of the text.")
    system: str | None = Field(None, description="Template or column of the item's own system message.")
    id: str | None = Field(None, description="Template or column of the item's name; none: its number.")
    group: str | None = Field(None, description="Template or column of what related items share.")
    tags: dict[str, str] = Field(default_factory=dict, description="Tag: template or column.")
    check: dict[str, str] = Field(
        default_factory=dict,
        description="Key of the item's `check`: a Jinja expression, e.g. `choices: choices.text`, `tests: test_code`.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ItemsSection:
        given = [key for key in ("spec", "jsonl", "hub", "lm_eval") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError("give one of spec (with split), jsonl, hub (with revision) or lm_eval")
        if self.spec is not None and self.split not in DATASET_SPLITS:
            raise ValueError(f"split: '{self.split}' is none of {', '.join(DATASET_SPLITS)}")
        if self.hub is not None and (not self.revision or self.revision in _MOVING):
            raise ValueError(
                "revision: a dataset of the hub needs a commit or tag, so that the items can never change"
            )
        if self.made_of_columns and self.spec is not None:
            raise ValueError("prompt, reference, …: the rows of a dataset build are items already")
        if self.made_of_columns and self.reference is None:
            raise ValueError("reference: name the column or template of the right answer")
        if self.hub is not None and not self.made_of_columns:
            raise ValueError(
                "reference: name the columns of the dataset that make an item: prompt, reference, …"
            )
        if self.lm_eval is None and (self.include_path is not None or self.num_fewshot is not None):
            raise ValueError("include_path and num_fewshot belong to lm_eval")
        return self

    @property
    def made_of_columns(self) -> bool:
        """Whether items are made of any columns by the templates of this section."""
        keys = ("prompt", "reference", "system", "id", "group", "tags", "check")
        return any(getattr(self, key) for key in keys)


class RawSection(Section):
    """How the parts of a prompt without chat template are joined."""

    answer_separator: str = Field(
        " ", description="Between a prompt and its answer, unless the prompt ends in white space."
    )
    example_separator: Annotated[str, Field(min_length=1)] = Field(
        "\n\n", description="Between examples; also ends an answer when decoding.stop is empty."
    )
