"""Another sidecar's peer port: can it be reached, over which interface, and does it talk to us."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvxfer.core.errors import KvxferError
from kvxfer.doctor.findings import Finding, Status, error, ok
from kvxfer.doctor.network import Interface
from kvxfer.tls import PeerTls, TlsFiles
from kvxfer.wire.fields import split_address

CHECK: Final = "peer"
#: How long a connection, and an answer, may take, seconds: with two packets lost a connection comes up after 3.
TIMEOUT: Final = 4.0
_UNREACHABLE: Final = frozenset({"EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "EHOSTDOWN", "EACCES", "EPERM"})


@dataclass(frozen=True, slots=True)
class Attempt:
    """A connection that was tried.

    :param address: of the peer.
    :param local: address of this machine that it went out from; empty where it did not.
    :param problem: name of the error (``ECONNREFUSED``, ``ETIMEDOUT``); empty where it was made.
    """

    address: str
    local: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """What was seen.

    :param unresolved: why the name means nothing; empty where it does.
    :param speaks: ``tls``, ``plaintext``, or empty where no connection was made or that could not be told.
    :param refused: why our side refuses its certificate; empty where it does not, or there was none.
    :param health: name of the answer's status (``SERVING``); empty where there was no answer.
    :param failure: gRPC's error where there was none.
    """

    target: str
    unresolved: str = ""
    attempts: tuple[Attempt, ...] = ()
    speaks: str = ""
    refused: str = ""
    health: str = ""
    failure: str = ""


def look(target: str, files: TlsFiles | None, server_name: str, timeout: float = TIMEOUT) -> Peer:
    """Connect as a sidecar with these settings would.

    :param target: ``host:port``, checked.
    :param files: for TLS; plaintext without.
    :param server_name: what the peer's certificate must name; empty: the host of ``target``.
    :param timeout: seconds for each step.
    """
    host, port = split_address(target)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as problem:
        return Peer(target, unresolved=problem.strerror or str(problem))
    attempts = []
    for family, kind, protocol, _, address in places[:4]:
        attempts.append(_connect(family, kind, protocol, address, timeout))
        if not attempts[-1].problem:
            speaks, refused = _greet(family, address, host, files, server_name, timeout)
            health, failure = ("", "") if refused else _ask(target, files, server_name, timeout, speaks)
            return Peer(target, "", tuple(attempts), speaks, refused, health, failure)
    return Peer(target, "", tuple(attempts))


def _connect(family: int, kind: int, protocol: int, address: tuple[object, ...], timeout: float) -> Attempt:
    shown = str(address[0])
    with socket.socket(family, kind, protocol) as tried:
        tried.settimeout(timeout)
        try:
            tried.connect(address)
        except TimeoutError:
            return Attempt(shown, problem="ETIMEDOUT")
        except OSError as problem:
            return Attempt(shown, problem=errno.errorcode.get(problem.errno or 0, str(problem)))
        return Attempt(shown, local=str(tried.getsockname()[0]))


def _greet(
    family: int, address: tuple[object, ...], host: str, files: TlsFiles | None, server_name: str, timeout: float
) -> tuple[str, str]:
    """What it speaks, and why its certificate is refused: as a client that checks it only if it can."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if files is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(files.ca)
        context.load_cert_chain(files.cert, files.key, password="")
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.settimeout(timeout)
        try:
            tried.connect(address)
            with context.wrap_socket(tried, server_hostname=server_name or host):
                return "tls", ""
        except ssl.SSLCertVerificationError as problem:
            return "tls", problem.verify_message
        except ssl.SSLError as problem:
            # What is no TLS at all is told so; an alert (a certificate is asked for) is TLS.
            return (
                ("plaintext", "") if problem.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE") else ("tls", "")
            )
        except ConnectionError:  # gRPC hangs up on what is no HTTP/2
            return "plaintext", ""
        except OSError:
            return "", ""


def _ask(target: str, files: TlsFiles | None, server_name: str, timeout: float, speaks: str) -> tuple[str, str]:
    """The health of the whole process, or why there is no answer."""
    if (speaks == "tls") is (files is None) and speaks:
        return "", ""  # the mismatch is told by itself
    host, port = split_address(target)
    options: list[tuple[str, object]] = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        credentials = PeerTls(files).channel_credentials() if files is not None else None
    except KvxferError as problem:
        return "", problem.message
    channel = grpc.secure_channel(where, credentials, options) if credentials else grpc.insecure_channel(where, options)
    with channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs have no methods
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as problem:
            return "", f"{problem.code().name}: {problem.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status), ""


