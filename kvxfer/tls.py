"""Mutual TLS between sidecars: certificate, key and CA come from files, and are read again for every connection.

Whoever replaces the files (Kubernetes swaps a symlink, others write in place) need tell nobody.  What is half-written,
or does not belong together, is left alone until it does: the last good files serve on.
"""

from __future__ import annotations

import os
import ssl
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import structlog

from kvxfer.core.errors import KvxferError, Reason

log = structlog.get_logger()


@dataclass(frozen=True)
class Pems:
    """What the files hold, checked to belong together; the key does not show in ``repr``."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes


@dataclass(frozen=True)
class TlsFiles:
    """Where certificate (with its intermediates), key and CA are, in PEM."""

    cert: Path
    key: Path
    ca: Path

    def read(self, good: Pems | None = None) -> Pems:
        """Read and check all three.

        :param good: what need not be checked again, if it is what the files still hold.

        :raises KvxferError: FIELD_INVALID, naming setting and path, where a file cannot be read, is not what it should
            be, or the key is not that of the certificate.
        """
        pems = Pems(*(_read(name, getattr(self, name)) for name in ("cert", "key", "ca")))
        if pems == good:
            return good
        for name in ("cert", "ca"):
            try:
                text = getattr(pems, name).decode("ascii", "ignore")  # people write comments into bundles
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
            except (ssl.SSLError, ValueError) as error:
                raise _invalid(name, getattr(self, name), f"is no list of PEM certificates: {error}") from error
        try:
            _load_pair(pems)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                problem = f"is not the key of the certificate in {self.cert}"
            else:
                problem = f"is no PEM key without a password that TLS can use: {error}"
            raise _invalid("key", self.key, problem) from error
        return pems


class PeerTls:
    """The credentials of one sidecar, for its peer listener and for its own connections to others.

    :raises KvxferError: as :meth:`TlsFiles.read`.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        self._good = files.read()
        self._problem = ""

    def current(self) -> Pems:
        """What the files hold now; while that cannot be used, what they held before.  Never raises, callable anywhere.

        It is compared by content: neither times nor inodes tell of every way to replace a file.
        """
        with self._lock:
            try:
                found, problem = self._files.read(self._good), ""
            except KvxferError as error:
                found, problem = self._good, error.message
            if problem and problem != self._problem:  # once, not for every connection
                log.warning("new TLS files cannot be used; the former serve on", problem=problem)
            if found != self._good:
                log.info("TLS files reloaded", cert=str(self._files.cert))
            self._good, self._problem = found, problem
            return found

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials that ask every client for a certificate of the CA, and follow the files."""
        served = self.current()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            # Called before every handshake, one at a time; None keeps what is there.
            nonlocal served
            now = self.current()
            if now == served:
                return None
            served = now
            return _configuration(now)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served),
            fetch,  # type: ignore[arg-type]  # the stubs do not know of None
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for one new channel, from what the files hold now."""
        now = self.current()
        return grpc.ssl_channel_credentials(now.ca, now.key, now.cert)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _invalid(name, path, f"cannot be read: {error.strerror}") from error


def _load_pair(pems: Pems) -> None:
    """Have OpenSSL compare certificate and key.

    It takes paths only, and by now the files may hold something else than what was read.
    """
    with ExitStack() as opened:
        paths = []
        for content in (pems.cert, pems.key):
            file = opened.enter_context(open(os.memfd_create("kvxfer-tls"), "wb", buffering=0))
            file.write(content)
            paths.append(f"/proc/self/fd/{file.fileno()}")
        # With a password given, even an empty one, nobody is asked for it on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(paths[0], paths[1], password="")


def _invalid(name: str, path: Path, problem: str) -> KvxferError:
    setting: Final = f"peer_tls_{name}"
    return KvxferError(Reason.FIELD_INVALID, f"{setting}: {path} {problem}", field=setting, path=path)
