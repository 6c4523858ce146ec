"""The stages of a run. Each is keyed by the digest of what it depends on and is skipped when nothing of that changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

from finetune.data.build import DatasetBuild, build_dataset, default_builds_root, open_build
from finetune.data.decontaminate import decontaminate
from finetune.data.rows import Row
from finetune.digest import digest_bytes, digest_json
from finetune.errors import UserError
from finetune.evaluation.canary import adapter_sha256, canary_differs, canary_logits
from finetune.evaluation.claims import combine
from finetune.evaluation.compare import compare_folders
from finetune.evaluation.cost import Spent
from finetune.evaluation.prompts import Arm, build_prompts
from finetune.evaluation.records import read_records, records_path, summary_path
from finetune.evaluation.run import evaluate_arm, prepare_arm
from finetune.evaluation.suite_data import SuiteData
from finetune.model.adapter_files import load_adapter
from finetune.model.load import load_model, load_tokenizer
from finetune.model.memory import release_memory
from finetune.model.new_tokens import NewTokens, add_new_tokens
from finetune.paths import disk_faults, read_json, write_json
from finetune.pipeline.baseline_store import fetch_baseline
from finetune.pipeline.before import load_before, tokenizer_before
from finetune.pipeline.checks import environment_findings, forecasts_here, row_findings, tell
from finetune.pipeline.decontaminate import contaminated_line, suite_questions
from finetune.pipeline.distil import compare_with_teacher, teacher_plan, teaching, teaching_key
from finetune.pipeline.inputs import RunInputs
from finetune.pipeline.live_diagnosis import LiveDiagnosis
from finetune.pipeline.manifest import RunManifest
from finetune.pipeline.methods import (
    Split,
    learnt,
    plain_rows,
    score_seed,
    tokenise_side,
    train_by_method,
)
from finetune.pipeline.preflight import check_packs
from finetune.pipeline.trainable import load_to_train
from finetune.telemetry.events import EventLog
from finetune.telemetry.memory import memory_basis, peak_memory_bytes, reset_peak_memory
from finetune.telemetry.progress import Progress
from finetune.training.processes import TRAIN, join_processes, leave_processes

_CANARY_PROMPTS = 2
# forecast.json of a model that no forecast is known for: what it used is written into it all the same.
NOT_FORECAST: dict[str, Any] = {"terms_bytes": {}, "total_bytes": None, "used_peak_bytes": None}


@dataclass(frozen=True)
class TunedTokens:
    """A tokenizer, and what was added to it."""

    tokenizer: Any
    new: NewTokens


@dataclass
class RunContext:
    """What the stages share. `done` collects which stages did work and which were complete already."""

    inputs: RunInputs
    manifest: RunManifest
    say: Callable[[str], None]
    tokenizer: Any = None
    skipped: list[str] = field(default_factory=list)
    worked: list[str] = field(default_factory=list)

    @cached_property
    def tuned(self) -> TunedTokens:
        """The tuned model's tokenizer, with the tokens that the recipe adds; without any it is the base's."""
        names = self.inputs.recipe.model.new_tokens
        if not names:
            return TunedTokens(self.tokenizer, NewTokens())
        if self.inputs.start is not None:
            raise UserError(
                "new tokens cannot be added to an adapter that is trained already",
                where="model.new_tokens",
                why="those that its own run added come with it",
                fix="leave out model.new_tokens (an empty list in a recipe that extends another one), or leave out adapter.start",
            )
        tokenizer = load_tokenizer(self.inputs.source)
        return TunedTokens(tokenizer, add_new_tokens(tokenizer, names))

    @property
    def folder(self) -> Path:
        return self.manifest.folder

    def source_rows(self) -> list[Row]:
        """The rows of the run's own build that are trained on, as they are before they become tokens."""
        build = open_build(self.folder / "data")
        return build.rows("train")[: self.inputs.recipe.data.max_train_rows]

    def stage(
        self, name: str, depends_on: dict[str, Any], work: Callable[[list[Path]], None], announcement: str
    ) -> None:
        """Run `work(outputs)` unless the stage is complete for `depends_on`; `work` lists the files it wrote."""
        if self.manifest.is_complete(name, depends_on):
            self.skipped.append(name)
            return
        self.say(announcement)
        outputs: list[Path] = []
        log = EventLog(self.folder / "events.jsonl")
        log.write("stage", name=name, status="running")
        with self.manifest.running(name, depends_on, outputs):
            work(outputs)
        seconds = self.manifest.stages[name]["seconds"]
        log.write("stage", name=name, status="complete", seconds=seconds)
        self.worked.append(name)


