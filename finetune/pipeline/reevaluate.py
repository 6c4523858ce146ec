"""Evaluate a finished run again: on other suites, against another baseline, or base against base for the noise floor.

Answers that are saved under the same key are not generated again, so an unchanged run costs nothing and loads no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.data.build import MANIFEST, build_dataset, default_builds_root, open_build
from finetune.digest import digest_file, digest_json
from finetune.errors import UserError
from finetune.evaluation.canary import adapter_sha256, refuse_same_answers
from finetune.evaluation.compare import compare_saved
from finetune.evaluation.cost import Spent
from finetune.evaluation.noise import flip_rate, with_other_seed
from finetune.evaluation.power import plan_suite
from finetune.evaluation.prompts import ARMS, Arm
from finetune.evaluation.records import repeat_of
from finetune.evaluation.run import prepare_arm
from finetune.evaluation.saved_arms import BASE, RunAnswers, SavedArm, find_baseline
from finetune.evaluation.suite import Suite
from finetune.evaluation.suite_data import SuiteData
from finetune.pipeline.baseline_store import fetch_baseline
from finetune.pipeline.before import load_before, tokenizer_before
from finetune.pipeline.decontaminate import show_trained_rows
from finetune.pipeline.inputs import RunInputs, gather_inputs
from finetune.pipeline.manifest import RunManifest
from finetune.pipeline.served import SERVED_FOLDER, Served
from finetune.pipeline.stages import RunContext, load_proven
from finetune.recipe.schema import PricesSection


@dataclass
class FinishedRun:
    """A run folder whose training is complete. Models are loaded when an answer is missing, and then once."""

    context: RunContext
    answers: RunAnswers
    batch_size: int
    served: Served | None = None
    _loaded: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        batch_size: int | None = None,
        serve: Callable[[RunInputs], Served] | None = None,
        say: Callable[[str], None],
    ) -> FinishedRun:
        """serve: lets a server answer instead of models loaded here. Raises UserError when `folder` is no run folder, or
        its training is not complete."""
        answers = RunAnswers.open(folder, backend=SERVED_FOLDER if serve else "")
        inputs = gather_inputs(str(folder / "recipe.resolved.yaml"), folders=answers.folders)
        manifest = RunManifest.of_run(folder)
        if not manifest.stages.get("train", {}).get("completed"):
            raise UserError(f"{folder} holds no tuned model yet", fix="finish it: run the same recipe again")
        _refuse_other_weights(manifest, inputs)
        context = RunContext(inputs, manifest, say, tokenizer_before(inputs))
        served = serve(inputs) if serve is not None else None
        return cls(context, answers, batch_size or inputs.recipe.eval.batch_size, served)

    def __enter__(self) -> FinishedRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends a server that was started for this run."""
        if self.served is not None:
            self.served.close()

    def data_of(self, suite: Suite) -> SuiteData:
        inputs = self.context.inputs
        data = inputs.data_of(suite)
        if not data.few_shot_rows:
            return data
        own = self.context.folder / "data"
        if not (own / MANIFEST).is_file():  # removed since, for its size
            build = build_dataset(inputs.spec_path, default_builds_root())
            return show_trained_rows(data, build, inputs.spec_path, compared=False)
        compared = suite.digest in {one.digest for one in inputs.suites}
        return show_trained_rows(data, open_build(own), inputs.spec_path, compared=compared)

    def answer(
        self,
        data: SuiteData,
        saved: SavedArm,
        *,
        batch_size: int | None = None,
        shared: bool = True,
        baseline: SavedArm | None = None,
    ) -> SavedArm:
        """Make sure that an arm of this run is answered in full; generates only what is missing.

        shared: untuned answers come from the store of all runs, and go there. baseline: what the arm is compared with;
        where the suite may stop early, no more is asked than that needs.
        """
        tuned = saved.arm == "tuned"
        key, arm = self._key(tuned=tuned), _arm(saved.arm)
        options: dict[str, Any] = {"arm": arm, "few_shot": data.few_shot_rows, "key": key}
        tokenizer = self.context.tuned.tokenizer if tuned else self.context.tokenizer
        job = prepare_arm(tokenizer, data.suite, data.items, **options)
        if job.saved(saved.folder) is not None:
            return saved
        self.context.say(f"evaluate: {data.suite.name}, {len(data.items)} items, {saved.arm}")
        size = batch_size or self.batch_size
        if shared and not tuned and self.served is None:
            fetch_baseline(
                job, saved.folder, model_key=key, model=self._base, batch_size=size, say=self.context.say
            )
        else:
            adapter = self._adapter_sha256() if tuned else None
            model = self._model(data) if tuned else self._base()
            against = baseline.records() if baseline is not None else None
            job.evaluate(model, saved.folder, batch_size=size, adapter_sha256=adapter, baseline=against)
        return saved

    def _key(self, *, tuned: bool) -> str:
        """The keys of `finetune run`, so that its answers are found; for a server, its models' names besides."""
        dtype: str = self.context.inputs.recipe.eval.dtype
        if self.served is not None:
            dtype = self.served.key(tuned=tuned)
        if tuned:
            return digest_json({"trained": self.context.manifest.output_digest("train"), "dtype": dtype})
        return self.context.inputs.before_key(dtype)

    def _adapter_sha256(self) -> str | None:
        adapter = self.context.folder / "adapter"
        return adapter_sha256(adapter) if self.context.inputs.recipe.adapter.kind != "none" else None

    def _model(self, data: SuiteData) -> Any:
        if self.served is not None:
            return self.served.tuned
        if "tuned" not in self._loaded:
            model, _ = load_proven(self.context, data)
            self._loaded = {"tuned": model}
        return self._loaded["tuned"]

    def _base(self) -> Any:
        if self.served is not None:
            return self.served.base
        if "base" not in self._loaded:
            recipe = self.context.inputs.recipe
            self._loaded = {
                "base": load_before(self.context.inputs, dtype=recipe.eval.dtype, attention="sdpa")
            }
        return self._loaded["base"]


