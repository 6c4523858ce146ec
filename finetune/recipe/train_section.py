"""The optimization: method, loss, optimizer, schedule, batch, memory, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.recipe.constraints import refused
from finetune.recipe.divergence_section import OnDivergence, RewindSection
from finetune.recipe.preference_section import Method, PreferenceSection, check_preference
from finetune.recipe.samples_section import SamplesSection
from finetune.recipe.section import Count, Section, Share

OptimizerName = Literal[
    "adamw_fused",
    "adamw",
    "adamw_8bit",
    "adamw_paged",
    "adamw_paged_8bit",
    "ademamix",
    "ademamix_8bit",
    "sgd",
    "momentum",
    "adafactor",
    "lion",
    "lion_8bit",
    "lion_paged",
    "muon",
    "soap",
    "adam_mini",
    "schedule_free_adamw",
    "schedule_free_sgd",
]
SCHEDULE_FREE: tuple[OptimizerName, ...] = ("schedule_free_adamw", "schedule_free_sgd")
Schedule = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]
Amount = Annotated[float, Field(ge=0)]
Option = float | bool | str | list[float]


class LossSection(Section):
    """What is minimised over the target tokens. The loss that is reported is always the plain negative log-likelihood."""

    kind: Literal["nll", "dft"] = Field(
        "nll",
        description="`nll`: negative log-likelihood. `dft`: each token's is weighted by the probability the model gives it.",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of the target probability that is spread over the whole vocabulary."
    )
    z_loss: Amount = Field(
        0.0, description="Weight of the squared log-normaliser, which keeps logits from drifting."
    )
    turn_weights: list[Amount] = Field(
        default_factory=list,
        description="Weights of a row's answers, aligned at its last one: with `[0.2, 1]` the last answer weighs 1 and every "
        "earlier one 0.2. None: all weigh 1.",
    )
    neftune_alpha: Amount = Field(
        0.0, description="NEFTune: uniform noise of size alpha / √(tokens · width) on a row's embeddings."
    )

    @model_validator(mode="after")
    def _sound(self) -> LossSection:
        if self.turn_weights and not any(self.turn_weights):
            raise refused(
                "turn_weights", "every weight is 0, so nothing is learnt", fix="give one turn a weight"
            )
        if self.kind == "dft" and self.label_smoothing:
            raise refused(
                "label_smoothing",
                "dft weights the target's own probability; smoothed targets have no single one",
                fix="leave out label_smoothing, or use kind: nll",
            )
        return self

    @property
    def is_plain(self) -> bool:
        """Whether what is minimised is the mean negative log-likelihood and nothing else."""
        return self.kind == "nll" and not (self.label_smoothing or self.z_loss or self.turn_weights)


class BatchRampSection(Section):
    """The global batch grows from `start_accumulation` micro-batches to `gradient_accumulation_steps`, evenly."""

    start_accumulation: Count = Field(1, description="Micro-batches in the first optimizer step.")
    steps: Count | None = Field(None, description="Optimizer steps until the batch is whole.")
    tokens: Count | None = Field(
        None, description="Trained tokens until the batch is whole; in place of `steps`."
    )

    @model_validator(mode="after")
    def _one_measure(self) -> BatchRampSection:
        if (self.steps is None) == (self.tokens is None):
            raise refused(
                "steps", "the ramp needs a length: steps or tokens, one of them", fix="add `steps: 100`"
            )
        return self


class TrainSection(Section):
    """The optimization."""

    method: Method = Field(
        "sft",
        description="`sft`: learn the answers. `distil`: learn from a teacher (see `distil`). From pairs: `dpo`, `orpo`, `cpo`, `simpo`, and `reward` (a model that scores). From "
        "answers that are wanted or not: `kto`.",
    )
    loss: LossSection = Field(default_factory=LossSection)
    preference: PreferenceSection = Field(default_factory=PreferenceSection)
    epochs: Annotated[float, Field(gt=0)] = Field(2.0, description="Passes over the train rows.")
    max_steps: Count | None = Field(
        None, description="Stop after this many optimizer steps, whatever `epochs` says."
    )
    optimizer: OptimizerName = Field(
        "adamw_fused",
        description="`momentum` is SGD with 0.9; `*_8bit` hold their state in 8 bits and `*_paged` in memory that can move to "
        "the host (CUDA); `muon` takes the inner matrices and leaves the rest to AdamW; `soap` is Shampoo's basis with "
        "Adam in it; `schedule_free_*` need `schedule: constant`.",
    )
    optimizer_options: dict[str, Option] = Field(
        default_factory=dict,
        description="Further arguments of the optimizer's class, e.g. `{betas: [0.9, 0.95]}`; unknown names are refused.",
    )
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = Field(2e-4, description="Peak learning rate.")
    lora_plus_ratio: Annotated[float, Field(ge=1)] | None = Field(
        None, description="LoRA+: the rate of the matrices B is this many times that of A, e.g. 16."
    )
    schedule: Schedule = Field(
        "cosine",
        description="Shape after the warm-up. `wsd`: constant, then a linear decay over `decay_share`; `inverse_sqrt`: falls with "
        "1/√step, in the warm-up's scale.",
    )
    warmup_share: Share = Field(0.05, description="Linear warm-up, as a share of all steps.")
    decay_share: Share = Field(0.2, description="Share of all steps in which `wsd` decays.")
    floor_share: Share = Field(0.1, description="`cosine`, `linear` and `wsd` end at this share of the peak.")
    weight_decay: Amount = Field(
        0.0, description="Decoupled decay; never on biases, norms, and vectors that scale."
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Clip, once, on the accumulated gradient."
    )
    micro_batch_size: Count = Field(1, description="Packs (or rows, without packing) in one forward pass.")
    gradient_accumulation_steps: Count = Field(1, description="Forward passes in one optimizer step.")
    batch_ramp: BatchRampSection | None = Field(
        None, description="Start with a smaller global batch; none: the whole one from the first step."
    )
    packing: bool = Field(True, description="Fill packs of whole rows that cannot see each other.")
    pack_tokens: Count = Field(1024, description="Capacity of a pack, in tokens.")
    share_prefixes: bool = Field(
        True,
        description="What rows of a pack begin with alike, e.g. a system prompt, is computed once: the same losses and gradients, "
        "faster. Of `sft` with `document` attention and without dropout and noise; elsewhere every row computes its own.",
    )
    model_dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="Sets every dropout of the model itself (attention, residual, embedding); none: as it is.",
    )
    gradient_checkpointing: bool | Literal["selective"] = Field(
        False,
        description="Recompute activations: less memory, about 30 % slower. `selective` keeps the results of matrix products and "
        "recomputes only what is cheap.",
    )
    activation_offload: bool = Field(
        False, description="Keep activations in the host's memory between forward and backward (CUDA)."
    )
    fp8: bool = Field(
        False,
        description="Matrix products in 8-bit floats (torchao), with `adapter.kind: none`. Needs a GPU of compute capability 8.9 or "
        "more.",
    )
    auto: bool = Field(
        False,
        description="Choose micro-batch, accumulation, checkpointing and pack length by measuring: the fastest that fits "
        "`memory_share` of the free memory. The tokens of an optimizer step stay as written.",
    )
    memory_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.85, description="Share of the memory that is free at the start which `auto` may use."
    )
    checkpoint_every_steps: Count = Field(50, description="Optimizer steps between resumable checkpoints.")
    keep_checkpoints: Count = Field(2, description="Newest checkpoints kept.")
    pin_checkpoints: list[Count] = Field(
        default_factory=list, description="Steps whose checkpoints are written and never removed."
    )
    validate_every_steps: Count | None = Field(
        None, description="Steps between token-weighted validation losses; none: once, at the end."
    )
    result: Literal["last", "best"] = Field(
        "last",
        description="Which step becomes the result. `best`: the earliest whose validation loss is not worse than the lowest one "
        "(paired over rows, 95 %).",
    )
    early_stopping: Count | None = Field(
        None,
        description="Stop after this many validations in a row that do not lower the loss beyond its noise; the result is then "
        "the best step.",
    )
    on_divergence: OnDivergence = Field(
        "stop",
        description="When the loss stays above where it began for ten steps, or is not finite. `rewind`: back to the last good checkpoint, "
        "and on as `rewind` says.",
    )
    rewind: RewindSection = Field(default_factory=RewindSection)
    samples: SamplesSection | None = Field(
        None, description="Write answers to fixed prompts while training; none: no answers."
    )
    report_to: list[Literal["trackio", "wandb", "tensorboard", "mlflow"]] = Field(
        default_factory=list, description="Trackers to feed besides events.jsonl."
    )

    @model_validator(mode="after")
    def _sound(self) -> TrainSection:
        check_preference(self.method, self.preference, self.gradient_accumulation_steps)
        if self.optimizer in SCHEDULE_FREE and self.schedule != "constant":
            raise refused(
                "schedule",
                f"{self.optimizer} averages the weights itself; a decaying rate would count twice",
                fix="set train.schedule: constant (the warm-up stays)",
            )
        if self.result == "best" or self.early_stopping is not None:
            key = "early_stopping" if self.early_stopping is not None else "result"
            if self.validate_every_steps is None:
                raise refused(key, "there is no validation to judge by", fix="add train.validate_every_steps")
        if self.warmup_share + (self.decay_share if self.schedule == "wsd" else 0.0) > 1.0:
            raise refused(
                "decay_share",
                "warm-up and decay together are longer than the run",
                fix="lower one of the shares",
            )
        if self.samples is not None and self.method == "reward":
            raise refused("samples", "a reward model writes no answers", fix="leave out train.samples")
        if self.rewind.remedy == "skip_rows" and self.method not in ("sft", "distil"):
            raise refused(
                "rewind.remedy",
                f"{self.method} learns from answers beside each other, of which none can be left out alone",
                fix="set train.rewind.remedy: halve_rate",
            )
        ramp = self.batch_ramp
        if ramp is not None and ramp.start_accumulation >= self.gradient_accumulation_steps:
            raise refused(
                "batch_ramp.start_accumulation",
                f"it is not below gradient_accumulation_steps ({self.gradient_accumulation_steps}), so nothing grows",
                fix="raise train.gradient_accumulation_steps to the whole batch",
            )
        return self