@dataclass(frozen=True)
class TrainingRows:
    """Tokenised rows of both sides, and the digest of everything that decided them."""

    train: Split
    validation: Split
    digest: str


def build_stage(context: RunContext) -> DatasetBuild:
    """Build the dataset of the recipe, or find it; what takes longer than two seconds says how long it will be."""
    with Progress("data", 100, "%") as progress:

        def show(share: float) -> None:
            progress.advance(max(0, int(100 * share) - progress.done))

        return build_dataset(context.inputs.spec_path, default_builds_root(), on_progress=show)


def data_stage(context: RunContext, build: DatasetBuild, suites: Sequence[SuiteData]) -> TrainingRows:
    """Leave out train rows that the suites ask, tokenise both sides, and write what became of every row."""
    recipe = context.inputs.recipe
    build, found = decontaminate(build, suite_questions(suites, context.inputs.spec_path))
    rows = training_rows(context, build)

    def work(outputs: list[Path]) -> None:
        outputs += _copy_build(build, context.folder / "data")
        summary = {
            side: {"counts": split.counts, "dropped": split.dropped, "target_tokens": split.n_targets}
            for side, split in (("train", rows.train), ("validation", rows.validation))
        }
        tokenised = context.folder / "data" / "tokenised.json"
        write_json(
            tokenised, {"digest": rows.digest, "max_tokens": recipe.data.max_tokens, "splits": summary}
        )
        outputs.append(tokenised)

    announcement = "\n".join(filter(None, [f"data: {_row_line(build)}", contaminated_line(found)]))
    context.stage("data", {"build": build.digest, "rows": rows.digest}, work, announcement)
    return rows


def training_rows(context: RunContext, build: DatasetBuild) -> TrainingRows:
    """Both sides of a build whose contaminated rows are left out, tokenised."""
    recipe = context.inputs.recipe
    context.tokenizer = tokenizer_before(context.inputs)
    tokenizer = context.tuned.tokenizer
    train = tokenise_side(recipe, build.rows("train")[: recipe.data.max_train_rows], tokenizer)
    held_out = build.rows("validation")[: recipe.data.max_validation_rows]
    validation = tokenise_side(recipe, held_out, tokenizer)
    digest = digest_json({"train": learnt(train), "validation": learnt(validation)})
    return TrainingRows(train, validation, digest)


def _copy_build(build: DatasetBuild, target: Path) -> list[Path]:
    with disk_faults(target):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(build.folder, target)
    return sorted(path for path in target.iterdir() if path.is_file())


def _row_line(build: DatasetBuild) -> str:
    ledger = build.manifest["ledger"]
    dropped = sum(ledger["dropped"].values())
    sides = ", ".join(f"{side} {build.manifest['splits'][side]['rows']}" for side in build.manifest["splits"])
    return f"{ledger['read']} rows read = {ledger['kept']} kept + {dropped} dropped + {ledger['quarantined']} quarantined ({sides})"


