"""A metric that an lm-eval task computes itself; the number is saved beside the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from finetune.errors import did_you_mean


def make_lm_eval(
    *, metric: str, filter: str = "none", higher_is_better: bool = True
) -> Callable[[str, Mapping[str, Any]], float]:
    """A metric of the suite's lm-eval task, as the task computes it for one document.

    metric: its name, with `log_` before a perplexity. filter: the task's filter of the answers, e.g. `strict-match`.
    """
    key = f"{metric},{filter}"

    def lm_eval(output: str, scores: Mapping[str, Any]) -> float:
        if key not in scores:
            raise ValueError(f"the task gives no '{key}' for this document; {did_you_mean(key, scores)}")
        return float(scores[key])

    return lm_eval
