"""What a check says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Status(str, Enum):
    """How bad it is.  UNKNOWN: it could not be checked, and ``what`` says why."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    :param check: the name of the check.
    :param what: what was found.
    :param why: why it matters; empty where nothing is wrong.
    :param todo: what to do about it; empty where nothing is.
    """

    check: str
    status: Status
    what: str
    why: str = ""
    todo: str = ""


def ok(check: str, what: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, Status.OK, what)


def unknown(check: str, what: str, why: str = "", todo: str = "") -> Finding:
    """It could not be checked."""
    return Finding(check, Status.UNKNOWN, what, why, todo)


def warning(check: str, what: str, why: str, todo: str) -> Finding:
    """It works, at a cost or for now."""
    return Finding(check, Status.WARNING, what, why, todo)


def error(check: str, what: str, why: str, todo: str) -> Finding:
    """It will not work."""
    return Finding(check, Status.ERROR, what, why, todo)


def healthy(findings: Iterable[Finding], *, strict: bool = False) -> bool:
    """Whether nothing is an error; ``strict``: nor a warning."""
    bad = {Status.ERROR, Status.WARNING} if strict else {Status.ERROR}
    return all(finding.status not in bad for finding in findings)


def as_json(findings: Iterable[Finding], *, strict: bool = False) -> dict[str, Any]:
    """All of it, for machines."""
    told = list(findings)
    return {
        "ok": healthy(told, strict=strict),
        "counts": {status.value: sum(f.status is status for f in told) for status in Status},
        "findings": [{**asdict(f), "status": f.status.value} for f in told],
    }
