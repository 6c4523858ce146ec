"""Entry point of the `finetune` command: registers the commands and turns errors into messages and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import typer
from typer._click.exceptions import ClickException  # typer carries its own click

from finetune import __version__
from finetune.cli import data, evaluate, merge, plan, recipe, report, review, run, stats
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
for group in (recipe, data, plan, evaluate, stats, merge):
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


def _exit_interrupted(arguments: Sequence[str]) -> NoReturn:
    """Say on stderr what Ctrl-C left behind, and exit; `run` and `data build` continue where they stopped."""
    continues = arguments[:1] == ["run"] or arguments[:2] == ["data", "build"]
    resumes = "; the same command continues where it stopped" if continues else ""
    print(f"interrupted{resumes}", file=sys.stderr)
    sys.exit(ExitCode.INTERRUPTED)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with the codes of `finetune.errors.ExitCode`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    limit_kernel_caches()
    try:
        code = app(args=arguments, standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # typer turns Ctrl-C inside a command into this code, silently
            _exit_interrupted(arguments)
        sys.exit(code if isinstance(code, int) else ExitCode.DONE)
    except UserError as error:
        print_user_error(error, as_json="--json" in arguments)
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _exit_interrupted(arguments)
    except ClickException as error:
        error.show()
        sys.exit(ExitCode.USER_ERROR)


if __name__ == "__main__":
    main()
