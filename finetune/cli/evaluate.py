"""`finetune eval run | compare | gate | score | pin | judge`: judge a run again, by hand or in a build server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.evaluate_model import model
from finetune.cli.output import JsonFlag, emit, note
from finetune.cli.prices import InputPriceOption, OutputPriceOption, PerHourOption, priced
from finetune.cli.servers import (
    ServeArgumentsOption,
    ServeOption,
    ServerBaseOption,
    ServerKeyOption,
    ServerOption,
    ServerTunedOption,
    ServeTimeoutOption,
)

app = typer.Typer(
    name="eval",
    help="Paired evaluation against a baseline, and the gate.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
BaselineOption = Annotated[
    str,
    typer.Option(
        help="`base` (the run's untuned model), another run's folder or digest, or a file of records."
    ),
]
SuiteOption = Annotated[
    list[str] | None,
    typer.Option("--suite", help="Suite by name or path, or lm_eval:TASK; default: those of the run."),
]
BatchSizeOption = Annotated[
    int | None, typer.Option(min=1, help="Rows decoded together; changes speed, not results.")
]
NoiseFlag = Annotated[
    bool, typer.Option("--noise", help="Also run the base against itself (A/A) for the noise floor.")
]
InnerFlag = Annotated[
    bool, typer.Option("--inner", help="Compare the items that both sides have; the others are left out.")
]


class Require(StrEnum):
    """What the gate asks of a task suite."""

    improvement = "improvement"
    no_regression = "no-regression"


@app.callback()
def group() -> None:
    """Paired evaluation against a baseline, and the gate."""


app.command()(model)


@app.command()
def run(
    folder: RunArgument,
    baseline: BaselineOption = "base",
    suites: SuiteOption = None,
    batch_size: BatchSizeOption = None,
    noise: NoiseFlag = False,
    inner: InnerFlag = False,
    server: ServerOption = None,
    server_base: ServerBaseOption = "base",
    server_tuned: ServerTunedOption = "tuned",
    server_key: ServerKeyOption = None,
    serve: ServeOption = None,
    serve_arguments: ServeArgumentsOption = None,
    serve_timeout: ServeTimeoutOption = 900.0,
    price_per_hour: PerHourOption = None,
    input_price: InputPriceOption = None,
    output_price: OutputPriceOption = None,
    as_json: JsonFlag = False,
) -> int:
    """Evaluate a finished run against a baseline, item by item. Saved answers are reused. The exit code is the verdict."""
    from finetune.cli.quiet import quiet_libraries

    quiet_libraries()
    from finetune.evaluation.claims import combine
    from finetune.evaluation.saved_arms import RunAnswers
    from finetune.evaluation.screen import comparison_lines, noise_lines
    from finetune.paths import write_json
    from finetune.pipeline.manifest import only_process
    from finetune.pipeline.reevaluate import FinishedRun, compare_run, measure_noise
    from finetune.pipeline.served import serving

    serve_by = serving(
        folder,
        server=server,
        names=(server_base, server_tuned),
        key_variable=server_key,
        start=serve.value if serve is not None else None,
        arguments=serve_arguments or [],
        timeout_seconds=serve_timeout,
        say=note,
    )
    RunAnswers.open(folder)  # a folder of another kind is told as such, and gets no lock
    with (
        only_process(folder),
        FinishedRun.open(folder, batch_size=batch_size, serve=serve_by, say=note) as finished,
    ):
        chosen = finished.answers.recipe_suites(suites)
        floor = measure_noise(finished, chosen) if noise else []
        prices = priced(finished.context.inputs.recipe.eval.prices, price_per_hour, input_price, output_price)
        results = compare_run(finished, chosen, baseline=baseline, inner=inner, prices=prices)
    comparison = combine(results, finished.answers.correction) | ({"noise": floor} if noise else {})
    path = folder / "eval" / f"comparison-{_slug(baseline, suites, serve_by is not None)}.json"
    write_json(path, comparison)
    _renew_report(folder)
    lines = noise_lines(floor) + [line for result in results for line in comparison_lines(result)]
    verdict = f"verdict: {comparison['verdict']} (written to {path})"
    emit({**comparison, "path": str(path)}, "\n".join([*lines, verdict]), as_json=as_json)
    return int(comparison["exit_code"])


def _renew_report(folder: Path) -> None:
    """The page shows what is in the folder: written again after a command has added to it."""
    from finetune.report.page import write_report

    write_report(folder)


def _slug(baseline: str, suites: list[str] | None, served: bool) -> str:
    """Part of a file name that tells comparisons of one run apart."""
    from finetune.evaluation.suite import suite_stem

    parts = [Path(baseline).name.removesuffix(".jsonl"), *(suite_stem(name) for name in suites or [])]
    return "-".join([*parts, "server"] if served else parts)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="Baseline: a file of records or a run folder.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The arm: a file of records or a run folder.")],
    suite: Annotated[
        str | None, typer.Option(help="Suite by name or path; default: the one B was evaluated on.")
    ] = None,
    inner: InnerFlag = False,
    price_per_hour: PerHourOption = None,
    input_price: InputPriceOption = None,
    output_price: OutputPriceOption = None,
    as_json: JsonFlag = False,
) -> int:
    """Compare two sets of saved answers, item by item. Nothing is generated. The exit code is the verdict."""
    from finetune.errors import UserError
    from finetune.evaluation.compare import compare_saved
    from finetune.evaluation.cost import Spent
    from finetune.evaluation.saved_arms import find_arm, find_suite
    from finetune.evaluation.screen import comparison_lines
    from finetune.recipe.schema import PricesSection

    chosen = find_suite(suite, second, first) if suite is not None else None
    name = chosen.name if chosen is not None else None
    arms = find_arm(first, name), find_arm(second, name)
    if chosen is None:
        summary = arms[1].summary()
        if summary is None:
            raise UserError(f"{arms[1].path} does not say which suite it answers", fix="add --suite")
        chosen = find_suite(summary.suite, second, first)
    prices = priced(PricesSection(), price_per_hour, input_price, output_price)
    result = compare_saved(chosen, *arms, inner=inner, spent=Spent(prices))
    emit(result, "\n".join(comparison_lines(result)), as_json=as_json)
    return int(result["exit_code"])


@app.command()
def gate(
    folder: RunArgument,
    baseline: BaselineOption = "base",
    suites: SuiteOption = None,
    require: Annotated[
        Require | None,
        typer.Option(
            help="Of task suites; default: improvement over `base`, no regression from anything else."
        ),
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a Markdown table here.")] = None,
    inner: InnerFlag = False,
    as_json: JsonFlag = False,
) -> int:
    """Pass or stop, from saved answers. Exit: 0 passed, 10 regressed, 11 inconclusive, 12 no evidence of improvement."""
    from finetune.evaluation.compare import compare_saved
    from finetune.evaluation.gate import gate as judge
    from finetune.evaluation.gate import to_junit, to_markdown
    from finetune.evaluation.saved_arms import BASE, RunAnswers, find_baseline
    from finetune.evaluation.screen import gate_lines
    from finetune.paths import write_atomic

    answers = RunAnswers.open(folder)
    results = [
        compare_saved(
            suite,
            find_baseline(baseline, answers, suite),
            answers.tuned(suite.name),
            inner=inner,
            slices=False,
            costs=False,
        )
        for suite in answers.load_suites(suites)
    ]
    default = Require.improvement if baseline == BASE else Require.no_regression
    answer = judge(results, require=(require or default).value, correction=answers.correction)
    if junit is not None:
        write_atomic(junit, to_junit(answer))
    if markdown is not None:
        write_atomic(markdown, to_markdown(answer, baseline))
    emit(answer.to_dict(), "\n".join(gate_lines(answer)), as_json=as_json)
    return int(answer.exit_code)


@app.command()
def score(
    folder: RunArgument,
    scorers: Annotated[
        list[str] | None,
        typer.Option("--scorer", help="Add a scorer: NAME, or 'NAME:{parameter: value, metric: name}'."),
    ] = None,
    suites: SuiteOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Score saved answers again, with the suite as it is now or with more scorers. Nothing is generated."""
    from finetune.evaluation.claims import combine
    from finetune.evaluation.compare import compare_records
    from finetune.evaluation.rescore import fits, parse_scorer, rescore_arm, with_scorers
    from finetune.evaluation.reviewed import read_reviewed
    from finetune.evaluation.saved_arms import RunAnswers
    from finetune.evaluation.screen import comparison_lines
    from finetune.paths import write_json
    from finetune.pipeline.manifest import only_process

    answers = RunAnswers.open(folder)
    added = [parse_scorer(text) for text in scorers or []]
    every = answers.load_suites(suites)
    fitting = [suite for suite in every if all(fits(suite, one) for one in added)]
    chosen = every if suites or not fitting else fitting  # where none fits, the first one says why
    wider = [with_scorers(suite, added) for suite in chosen]
    with only_process(folder):
        for suite in chosen:
            for saved in answers.saved(suite.name):
                rescore_arm(suite, saved, added)
    results = [
        compare_records(
            suite,
            answers.base(suite).records(),
            answers.tuned(suite.name).records(),
            reviewed=read_reviewed(folder, suite.name),
        )
        for suite in wider
    ]
    if added:
        write_json(folder / "eval" / "comparison-scored.json", combine(results, answers.correction))
    _renew_report(folder)
    lines = [line for result in results for line in comparison_lines(result)]
    emit({"suites": results}, "\n".join(lines), as_json=as_json)


