"""The page of costs over volume: from where a tuned small model is cheaper than the large one, as a curve and a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from finetune.paths import write_atomic
from finetune.plan.cost import BreakEven
from finetune.report.comparison import Judgement
from finetune.report.rendering import render
from finetune.report.svg import Series, line_plot
from finetune.units import format_amount

_VOLUME = "volume"  # short: the first tick of the axis carries it


def write_break_even_page(
    path: Path, result: BreakEven, *, months: float, query_costs: Mapping[str, float]
) -> Path:
    """Write the page to `path`, atomically. `query_costs`: price of one query by 'large' and 'tuned', where known."""
    write_atomic(path, render_break_even(result, months=months, query_costs=query_costs))
    return path


def render_break_even(result: BreakEven, *, months: float, query_costs: Mapping[str, float]) -> str:
    """The whole page as HTML; equal results give equal bytes."""
    pays = result.million_tokens_per_month is not None
    judged = Judgement("Pays", "good", "check") if pays else Judgement("Never pays", "bad", "cross")
    facts = [
        (
            "fixed cost of the tuned model",
            f"{result.fixed_cost_per_month:,.2f} a month over {months:g} months",
        ),
        ("saved on a million tokens", f"{result.saving_per_million_tokens:,.2f}"),
        *((f"a query with the {name} model", f"{cost:.6f}") for name, cost in query_costs.items()),
    ]
    rows = [
        (
            format_amount(point.million_tokens_per_month),
            f"{point.large_model:,.2f}",
            f"{point.tuned_model:,.2f}",
            f"{point.large_model - point.tuned_model:+,.2f}".replace("-", "\N{MINUS SIGN}"),
        )
        for point in result.curve
    ]
    return render(
        "break_even.html.j2",
        judged=judged,
        sentence=_sentence(result),
        facts_told=facts,
        drawing=_drawing(result),
        rows=rows,
    )


def _sentence(result: BreakEven) -> str:
    if result.million_tokens_per_month is None or result.of_which_gpu_only is None:
        return "The tuned model saves nothing on a token: no volume pays for it."
    return (
        f"The tuned model is cheaper from {format_amount(result.million_tokens_per_month)} million tokens a month on, and "
        f"from {format_amount(result.of_which_gpu_only)} once the tuning is paid off."
    )


def _drawing(result: BreakEven) -> Markup | None:
    """Cost a month of both ways over the volume, with the volume where they cross; without the volume of nothing."""
    curve = result.curve[1:]
    lines = {
        "large model": ("validation", [(p.million_tokens_per_month, p.large_model) for p in curve]),
        "tuned model": ("train", [(p.million_tokens_per_month, p.tuned_model) for p in curve]),
    }
    volume = result.million_tokens_per_month
    return line_plot(
        [Series(name, style, points) for name, (style, points) in lines.items()],
        label=f"Cost a month of both models over the volume. {_sentence(result)}",
        height=260,
        x_name=_VOLUME,
        events=[(volume, "break-even")] if volume is not None else [],
        from_zero=True,
    )
