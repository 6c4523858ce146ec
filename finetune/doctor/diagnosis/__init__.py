"""What a run's curve means and what to do: pure functions over its events, no torch."""

from finetune.doctor.diagnosis.diagnose import diagnose, events_of, new_findings
from finetune.doctor.diagnosis.finding import Diagnosis, Severity, Shape

__all__ = ["Diagnosis", "Severity", "Shape", "diagnose", "events_of", "new_findings"]
