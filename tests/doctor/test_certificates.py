"""TLS files: tried as a peer tries them, and judged."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvxfer.doctor import certificates
from kvxfer.doctor.certificates import Certificate, Tls
from kvxfer.doctor.findings import Finding, Status
from kvxfer.tls import TlsFiles
from tests.support.certificates import Authority, Identity, write

FILES = TlsFiles(Path("/c"), Path("/k"), Path("/a"))
NOW = 1_700_000_000.0
DAY = 86_400.0
GOOD = Tls(FILES, "", Certificate(("DNS:p.example",), NOW - DAY, NOW + 90 * DAY), (NOW + 900 * DAY,), "", 0o600)


def changed(**changes: object) -> Tls:
    return Tls(**{**{name: getattr(GOOD, name) for name in Tls.__slots__}, **changes})  # type: ignore[arg-type]


def dates(begins: float, ends: float) -> Certificate:
    return Certificate(("DNS:p.example",), NOW + begins * DAY, NOW + ends * DAY)


@pytest.mark.parametrize(
    "tls, host, status, says",
    [
        (GOOD, "p.example", Status.OK, "/c is good until 2024-02-12 22:13 UTC by this machine's clock"),
        (GOOD, "", Status.OK, "names DNS:p.example"),
        (GOOD, "q.example", Status.ERROR, "does not name q.example; it names DNS:p.example"),
        (changed(certificate=dates(-9, -1)), "", Status.ERROR, "expired on"),
        (changed(certificate=dates(1, 9)), "", Status.ERROR, "is not good before"),
        (changed(certificate=dates(-1, 29)), "", Status.WARNING, "expires on"),
        (changed(certificate=dates(-1, 31)), "", Status.OK, ""),
        (changed(refused="unable to get local issuer certificate"), "", Status.ERROR, "unable to get local issuer"),
        (changed(key_mode=0o640), "", Status.WARNING, "others may read the key /k (mode 0640)"),
        (changed(cas=(NOW - DAY,)), "", Status.ERROR, "a CA in /a ended on"),
        (changed(cas=(NOW - DAY, NOW + DAY)), "", Status.WARNING, "a CA in /a ended on"),
        (Tls(FILES, "peer_tls_key: /k is not the key"), "", Status.ERROR, "peer_tls_key: /k is not the key"),
    ],
)
def test_judged(tls: Tls, host: str, status: Status, says: str) -> None:
    (found,) = certificates.judge(tls, NOW, host)
    assert found.status is status
    assert says in found.what


@pytest.mark.parametrize(
    "host, named",
    [
        ("p.example", True),
        ("P.EXAMPLE", True),
        ("a.kv.svc", True),
        ("a.b.kv.svc", False),
        ("kv.svc", False),
        ("10.0.0.1", True),
        ("10.0.0.2", False),
        ("other", False),
    ],
)
def test_names(host: str, named: bool) -> None:
    names = ("DNS:p.example", "DNS:*.kv.svc", "IP Address:10.0.0.1", "URI:spiffe://other")
    assert certificates.named(host, names) is named


def bad(findings: list[Finding]) -> list[str]:
    return [f.what for f in findings if f.status is Status.ERROR]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("ca")


def look(directory: Path, identity: Identity) -> Tls:
    files = write(directory, identity)
    return certificates.look(TlsFiles(*(files[f"peer_tls_{name}"] for name in ("cert", "key", "ca"))))


def test_files_that_are_good(authority: Authority, tmp_path: Path) -> None:
    found = look(tmp_path, Identity(authority, "p.example", "10.0.0.1", "spiffe://kv/p"))
    assert found.certificate is not None
    assert found.certificate.names == ("DNS:p.example", "IP Address:10.0.0.1", "URI:spiffe://kv/p")
    assert (found.unusable, found.refused) == ("", "")
    assert found.certificate.begins < time.time() < found.certificate.ends
    assert len(found.cas) == 1
    assert bad(certificates.judge(found, time.time(), "p.example")) == []


def test_an_expired_certificate_is_told_as_that_and_nothing_else(authority: Authority, tmp_path: Path) -> None:
    found = look(tmp_path, Identity(authority, "p.example", expired=True))
    assert found.refused == ""
    (what,) = bad(certificates.judge(found, time.time(), "p.example"))
    assert "expired on" in what


def test_a_certificate_of_another_ca(authority: Authority, tmp_path: Path) -> None:
    found = look(tmp_path, Identity(authority, "p.example", trusts=Authority("other")))
    assert found.certificate is not None
    assert "issuer" in found.refused
    assert len(bad(certificates.judge(found, time.time(), "p.example"))) == 1


def test_files_that_cannot_be_used(authority: Authority, tmp_path: Path) -> None:
    identity = Identity(authority, "p.example")
    files = write(tmp_path, identity)
    files["peer_tls_key"].write_bytes(Identity(authority, "p.example").key)
    paths = TlsFiles(*(files[f"peer_tls_{name}"] for name in ("cert", "key", "ca")))
    assert "is not the key of the certificate" in certificates.look(paths).unusable
    files["peer_tls_key"].unlink()
    assert "cannot be read" in certificates.look(paths).unusable
