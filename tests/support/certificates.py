"""Certificates for tests: throw-away CAs, and files as an operator would mount them."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

#: What sidecars of the tests listen at.
HOST = "127.0.0.1"
DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _san(name: str) -> x509.GeneralName:
    """An IP address, a URI, a mail address or a DNS name, by its looks."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        kind = x509.UniformResourceIdentifier if "://" in name else x509.RFC822Name if "@" in name else x509.DNSName
        return kind(name)


class Authority:
    """A CA."""

    def __init__(self, name: str) -> None:
        self._name, self._key = _name(name), ec.generate_private_key(ec.SECP256R1())
        self.pem = self.sign(self._key.public_key(), self._name, ca=True)

    def sign(
        self, key: ec.EllipticCurvePublicKey, subject: x509.Name, *names: str, ca: bool = False, age: int = 0
    ) -> bytes:
        """A certificate in PEM, good for two days, of which the first ended ``age`` days ago."""
        middle = datetime.datetime.now(datetime.timezone.utc) - age * DAY
        builder = (
            x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number())
            .not_valid_before(middle - DAY)
            .not_valid_after(middle + DAY)
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(map(_san, names)), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


class Identity:
    """A certificate with its key, and the CA that its holder trusts; its common name is no name that counts."""

    def __init__(
        self, issuer: Authority, *names: str, trusts: Authority | None = None, expired: bool = False, common: str = "x"
    ) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        self.key = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self.cert = issuer.sign(key.public_key(), _name(common), *names, age=7 if expired else 0)
        self.ca = (trusts or issuer).pem

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """For a client."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    @property
    def files(self) -> Mapping[str, bytes]:
        """What each setting's file holds."""
        return {"peer_tls_cert": self.cert, "peer_tls_key": self.key, "peer_tls_ca": self.ca}


def write(directory: Path, identity: Identity) -> dict[str, Path]:
    """Put the files of an identity in place, each at once; the settings that name them."""
    directory.mkdir(exist_ok=True)
    for name, content in identity.files.items():
        fresh = directory / f"{name}.new"
        fresh.write_bytes(content)
        os.replace(fresh, directory / name)
    return {name: directory / name for name in identity.files}
