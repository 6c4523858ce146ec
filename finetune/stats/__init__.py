"""Seeded intervals, paired tests, power and multiplicity. No torch.

`compare` judges two arms on the same items, `mean_interval` one arm; `plan_power` says before a run what it can tell.
Every number's method is chosen from the data and named beside it; `benchmarks/stats_calibration.py` measures how often
the intervals and verdicts are wrong.
"""

from finetune.stats.compare import Comparison, compare
from finetune.stats.means import MeanInterval, mean_interval
from finetune.stats.multiplicity import adjust
from finetune.stats.plan import PowerPlan, plan_power
from finetune.stats.rates import failure_rate_upper_bound
from finetune.stats.repeats import VarianceParts, variance_parts
from finetune.stats.sequential import EProcess

__all__ = [
    "Comparison",
    "EProcess",
    "MeanInterval",
    "PowerPlan",
    "VarianceParts",
    "adjust",
    "compare",
    "failure_rate_upper_bound",
    "mean_interval",
    "plan_power",
    "variance_parts",
]
