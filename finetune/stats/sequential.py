"""Looking at the results while they come in, without paying for it in false positives: an e-process on discordant items.

Under 'each discordant item is fixed or broken like a fair coin' the mixture likelihood ratio below is a nonnegative
martingale with mean 1, so by Ville's inequality it ever reaches 1/alpha with probability at most alpha, whenever and as
often as one looks. The mixture is the Beta(1/2, 1/2) of Jeffreys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.errors import UserError


@dataclass(slots=True)
class EProcess:
    """Counts of discordant items so far; `update` after each item or batch, stop when `decision` is not None.

    alpha: bound on the probability of ever deciding when the arms are equally good.
    Items must arrive in an order that does not depend on their results, and must be independent.
    """

    alpha: float = 0.05
    fixed: int = 0
    broken: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 1.0:
            raise UserError(f"alpha {self.alpha} must lie between 0 and 1", fix="write 5 % as 0.05")

    def update(self, fixed: int, broken: int) -> None:
        """Add newly seen discordant items; concordant items change nothing."""
        if fixed < 0 or broken < 0:
            raise ValueError(f"counts must not be negative: fixed={fixed}, broken={broken}")
        self.fixed += fixed
        self.broken += broken

    @property
    def e_value(self) -> float:
        """Evidence against equal arms so far; at least 1/alpha is enough. 1 before any discordant item."""
        return math.exp(min(float(self.log_e_value(self.fixed, self.broken)), 700.0))

    @property
    def p_value(self) -> float:
        """A p-value that stays valid however often one looks: 1/e, at most 1."""
        return min(1.0, 1.0 / self.e_value)

    @property
    def decision(self) -> str | None:
        """'improved' or 'regressed' once the evidence is enough, else None: keep going."""
        if self.log_e_value(self.fixed, self.broken) < math.log(1.0 / self.alpha):
            return None
        return "improved" if self.fixed > self.broken else "regressed"

    @staticmethod
    def log_e_value(fixed: Any, broken: Any) -> Any:
        """log of B(fixed + 1/2, broken + 1/2) / B(1/2, 1/2) · 2^(fixed + broken), B the beta function; arrays broadcast."""
        from scipy.special import betaln

        fixed, broken = np.asarray(fixed, dtype=np.float64), np.asarray(broken, dtype=np.float64)
        return (betaln(fixed + 0.5, broken + 0.5) - betaln(0.5, 0.5) + (fixed + broken) * math.log(2.0))[()]
