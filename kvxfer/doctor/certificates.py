"""TLS files: do they belong together, until when, for which names.

They are tried as a peer tries them: by a TLS handshake of this sidecar with itself, in memory.
"""

from __future__ import annotations

import fnmatch
import os
import ssl
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvxfer.core.errors import KvxferError
from kvxfer.doctor.findings import Finding, error, ok, warning
from kvxfer.tls import TlsFiles

CHECK: Final = "tls"
_DAY: Final = 86_400
_SOON: Final = 30 * _DAY
#: X509_V_FLAG_NO_CHECK_TIME and X509_V_FLAG_PARTIAL_CHAIN of OpenSSL.
_ANY_TIME, _PARTIAL = 0x200000, 0x80000


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a certificate says.

    :param names: its DNS names, IP addresses and URIs, as ``DNS:p.example``.
    :param begins: seconds since the epoch, as ``ends``.
    """

    names: tuple[str, ...]
    begins: float
    ends: float


@dataclass(frozen=True, slots=True)
class Tls:
    """What was found.

    :param unusable: why the files cannot be used at all; the rest is empty then.
    :param certificate: of this sidecar; None where it could not be read.
    :param cas: when each CA ends, seconds since the epoch.
    :param refused: what a peer with these files would say of the certificate, whatever the date; empty: nothing.
    :param key_mode: permission bits of the key.
    """

    files: TlsFiles
    unusable: str = ""
    certificate: Certificate | None = None
    cas: tuple[float, ...] = ()
    refused: str = ""
    key_mode: int = 0


def look(files: TlsFiles) -> Tls:
    """Read the files, and try them."""
    try:
        pems = files.read()
        mode = stat.S_IMODE(os.stat(files.key).st_mode)
    except KvxferError as problem:
        return Tls(files, unusable=problem.message)
    except OSError as problem:
        return Tls(files, unusable=f"peer_tls_key: {files.key} cannot be read: {problem.strerror}")
    own = pems.cert.decode("ascii", "ignore")
    trusted = pems.ca.decode("ascii", "ignore")
    refused = _handshake(files, trusted, _ANY_TIME)[1]
    # Trusting itself, the certificate is told about in any case.
    told = _handshake(files, own, _ANY_TIME | _PARTIAL)[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=trusted)
    cas = tuple(ssl.cert_time_to_seconds(str(ca["notAfter"])) for ca in context.get_ca_certs())
    return Tls(files, "", _certificate(told) if told else None, cas, refused, mode)


def _handshake(files: TlsFiles, trusted: str, flags: int) -> tuple[dict[str, Any], str]:
    """Mutual TLS of the files' owner with itself: the certificate as the client sees it, and why it was refused."""
    server, client = (ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    client.check_hostname = False  # names are told apart
    for context in (server, client):
        context.load_cert_chain(files.cert, files.key, password="")
        context.load_verify_locations(cadata=trusted)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags = ssl.VerifyFlags(flags)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    waiting = list(ends)
    for _ in range(10):  # a handshake has fewer flights
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as problem:
                by = "called" if end is ends[0] else "calling"
                return {}, f"{problem.verify_message} (when it is {by})"
            except ssl.SSLError as problem:
                return {}, str(problem)
        if not waiting:
            return dict(ends[0].getpeercert() or {}), ""
    return {}, "the handshake did not come to an end"


def _certificate(told: dict[str, Any]) -> Certificate:
    names = tuple(f"{kind}:{value}" for kind, value in told.get("subjectAltName", ()))
    return Certificate(names, ssl.cert_time_to_seconds(told["notBefore"]), ssl.cert_time_to_seconds(told["notAfter"]))


def named(host: str, names: Sequence[str]) -> bool:
    """Whether a certificate of these names is one for a host; ``*`` stands for one label."""
    for kind, _, value in (name.partition(":") for name in names):
        if kind == "IP Address" and value.lower() == host.lower():
            return True
        if kind == "DNS" and (
            value.lower() == host.lower()
            or (value.startswith("*.") and fnmatch.fnmatch(host.lower().partition(".")[2], value[2:].lower()))
        ):
            return True
    return False


def judge(tls: Tls, now: float, host: str) -> list[Finding]:
    """:param now: seconds since the epoch, by this machine's clock.

    :param host: what the certificate must name: ``peer_server_name``, or the host that is advertised.
    """
    files = tls.files
    if tls.unusable:
        return [error(CHECK, tls.unusable, "The sidecar does not start.", "Correct the path, or the file.")]
    findings = []
    if tls.refused:
        findings.append(
            error(
                CHECK,
                f"peers with the CA in {files.ca} would refuse {files.cert}: {tls.refused}",
                "Every connection from and to peers fails.",
                "Issue it by that CA, append its intermediates to it, and allow both uses (server and client "
                "authentication).",
            )
        )
    if tls.certificate is not None:
        findings += _dates(tls.certificate, f"{files.cert}", now)
        if host and not named(host, tls.certificate.names):
            findings.append(
                error(
                    CHECK,
                    f"{files.cert} does not name {host}; it names {', '.join(tls.certificate.names) or 'nothing'}",
                    "Peers call this sidecar by the address that it advertises, and refuse a certificate for another.",
                    "Issue one that names it, set --advertise to a host that it names, or set peer_server_name.",
                )
            )
    if any(ends < now for ends in tls.cas):
        findings.append(
            (error if all(ends < now for ends in tls.cas) else warning)(
                CHECK,
                f"a CA in {files.ca} ended on {_day(min(tls.cas))}",
                "Certificates of an expired CA are refused.",
                "Put its successor into the file; both may be there at once.",
            )
        )
    if tls.key_mode & 0o077:
        findings.append(
            warning(
                CHECK,
                f"others may read the key {files.key} (mode {tls.key_mode:04o})",
                "Whoever has the key can call every peer, and read every cache.",
                f"chmod 600 {files.key} (Kubernetes: defaultMode: 0400 on the secret's volume)",
            )
        )
    if not findings and tls.certificate is not None:
        until = f"until {_day(tls.certificate.ends)} by this machine's clock"
        findings.append(ok(CHECK, f"{files.cert} is good {until}, and names {', '.join(tls.certificate.names)}"))
    return findings


def _dates(certificate: Certificate, path: str, now: float) -> list[Finding]:
    clock = f"(by this machine's clock, {_day(now)})"
    if certificate.ends < now:
        return [
            error(
                CHECK,
                f"{path} expired on {_day(certificate.ends)} {clock}",
                "Peers refuse every new connection; those that exist go on until they break.",
                "Issue a new one; it is used by the next connection, without a restart.",
            )
        ]
    if certificate.begins > now:
        return [
            error(
                CHECK,
                f"{path} is not good before {_day(certificate.begins)} {clock}",
                "Peers refuse every connection until then.",
                "Check this machine's clock, or wait.",
            )
        ]
    if certificate.ends - now < _SOON:
        return [
            warning(
                CHECK,
                f"{path} expires on {_day(certificate.ends)} {clock}",
                "Peers will refuse every new connection from then on.",
                "Renew it, unless something does so by itself: new files are used without a restart.",
            )
        ]
    return []


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
