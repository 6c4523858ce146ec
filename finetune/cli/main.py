"""Entry point of the `finetune` command: registers the commands and turns errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import typer
from typer._click.exceptions import ClickException  # typer carries its own click

from finetune import __version__
from finetune.cli import (
    data,
    decide,
    diagnose,
    distil,
    doctor,
    evaluate,
    export,
    merge,
    plan,
    recipe,
    report,
    review,
    run,
    stats,
    sweep,
    watch,
)
from finetune.cli.output import print_user_error
from finetune.errors import ExitCode, UserError
from finetune.plan.kernel_cache import limit_kernel_caches

app = typer.Typer(
    name="finetune",
    help="Tune a language model, and know with a margin of error whether it helped.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(run.run)
app.command()(watch.watch)
app.command()(diagnose.diagnose)
app.command()(sweep.sweep)
app.command()(decide.decide)
for group in (recipe, data, plan, doctor, evaluate, stats, merge, export, distil):
    app.add_typer(group.app)
app.command()(report.report)
app.command()(review.review)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"finetune {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Tune a language model, and know with a margin of error whether it helped."""


def _only_one_tells(exit_code: int) -> None:
    """Of the processes of one run the first that fails goes on here and tells why; the others end in silence."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return
    from finetune.training.processes import claim_failure

    if (code := claim_failure(exit_code)) is not None:
        _end(code)


def _end(code: int) -> NoReturn:
    """Exit; one of several processes not through destructors, which would wait for processes that are gone."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _exit_interrupted(arguments: Sequence[str]) -> NoReturn:
    """Say what Ctrl-C left behind, and exit; what is named here continues where it stopped."""
    _only_one_tells(ExitCode.INTERRUPTED)
    if "FINETUNE_FAILURE_FILE" in os.environ:  # the launcher of this process tells it
        _end(ExitCode.INTERRUPTED)
    continues = arguments[:1] in (["run"], ["sweep"]) or arguments[:2] in (
        ["data", "build"],
        ["eval", "run"],
        ["distil", "cache"],
        ["merge", "models"],
        ["merge", "search"],
    )
    resumes = "; the same command continues where it stopped" if continues else ""
    if "--json" in arguments:
        error = UserError(f"interrupted{resumes}", exit_code=ExitCode.INTERRUPTED)
        print_user_error(error, as_json=True)
    else:
        print(f"interrupted{resumes}", file=sys.stderr)
    _end(ExitCode.INTERRUPTED)


def _lost_connection(error: Exception) -> UserError | None:
    """What to say when another process of the run is gone."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    from finetune.training.processes import lost_connection

    return lost_connection(error)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with the codes of `finetune.errors.ExitCode`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    limit_kernel_caches()
    try:
        code = app(args=arguments, standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # typer turns Ctrl-C inside a command into this code, silently
            _exit_interrupted(arguments)
        sys.stdout.flush()  # here, where a reader that has gone away is no fault of ours
        sys.exit(code if isinstance(code, int) else ExitCode.DONE)
    except UserError as error:
        _only_one_tells(error.exit_code)
        print_user_error(error, as_json=as_json)
        _end(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _exit_interrupted(arguments)
    except ClickException as error:
        if as_json:
            print_user_error(UserError(error.format_message(), fix="add --help"), as_json=True)
        else:
            error.show()
        sys.exit(ExitCode.USER_ERROR)
    except BrokenPipeError:
        # or Python complains once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.INTERNAL_FAULT)
    except Exception as error:  # a bug keeps its traceback; a machine gets an answer all the same
        _only_one_tells(ExitCode.INTERNAL_FAULT)
        if (lost := _lost_connection(error)) is not None:
            print_user_error(lost, as_json=as_json)
            _end(lost.exit_code)
        if as_json:
            what = f"internal fault: {type(error).__name__}: {error}"
            print_user_error(UserError(what, exit_code=ExitCode.INTERNAL_FAULT), as_json=True)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            traceback.print_exc()
            _end(ExitCode.INTERNAL_FAULT)
        raise


if __name__ == "__main__":
    main()
