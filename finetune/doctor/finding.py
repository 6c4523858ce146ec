"""What a check found, and how checks are run: each by itself, so that one that fails does not hide the others."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

from finetune.errors import ExitCode, Fault, UserError

Status = Literal["ok", "warning", "fault", "skipped"]
Made = TypeVar("Made")
_log = logging.getLogger(__name__)


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
        lines = [f"{self.status:<7} {self.check}{number}: {self.detail}"]
        if self.where and self.status in ("fault", "warning"):
            lines.append(f"        where: {self.where}")
        if self.remedy:
            lines.append(f"        fix: {self.remedy}")
        return "\n".join(lines)

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
    """The findings of one check, with its group. A UserError of it is as many faults as it carries, and a check that fails
    itself is one fault, so that the others go on."""
    try:
        found = check()
        for one in [found] if isinstance(found, Finding) else found:
            yield replace(one, group=group)
    except Exception as error:
        yield from _raised(group, name, error)


def attempt(group: str, name: str, work: Callable[[], Made]) -> tuple[Made | None, list[Finding]]:
    """What `work` makes, which checks stand on; or none, and what went wrong as in `examine`."""
    try:
        return work(), []
    except Exception as error:
        return None, _raised(group, name, error)


def _raised(group: str, name: str, error: Exception) -> list[Finding]:
    found = faults_of(name, error) if isinstance(error, UserError) else [crashed(name, error)]
    return [replace(one, group=group) for one in found]


def crashed(name: str, error: Exception) -> Finding:
    """A check that failed itself: a fault of the program, unless what it looked at is damaged. The traceback is logged."""
    _log.error("the check '%s' failed", name, exc_info=error)
    first = (str(error).strip() or "no message").splitlines()[0]
    return fault(
        name,
        f"the check of '{name}' failed itself, so nothing is known of it: {type(error).__name__}: {first}",
        "look at the traceback on standard error: if it names no file of yours, report it with the recipe",
        exit_code=ExitCode.INTERNAL_FAULT,
    )


def told_once(findings: Iterable[Finding]) -> list[Finding]:
    """Without the faults and warnings that an earlier check has told in the same words of the same place."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for one in findings:
        key = (one.detail, one.where)
        if one.status in ("fault", "warning"):
            if key in seen:
                continue
            seen.add(key)
        kept.append(one)
    return kept


def faults_in(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status == "fault"]


def exit_code_of(findings: Sequence[Finding]) -> ExitCode:
    """Done without faults; otherwise that of the faults where all have the same, else that of a user error."""
    codes = {finding.exit_code for finding in faults_in(findings)}
    if not codes:
        return ExitCode.DONE
    return codes.pop() if len(codes) == 1 else ExitCode.USER_ERROR
