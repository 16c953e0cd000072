"""Which checks there are, and that each tells something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvxfer.cli.doctor.command import doctor
from kvxfer.config import Settings
from kvxfer.doctor import checks, probe
from kvxfer.doctor.checks import CHECKS, Examination, Question
from kvxfer.doctor.findings import Finding, Status
from kvxfer.tls import TlsFiles
from tests.support.certificates import Authority, Identity, write

LOOKS = probe.Survey("1.5.1", "1.23.0", ("cma",), ("cma",), {"lo": "tcp"}, ("cma", "tcp"))


@pytest.fixture(autouse=True)
def no_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ones are started elsewhere; here all get the same answer, once."""
    answers = iter([(LOOKS, probe.Pair(failure="none here"))])
    monkeypatch.setattr(probe, "look", lambda _: next(answers))


def examine(name: str, **question: object) -> list[Finding]:
    values = {"settings": Settings(), "problems": (), "environment": {}, **question}
    return list(CHECKS[name](Examination(Question(**values))))  # type: ignore[arg-type]


def test_the_help_names_every_check() -> None:
    listed = re.search(r"Checks: ([^.]*)\.", doctor.__doc__ or "")
    assert listed is not None
    assert re.split(r",\s+", listed[1]) == list(CHECKS)


def test_every_check_tells_something_under_its_own_name() -> None:
    examination = Examination(Question(Settings(), ("that",), {}, as_uid=0))
    for name, check in CHECKS.items():
        findings = list(check(examination))
        assert {f.check for f in findings} == ({name} if name != "peer" else set())


def test_problems_of_the_settings() -> None:
    (found,) = examine("settings", problems=("peer_port: bad",))
    assert (found.status, found.what) == (Status.ERROR, "peer_port: bad")
    assert examine("settings")[0].status is Status.OK
    (found,) = examine("settings", settings=Settings(peer_host="0.0.0.0", insecure_peer=True))
    assert found.status is Status.WARNING
    named = Settings(peer_host="0.0.0.0", insecure_peer=True, advertise="p.example:9000")
    assert examine("settings", settings=named)[0].status is Status.OK


def test_every_port_among_the_settings_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, str, int]] = []
    monkeypatch.setattr(checks.ports, "look_at_port", lambda *port: tried.append(port) or checks.ports.Port(*port))
    examine("ports", settings=Settings(peer_port=9000, insecure_peer=True, peer_host="0.0.0.0", http_port=9100))
    assert {("peer_port", "0.0.0.0", 9000), ("http_port", "127.0.0.1", 9100)} <= set(tried)
    assert len(tried) == sum(name.endswith("_port") for name in Settings.model_fields)


def test_a_peer_is_not_tried_with_files_that_cannot_be_used(tmp_path: Path) -> None:
    files = write(tmp_path, Identity(Authority("ca"), "p.example"))
    settings = Settings(**files)  # type: ignore[arg-type]
    files["peer_tls_key"].unlink()
    assert settings.peer_tls() == TlsFiles(*files.values())
    (found,) = examine("peer", settings=settings, peer="127.0.0.1:1")
    assert found.status is Status.UNKNOWN
    assert "peer_tls_key" in found.what


def test_the_name_that_the_certificate_must_carry(tmp_path: Path) -> None:
    files = write(tmp_path, Identity(Authority("ca"), "p.example"))
    for flags, named in (
        ({"advertise": "q.example:9000"}, "q.example"),
        ({"advertise": "q.example:9000", "peer_server_name": "r.example"}, "r.example"),
        ({"peer_host": "10.0.0.1"}, "10.0.0.1"),
    ):
        found = examine("tls", settings=Settings(**files, **flags))  # type: ignore[arg-type]
        assert any(f"does not name {named}" in f.what for f in found)
