"""A whole run, in order: data → check → baseline → train → evaluate → compare → report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.build import open_build
from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.paths import disk_faults, runs_root, write_atomic, write_json
from finetune.pipeline.alignment import check_teacher
from finetune.pipeline.decontaminate import show_trained_rows
from finetune.pipeline.environment import describe_environment
from finetune.pipeline.generate import ensure_generated
from finetune.pipeline.inputs import RunInputs, gather_inputs
from finetune.pipeline.manifest import RESOLVED, RunManifest, only_process, refuse_foreign, short_path
from finetune.pipeline.power import announce_power
from finetune.pipeline.preflight import preflight
from finetune.pipeline.stages import (
    RunContext,
    baseline_stage,
    build_stage,
    check_stage,
    compare_stage,
    data_stage,
    train_stage,
    tuned_stage,
)
from finetune.pipeline.teacher_stage import cache_stage, teacher_stage
from finetune.recipe.resolve import resolved_yaml
from finetune.training.processes import END, join_processes


@dataclass(frozen=True)
class RunOutcome:
    """Where a run ended: its folder, its comparison, and which stages had nothing to do."""

    folder: Path
    comparison: dict[str, Any]
    worked: tuple[str, ...]
    skipped: tuple[str, ...]
    report: Path

    @property
    def exit_code(self) -> int:
        return int(self.comparison["exit_code"])


def run_recipe(
    path: str, overrides: Sequence[str] = (), *, run_dir: Path | None = None, say: Callable[[str], None]
) -> RunOutcome:
    """Run a recipe from the first stage that is not complete. The verdict is in the outcome.

    Of several processes the first one calls this, the others `follow_run`.
    Raises UserError for anything the user can mend; KeyboardInterrupt after Ctrl-C, with everything complete saved.
    """
    from finetune.report.page import write_report

    inputs = gather_inputs(path, overrides, say=say)
    folder = (run_dir or runs_root() / inputs.folder_name).absolute()
    with disk_faults(folder):
        refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
    with only_process(folder), _report_when_interrupted(folder):
        manifest = RunManifest.open(folder, recipe_digest=inputs.digest, recipe_name=inputs.recipe.name)
        say(f"run folder: {short_path(folder)}")
        _describe(inputs, manifest)
        context = RunContext(inputs, manifest, say)
        preflight(inputs.recipe, inputs.source, inputs.start)
        check_teacher(inputs)
        ensure_generated(
            inputs.spec_path, say=say, server=inputs.teacher.server if inputs.teacher is not None else None
        )
        build = build_stage(context)
        suites = [inputs.data_of(suite) for suite in inputs.suites]
        rows = data_stage(context, build, suites)
        trained = open_build(folder / "data")
        suites = [show_trained_rows(data, trained, inputs.spec_path, compared=True) for data in suites]
        check_stage(context, rows)
        baseline_stage(context, suites)
        teacher_stage(context, suites)
        announce_power(context, suites)
        cache_stage(context, rows)
        write_report(folder)  # what is known before the tuning, while it runs
        train_stage(context, rows)
        tuned_stage(context, suites)
        comparison = compare_stage(context, suites)
        if not context.worked:
            say("nothing to do: every stage of this run is complete")
        report = write_report(folder)
    if "train" not in context.worked:
        join_processes().post(END)  # the others still wait
    return RunOutcome(folder, comparison, tuple(context.worked), tuple(context.skipped), report)


def _describe(inputs: RunInputs, manifest: RunManifest) -> None:
    """Write the resolved recipe, the environment, and the digests of everything that was read."""
    write_atomic(manifest.folder / RESOLVED, resolved_yaml(inputs.recipe))
    write_json(manifest.folder / "environment.json", describe_environment())
    manifest.inputs = {
        RESOLVED: digest_file(manifest.folder / RESOLVED),
        "model": inputs.source.digest,
        **({"start": inputs.start.digest} if inputs.start is not None else {}),
        **({"teacher": inputs.teacher.digest} if inputs.teacher is not None else {}),
        **{f"suite {suite.name}": suite.digest for suite in inputs.suites},
    }
    manifest.folders = dict(inputs.folders)
    manifest.save()


@contextmanager
def _report_when_interrupted(folder: Path) -> Iterator[None]:
    """After Ctrl-C, and where the user has to mend something, leave a report of how far the run came; the error goes on."""
    from finetune.report.page import write_report

    try:
        yield
    except (KeyboardInterrupt, UserError):
        if (folder / "events.jsonl").is_file():
            with suppress(UserError):
                write_report(folder)
        raise
