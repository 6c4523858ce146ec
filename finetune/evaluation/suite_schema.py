"""The suite: one frozen, closed schema that fixes what is asked, how answers are made and how they are scored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, model_validator

from finetune.digest import digest_file, digest_json
from finetune.errors import did_you_mean
from finetune.evaluation.item_source import DATASET_SPLITS, ItemsSection, RawSection
from finetune.evaluation.scorers.judged import PointwiseRules
from finetune.evaluation.scorers.kind import Score, ScorerKind, WellFormed
from finetune.evaluation.scorers.registry import (
    SCORERS,
    find_scorer,
    make_format,
    make_scorer,
    scorer_digest,
    scorer_names,
)
from finetune.evaluation.suite_sections import (
    DecodingSection,
    FewShotSection,
    ScorerSection,
    SlicesSection,
    StopEarlySection,
    ZeroShotSection,
)
from finetune.recipe.schema import Count, Section, Share


class Suite(Section):
    """A fixed set of items with scorers. Load with `load_suite`."""

    suite: Literal[1] = Field(1, description="Version of this schema.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = Field(
        description="Name."
    )
    version: Count = Field(1, description="Raise it when the meaning of the suite changes.")
    description: str = Field("", description="One sentence for the report.")
    role: Literal["task", "regression", "forgetting"] = Field(
        "task", description="`task` should improve; the other two must not get worse than `margin`."
    )
    task: Literal["generate", "choice", "text", "lm_eval"] = Field(
        "generate",
        description="`generate` a written answer; `choice`: the likeliest of the item's `check.choices`; `text`: the "
        "likelihood of the item's reference as a whole; `lm_eval`: what the task of `items.lm_eval` asks.",
    )
    items: ItemsSection
    prompt_format: Literal["chat", "raw"] = Field(
        "chat",
        description="`chat`: the model's chat template; `raw`: the text itself, for base models without one, and the "
        "default with `items.lm_eval`.",
    )
    raw: RawSection = Field(default_factory=RawSection)
    zero_shot: ZeroShotSection = Field(default_factory=ZeroShotSection)
    few_shot: FewShotSection | None = Field(None, description="None: the suite has no few-shot arm.")
    decoding: DecodingSection = Field(default_factory=DecodingSection)
    scorers: list[str | ScorerSection] = Field(
        default_factory=list,
        description="Metrics: a scorer's name, or a mapping with its parameters. Required, but with `items.lm_eval`: "
        "none are the task's own.",
    )
    primary_metric: str = Field(
        "",
        description="The metric that decides the verdict. Required, but with `items.lm_eval`: none is the first.",
    )
    cluster: str | None = Field(
        "group", description="What related items share: `group`, a tag, or none for independent items."
    )
    margin: Share = Field(0.02, description="A loss up to this size does not count as a regression.")
    confidence: Annotated[float, Field(gt=0.5, le=0.9999)] = Field(
        0.95, description="Level of every interval."
    )
    slices: SlicesSection = Field(default_factory=SlicesSection)
    stop_early: StopEarlySection | None = Field(
        None, description="None: every item is answered; the primary metric must be right or wrong."
    )
    _path: Path = PrivateAttr(default=Path())
    _task_digest: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _task_of_the_harness(self) -> Suite:
        """Items of an lm-eval task bring their prompts, decoding and metrics with them."""
        if self.items.lm_eval is None:
            if self.task == "lm_eval":
                raise ValueError("task: lm_eval takes its items from items.lm_eval")
            if not self.scorers or not self.primary_metric:
                raise ValueError(
                    "scorers and primary_metric: name at least one metric, and the one that decides"
                )
            return self
        given = self.model_fields_set
        if "task" in given and self.task != "lm_eval":
            raise ValueError(f"task: items of an lm-eval task go with task: lm_eval, not {self.task}")
        own = sorted(given & {"zero_shot", "few_shot", "decoding", "raw", "stop_early"})
        if own:
            raise ValueError(f"{own[0]}: the lm-eval task itself fixes prompts, examples and decoding")
        defaults = {"task": "lm_eval"} | ({} if "prompt_format" in given else {"prompt_format": "raw"})
        self.__dict__.update(defaults)  # still being made
        return self

    @model_validator(mode="after")
    def _raw_answers_end(self) -> Suite:
        """A base model goes on to the next example rather than end its turn: that is where its answer ends."""
        if self.prompt_format == "raw" and not self.decoding.stop and self.items.lm_eval is None:
            stop = [self.raw.example_separator]
            self.__dict__["decoding"] = self.decoding.model_copy(update={"stop": stop})  # still being made
        return self

    @model_validator(mode="after")
    def _metrics_fit(self) -> Suite:
        shown = self.few_shot
        if shown is not None and self.items.hub is None and shown.split not in DATASET_SPLITS:
            raise ValueError(f"few_shot.split: '{shown.split}' is none of {', '.join(DATASET_SPLITS)}")
        strange = [one.scorer for one in self.scoring if one.scorer not in SCORERS]
        unknown = [name for name in strange if name not in scorer_names()]
        if unknown:
            raise ValueError(f"scorers: no scorer '{unknown[0]}'; {did_you_mean(unknown[0], scorer_names())}")
        names = self.metrics
        if not names and self.items.lm_eval is not None:
            return self  # the task's own, once its definition is read
        if len(set(names)) != len(names):
            raise ValueError(f"scorers: two metrics of one name among {', '.join(names)}; set `metric`")
        if self.stop_early is not None and self.decoding.repeats > 1:
            raise ValueError(
                "stop_early: bets are on right or wrong items, and means of several answers are neither; "
                "set decoding.repeats to 1, or leave stop_early out"
            )
        if self.decoding.is_sampled and self.task != "generate":
            raise ValueError(f"decoding.temperature: nothing is sampled with task: {self.task}")
        if self.primary_metric and self.primary_metric not in names:
            raise ValueError(
                f"primary_metric: no scorer gives '{self.primary_metric}'; {did_you_mean(self.primary_metric, names)}"
            )
        for one in self.scoring:
            kind = SCORERS.get(one.scorer)
            if kind is not None and kind.task != self.task:
                raise ValueError(
                    f"scorers: '{one.scorer}' scores suites with task: {kind.task}, not {self.task}"
                )
        return self

    @property
    def scoring(self) -> list[ScorerSection]:
        """`scorers` with a bare name written out."""
        return [ScorerSection(scorer=one) if isinstance(one, str) else one for one in self.scorers]

    @property
    def metrics(self) -> list[str]:
        return [scorer.name for scorer in self.scoring]

    @property
    def measures_kl(self) -> bool:
        """Whether a scorer compares the model's distributions with the base's."""
        return any(one.scorer == "kl_per_token" for one in self.scoring)

    def baseline_arms(self, wanted: Sequence[str]) -> list[str]:
        """Which of the wanted untuned arms this suite has; `zero_shot` stands in when none is left."""
        return [arm for arm in wanted if arm != "few_shot" or self.few_shot is not None] or ["zero_shot"]

    @property
    def path(self) -> Path:
        """The file that the suite was loaded from."""
        return self._path

    @property
    def items_file(self) -> Path | None:
        """The JSONL of items, when they are a file."""
        return self._path.parent / self.items.jsonl if self.items.jsonl is not None else None

    @property
    def files(self) -> list[Path]:
        """Every file beside the suite that it takes items or examples from."""
        shown = self.few_shot.jsonl if self.few_shot is not None else None
        return [self._path.parent / name for name in (self.items.jsonl, shown) if name is not None]

    def scorer_of(self, metric: str) -> ScorerKind:
        """The scorer behind a metric of this suite."""
        section = next(one for one in self.scoring if one.name == metric)
        return find_scorer(section.scorer).bound(section.parameters)

    def score_functions(self) -> dict[str, Score]:
        """Metric name -> function (output, reference) -> score; without the metrics of `judges`."""
        return {name: made for name, made in self._made().items() if not isinstance(made, PointwiseRules)}

    def judges(self) -> dict[str, PointwiseRules]:
        """Metric name -> rules of the judge that gives it; such a score may be missing."""
        return {name: made for name, made in self._made().items() if isinstance(made, PointwiseRules)}

    def _made(self) -> dict[str, Score | PointwiseRules]:
        return {
            one.name: make_scorer(one.scorer, one.parameters, where=f"{self._path}: scorers")
            for one in self.scoring
        }

    def format_functions(self) -> dict[str, WellFormed]:
        """Metric name -> whether an answer has the form that the metric needs; only metrics that need one."""
        found = {one.name: make_format(one.scorer, one.parameters) for one in self.scoring}
        return {metric: function for metric, function in found.items() if function is not None}

    @property
    def digest(self) -> str:
        """SHA-256 of what the suite means: every key but the description, the items file, and the scorers' code.

        Items that come from a dataset build are not in it; `items_digest` pins those, beside it in every summary.
        """
        definition = self.model_dump(mode="json", exclude={"description"})
        definition["code"] = [scorer_digest(one.scorer, one.parameters) for one in self.scoring]
        if self.files:
            definition["files"] = [digest_file(path) for path in self.files]
        if self._task_digest:
            definition["lm_eval"] = self._task_digest
        return digest_json(definition)
