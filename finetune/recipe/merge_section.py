"""The merge recipe: one frozen, closed schema. A superset of mergekit's YAML, so that such files are read as they are.

A file with `merge: 1` is ours and means the `paper` dialect; one without is taken for mergekit's and means `mergekit`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from finetune.recipe.merge_methods import Dialect, MethodName
from finetune.recipe.section import Count, Section

Value = int | float | bool


class Conditional(Section):
    """A value for the tensors whose name contains `filter`; without one, or with '*', for all."""

    value: Value | list[Value] = Field(description="A number, or a gradient over the layers.")
    filter: str | None = Field(None, description="Part of a tensor's name.")


Setting = Value | Conditional | list[Value | Conditional]
"""A value, a gradient over the layers (a list of numbers), or conditional values of which the first that fits counts."""


class Parameters(Section):
    """Parameters of methods; which of them a method reads is in `recipe/merge_methods.py`."""

    weight: Setting | None = Field(None, description="Weight of a model.")
    density: Setting | None = Field(None, description="Share of a delta that is kept.")
    gamma: Setting | None = Field(None, description="Breadcrumbs: share of the largest magnitudes dropped.")
    epsilon: Setting | None = Field(
        None, description="DELLA: half the window of probabilities around density."
    )
    scale: Setting | None = Field(None, description="Passthrough: factor of the tensor.")
    t: Setting | None = Field(None, description="SLERP: 0 is the base, 1 the model.")
    lambda_: Setting | None = Field(None, alias="lambda", description="Factor of the fused delta.")
    normalize: Setting | None = Field(None, description="Divide by the sum of weights.")
    rescale: Setting | None = Field(
        None, description="Scale what a sparsified delta has left; by default true for DARE and DELLA."
    )
    select_topk: Setting | None = Field(None, description="SCE: share of elements selected by variance.")
    filter_wise: Setting | None = Field(None, description="Model stock: an angle for each row.")
    nuslerp_row_wise: Setting | None = Field(None, description="NuSLERP: columns as vectors.")
    nuslerp_flatten: Setting | None = Field(None, description="NuSLERP: the whole tensor as one vector.")
    max_iter: Setting | None = Field(None, description="Karcher: most iterations.")
    tol: Setting | None = Field(None, description="Karcher: length of a step at which it stops.")
    int8_mask: Setting | None = Field(
        None, description="mergekit files only: a type inside mergekit that changes no value."
    )

    @field_validator("density", "gamma", "select_topk", "t", "epsilon")
    @classmethod
    def _is_share(cls, setting: Setting | None) -> Setting | None:
        for value in numbers(setting):
            if not 0 <= value <= 1:
                raise ValueError(f"every value must lie between 0 and 1, {value:g} does not")
        return setting

    def get(self, name: str) -> Setting | None:
        """A parameter by the name it has in a file."""
        value: Setting | None = getattr(self, "lambda_" if name == "lambda" else name)
        return value

    @property
    def given(self) -> list[str]:
        """Names, as in a file, of everything that is set."""
        return [
            field.alias or name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) is not None
        ]


def numbers(setting: Setting | None) -> list[float]:
    """Every number anywhere in a setting."""
    if setting is None:
        return []
    if isinstance(setting, Conditional):
        return numbers(setting.value)  # type: ignore[arg-type]
    if isinstance(setting, list):
        return [number for part in setting for number in numbers(part)]
    return [float(setting)]


def _plain_model(name: str) -> str:
    if "+" in name and not Path(name).expanduser().exists():
        raise ValueError(
            f"'{name}' names an adapter after '+'; merge it first (finetune merge adapter) and name the merged folder"
        )
    return name


class _Named(Section):
    model: str = Field(description="A folder, builtin:NAME, or a hub id (ID@REVISION).")
    parameters: Parameters = Field(default_factory=Parameters)

    @field_validator("model")
    @classmethod
    def _no_adapter(cls, name: str) -> str:
        return _plain_model(name)


class ModelInput(_Named):
    """One model of a merge of whole models."""


class SliceSource(_Named):
    """Some layers of one model."""

    layer_range: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)] = Field(
        description="First layer, and the layer after the last."
    )


class OutputSlice(Section):
    """Layers of the result, merged from equally many layers of each source."""

    sources: Annotated[list[SliceSource], Field(min_length=1)]
    base_model: str | None = Field(None, description="Instead of the recipe's base_model.")
    parameters: Parameters = Field(default_factory=Parameters)


class TokenizerSection(Section):
    """The tokenizer of the result."""

    source: str = Field("union", description="union, base, or a model of the merge.")
    pad_to_multiple_of: Count | None = Field(
        None, description="Add mean rows to the embeddings up to a multiple."
    )


class MergeRecipe(Section):
    """One YAML that fixes a merge of models."""

    merge: Literal[1] | None = Field(None, description="Version of this schema; without it: a mergekit file.")
    description: str = Field("", description="One sentence.")
    merge_method: MethodName = Field(description="How tensors are merged.")
    dialect: Dialect | None = Field(
        None, description="Whose definition of the method; paper, or mergekit in a mergekit file."
    )
    base_model: str | None = Field(
        None, description="What deltas start from, and whose configuration and tokenizer are kept."
    )
    models: Annotated[list[ModelInput], Field(min_length=1)] | None = Field(
        None, description="The models; or name them with --model."
    )
    slices: Annotated[list[OutputSlice], Field(min_length=1)] | None = Field(
        None, description="Layer by layer, instead of `models`."
    )
    parameters: Parameters = Field(default_factory=Parameters, description="For all models and layers.")
    dtype: Literal["bfloat16", "float16", "float32", "bf16", "fp16", "fp32"] | None = Field(
        None, description="Type of the written weights; by default as the base's lie on disk. Sums are fp32."
    )
    out_dtype: Literal["bfloat16", "float16", "float32", "bf16", "fp16", "fp32"] | None = Field(
        None, description="mergekit's name for the written type; wins over dtype."
    )
    tokenizer_source: str | None = Field(None, description="Short for tokenizer.source.")
    tokenizer: TokenizerSection | None = Field(
        None, description="By default all models must have the same tokenizer."
    )
    chat_template: str | None = Field(None, description="A template that replaces the base's.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(17, description="Seed of DARE and DELLA.")

    @field_validator("chat_template")
    @classmethod
    def _is_template(cls, text: str | None) -> str | None:
        if text is not None and "{" not in text:
            raise ValueError("write the template itself; names of templates and 'auto' are not read")
        return text

    @property
    def spoken(self) -> Dialect:
        """The dialect in force."""
        return self.dialect or ("paper" if self.merge == 1 else "mergekit")
