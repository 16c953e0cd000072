"""NIXL is there, or it is not."""

from __future__ import annotations

from kvxfer.doctor import library
from kvxfer.doctor.findings import Finding, Status
from kvxfer.doctor.probe import Survey

GOOD = Survey("1.5.1", "1.23.0", ("cma", "ib"), ("cma", "cuda", "ib"), {"eth0": "tcp"}, ("cma", "tcp"))
INSTALLED = library.Installed({"nixl": "1.5.1", "torch": "2.13.0"}, True)


def bad(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.status is not Status.OK]


def test_all_is_there() -> None:
    findings = library.judge(INSTALLED, GOOD)
    assert bad(findings) == []
    assert findings[0].what.startswith("NIXL 1.5.1, UCX 1.23.0; UCX modules loaded: cma, ib; not loaded")
    assert findings[0].what.endswith(": cuda")
    assert "torch 2.13.0" in findings[1].what


def test_no_nixl() -> None:
    (found,) = bad(library.judge(library.Installed({}, False), None))
    assert found.status is Status.ERROR
    assert "pip install 'nixl>=1.5,<2'" in found.todo


def test_nixl_that_cannot_be_loaded() -> None:
    (found,) = bad(library.judge(INSTALLED, Survey(failure="NIXL is not installed: libcudart.so.13: no such file")))
    assert found.status is Status.ERROR
    assert "libcudart" in found.what


def test_no_cma_and_a_strange_version() -> None:
    survey = Survey("2.0.0", "1.23.0", ("ib",), ("ib",), {}, ())
    found = bad(library.judge(INSTALLED, survey))
    assert [f.status for f in found] == [Status.UNKNOWN, Status.WARNING]
    assert "cma" in found[1].what


def test_this_environment() -> None:
    installed = library.look()
    assert installed.importable
    assert "nixl" in installed.versions