def check_stage(context: RunContext, rows: TrainingRows) -> None:
    """What the rows add to `preflight`: whether each fits a pack, what the doctor's quick checks say, the memory forecast.

    Faults stop the run; warnings are said once, and are kept in checks.json.
    """
    recipe = context.inputs.recipe
    for split in (rows.train, rows.validation):
        check_packs(recipe, split)
    depends_on = {"recipe": context.inputs.digest, "rows": rows.digest}

    def work(outputs: list[Path]) -> None:
        inputs = context.inputs
        forecasts = forecasts_here(recipe, inputs.config, rows.train, inputs.suites, teacher_plan(inputs))
        forecast = forecasts.training if forecasts is not None else None
        evaluation = {} if forecasts is None else {"evaluation": forecasts.evaluation.to_dict()}
        told = NOT_FORECAST if forecast is None else forecast.to_dict()
        write_json(context.folder / "forecast.json", {**told, **evaluation})
        findings = [
            *environment_findings(recipe.model.dtype),
            *row_findings(
                recipe,
                inputs.config,
                forecasts,
                context.source_rows(),
                rows.train,
                context.tuned.tokenizer,
                n_parameters=forecast.n_parameters if forecast else inputs.source.n_parameters or 0,
                n_validation=len(rows.validation.rows),
                n_added_tokens=len(context.tuned.new.ids),
            ),
        ]
        write_json(context.folder / "checks.json", {"findings": [one.to_dict() for one in findings]})
        tell(findings, context.say)

    context.stage("check", depends_on, work, "check: machine, rows, tokens and memory forecast")


def baseline_stage(context: RunContext, suites: Sequence[SuiteData]) -> None:
    """Evaluate the model as it is before training: the base, with the adapter that training goes on from, if any.

    It is loaded only when no run has asked it the same before (see `baseline_store`).
    """
    inputs = context.inputs
    recipe, key = inputs.recipe, inputs.before_key(inputs.recipe.eval.dtype)
    for data in suites:
        suite = data.suite
        arms = cast("list[Arm]", suite.baseline_arms(recipe.eval.baselines))
        depends_on = {
            "model": key,
            "suite": suite.digest,
            "items": data.digest,
            "arms": arms,
            "shown": digest_json([row.to_dict() for row in data.few_shot_rows]),
        }

        def work(outputs: list[Path], data: SuiteData = data, arms: list[Arm] = arms) -> None:
            model = cache(lambda: load_before(inputs, dtype=recipe.eval.dtype, attention="sdpa"))
            target = context.folder / "baseline" / data.suite.name
            for arm in arms:
                job = prepare_arm(
                    context.tokenizer, data.suite, data.items, arm=arm, few_shot=data.few_shot_rows, key=key
                )
                with _evaluation_peak(context):
                    fetch_baseline(
                        job,
                        target,
                        model_key=key,
                        model=model,
                        batch_size=recipe.eval.batch_size,
                        say=context.say,
                    )
                outputs += [records_path(target, arm), summary_path(target, arm)]

        context.stage(
            f"baseline {suite.name}",
            depends_on,
            work,
            f"baseline: {suite.name}, {len(data.items)} items, {' and '.join(arms)}",
        )


def train_stage(context: RunContext, rows: TrainingRows) -> None:
    """Tune. Refuses to begin before every baseline is complete."""
    unfinished = [name for name in _baseline_names(context) if not context.manifest.stages[name]["completed"]]
    assert not unfinished, f"nothing is tuned before there is an evaluation: {unfinished}"
    depends_on = train_depends_on(context, rows)
    _drop_outdated_checkpoints(context, depends_on)

    def work(outputs: list[Path]) -> None:
        join_processes().post(TRAIN, rows.digest)
        result = train_model(context, rows, owner=digest_json(depends_on))
        forecast = read_json(context.folder / "forecast.json")
        forecast |= {"used_peak_bytes": peak_memory_bytes(), "basis": memory_basis()}
        write_json(context.folder / "forecast.json", forecast)
        write_json(context.folder / "training.json", result.to_dict())
        output = context.folder / result.output
        outputs += sorted(path for path in output.rglob("*") if path.is_file())
        outputs.append(context.folder / "training.json")

    context.stage(
        "train",
        depends_on,
        work,
        f"train: {len(rows.train.rows)} rows, {rows.train.n_targets} targets an epoch",
    )


