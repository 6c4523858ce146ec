"""`finetune stats compare | power`: judge any two files of scores, and plan how many items a judgement needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune.cli.output import JsonFlag, emit

if TYPE_CHECKING:
    from finetune.stats.compare import Comparison
    from finetune.stats.records import PairedScores

app = typer.Typer(
    name="stats",
    help="Paired comparison of any two files of scores, and power before a run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
AlphaOption = Annotated[float, typer.Option(help="Accepted rate of false positives.")]
ArmArgument = typer.Argument(show_default=False)


@app.callback()
def group() -> None:
    """Paired comparison of any two files of scores, and power before a run."""


@app.command()
def compare(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="The baseline: JSONL, lm-eval samples or an inspect log.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The arm under test, on the same items.")],
    metric: Annotated[
        str | None, typer.Option(help="Which score; needed when the files share several.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Key of each item's cluster (template, document); 'none': independent items."),
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="Greatest acceptable loss, 0.02 for two points.")
    ] = None,
    inner: Annotated[
        bool, typer.Option("--inner", help="Compare the items that both files have scored.")
    ] = False,
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="The score is a loss: a lower B is an improvement.")
    ] = False,
    confidence: Annotated[float, typer.Option(help="Of the interval.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="For tests that sample.")] = 0,
    as_json: JsonFlag = False,
) -> int:
    """Compare B with A item by item. The exit code is the verdict: 0 improved, 10 regressed, 11 inconclusive, 12 no evidence."""
    from finetune.stats.compare import compare as compare_arms
    from finetune.stats.records import read_pair

    pair = read_pair(a, b, metric=metric, cluster=cluster, inner=inner)
    sign = -1.0 if lower_is_better else 1.0
    result = compare_arms(
        [sign * score for score in pair.a],
        [sign * score for score in pair.b],
        clusters=pair.clusters,
        margin=margin,
        confidence=confidence,
        seed=seed,
    )
    noise = _sampling_noise(pair)
    payload = {
        "metric": pair.metric,
        "higher_is_better": not lower_is_better,
        "cluster": pair.cluster_key,
        "left_out": {"a": pair.left_out[0], "b": pair.left_out[1]},
        **result.to_dict(),
        **({"variance": noise} if noise else {}),
        "exit_code": int(result.exit_code),
    }
    emit(payload, "\n".join(_comparison_lines(pair, result, noise, sign)), as_json=as_json)
    return int(result.exit_code)


def _sampling_noise(pair: PairedScores) -> dict[str, Any] | None:
    """How each arm's variance splits between questions and sampling, when items were sampled more than once."""
    if len(pair.items) < 2 or not any(len(samples) > 1 for samples in (*pair.samples_a, *pair.samples_b)):
        return None
    from finetune.stats.repeats import variance_parts

    return {"a": variance_parts(pair.samples_a).to_dict(), "b": variance_parts(pair.samples_b).to_dict()}


def _comparison_lines(
    pair: PairedScores, result: Comparison, noise: dict[str, Any] | None, sign: float
) -> list[str]:
    means = [sign * mean for mean in (result.mean_a, result.mean_b)]
    shown = [f"{mean:.1%}" if result.scale == "share" else f"{mean:.4g}" for mean in means]
    lines = [f"{pair.metric} on {result.n:,} items: A {shown[0]}, B {shown[1]}"]
    if any(pair.left_out):
        lines.append(
            f"left out because only one file scores them: {pair.left_out[0]} of A, {pair.left_out[1]} of B"
        )
    better = "" if sign > 0 else " (positive is better: the score is a loss)"
    low, high = (result.amount(end, signed=True) for end in (result.low, result.high))
    lines += [
        f"difference {result.amount(result.difference, signed=True)}, "
        f"{result.confidence:.0%} interval {low} to {high}, p = {result.p_value:.3g}{better}",
        f"test: {result.test}; interval: {result.interval}; {result.reason}",
    ]
    if result.fixed is not None:
        lines.append(
            f"fixed {result.fixed}, broken {result.broken}, both right {result.both_right}, both wrong {result.both_wrong}"
        )
    lines += [f"note: {note}" for note in result.notes]
    for arm, parts in (noise or {}).items():
        lines.append(
            f"{arm.upper()}: {parts['samples']:.3g} samples an item; sampling makes {parts['sampling_share']:.0%} "
            "of an item's variance, the choice of items the rest"
        )
    if result.noninferiority is not None:
        lines.append(
            f"non-inferiority at {result.amount(result.margin or 0.0)}: {result.noninferiority} "
            f"(one-sided {result.confidence:.0%} bound {result.amount(result.one_sided_low, signed=True)})"
        )
    return [*lines, result.limits(), f"verdict: {result.verdict}"]


@app.command()
def power(
    effect: Annotated[float, typer.Option(help="The difference worth finding, 0.02 for two points.")] = 0.02,
    discordance: Annotated[
        float | None, typer.Option(help="Share of items on which the arms differ, as a pilot shows it.")
    ] = None,
    pilot: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two files of right/wrong scores to take the discordance from."),
    ] = None,
    items: Annotated[int | None, typer.Option(min=1, help="Items at hand: what can they tell?")] = None,
    accuracy: Annotated[float, typer.Option(help="Accuracy of the baseline, for the unpaired design.")] = 0.7,
    margin: Annotated[
        float | None, typer.Option(help="Also plan a non-inferiority test with this margin.")
    ] = None,
    cluster_size: Annotated[int, typer.Option(min=1, help="Items that share a cluster.")] = 1,
    icc: Annotated[float, typer.Option(help="How alike the differences within a cluster are, 0 to 1.")] = 0.0,
    wished_power: Annotated[
        float, typer.Option("--power", help="Wished chance of finding the effect.")
    ] = 0.8,
    alpha: AlphaOption = 0.05,
    metric: Annotated[str | None, typer.Option(help="Which score of the pilot.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Items that a paired and an unpaired comparison need, and what the items at hand can tell."""
    from finetune.errors import UserError
    from finetune.stats.plan import plan_power

    if pilot is not None and discordance is not None:
        raise UserError(
            "the discordance is given, and a pilot to take it from",
            where="--discordance, --pilot",
            fix="leave one of them out",
        )
    accuracy_a, share = accuracy, discordance
    if pilot is not None:
        accuracy_a, share = _pilot(pilot, metric)
    answer = plan_power(
        effect=effect,
        discordance=share,
        accuracy=accuracy_a,
        items=items,
        margin=margin,
        cluster_size=cluster_size,
        icc=icc,
        alpha=alpha,
        power=wished_power,
    )
    emit(answer.to_dict(), "\n".join(answer.lines()), as_json=as_json)


def _pilot(paths: tuple[Path, Path], metric: str | None) -> tuple[float, float]:
    """(accuracy of A, share of discordant items) in two pilot files."""
    from finetune.errors import UserError
    from finetune.stats.compare import compare as compare_arms
    from finetune.stats.records import read_pair

    pair = read_pair(*paths, metric=metric, cluster="none")
    result = compare_arms(pair.a, pair.b)
    if result.fixed is None or result.broken is None:
        raise UserError(
            f"'{pair.metric}' is not right or wrong, so the pilot has no discordant items",
            fix="choose a right/wrong metric, or give --discordance",
        )
    return result.mean_a, (result.fixed + result.broken) / result.n
