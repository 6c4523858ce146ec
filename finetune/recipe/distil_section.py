"""Distillation: who teaches, what the student learns from it, and what the student is. The section `distil` of a recipe."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.recipe.adapter_section import VIRTUAL_TOKENS, AdapterSection
from finetune.recipe.constraints import refused
from finetune.recipe.model_section import ModelSection
from finetune.recipe.section import Count, Section, Share
from finetune.recipe.teacher_section import TeacherSection
from finetune.recipe.train_section import TrainSection

DivergenceName = Literal[
    "forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation", "uld"
]
WEIGHED: tuple[DivergenceName, ...] = ("jsd", "skew_forward_kl", "skew_reverse_kl")
LEAST_WEIGHT = 1e-3  # nearer to 0 or 1 a mixture is one of its two parts in fp32
Temperature = Annotated[float, Field(gt=0, le=20)]
_LAYERS = re.compile(r"layers\[\s*(\d+(?:\s*,\s*\d+)*)\s*,?\s*\]")


class DistilLossSection(Section):
    """What is minimised over the target tokens: (1 - answer_weight) · T² · divergence + answer_weight · cross-entropy."""

    kind: DivergenceName = Field(
        "forward_kl",
        description="Divergence between teacher p and student q: KL(p‖q), KL(q‖p), the generalised Jensen-Shannon divergence, KL "
        "of p or q to a mixture (skew), or half the L1 distance. `uld`, with `alignment: text`: the L1 distance of the "
        "probabilities in descending order, whatever their tokens.",
    )
    temperature: Temperature = Field(
        1.0, description="T: logits of both are divided by it, and the divergence is multiplied by T²."
    )
    beta: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="β of `jsd`, the weight of the teacher in the mixture (none: 0.5), or α of the skew kinds, the share of the first "
        "distribution in it (none: 0.1; 0: plain KL).",
    )
    answer_weight: Share = Field(
        0.0, description="Weight of the answers' own cross-entropy; the rest is the divergence's."
    )

    @model_validator(mode="after")
    def _weight_of_the_kind(self) -> DistilLossSection:
        if self.beta is None:
            return self
        if self.kind not in WEIGHED:
            raise refused(
                "beta", f"{self.kind} has no mixture; it is for {', '.join(WEIGHED)}", fix="leave out beta"
            )
        least = 0.0 if self.kind != "jsd" and self.beta == 0.0 else LEAST_WEIGHT
        if not least <= self.beta <= 1.0 - LEAST_WEIGHT:
            raise refused(
                "beta",
                f"{self.kind} with {self.beta} compares nothing: it has to be from {LEAST_WEIGHT} to {1.0 - LEAST_WEIGHT}",
                fix="for what jsd tends to at 0 and 1, set kind: forward_kl or reverse_kl",
            )
        return self


class TeacherCacheSection(Section):
    """What is kept of the teacher's distribution at every target token."""

    k: Count = Field(
        64, description="Most likely tokens kept with their logits; the rest is one bucket of known mass."
    )
    dtype: Literal["fp16", "fp32"] = Field("fp16", description="Type of the kept logits.")
    temperatures: list[Temperature] = Field(
        default_factory=list,
        description="Temperatures whose log-normaliser is kept, so that a later run may use any of them; the loss's own is always "
        "among them.",
    )
    coverage: Share = Field(
        0.0, description="The least mean probability that the k tokens together must have; less is an error."
    )


class OnPolicySection(Section):
    """How the student answers the prompts that it then learns from, with `way: on_policy`."""

    share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="λ of GKD: share of the micro-batches that the student answers; the others keep the dataset's answers.",
    )
    temperature: Temperature = Field(1.0, description="Of the student's sampling.")
    max_new_tokens: Count = Field(
        128, description="Longest sampled answer; a longer one is cut and learnt from as it is."
    )


class StudentSection(Section):
    """What the student is before it learns."""

    init: str = Field(
        "model",
        description="`model`: that of `model.id`, with the adapter of `adapter.start`. `layers[0, 3, 6]`: cut from the teacher, its "
        "embeddings, head and these layers, counted from 0; `model.id` is then the teacher's base.",
    )

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The teacher's layers that the student has; None when it is not cut from it."""
        found = _LAYERS.fullmatch(self.init)
        return tuple(int(number) for number in found[1].split(",")) if found else None

    @model_validator(mode="after")
    def _ascending(self) -> StudentSection:
        if self.init == "model":
            return self
        layers = self.layers
        if layers is None:
            raise refused(
                "init",
                f"'{self.init}' is neither model nor layers of the teacher",
                fix="name each layer by its number from 0, as in `init: layers[0, 3, 6, 9]`, or write `init: model`",
            )
        if list(layers) != sorted(set(layers)):
            raise refused(
                "init", "layers are named once each, in their order", fix=f"init: layers{sorted(set(layers))}"
            )
        return self


