"""What a diagnosis says: the shape of a curve, why it is called so, the evidence, and the remedy of the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Shape = Literal[
    "healthy",
    "plateau_then_fall",
    "epoch_steps",
    "spike",
    "recurring_spikes",
    "divergence",
    "overfitting",
    "rate_too_low",
    "no_signal",
    "data_too_hard",
    "data_too_easy",
    "regular_steps",
    "throughput_leak",
    "near_zero_loss",
    "fp16_overflow",
    "too_short",
]
Severity = Literal["fault", "warning", "note"]

TITLES: dict[Shape, str] = {
    "healthy": "healthy",
    "plateau_then_fall": "a plateau, then a fall",
    "epoch_steps": "steps at epoch boundaries",
    "spike": "a spike",
    "recurring_spikes": "spikes that come back with the same rows",
    "divergence": "divergence",
    "overfitting": "overfitting",
    "rate_too_low": "learning rate too low",
    "no_signal": "no signal arrives",
    "data_too_hard": "nothing to learn from these answers",
    "data_too_easy": "nothing left to learn",
    "regular_steps": "regular steps: the order is not shuffled",
    "throughput_leak": "throughput leaks away",
    "near_zero_loss": "loss near zero from the start",
    "fp16_overflow": "fp16 overflow",
    "too_short": "too few steps to tell",
}

# Which shape names the run when several are found: what makes the others meaningless comes first.
PRECEDENCE: tuple[Shape, ...] = (
    "fp16_overflow",
    "no_signal",
    "near_zero_loss",
    "regular_steps",
    "divergence",
    "rate_too_low",
    "recurring_spikes",
    "data_too_hard",
    "data_too_easy",
    "overfitting",
    "throughput_leak",
    "spike",
    "plateau_then_fall",
    "epoch_steps",
    "healthy",
    "too_short",
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One shape that was found. `steps` are those to look at, `rows` ids of rows; `evidence` are the numbers behind `why`.

    `fault`: the result cannot be trusted or is thrown away; `warning`: worth acting on; `note`: nothing to do.
    """

    shape: Shape
    severity: Severity
    why: str
    remedy: str
    evidence: Mapping[str, float | int | str] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return TITLES[self.shape]

    @property
    def is_alarm(self) -> bool:
        return self.severity != "note"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "shape": self.shape,
            "title": self.title,
            "severity": self.severity,
            "why": self.why,
            "remedy": self.remedy,
            "evidence": dict(self.evidence),
            "steps": list(self.steps),
            "rows": list(self.rows),
        }

    def __str__(self) -> str:
        lines = [f"{self.severity:<7} {self.title}: {self.why}", f"        remedy: {self.remedy}"]
        if self.rows:
            shown = ", ".join(self.rows[:10]) + (
                f" and {len(self.rows) - 10} more" if len(self.rows) > 10 else ""
            )
            lines.append(f"        rows: {shown}")
        return "\n".join(lines)
