"""Every setting of a sidecar: one validated class, from flags, environment (``KVXFER_*``) or a TOML file.

Sizes are bytes, times seconds.  A value that cannot work is refused when the settings are built, never later.
"""

from __future__ import annotations

import errno
import grp
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.policy import DEFAULT_DIRECTORY, MemoryPolicy
from kvxfer.service.settings import ServiceSettings
from kvxfer.tls import TlsFiles
from kvxfer.wire.fields import address, split_address

#: 200,000 packed block IDs on each side are about 1 MiB; layouts of the largest models a few.
MESSAGE_LIMIT = 16 * 1024 * 1024

#: Longest path of a Unix socket, in bytes: what Linux's ``sockaddr_un`` has room for, and a NUL.
SOCKET_PATH_LIMIT = 107

Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _mode(value: str) -> str:
    if not re.fullmatch(r"0?[0-7]{3}", value):
        raise ValueError(f"{value!r} is not an octal file mode such as 0600")
    return value


def _group(value: str) -> str:
    if value and not value.isdigit():
        try:
            grp.getgrnam(value)
        except KeyError:
            raise ValueError(f"there is no group called {value!r} on this machine") from None
    return value


FileMode = Annotated[str, AfterValidator(_mode)]
GroupName = Annotated[str, AfterValidator(_group)]


