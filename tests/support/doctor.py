"""``kvxfer doctor`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DEADLINE = 60.0


def command(*arguments: str) -> list[str]:
    """The command line."""
    return [sys.executable, "-m", "kvxfer", "doctor", *arguments]


@dataclass(frozen=True)
class Told:
    """What it said.

    :param status: its exit status.
    """

    status: int
    findings: Sequence[Mapping[str, Any]]

    def only(self, status: str) -> Mapping[str, Any]:
        """The one finding of a status."""
        found = [f for f in self.findings if f["status"] == status]
        assert len(found) == 1, self.findings
        return found[0]

    def bad(self) -> list[tuple[str, str]]:
        """Check and status of what is neither ok nor unknown."""
        return [(f["check"], f["status"]) for f in self.findings if f["status"] in ("warning", "error")]


def doctor(*arguments: str, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Told:
    """Run it, with ``--json``.

    :param prefix: a command that becomes the one that follows it.
    :param environment: variables beside those of this process that do not steer kvxfer, UCX or NIXL.
    """
    line = [*prefix, *command("--json", *arguments)]
    done = run(line, environment)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is (done.returncode == 0)
    for finding in told["findings"]:
        assert finding["what"]
        # Whoever is told of a problem is told why it matters and what to do.
        assert finding["status"] not in ("warning", "error") or (finding["why"] and finding["todo"])
    return Told(done.returncode, told["findings"])


def run(line: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVXFER_", "UCX_", "NIXL_"))}
    return subprocess.run(
        line,
        capture_output=True,
        text=True,
        check=False,
        timeout=_DEADLINE,
        env={**inherited, **(environment or {})},
        stdin=subprocess.DEVNULL,
    )
