"""What makes a machine healthy, and what a finding looks like to machines."""

from __future__ import annotations

import pytest

from kvxfer.doctor.findings import Finding, Status, as_json, error, healthy, ok, unknown, warning

FINDINGS = {
    Status.OK: ok("a", "fine"),
    Status.UNKNOWN: unknown("b", "who knows"),
    Status.WARNING: warning("c", "slow", "it matters", "do this"),
    Status.ERROR: error("d", "broken", "it matters", "do that"),
}


@pytest.mark.parametrize(
    "status, plain, strict",
    [
        (Status.OK, True, True),
        (Status.UNKNOWN, True, True),
        (Status.WARNING, True, False),
        (Status.ERROR, False, False),
    ],
)
def test_what_fails(status: Status, plain: bool, strict: bool) -> None:
    findings = [FINDINGS[Status.OK], FINDINGS[status]]
    assert healthy(findings) is plain
    assert healthy(findings, strict=strict) is (strict or plain)
    assert healthy(findings, strict=True) is strict
    assert as_json(findings, strict=True)["ok"] is strict


def test_json_has_it_all() -> None:
    told = as_json(iter(FINDINGS.values()))
    assert told["ok"] is False
    assert told["counts"] == {"ok": 1, "unknown": 1, "warning": 1, "error": 1}
    assert told["findings"][3] == {
        "check": "d",
        "status": "error",
        "what": "broken",
        "why": "it matters",
        "todo": "do that",
    }
    assert Finding("a", Status.OK, "fine") == FINDINGS[Status.OK]