class Settings(BaseSettings):
    """What a sidecar is told.  Flags win over the environment, the environment over the file."""

    model_config = SettingsConfigDict(env_prefix="KVXFER_", extra="forbid", frozen=True, validate_default=True)

    # -- listeners
    engine_socket: Path = Field(
        Path("/run/kvxfer/kvxfer.sock"), description="Unix socket of the engine listener (KvTransfer)."
    )
    engine_socket_mode: FileMode = Field("0600", description="Its file mode, octal.")
    engine_socket_group: GroupName = Field("", description="Its group, by name or number; empty leaves it.")
    peer_host: str = Field("127.0.0.1", description="Address that the peer listener (KvPeer) binds.")
    peer_port: int = Field(0, ge=0, le=65_535, description="Its TCP port; 0 takes a free one, told by GetStatus.")
    advertise: str = Field(
        "", description="host:port under which peers reach the peer listener; empty: peer_host and the port bound."
    )
    insecure_peer: bool = Field(False, description="Allow a plaintext peer listener off loopback.")
    peer_tls_cert: Path | None = Field(
        None, description="Certificate, PEM, with its intermediates: of the peer listener and for calling others."
    )
    peer_tls_key: Path | None = Field(None, description="Its key, PEM, without a password.")
    peer_tls_ca: Path | None = Field(None, description="CA certificates, PEM, that peers' certificates must be of.")
    peer_allowed_sans: tuple[str, ...] = Field(
        (),
        description="Globs of names (DNS, IP, or URI where the glob has ://) whose certificates may call the peer "
        "listener; none: every certificate of the CA.",
    )
    peer_server_name: str = Field(
        "", description="Name that the certificates of peers must carry; empty: the host of their address."
    )
    message_limit: int = Field(
        MESSAGE_LIMIT, ge=1024 * 1024, le=256 * 1024 * 1024, description="Largest gRPC message, in bytes."
    )

    # -- metrics and probes
    http_host: str = Field("127.0.0.1", description="Address that /metrics, /healthz and /readyz are served at.")
    http_port: int | None = Field(
        None, ge=0, le=65_535, description="Their TCP port; 0 takes a free one, told in the log; none: not served."
    )

    # -- memory
    memory_directories: tuple[str, ...] = Field(
        (DEFAULT_DIRECTORY,),
        description="Directories whose files an engine may hand over; sidecar-owned files go first.",
    )
    shm_prefix: str = Field("/kvxfer-", description="What names of POSIX shared memory must start with; / allows all.")
    allow_posix_shm: bool = Field(True, description="Take POSIX shared memory.")
    max_region_bytes: int = Field(0, ge=0, description="Largest region, in bytes; 0: the memory of the machine.")
    allow_memfd: bool = Field(True, description="Take sealed memfds of processes on this host.")
    allow_address: bool = Field(
        False, description="Take plain addresses: embedded mode only, set by the code that embeds."
    )
    allow_cuda: bool = Field(False, description="Take CUDA IPC handles, and make memory on GPUs: never tested on one.")
    memory_file_mode: FileMode = Field("0600", description="Mode of sidecar-owned memory files, octal.")
    memory_file_group: GroupName = Field("", description="Their group, by name or number; empty leaves it.")

    # -- limits
    max_registrations: int = Field(8, ge=1, le=1024, description="Engines registered at once.")
    max_transfers: int = Field(4096, ge=1, le=1_000_000, description="Transfers that are not finished, per engine.")
    max_transfers_per_peer: int = Field(1024, ge=1, le=1_000_000, description="Of them from one remote engine.")
    max_bytes_in_flight: int = Field(64 * 2**30, ge=2**20, description="Bytes posted and not finished, per engine.")
    max_bytes_in_flight_per_peer: int = Field(32 * 2**30, ge=2**20, description="Of them from one remote engine.")
    max_peers: int = Field(
        256,
        ge=1,
        le=16_384,
        description="Remote engines that an engine may read from at once; each takes its own agents.",
    )
    max_descriptors: int = Field(8_388_608, ge=1, le=2**31 - 1, description="Descriptors that one read may name.")
    max_leases: int = Field(65_536, ge=1, description="Published requests held at once, per engine.")
    kept_transfers: int = Field(4096, ge=0, description="Finished transfers that GetTransfer still knows, per engine.")
    kept_leases: int = Field(4096, ge=0, description="Ended leases that ListLeases still knows, per engine.")
    lanes: int = Field(2, ge=1, le=16, description="NIXL agents that read at once; large reads are split over them.")

    # -- times
    handshake_timeout: Seconds = Field(10.0, description="A handshake's deadline, unless the call sets one.")
    read_timeout: Seconds = Field(60.0, description="A read's deadline, unless the call sets one.")
    prepared_ttl: Seconds = Field(60.0, description="How long a prepared transfer waits for its ReadBlocks.")
    lease_ttl: Seconds = Field(30.0, description="How long a published request is held, unless the call says.")
    max_lease_ttl: Seconds = Field(3600.0, description="The longest hold that a call may ask for.")
    publish_wait: Seconds = Field(2.0, description="How long a reader's OpenRead waits for its request's publication.")
    read_grant: Seconds = Field(15.0, description="How long a reader may read before it must renew.")
    max_read: Seconds = Field(600.0, description="How long a reader may read in all, with renewals.")
    warm_up_timeout: Seconds = Field(5.0, description="How long a new connection may take to carry its first byte.")
    drain_timeout: Seconds = Field(10.0, description="At shutdown: how long posted reads may still run.")
    drain_limit: Seconds = Field(
        10.0, description="How long a read that has failed may stay in flight before its NIXL agent is destroyed."
    )
    engine_grace: Seconds = Field(
        5.0, description="How long a registration outlives the last stream that held it (HoldRegistration)."
    )
    poll_interval: Annotated[float, Field(gt=0, le=0.010)] = Field(
        0.0095,
        description="How often NIXL is polled for ten seconds after a reader was met or has read; at most 10 ms.",
    )

    # -- logs
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level logged.")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, else JSON.")

    @field_validator("engine_socket")
    @classmethod
    def _bindable(cls, value: Path) -> Path:
        length = len(os.fsencode(value))
        if length > SOCKET_PATH_LIMIT:
            raise ValueError(f"the path has {length} bytes; a Unix socket's may have {SOCKET_PATH_LIMIT}")
        return value

    @field_validator("advertise")
    @classmethod
    def _advertised(cls, value: str) -> str:
        if value:
            try:
                address(value, "advertise")
            except KvxferError as error:
                raise ValueError(error.message) from None
        return value

    @model_validator(mode="after")
    def _peer_must_be_private(self) -> Settings:
        if not self.insecure_peer and self.peer_tls() is None and not is_loopback(self.peer_host):
            raise ValueError(
                f"peer_host {self.peer_host!r} is not loopback, and the peer listener is plaintext: whoever reaches it "
                "can read every registered cache.  Set peer_tls_cert, peer_tls_key and peer_tls_ca; or insecure_peer "
                "to accept that on a network you trust"
            )
        return self

    @model_validator(mode="after")
    def _peer_tls_must_work(self) -> Settings:
        files = self.peer_tls()
        if files is None:
            for name in ("peer_allowed_sans", "peer_server_name"):
                if getattr(self, name):
                    raise ValueError(f"{name} means nothing without peer_tls_cert, peer_tls_key and peer_tls_ca")
            return self
        try:
            files.read()
        except KvxferError as error:
            raise ValueError(error.message) from None
        return self

    @field_validator("peer_allowed_sans")
    @classmethod
    def _patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("an empty pattern allows nobody")
        return value

    @field_validator("memory_directories")
    @classmethod
    def _as_typed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Without the slash that a shell's completion leaves at the end."""
        return tuple(path.rstrip("/") or path[:1] for path in value)

    @model_validator(mode="after")
    def _memory_must_make_sense(self) -> Settings:
        try:
            self.memory_policy()
        except KvxferError as error:
            what = error.message.removeprefix("memory policy: ")
            named = what.partition(" ")[0].partition("[")[0] in type(self).model_fields
            raise ValueError(what if named else f"memory_{what}") from None
        return self

    def peer_tls(self) -> TlsFiles | None:
        """Where the peer port's certificate is; ``None`` for plaintext.

        :raises ValueError: where one of the three files is set and another is not.
        """
        files = {n: getattr(self, n) for n in ("peer_tls_cert", "peer_tls_key", "peer_tls_ca")}
        missing = [name for name, path in files.items() if path is None]
        if len(missing) == len(files):
            return None
        if missing:
            raise ValueError(f"TLS needs certificate, key and CA: {' and '.join(missing)} is not set")
        return TlsFiles(*files.values())

    def advertised_host(self) -> str:
        """The host, by name or address, under which peers are told to call: also where every address is listened at."""
        if self.advertise:
            return split_address(self.advertise)[0]
        return socket.gethostname() if self.peer_host in EVERY_ADDRESS else self.peer_host.strip("[]")

    def memory_policy(self) -> MemoryPolicy:
        """What memory may be mapped."""
        policy = MemoryPolicy(
            directories=self.memory_directories,
            allow_posix_shm=self.allow_posix_shm,
            shm_prefix=self.shm_prefix,
            allow_memfd=self.allow_memfd,
            allow_address=self.allow_address,
            allow_cuda=self.allow_cuda,
            file_mode=int(self.memory_file_mode, 8),
            group=group_number(self.memory_file_group),
        )
        return replace(policy, max_region_bytes=self.max_region_bytes) if self.max_region_bytes else policy

    def service(self) -> ServiceSettings:
        """What the service needs of all this."""
        shared = {f.name for f in fields(ServiceSettings)} & set(type(self).model_fields)
        return ServiceSettings(memory=self.memory_policy(), **{name: getattr(self, name) for name in shared})

    @classmethod
    def load(cls, file: Path | None = None, **flags: Any) -> Settings:
        """Settings from flags, then ``KVXFER_*``, then ``file`` (TOML), then the defaults.

        :raises pydantic.ValidationError: naming every setting that is wrong.
        :raises KvxferError: FIELD_INVALID, if ``file`` cannot be read, or is no TOML.
        """
        if file is None:
            return cls(**flags)

        class FromFile(cls):  # type: ignore[misc, valid-type]  # a subclass only to carry the file's name
            @classmethod
            def settings_customise_sources(
                cls,
                settings_cls: type[BaseSettings],
                init_settings: PydanticBaseSettingsSource,
                env_settings: PydanticBaseSettingsSource,
                dotenv_settings: PydanticBaseSettingsSource,
                file_secret_settings: PydanticBaseSettingsSource,
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, file)

        try:
            if not file.is_file():
                raise FileNotFoundError(errno.ENOENT, "there is no such file")
            loaded: Settings = FromFile(**flags)
        except ValidationError:
            raise
        except (OSError, ValueError) as error:  # of the latter are what is no TOML, and what is no text
            why = (isinstance(error, OSError) and error.strerror) or error
            raise KvxferError(
                Reason.FIELD_INVALID, f"the settings file {file} cannot be read: {why}", field="config"
            ) from error
        return loaded


def problems(error: ValidationError) -> list[str]:
    """What is wrong with settings, one text for each."""
    return [_problem(one) for one in error.errors()]


def _problem(one: Mapping[str, Any]) -> str:
    name = ".".join(map(str, one["loc"])) or "settings"
    if one["type"] == "extra_forbidden":
        return no_setting(name, list(Settings.model_fields))
    if one["type"] == "value_error":  # of our own checks, which say what the value is
        return f"{name}: {one['msg'].removeprefix('Value error, ')}"
    return f"{name}: {one['msg']}, not {one['input']!r}"


def no_setting(name: str, known: Sequence[str]) -> str:
    """That there is no such setting, and which may be meant."""
    meant = get_close_matches(name, known, 1, cutoff=0.8)
    return f"{name} is no setting" + (f"; is {meant[0]} meant?" if meant else "")


#: Hosts that stand for every address of this machine, and so for none that a peer can call.
EVERY_ADDRESS: Final = ("0.0.0.0", "::", "[::]")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def group_number(name: str) -> int | None:
    """A group's number from its name or number; ``None`` for an empty name."""
    if not name:
        return None
    return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