def train_depends_on(context: RunContext, rows: TrainingRows) -> dict[str, Any]:
    """What decides the trained weights; its digest owns the checkpoints."""
    inputs = context.inputs
    depends_on = {"recipe": inputs.digest, "model": inputs.source.digest, "rows": rows.digest}
    if inputs.start is not None:
        depends_on["start"] = inputs.start.digest
    return depends_on | teaching_key(inputs)


def train_model(context: RunContext, rows: TrainingRows, *, owner: str) -> Any:
    """Load the base, attach what is trained, and train: what every process of a run does. Returns the TrainResult."""
    recipe, source = context.inputs.recipe, context.inputs.source
    release_memory()  # so that the peak of training is not that of the evaluation before it
    reset_peak_memory()
    model = load_to_train(context.inputs, new_tokens=context.tuned.new, rows=rows.train.rows)
    result = train_by_method(
        recipe,
        model,
        context.tuned.tokenizer,
        rows.train,
        rows.validation,
        run_folder=context.folder,
        owner=owner,
        say=context.say,
        source=source,
        callbacks=[LiveDiagnosis(context.folder / "events.jsonl", context.say)],
        **teaching(
            context.inputs,
            context.tuned.tokenizer,
            plain_rows(rows.train),
            context.say,
            source_rows=context.source_rows,
        ),
    )
    leave_processes()
    return result


def _drop_outdated_checkpoints(context: RunContext, depends_on: dict[str, Any]) -> None:
    """Checkpoints of this recipe over other rows or another base are of no use to anyone: training starts over."""
    before = context.manifest.stages.get("train")
    checkpoints = context.folder / "checkpoints"
    if before is not None and before["digest"] != digest_json(depends_on) and checkpoints.exists():
        context.say("the rows or the base model changed since the last training; its checkpoints are removed")
        with disk_faults(checkpoints):
            shutil.rmtree(checkpoints)


def _baseline_names(context: RunContext) -> list[str]:
    return [f"baseline {suite.name}" for suite in context.inputs.suites]


def tuned_stage(context: RunContext, suites: Sequence[SuiteData]) -> None:
    """Evaluate the tuned model: the saved adapter, loaded afresh and proven active, or the saved full model."""
    recipe = context.inputs.recipe
    trained = context.manifest.output_digest("train")
    for data in suites:
        depends_on = {
            "trained": trained,
            "dtype": recipe.eval.dtype,
            "suite": data.suite.digest,
            "items": data.digest,
        }
        against = data.suite.baseline_arms([recipe.eval.against])[0]
        if data.suite.stop_early is not None:  # then the baseline's answers decide how far this arm goes
            depends_on |= {
                "against": against,
                "baseline": context.manifest.output_digest(f"baseline {data.suite.name}"),
            }

        def work(outputs: list[Path], data: SuiteData = data, against: str = against) -> None:
            target = context.folder / "eval" / data.suite.name
            with _evaluation_peak(context):
                model, adapter_digest = load_proven(context, data)
                evaluate_arm(
                    model,
                    context.tuned.tokenizer,
                    data.suite,
                    data.items,
                    arm="tuned",
                    batch_size=recipe.eval.batch_size,
                    out_folder=target,
                    key=digest_json({"trained": trained, "dtype": recipe.eval.dtype}),
                    adapter_sha256=adapter_digest,
                    baseline=read_records(context.folder / "baseline" / data.suite.name, against),
                )
            outputs += [target / "tuned.jsonl", target / "tuned.summary.json"]

        name = data.suite.name
        context.stage(
            f"evaluate {name}", depends_on, work, f"evaluate: {name}, {len(data.items)} items, tuned"
        )


@contextmanager
def _evaluation_peak(context: RunContext) -> Iterator[None]:
    """Write what an evaluation used beside its forecast: the highest of all arms and suites of this run."""
    release_memory()  # what training left would otherwise lie beside the model that is loaded now
    reset_peak_memory()
    yield
    path = context.folder / "forecast.json"
    forecast = read_json(path)
    evaluation = forecast.setdefault("evaluation", dict(NOT_FORECAST))
    evaluation["used_peak_bytes"] = max(evaluation["used_peak_bytes"] or 0, peak_memory_bytes())
    evaluation["basis"] = memory_basis()
    write_json(path, forecast)


