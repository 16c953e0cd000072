"""NIXL and UCX: are they here, which, and what of UCX was loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvxfer.doctor.findings import Finding, error, ok, unknown, warning
from kvxfer.doctor.probe import Survey

CHECK: Final = "library"
_DISTRIBUTIONS: Final = ("nixl", "nixl-cu13", "nixl-cu12", "nixl-rocm", "torch")
_NEEDED: Final = "nixl>=1.5,<2"


@dataclass(frozen=True, slots=True)
class Installed:
    """What is installed: distribution -> version.

    :param importable: whether there is a module ``nixl``.
    """

    versions: Mapping[str, str]
    importable: bool


def look() -> Installed:
    """Ask the environment of this Python."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Installed(found, importlib.util.find_spec("nixl") is not None)


def judge(installed: Installed, survey: Survey | None) -> list[Finding]:
    """:param survey: what was seen of NIXL in a process of its own; None where there is no NIXL to ask."""
    torch = installed.versions.get("torch")
    about_torch = ok(
        CHECK, f"torch {torch} is installed; kvxfer does not load it" if torch else "no torch; none is needed"
    )
    if not installed.importable or survey is None:
        return [
            error(
                CHECK,
                "NIXL is not installed",
                "kvxfer moves bytes with it; only planning, inspecting and the client work without.",
                f"pip install '{_NEEDED}' (torch comes along, unless --no-deps is given with nixl-cu12 or nixl-cu13)",
            ),
            about_torch,
        ]
    if survey.failure:
        return [
            error(
                CHECK,
                f"NIXL {installed.versions.get('nixl', '')} is installed and cannot be loaded: {survey.failure}",
                "A sidecar would fail in the same way.",
                f"Install it again: pip install --force-reinstall '{_NEEDED}'",
            ),
            about_torch,
        ]
    loaded = ", ".join(survey.modules) or "none"
    idle = [module for module in survey.shipped if module not in survey.modules]
    beside = f"; not loaded, for want of their hardware or libraries: {', '.join(idle)}" if idle else ""
    findings = [ok(CHECK, f"NIXL {survey.nixl}, UCX {survey.ucx}; UCX modules loaded: {loaded}{beside}"), about_torch]
    if not survey.nixl.startswith("1."):
        findings.append(
            unknown(
                CHECK,
                f"NIXL {survey.nixl} is not a version that kvxfer is tested with",
                "kvxfer relies on what NIXL 1.5 does beyond what it promises.",
                f"pip install '{_NEEDED}'",
            )
        )
    if "cma" not in survey.modules:
        findings.append(
            warning(
                CHECK,
                "UCX has not loaded its module cma",
                "Without it, reads between processes of one host go over TCP.",
                "Use a UCX that was built with CMA, as NIXL's wheels are.",
            )
        )
    return findings
