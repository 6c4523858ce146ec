"""What a check found, and how checks are run: each by itself, so that one that fails does not hide the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from finetune.errors import ExitCode, Fault, UserError

Status = Literal["ok", "warning", "fault", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `measured` is compared with `limit` where the check has a number; `detail` says what it means.

    `remedy` is what to do, `where` a file, a key or a row. `changes` are dotted keys of the recipe with values that mend it
    without changing what is learnt; `--fix` writes them. `exit_code` is that of a fault.
    """

    check: str
    status: Status
    detail: str
    measured: float | None = None
    limit: float | None = None
    remedy: str = ""
    where: str = ""
    group: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    exit_code: ExitCode = ExitCode.USER_ERROR

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a measurement that is no number is none."""
        measured = self.measured if self.measured is None or math.isfinite(self.measured) else None
        return {**asdict(self), "measured": measured, "exit_code": int(self.exit_code)}

    def __str__(self) -> str:
        number = ""
        if self.measured is not None and self.limit is not None:
            number = f" ({self.measured:.2g}, limit {self.limit:.2g})"
        line = f"{self.status:<7} {self.check}{number}: {self.detail}"
        return f"{line}\n        fix: {self.remedy}" if self.remedy else line

    def as_fault(self) -> Fault:
        """As an error of a run."""
        return Fault(f"{self.check}: {self.detail}", self.where, "", self.remedy)


def at_most(check: str, measured: float, limit: float, detail: str, *, remedy: str = "") -> Finding:
    """ok when `measured` does not pass `limit`; a value that is no number is a fault."""
    status: Status = "ok" if measured <= limit else "fault"
    return Finding(check, status, detail, measured, limit, remedy="" if status == "ok" else remedy)


def ok(check: str, detail: str) -> Finding:
    return Finding(check, "ok", detail)


def skipped(check: str, detail: str) -> Finding:
    return Finding(check, "skipped", detail)


def warning(check: str, detail: str, remedy: str, **more: Any) -> Finding:
    return Finding(check, "warning", detail, remedy=remedy, **more)


def fault(check: str, detail: str, remedy: str, **more: Any) -> Finding:
    return Finding(check, "fault", detail, remedy=remedy, **more)


def faults_of(check: str, error: UserError) -> list[Finding]:
    """Every fault of an error as a finding."""
    return [
        fault(
            check,
            f"{one.what} ({one.why})" if one.why else one.what,
            one.fix,
            where=one.where,
            exit_code=error.exit_code,
        )
        for one in error.faults
    ]


def examine(group: str, name: str, check: Callable[[], Finding | Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of one check, with its group; a UserError of it is as many faults as it carries."""
    try:
        found = check()
        for one in [found] if isinstance(found, Finding) else found:
            yield replace(one, group=group)
    except UserError as error:
        for one in faults_of(name, error):
            yield replace(one, group=group)


def faults_in(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status == "fault"]


def exit_code_of(findings: Sequence[Finding]) -> ExitCode:
    """Done without faults; otherwise that of the faults where all have the same, else that of a user error."""
    codes = {finding.exit_code for finding in faults_in(findings)}
    if not codes:
        return ExitCode.DONE
    return codes.pop() if len(codes) == 1 else ExitCode.USER_ERROR