class DistilSection(Section):
    """Passing on what a teacher knows to a student; with `train.method: distil`."""

    teacher: TeacherSection
    student: StudentSection = Field(default_factory=StudentSection)
    way: Literal["logits", "on_policy", "answers"] = Field(
        "logits",
        description="What the student learns from. `logits`: the teacher's distribution at every target token of the dataset's "
        "answers. `on_policy`: the same at every token of what the student itself answers (see `on_policy`), with `targets: live`. "
        "`answers`: the teacher's own answers as text, generated and filtered by the dataset's spec (`kind: generated`, "
        "`write: chat`); with several answers to a prompt and a check, this is how reasoning is passed on.",
    )
    targets: Literal["cache", "live"] = Field(
        "cache",
        description="`cache`: the teacher runs once and what it says is kept (see `cache`); `live`: it runs beside the student at "
        "every step, and its whole distribution counts.",
    )
    alignment: Literal["tokens", "text"] = Field(
        "tokens",
        description="`tokens`: both models have the same tokens under the same ids, which is checked. `text`: their tokenizers "
        "differ; they are compared wherever both have a boundary between tokens, over the tokens that both have, the text up to "
        "the next boundary, and all else as one (docs/distillation.md says what is lost).",
    )
    loss: DistilLossSection = Field(default_factory=DistilLossSection)
    on_policy: OnPolicySection = Field(default_factory=OnPolicySection)
    cache: TeacherCacheSection = Field(default_factory=TeacherCacheSection)

    @model_validator(mode="after")
    def _sound(self) -> DistilSection:
        if self.way == "answers":
            for key in ("targets", "alignment", "loss", "cache"):
                default = type(self).model_fields[key].get_default(call_default_factory=True)
                if getattr(self, key) != default:
                    raise refused(
                        key, "way answers learns text, with train.loss", fix=f"leave out distil.{key}"
                    )
        self._check_alignment()
        self._check_server()
        if self.way == "on_policy" and self.targets == "cache":
            raise refused(
                "targets", "what the student will say cannot be cached", fix="set distil.targets: live"
            )
        if self.way == "on_policy" and self.loss.answer_weight:
            raise refused(
                "loss.answer_weight",
                "the student's own samples are no answers to copy",
                fix="leave out distil.loss.answer_weight",
            )
        if self.way != "on_policy" and self.on_policy != OnPolicySection():
            raise refused(
                "on_policy",
                f"way {self.way} samples nothing",
                fix="leave it out, or set distil.way: on_policy",
            )
        if self.targets == "live" and self.cache != TeacherCacheSection():
            raise refused(
                "cache",
                "with targets live nothing is cached",
                fix="leave out distil.cache, or set targets: cache",
            )
        return self

    def _check_alignment(self) -> None:
        """What tokenizers that differ allow."""
        if self.alignment == "tokens":
            if self.loss.kind == "uld":
                raise refused(
                    "loss.kind",
                    "uld takes no notice of which token is which, and here both models have the same",
                    fix="set distil.loss.kind: forward_kl, or distil.alignment: text for other tokenizers",
                )
            return
        if self.way == "on_policy":
            raise refused(
                "alignment",
                "what the student samples is judged in its own tokens",
                fix="set distil.way: logits, or take a teacher with the student's tokenizer",
            )
        if self.student.layers is not None:
            raise refused(
                "alignment",
                "a student that is cut from its teacher has the teacher's tokens",
                fix="leave out distil.alignment",
            )

    def _check_server(self) -> None:
        """What a teacher behind a server can be asked for."""
        if self.teacher.server is None:
            return
        if self.targets == "live" and self.way != "answers":
            raise refused(
                "targets",
                "a teacher behind a server runs once, for the cache",
                fix="set distil.targets: cache and distil.way: logits, or leave out distil.teacher.server",
            )
        if self.student.layers is not None:
            raise refused(
                "student.init",
                "the teacher's layers are not here",
                fix="set distil.student.init: model, or leave out distil.teacher.server",
            )
        if self.way == "logits" and {self.loss.temperature, *self.cache.temperatures} != {1.0}:
            raise refused(
                "loss.temperature" if self.loss.temperature != 1.0 else "cache.temperatures",
                "a server's log-probabilities are those of temperature 1 only",
                fix="set distil.loss.temperature: 1 and leave out distil.cache.temperatures, or run the teacher here",
            )


def check_distil_agrees(
    model: ModelSection,
    adapter: AdapterSection,
    train: TrainSection,
    distil: DistilSection | None,
    *,
    long_rows: str,
) -> None:
    """Raise, at the key to change, where method and section, or student and teacher, cannot be together."""
    if (train.method == "distil") != (distil is not None):
        raise refused(
            "train.method" if distil is not None else "distil",
            f"the section distil is not read by train.method {train.method}"
            if distil is not None
            else "train.method distil needs to know who teaches",
            fix="set train.method: distil, or leave out distil"
            if distil is not None
            else "add `distil: {teacher: {run: runs/<recipe name>}}`",
        )
    if distil is None:
        return
    if distil.way != "answers" and (not train.loss.is_plain or train.loss.neftune_alpha):
        raise refused("train.loss", "the loss of distil is distil.loss", fix="leave out train.loss")
    if train.auto:
        raise refused(
            "train.auto",
            "the batching of distil is not searched, only that of sft",
            fix="set train.auto: false and give micro_batch_size and gradient_accumulation_steps",
        )
    if distil.way != "answers" and model.new_tokens:
        raise refused(
            "model.new_tokens",
            "the teacher has no probability for tokens that only the student knows",
            fix="leave out model.new_tokens",
        )
    if distil.way == "on_policy" and train.batch_ramp is not None:
        raise refused(
            "train.batch_ramp", "way on_policy trains with one global batch", fix="leave out train.batch_ramp"
        )
    if distil.way == "on_policy" and adapter.kind in VIRTUAL_TOKENS:
        raise refused(
            "adapter.kind",
            f"a student with the virtual tokens of {adapter.kind} cannot answer while it trains",
            fix="use adapter.kind: lora",
        )
    if distil.student.layers is not None and adapter.start is not None:
        raise refused(
            "adapter.start",
            "a student that is cut from its teacher starts from the teacher's weights",
            fix="leave out adapter.start, or set distil.student.init: model",
        )
    if distil.alignment == "text" and long_rows not in ("error", "drop"):
        raise refused(
            "data.long_rows",
            f"a row that {long_rows} changes would be another one for the teacher",
            fix="set data.long_rows: drop (or error), or distil.alignment: tokens",
        )
