"""Another sidecar's peer port: reached as a sidecar would, and judged."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from kvxfer.doctor import peer
from kvxfer.doctor.findings import Status
from kvxfer.doctor.network import Interface
from kvxfer.doctor.peer import Attempt, Peer
from kvxfer.tls import PeerTls, TlsFiles
from tests.support.certificates import HOST, Authority, Identity, write

LO = Interface("lo", True, True, True, (HOST,))
FILES = TlsFiles(Path("/c"), Path("/k"), Path("/a"))
REACHED = (Attempt("10.0.0.2", "10.0.0.1"),)


@contextlib.contextmanager
def server(files: TlsFiles | None) -> Iterator[str]:
    """The health service of a peer listener; its address."""
    with ThreadPoolExecutor(2) as pool:
        it = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), it)
        port = (
            it.add_insecure_port(f"{HOST}:0")
            if files is None
            else it.add_secure_port(f"{HOST}:0", PeerTls(files).server_credentials())
        )
        it.start()
        try:
            yield f"{HOST}:{port}"
        finally:
            it.stop(None).wait()


def tls(directory: Path, identity: Identity) -> TlsFiles:
    files = write(directory, identity)
    return TlsFiles(*(files[f"peer_tls_{name}"] for name in ("cert", "key", "ca")))


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("ca")


def test_a_plaintext_peer(authority: Authority, tmp_path: Path) -> None:
    files = tls(tmp_path, Identity(authority, HOST))
    with server(None) as address:
        found = peer.look(address, None, "")
        mismatched = peer.look(address, files, "")
    assert (found.speaks, found.health, found.attempts) == ("plaintext", "SERVING", (Attempt(HOST, HOST),))
    (told,) = peer.judge(found, None, [LO])
    assert told.status is Status.OK
    assert f"is reached from {HOST} (lo): SERVING (plaintext)" in told.what
    assert "UCX_TCP_PORT_RANGE" in told.what
    (told,) = peer.judge(mismatched, files, [LO])
    assert told.status is Status.ERROR
    assert "it speaks plaintext, and this side's settings are for TLS" in told.what


def test_a_peer_with_tls(authority: Authority, tmp_path: Path) -> None:
    theirs, mine = (tls(tmp_path / name, Identity(authority, HOST)) for name in ("theirs", "mine"))
    with server(theirs) as address:
        found = peer.look(address, mine, "")
        mismatched = peer.look(address, None, "")
    assert (found.speaks, found.refused, found.health) == ("tls", "", "SERVING")
    assert "both certificates accepted" in peer.judge(found, mine, [LO])[0].what
    (told,) = peer.judge(mismatched, None, [LO])
    assert told.status is Status.ERROR
    assert "it speaks TLS, and this side's settings have no certificate" in told.what


@pytest.mark.parametrize(
    "names, expired, foreign, says",
    [
        ((HOST,), True, False, "certificate has expired"),
        (("p.example",), False, False, "IP address mismatch"),
        ((HOST,), False, True, "unable to get local issuer certificate"),
    ],
)
def test_a_certificate_that_is_refused_here(
    authority: Authority, tmp_path: Path, names: tuple[str, ...], expired: bool, foreign: bool, says: str
) -> None:
    issuer = Authority("other") if foreign else authority
    theirs = tls(tmp_path / "theirs", Identity(issuer, *names, expired=expired))
    mine = tls(tmp_path / "mine", Identity(authority, HOST))
    with server(theirs) as address:
        found = peer.look(address, mine, "")
        named = peer.look(address, mine, "p.example") if names[0] != HOST else None
    assert says in found.refused
    assert f"its certificate is refused here: {found.refused}" in peer.judge(found, mine, [LO])[0].what
    assert named is None or named.health == "SERVING"


def test_a_certificate_of_ours_that_is_refused_there(authority: Authority, tmp_path: Path) -> None:
    theirs = tls(tmp_path / "theirs", Identity(authority, HOST))
    mine = tls(tmp_path / "mine", Identity(Authority("other"), HOST, trusts=authority))
    with server(theirs) as address:
        found = peer.look(address, mine, "")
    assert (found.refused, found.health) == ("", "")
    (told,) = peer.judge(found, mine, [LO])
    assert told.status is Status.ERROR
    assert "does not answer as a sidecar: UNAVAILABLE" in told.what


def test_nobody_and_somebody_else() -> None:
    with socket.create_server((HOST, 0)) as silent:
        address = f"{HOST}:{silent.getsockname()[1]}"
        found = peer.look(address, None, "", timeout=0.3)
    assert (found.speaks, found.health) == ("", "")
    assert found.failure
    gone = peer.look(address, None, "", timeout=0.3)
    assert gone.attempts == (Attempt(HOST, problem="ECONNREFUSED"),)
    assert peer.look("nowhere.invalid:80", None, "").unresolved


@pytest.mark.parametrize(
    "seen, files, says",
    [
        (Peer("p:1", unresolved="unknown"), None, "the name is not known: unknown"),
        (Peer("p:1", "", (Attempt("10.0.0.2", problem="ETIMEDOUT"),)), None, "packets vanish"),
        (Peer("p:1", "", (Attempt("10.0.0.2", problem="ECONNREFUSED"),)), None, "refuses"),
        (
            Peer("p:1", "", (Attempt("10.0.0.2", problem="ENETUNREACH"),)),
            None,
            "cannot be reached: Network is unreachable",
        ),
        (Peer("p:1", "", (Attempt("10.0.0.2", problem="EMFILE"),)), None, "EMFILE"),
        (Peer("p:1", "", REACHED, failure="UNIMPLEMENTED: x"), None, "does not answer as a sidecar: UNIMPLEMENTED: x"),
        (Peer("p:1", "", REACHED, "plaintext"), FILES, "it speaks plaintext"),
        (Peer("p:1", "", REACHED, "tls"), None, "it speaks TLS"),
        (Peer("p:1", "", REACHED, "tls", "expired"), FILES, "refused here: expired"),
    ],
)
def test_judged(seen: Peer, files: TlsFiles | None, says: str) -> None:
    (told,) = peer.judge(seen, files, [Interface("eth0", True, True, False, ("10.0.0.1",))])
    assert told.status is Status.ERROR
    assert says in told.what
    assert told.why
    assert told.todo


def test_one_address_of_several() -> None:
    seen = Peer("p:1", "", (Attempt("fd00::2", problem="ETIMEDOUT"), *REACHED), "plaintext", "", "NOT_SERVING")
    told = peer.judge(seen, None, [Interface("eth0", True, True, False, ("10.0.0.1",))])
    assert [t.status for t in told] == [Status.WARNING, Status.OK]
    assert "from 10.0.0.1 (eth0): NOT_SERVING" in told[1].what


def test_localhost_is_two_addresses() -> None:
    seen = Peer("localhost:1", "", (Attempt("::1", problem="ECONNREFUSED"), *REACHED), "plaintext", "", "SERVING")
    assert [t.status for t in peer.judge(seen, None, [])] == [Status.OK]
