"""Seeded intervals, paired tests, power and multiplicity. No torch."""

from finetune.stats.compare import Comparison, compare
from finetune.stats.means import MeanInterval, mean_interval

__all__ = ["Comparison", "MeanInterval", "compare", "mean_interval"]
