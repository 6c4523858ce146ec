"""Who teaches: a model of this machine, tuned by a run or not, or one behind a server. `distil.teacher` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.recipe.constraints import refused
from finetune.recipe.section import Section


class TeacherServerSection(Section):
    """An OpenAI-compatible server that tells the log-probabilities of a prompt's tokens, as vLLM does."""

    url: Annotated[str, Field(pattern=r"^https?://")] = Field(
        description="Its address up to the version, e.g. `http://localhost:8000/v1`."
    )
    model: Annotated[str, Field(min_length=1)] = Field(description="Its name of the teacher.")
    key_variable: str | None = Field(None, description="Environment variable that holds the API key.")


class TeacherSection(Section):
    """The model that teaches: what a run has tuned, or a model, with an adapter on it where one is named."""

    run: str | None = Field(
        None,
        description="`runs/<id>`, or `runs/<recipe name>` for that recipe's newest finished run: its tuned model.",
    )
    id: str | None = Field(None, description="A model, as `model.id`; in place of `run`.")
    revision: str | None = Field(None, description="Commit or tag of a hub id.")
    adapter: str | None = Field(None, description="Folder of an adapter that lies on the model `id`.")
    server: TeacherServerSection | None = Field(
        None,
        description="Where the teacher runs, when it is not here; `id` then gives its tokenizer and chat template, and no weights are "
        "read. The server is taken at its word that it serves this model.",
    )
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="Type of the teacher's weights and compute.")
    quantize: Literal["none", "nf4", "fp4", "int8"] = Field(
        "none",
        description="Quantization of the teacher's frozen weights; with `run` it is that of its training.",
    )
    licence: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="What the teacher's terms allow to be done with what it says, e.g. `Apache-2.0`; none: unknown, and report "
        "and model card warn.",
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> TeacherSection:
        if (self.run is None) == (self.id is None):
            raise refused("run", "give either run or id", fix="run: runs/<recipe name>")
        for key in ("revision", "adapter"):
            if self.run is not None and getattr(self, key) is not None:
                raise refused(
                    key, "a run knows its own base and adapter", fix=f"leave out {key}, or give id, not run"
                )
        if self.server is not None:
            self._check_server()
        if self.run is not None and self.quantize != "none":
            raise refused(
                "quantize",
                "a run's model is held as it was trained",
                fix="leave out quantize, or name base and adapter by id and adapter",
            )
        return self

    def _check_server(self) -> None:
        """Of a teacher behind a server only tokenizer and template are read here."""
        if self.run is not None:
            raise refused(
                "server",
                "a run's model is here; a server is for one that is not",
                fix="name the served model by id, or use `finetune distil cache --server` for the run's own model",
            )
        for key in ("adapter", "quantize", "dtype"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise refused(
                    key, "the server decides how the teacher is held", fix=f"leave out distil.teacher.{key}"
                )
