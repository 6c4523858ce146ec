"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "fault", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `measured` is compared with `limit` where the check has a number; `detail` says what it means."""

    check: str
    status: Status
    detail: str
    measured: float | None = None
    limit: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        number = ""
        if self.measured is not None and self.limit is not None:
            number = f" ({self.measured:.2g}, limit {self.limit:.2g})"
        return f"{self.status:<7} {self.check}{number}: {self.detail}"


def at_most(check: str, measured: float, limit: float, detail: str) -> Finding:
    """ok when `measured` does not pass `limit`; a value that is no number is a fault."""
    status: Status = "ok" if measured <= limit else "fault"
    return Finding(check, status, detail, measured, limit)
