"""The trained part of the model: which kind of adapter, where it sits and how it starts, or which weights train."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.recipe.constraints import refused
from finetune.recipe.section import Count, Section

AdapterKind = Literal["lora", "dora", "vera", "ia3", "prompt", "prefix", "bitfit", "none"]
AdapterInit = Literal["default", "gaussian", "orthogonal", "pissa", "olora", "eva", "loftq"]

LOW_RANK: tuple[AdapterKind, ...] = ("lora", "dora")
VIRTUAL_TOKENS: tuple[AdapterKind, ...] = ("prompt", "prefix")
TARGETED: tuple[AdapterKind, ...] = (*LOW_RANK, "vera", "ia3")

# Which kinds a key means something to; one that is set for another kind is refused, not ignored. Rank, alpha, dropout and
# target modules are left out: a recipe that extends another one would inherit them with no way to take them back.
_MEANT_FOR: dict[str, tuple[AdapterKind, ...]] = {
    "rslora": LOW_RANK,
    "init": LOW_RANK,
    "rank_pattern": LOW_RANK,
    "alpha_pattern": LOW_RANK,
    "layers": (*TARGETED, "none"),
    "freeze": ("none",),
    "modules_to_save": TARGETED,
    "virtual_tokens": VIRTUAL_TOKENS,
}


class AdapterSection(Section):
    """The trained part."""

    kind: AdapterKind = Field(
        "lora",
        description="`lora`, `dora`, `vera` (random matrices, trained scales), `ia3` (scales of activations), `prompt` and "
        "`prefix` (virtual tokens), `bitfit` (the model's own biases); `none` tunes all weights.",
    )
    rank: Count = Field(32, description="Rank r of the update B·A.")
    alpha: Annotated[float, Field(gt=0)] = Field(64.0, description="The update is scaled by alpha / rank.")
    rslora: bool = Field(
        False, description="Scale by alpha / √rank instead: the update keeps its size at high ranks."
    )
    init: AdapterInit = Field(
        "default",
        description="How A and B start. `pissa`: principal components of the weight; `olora`: its QR factors; `eva`: components "
        "of the activations on train rows, which also shares out the ranks; `loftq`: against the error of 4-bit "
        "weights; `gaussian`, `orthogonal`. The base weights are never changed.",
    )
    start: str | None = Field(
        None,
        description="Adapter to train on from: a run (`runs/<id>`, or `runs/<recipe name>` for its newest finished one) or a folder "
        "that PEFT saved; none: a fresh one. Kind, rank, alpha and rslora have to be those it has.",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Dropout on the adapter's input.")
    rank_pattern: dict[str, Count] = Field(
        default_factory=dict,
        description="Rank of single modules, by name, e.g. `{down_proj: 64}`; every name must match.",
    )
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Alpha of single modules, by name; every name must match."
    )
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="Names of the adapted modules; every name must match at least one module."
    )
    layers: list[int] | None = Field(
        None,
        description="Train in these layers only, counted from 0, or from the end with -1, -2, …; none: all. With `none` the rest "
        "of the model (embeddings, last norm, head) trains too unless `freeze` names it.",
    )
    freeze: list[str] = Field(
        default_factory=list,
        description="With kind `none`: names of modules whose weights stay, e.g. `[embed_tokens, norm]`; every name must match.",
    )
    modules_to_save: list[str] = Field(
        default_factory=list,
        description="Modules trained whole beside the adapter and saved with it, e.g. `[lm_head]`; every name must match.",
    )
    virtual_tokens: Count = Field(20, description="Number of virtual tokens of `prompt` and `prefix`.")

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> AdapterSection:
        for key, kinds in _MEANT_FOR.items():
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if self.kind not in kinds and getattr(self, key) != default:
                raise refused(
                    key,
                    f"it means nothing to adapter.kind {self.kind}; it is for {', '.join(kinds)}",
                    fix=f"leave out adapter.{key}, or choose another kind",
                )
        for key in ("layers", "modules_to_save", "freeze"):
            given = getattr(self, key)
            if given is not None and len(set(given)) != len(given):
                raise refused(key, "an entry is named twice", fix="name each once")
        if self.start is not None and (self.kind == "none" or self.init != "default"):
            raise refused(
                "start" if self.kind == "none" else "init",
                "the weights come from adapter.start"
                if self.kind != "none"
                else "there is no adapter to train on from when all weights are tuned",
                fix="leave out adapter.init" if self.kind != "none" else "set model.id to the run instead",
            )
        if self.layers == []:
            raise refused(
                "layers", "no layer is named, so nothing would train", fix="leave out adapter.layers"
            )
        return self