@app.command()
def pin(
    folder: RunArgument,
    suites: SuiteOption = None,
    to: Annotated[Path, typer.Option(help="Folder of the regressions files.")] = Path("eval/regressions"),
    limit: Annotated[int | None, typer.Option(min=1, help="Add at most this many items a suite.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Pin the items that a run got right: later runs must keep them right."""
    from finetune.evaluation.pin import pin_suites
    from finetune.evaluation.saved_arms import RunAnswers
    from finetune.evaluation.suite_data import load_suite_data

    answers = RunAnswers.open(folder)
    jobs = [
        (suite, load_suite_data(suite).items, answers.tuned(suite.name).records())
        for suite in answers.load_suites(suites)
    ]
    pinned, left_out = pin_suites(jobs, folder=to, limit=limit)
    lines = [
        f"{one.path}: {one.added} added, {one.total} pinned; evaluate them with --suite {one.suite_path}"
        for one in pinned
    ]
    lines += [f"left out: {error.faults[0].where}: {error.faults[0].what}" for error in left_out]
    payload = [
        {"path": str(one.path), "added": one.added, "total": one.total, "suite": str(one.suite_path)}
        for one in pinned
    ]
    skipped = [{"suite": error.faults[0].where, "why": error.faults[0].what} for error in left_out]
    emit({"pinned": payload, "left_out": skipped}, "\n".join(lines), as_json=as_json)


@app.command()
def judge(
    folder: RunArgument,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible server of the judging model.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --server: its name of the judging model.")] = None,
    local: Annotated[
        str | None, typer.Option(help="Judge with a model of this machine: a folder, a hub id or builtin:….")
    ] = None,
    baseline: BaselineOption = "base",
    suite: Annotated[
        str | None, typer.Option(help="Suite by name or path; default: the run's first.")
    ] = None,
    rubric: Annotated[Path | None, typer.Option(help="Text file with what the judge should look at.")] = None,
    key: Annotated[str | None, typer.Option(help="Environment variable that holds the API key.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="With --server: questions asked at a time.")] = 4,
    as_json: JsonFlag = False,
) -> int:
    """Let a model compare the answers of both arms, in both orders, and say how far it agrees with what was read by hand.

    Its verdict is the exit code only when it is calibrated: enough items read by hand (`finetune review`), and agreement
    that is shown to be better than chance. Until then the exit code is 11, inconclusive. To score single answers by
    a rubric instead, use the scorer `judge` in a suite or with `finetune eval score`.
    """
    from finetune.evaluation.judge import Judge, judge_run
    from finetune.evaluation.judge_model import find_judge
    from finetune.evaluation.saved_arms import RunAnswers, find_baseline
    from finetune.evaluation.screen import judge_lines

    answers = RunAnswers.open(folder)
    chosen = answers.load_suites([suite] if suite is not None else None)[0]
    judging = Judge(
        find_judge(server=server, model=model, key=key, local=local, concurrency=concurrency),
        _rubric(rubric) if rubric else "",
    )
    arms = find_baseline(baseline, answers, chosen).records(), answers.tuned(chosen.name).records()
    found = judge_run(judging, chosen, *arms, run_folder=folder)
    _renew_report(folder)
    emit(found, "\n".join(judge_lines(found)), as_json=as_json)
    return int(found["exit_code"])


def _rubric(path: Path) -> str:
    from finetune.errors import UserError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {path}: {error}", where="--rubric", fix="name a text file in UTF-8"
        ) from None


@app.command()
def scorers(as_json: JsonFlag = False) -> None:
    """List the scorers that a suite can name, with their parameters."""
    from finetune.evaluation.scorers.registry import find_scorer, scorer_names

    listed = {
        kind.name: {"task": kind.task, "parameters": list(kind.parameters), "summary": kind.summary}
        for kind in map(find_scorer, scorer_names())
    }
    width = max(map(len, listed))
    lines = [
        f"{name:<{width}}  {one['summary']}"
        + (f" (parameters: {', '.join(one['parameters'])})" if one["parameters"] else "")
        for name, one in listed.items()
    ]
    emit({"scorers": listed}, "\n".join(lines), as_json=as_json)
