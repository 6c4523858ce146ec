"""Several suites or slices at once: p-values adjusted so that many looks do not make a finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from finetune.errors import UserError

Method = Literal["holm", "bh", "bonferroni", "all-must-pass"]
METHODS: tuple[Method, ...] = ("holm", "bh", "bonferroni", "all-must-pass")

_EXPLANATIONS: dict[Method, str] = {
    "holm": "Holm: the chance of any false finding stays below the level",
    "bh": "Benjamini-Hochberg: at most that share of the findings is false on average",
    "bonferroni": "Bonferroni: the chance of any false finding stays below the level",
    "all-must-pass": "every suite must pass, so no correction is needed: a false pass needs every one of them to be false",
}


def explain(method: Method) -> str:
    """What the declared correction promises, in one sentence for the page."""
    return _EXPLANATIONS[method]


def adjust(p_values: Sequence[float], method: Method = "holm") -> list[float]:
    """Adjusted p-values in the given order; compare each with the level as if it stood alone.

    `holm` (Holm 1979) bounds the chance of any false rejection, `bh` (Benjamini & Hochberg 1995) the expected share of false
    ones; 'all-must-pass' leaves the values as they are: a claim that needs every test to reject is already as strict as
    its weakest test. Raises UserError for a value outside [0, 1].
    """
    if method not in METHODS:
        raise UserError(f"unknown correction '{method}'", fix=f"known: {', '.join(METHODS)}")
    p = np.asarray(list(p_values), dtype=np.float64)
    if p.size and not (np.all(p >= 0.0) and np.all(p <= 1.0)):
        raise UserError("p-values must lie between 0 and 1", fix="leave out comparisons that have none")
    if p.size == 0 or method == "all-must-pass":
        return [float(value) for value in p]
    count, order = p.size, np.argsort(p, kind="stable")
    ordered, rank = p[order], np.arange(1, p.size + 1)
    if method == "holm":
        stepped = np.maximum.accumulate(ordered * (count - rank + 1))
    elif method == "bh":
        stepped = np.minimum.accumulate((ordered * count / rank)[::-1])[::-1]
    else:
        stepped = ordered * count
    adjusted = np.empty(count)
    adjusted[order] = np.minimum(stepped, 1.0)
    return [float(value) for value in adjusted]
