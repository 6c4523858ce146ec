"""The distillation losses measured on this machine: a wrong one trains without a complaint."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from finetune.distil.aligned.conformance import run_aligned_conformance
from finetune.distil.conformance import run_conformance
from finetune.doctor.finding import Finding, at_most


def check_losses() -> Iterator[Finding]:
    """The conformance checks of the distillation losses, one by one; a fault is one of the program or of its libraries."""
    for check, value, limit, detail in chain(run_conformance(), run_aligned_conformance()):
        yield at_most(check, value, limit, detail)
