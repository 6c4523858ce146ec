"""`finetune run RECIPE`: the main job, from data to verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.output import JsonFlag, emit, note
from finetune.errors import ExitCode

SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: --set train.learning_rate=1e-4.")
]


def run(
    recipe: Annotated[
        str, typer.Argument(help="A recipe file or a shipped name, e.g. sft/home_intents_lora.")
    ],
    overrides: SetOption = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder; default runs/<recipe>-<digest8>.")] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            help="Train in several processes: an accelerate config, e.g. recipes/launch/ddp_2.yaml."
        ),
    ] = None,
    launch_overrides: Annotated[
        list[str] | None,
        typer.Option("--launch-set", help="Override a key of that config: --launch-set machine_rank=1."),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Curate, evaluate the base, tune, evaluate again, compare, report. The exit code is the verdict."""
    from finetune.cli.quiet import quiet_libraries
    from finetune.recipe.resolve import read_recipe
    from finetune.training.sharding import load_deepspeed

    read_recipe(recipe, overrides or [])  # a typo is told before libraries are loaded
    quiet_libraries()
    load_deepspeed()
    if launch is not None:
        from finetune.training.launch import launch_processes

        arguments = [recipe, *(f"--set={override}" for override in overrides or [])]
        arguments += ["--run-dir", str(run_dir)] if run_dir is not None else []
        arguments += ["--json"] if as_json else []
        code = launch_processes(launch, launch_overrides or [], ["run", *arguments])
        if code == ExitCode.INTERRUPTED:  # one of the processes has said so
            raise SystemExit(code)
        return code
    from finetune.pipeline.run import run_recipe
    from finetune.pipeline.screen import last_screen
    from finetune.training.processes import join_processes

    processes = join_processes()
    if not processes.works_alone:
        from finetune.pipeline.follow import follow_run

        follow_run(recipe, overrides or [], run_dir=run_dir, processes=processes)
        return 0
    outcome = run_recipe(recipe, overrides or [], run_dir=run_dir, say=note)
    payload = {
        "run": str(outcome.folder),
        "report": str(outcome.report),
        "worked": list(outcome.worked),
        "skipped": list(outcome.skipped),
        "comparison": outcome.comparison,
        "exit_code": outcome.exit_code,
    }
    emit(payload, last_screen(outcome.folder, outcome.comparison, outcome.report), as_json=as_json)
    return outcome.exit_code