_UCX_PORTS: Final = (
    "The bytes of a cache take UCX's ports, not this one, and those cannot be tried from here: allow "
    "UCX_TCP_PORT_RANGE between sidecars as well (docs/security.md)"
)


def judge(peer: Peer, files: TlsFiles | None, interfaces: Sequence[Interface]) -> list[Finding]:
    """:param files: this side's TLS; None for plaintext.  :param interfaces: of this machine."""
    if peer.unresolved:
        return [
            error(
                CHECK,
                f"{peer.target}: the name is not known: {peer.unresolved}",
                "No handshake with this peer can work.",
                "Check the name, and this machine's or container's DNS (in Kubernetes: a headless service).",
            )
        ]
    reached = next((attempt for attempt in peer.attempts if not attempt.problem), None)
    if reached is None:
        return [_of(attempt, peer.target) for attempt in peer.attempts]
    # gRPC goes on to the next address: at once where one refuses (localhost is two), after a while where none answers.
    slow = (attempt for attempt in peer.attempts if attempt.problem not in ("", "ECONNREFUSED"))
    findings = [replace(_of(attempt, peer.target), status=Status.WARNING) for attempt in slow]
    through = next((i.name for i in interfaces if reached.local in i.addresses), "an interface that is not known")
    what = f"{peer.target} ({reached.address}) is reached from {reached.local} ({through})"
    if peer.speaks == "plaintext" and files is not None:
        return [
            *findings,
            error(
                CHECK,
                f"{what}; it speaks plaintext, and this side's settings are for TLS",
                "Every handshake fails.",
                "Give both sides certificates, or neither.",
            ),
        ]
    if peer.speaks == "tls" and files is None:
        return [
            *findings,
            error(
                CHECK,
                f"{what}; it speaks TLS, and this side's settings have no certificate",
                "Every handshake fails.",
                "Set peer_tls_cert, peer_tls_key and peer_tls_ca here, too.",
            ),
        ]
    if peer.refused:
        return [
            *findings,
            error(
                CHECK,
                f"{what}; its certificate is refused here: {peer.refused}",
                "Every handshake fails.",
                "Look at its certificate there: kvxfer doctor with that sidecar's settings.  It must be of the CA in "
                "peer_tls_ca, and name the host of the address, or peer_server_name.",
            ),
        ]
    if not peer.health:
        return [
            *findings,
            error(
                CHECK,
                f"{what}, and does not answer as a sidecar: {peer.failure}",
                "Something else may listen there, or it refuses this side's certificate (peer_allowed_sans, its CA).",
                "See the log of the peer: it names those that it refuses.",
            ),
        ]
    secured = "TLS, both certificates accepted" if files is not None else "plaintext"
    findings.append(ok(CHECK, f"{what}: {peer.health} ({secured}).  {_UCX_PORTS}"))
    return findings


def _of(attempt: Attempt, target: str) -> Finding:
    what = f"{target} ({attempt.address})"
    why = "No handshake with this peer can work."
    if attempt.problem == "ETIMEDOUT":
        return error(
            CHECK,
            f"{what} does not answer: packets vanish",
            f"{why}  A firewall or NetworkPolicy drops them, or the host is down or unknown on this network.",
            "Allow the peer port between sidecars, on both hosts and in between; and UCX_TCP_PORT_RANGE as well.",
        )
    if attempt.problem == "ECONNREFUSED":
        return error(
            CHECK,
            f"{what} refuses: the host is there, and nothing listens on the port",
            f"{why}  (A firewall that rejects looks the same.)",
            "Start the sidecar there; check its peer_port, and that peer_host is not loopback.",
        )
    if attempt.problem in _UNREACHABLE:
        return error(
            CHECK,
            f"{what} cannot be reached: {os.strerror(getattr(errno, attempt.problem))}",
            f"{why}  There is no way to that network, or a firewall on the way says so.",
            "ip route get ADDRESS tells which way is taken.",
        )
    return error(CHECK, f"{what}: {attempt.problem}", why, "See the error.")
