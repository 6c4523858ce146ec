"""What answers take, in a line or two: tokens, latency, speed and price of both arms, with paired ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def cost_lines(cost: Mapping[str, Any]) -> list[str]:
    """'prompt 1,014 → 43 tokens (×0.042 [0.041, 0.043]), output …'; with prices a second line, with the break-even."""
    before, after, ratios = cost["baseline"], cost["arm"], cost["ratios"]
    tokens = [
        f"{name} {_number(before[f'{name}_tokens_per_item'])} → {_number(after[f'{name}_tokens_per_item'])} tokens"
        f"{_ratio(ratios[f'{name}_tokens'])}"
        for name in ("prompt", "output")
    ]
    latencies = [
        f"{name} {_number(before['latency_seconds'][name])} → {_number(after['latency_seconds'][name])} s"
        f"{_ratio(ratios[f'latency_seconds_{name}'])}"
        for name in ("p50", "p95")
    ]
    lines = [", ".join(tokens), f"latency {', '.join(latencies)}"]
    speeds = [side["output_tokens_per_second"] for side in (before, after)]
    if None not in speeds:
        lines[-1] += f"; {_number(speeds[0])} → {_number(speeds[1])} tokens/s for all together"
    prices = [side["price_per_query"] for side in (before, after)]
    if None not in prices:
        lines.append(
            f"price {prices[0]:.3g} → {prices[1]:.3g} a query{_ratio(ratios['price'])}; {break_even_text(cost)}"
        )
    return lines


def break_even_text(cost: Mapping[str, Any]) -> str:
    """'the tuning pays from 12,300 queries a month', or why no volume pays."""
    even = cost["break_even"]
    paid = f"{_number(even['tuning_cost'])} for the tuning over {even['months']:g} months"
    if even["queries_per_month"] is None:
        return f"the tuned model saves nothing on a query, so no volume pays for it ({paid})"
    return f"the tuned model is cheaper from {even['queries_per_month']:,.0f} queries a month ({paid})"


def _number(value: float) -> str:
    """Three digits at most, but never 1.09e+03."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(found: Mapping[str, Any]) -> str:
    if found["ratio"] is None:
        return ""
    if found["low"] is None or found["high"] is None:
        return f" (×{found['ratio']:.3g})"
    return f" (×{found['ratio']:.3g} [{found['low']:.3g}, {found['high']:.3g}])"