def _refuse_other_weights(manifest: RunManifest, inputs: RunInputs) -> None:
    """Saved answers are found by what was trained: weights that changed since then must not pass for theirs."""
    train = manifest.stages["train"]
    trained_on = train.get("inputs", {}).get("model")
    if trained_on not in (None, inputs.source.digest):
        raise UserError(
            f"the base model is not the one that this run was trained on: {inputs.source.digest[:12]} now, "
            f"{trained_on[:12]} then",
            where=inputs.source.id,
            why="the tuned model is that base with what was learnt on it",
            fix="bring the base back as it was, or train again: finetune run with the same recipe",
        )
    for name, digest in train.get("outputs", {}).items():
        path = manifest.folder / name
        if path.is_file() and digest_file(path) != digest:
            raise UserError(
                f"{path} was changed after the training",
                why="its SHA-256 is not the one that the training recorded, so this run's answers are not this model's",
                fix="bring the file back, or train again: finetune run with the same recipe",
            )


def compare_run(
    run: FinishedRun,
    suites: Sequence[Suite],
    *,
    baseline: str = BASE,
    inner: bool = False,
    prices: PricesSection | None = None,
) -> list[dict[str, Any]]:
    """One comparison a suite, of the run's tuned model against the baseline; missing answers are generated. prices: in
    place of the recipe's."""
    every = [run.data_of(suite) for suite in suites]
    arms = {data.suite.name: find_baseline(baseline, run.answers, data.suite) for data in every}
    if baseline == BASE:  # all answers of one model first, so that two models are never in memory together
        for data in every:
            run.answer(data, arms[data.suite.name])
            if run.answers.tuned(data.suite.name).summary() is None:
                for line in plan_suite(data.suite, [arms[data.suite.name].records()]).lines():
                    run.context.say(line)
    for data in every:
        own = (
            arms[data.suite.name] if baseline == BASE else None
        )  # another run's may itself have stopped early
        tuned = run.answer(data, run.answers.tuned(data.suite.name), baseline=own)
        if run.served is not None and baseline == BASE:
            answers = tuned.records()
            before = {(one["item"], repeat_of(one)): one["output"] for one in arms[data.suite.name].records()}
            refuse_same_answers(
                [before[one["item"], repeat_of(one)] for one in answers], [one["output"] for one in answers]
            )
    declared = run.context.inputs.recipe.eval.prices
    spent = Spent(prices or declared, run.context.manifest.stages["train"].get("seconds"))
    return [
        compare_saved(
            data.suite,
            arms[data.suite.name],
            run.answers.tuned(data.suite.name),
            inner=inner,
            spent=spent,
        )
        for data in every
    ]


def measure_noise(run: FinishedRun, suites: Sequence[Suite]) -> list[dict[str, Any]]:
    """Answer every suite with the base a second time, in other batches, and count what changed."""
    results = []
    for suite in suites:
        data = run.data_of(suite)
        first = run.answer(data, run.answers.base(suite))
        again = SavedArm(first.folder / "again", first.arm)
        second = replace(data, suite=with_other_seed(suite))
        run.answer(second, again, batch_size=max(1, run.batch_size // 2 - 1), shared=False)
        metric = suite.primary_metric
        floor = flip_rate(first.records(), again.records(), metric, may_lack=metric in suite.judges())
        results.append({"suite": suite.name, **floor})
    return results


def _arm(name: str) -> Arm:
    for arm in ARMS:
        if name == arm:
            return arm
    raise UserError(f"'{name}' is no arm that can be generated", fix=f"one of: {', '.join(ARMS)}")