def load_proven(context: RunContext, data: SuiteData) -> tuple[Any, str]:
    """`load_tuned`, after a proof that the model is a tuned one: canary prompts give other logits than with the base.

    An adapter is switched off for that; for a fully tuned model the base is loaded first, and is gone before the other comes.
    """
    recipe = context.inputs.recipe
    prompts = build_prompts(data.suite, data.items[:_CANARY_PROMPTS], context.tokenizer, arm="tuned")
    canaries = [prompt.ids for prompt in prompts]
    base_logits = None
    if recipe.adapter.kind == "none":
        base = load_model(
            context.inputs.source, dtype=recipe.eval.dtype, attention="sdpa", score_seed=score_seed(recipe)
        )
        base_logits = canary_logits(base, canaries)
        del base
        release_memory()
    model, digest = load_tuned(context)
    canary_differs(model, canaries, base_logits=base_logits)
    return model, digest


def load_tuned(context: RunContext) -> tuple[Any, str]:
    """The tuned model as it will be used, in the evaluation's compute type, and the SHA-256 of its trained weights."""
    from finetune.model.source import resolve_model

    recipe = context.inputs.recipe
    if recipe.adapter.kind == "none":
        source = resolve_model(str(context.folder / "model"))
        model = load_model(source, dtype=recipe.eval.dtype, attention="sdpa", score_seed=score_seed(recipe))
        return model, source.digest
    base = load_model(
        context.inputs.source,
        dtype=recipe.eval.dtype,
        quantize=recipe.model.quantize,
        double_quantization=recipe.model.double_quantization,
        attention="sdpa",
        trust_remote_code=recipe.model.trust_remote_code,
        score_seed=score_seed(recipe),
    )
    adapter = context.folder / "adapter"
    return load_adapter(base, adapter, source=context.inputs.source), adapter_sha256(adapter)


def compare_stage(context: RunContext, suites: Sequence[SuiteData]) -> dict[str, Any]:
    """The paired comparison of every suite, and one verdict: `eval/comparison.json`."""
    recipe = context.inputs.recipe
    path = context.folder / "eval" / "comparison.json"
    depends_on = {
        "against": recipe.eval.against,
        "arms": {
            name: record["outputs"]
            for name, record in context.manifest.stages.items()
            if name.startswith(("baseline ", "teacher ", "evaluate "))
        },
        "suites": [data.suite.digest for data in suites],
        "correction": recipe.eval.correction,
        "prices": recipe.eval.prices.model_dump(mode="json"),
        "code": _statistics_digest(),
    }

    def work(outputs: list[Path]) -> None:
        results = []
        spent = Spent(recipe.eval.prices, context.manifest.stages["train"].get("seconds"))
        for data in suites:
            name = data.suite.name
            baseline, tuned = context.folder / "baseline" / name, context.folder / "eval" / name
            against = data.suite.baseline_arms([recipe.eval.against])[0]
            result = compare_folders(data.suite, baseline, against, tuned, spent=spent)
            for arm in data.suite.baseline_arms(recipe.eval.baselines):
                if arm != against:
                    result["comparisons"] += compare_folders(data.suite, baseline, arm, tuned, slices=False)[
                        "comparisons"
                    ]
            compare_with_teacher(context.inputs, data, result, baseline, tuned)
            results.append(result)
        write_json(path, combine(results, recipe.eval.correction))
        outputs.append(path)

    context.stage("compare", depends_on, work, "compare: item by item")
    comparison: dict[str, Any] = read_json(path)
    return comparison


def _statistics_digest() -> str:
    """A change of the statistics compares saved answers again, without generating one."""
    root = Path(__file__).parent.parent
    names = ("compare", "claims", "cost", "gap", "slicing")
    files = sorted([*(root / "stats").glob("*.py"), *(root / "evaluation" / f"{name}.py" for name in names)])
    return digest_json([[path.name, digest_bytes(path.read_bytes())] for path in files])
