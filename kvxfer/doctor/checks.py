"""Which checks there are, and how they come by their facts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvxfer.config import EVERY_ADDRESS, Settings
from kvxfer.core.errors import KvxferError
from kvxfer.doctor import (
    certificates,
    files,
    gpu,
    library,
    limits,
    memory,
    network,
    peer,
    ports,
    probe,
    processes,
    transport,
    ucx,
)
from kvxfer.doctor.findings import Finding, error, ok, unknown, warning
from kvxfer.tls import TlsFiles

SETTINGS: Final = "settings"


@dataclass(frozen=True)
class Question:
    """What is to be checked.

    :param settings: those of the sidecar; its problems are told by ``problems``, not raised.
    :param problems: why ``kvxfer serve`` would refuse the settings.
    :param environment: the process environment of the sidecar.
    :param peer: ``host:port`` of another sidecar, checked; empty for none.
    :param engine_pid: the engine's process, or None.
    :param as_uid: also say what a process of this user may lock.
    """

    settings: Settings
    problems: tuple[str, ...]
    environment: Mapping[str, str]
    peer: str = ""
    engine_pid: int | None = None
    as_uid: int | None = None


class Examination:
    """One examination; facts that several checks need are looked for once, when the first of them asks."""

    def __init__(self, question: Question) -> None:
        self._asked: Final = question

    @cached_property
    def _probed(self) -> tuple[probe.Survey, probe.Pair] | tuple[None, None]:
        return probe.look(self._asked.environment) if self._installed.importable else (None, None)

    @cached_property
    def _installed(self) -> library.Installed:
        return library.look()

    @cached_property
    def _locking(self) -> limits.Locking:
        return limits.look()

    @cached_property
    def _interfaces(self) -> list[network.Interface]:
        return network.look()

    @cached_property
    def _tls(self) -> TlsFiles | None:
        with suppress(ValueError):  # incomplete: the settings' problems say so
            return self._asked.settings.peer_tls()
        return None

    def check_settings(self) -> Iterator[Finding]:
        """Would ``kvxfer serve`` take them?"""
        for problem in self._asked.problems:
            yield error(SETTINGS, problem, "kvxfer serve refuses to start.", "Correct the setting.")
        settings = self._asked.settings
        if settings.peer_host in EVERY_ADDRESS and not settings.advertise:
            yield warning(
                SETTINGS,
                f"peer_host is {settings.peer_host} and advertise is not set",
                f"Peers are told to call {settings.advertised_host()}: the name of this host, which they may not know.",
                "Set advertise to the host:port under which peers reach this sidecar.",
            )
        elif not self._asked.problems:
            yield ok(SETTINGS, "kvxfer serve takes these settings")

    def check_library(self) -> Iterator[Finding]:
        """NIXL, UCX, torch."""
        yield from library.judge(self._installed, self._probed[0])

    def check_transport(self) -> Iterator[Finding]:
        """Two agents of this host."""
        survey, pair = self._probed
        yield from transport.judge(pair, survey, processes.look())

    def check_ucx(self) -> Iterator[Finding]:
        """UCX's variables."""
        yield from ucx.judge(self._asked.environment, *self._probed)

    def check_network(self) -> Iterator[Finding]:
        """Interfaces."""
        yield from network.judge(self._interfaces, self._probed[0], self._asked.environment)

    def check_namespaces(self) -> Iterator[Finding]:
        """This process and the engine's."""
        pid = self._asked.engine_pid
        yield from processes.judge(processes.look(), processes.look_at(pid) if pid is not None else None)

    def check_memlock(self) -> Iterator[Finding]:
        """Locked memory."""
        yield limits.judge(self._locking)
        uid = self._asked.as_uid
        if uid is not None and uid != self._locking.uid:
            yield limits.judge(limits.look_as(uid))

    def check_files(self) -> Iterator[Finding]:
        """Open files."""
        settings = self._asked.settings
        yield files.judge(files.look(), settings.lanes, settings.max_peers)

    def check_memory(self) -> Iterator[Finding]:
        """Shared memory and the memory directories."""
        settings = self._asked.settings
        shared = (memory.SHARED,) if settings.allow_posix_shm else ()
        for path in dict.fromkeys((*shared, *settings.memory_directories)):
            yield from memory.judge(memory.look(path), self._locking.uid)

    def check_ports(self) -> Iterator[Finding]:
        """What will be listened at: every setting that is a port, on its host, and the engine's socket."""
        settings = self._asked.settings
        for name in type(settings).model_fields:
            if name.endswith("_port"):
                host = getattr(settings, f"{name.removesuffix('_port')}_host", settings.peer_host)
                port = getattr(settings, name)
                if port is not None:
                    yield ports.judge_port(ports.look_at_port(name, host, port))
        yield ports.judge_socket(ports.look_at_socket(settings.engine_socket))

    def check_tls(self) -> Iterator[Finding]:
        """Certificates."""
        settings = self._asked.settings
        if self._tls is None:
            if any((settings.peer_tls_cert, settings.peer_tls_key, settings.peer_tls_ca)):
                yield unknown(certificates.CHECK, "not all of certificate, key and CA are set")
            else:
                yield ok(certificates.CHECK, "no TLS files are set: the peer port is plaintext")
            return
        name = settings.peer_server_name or settings.advertised_host()
        yield from certificates.judge(certificates.look(self._tls), time.time(), name)

    def check_peer(self) -> Iterator[Finding]:
        """Another sidecar."""
        target, tls = self._asked.peer, self._tls
        if not target:
            return
        try:
            if tls is not None:
                tls.read()
        except KvxferError as problem:
            yield unknown(peer.CHECK, f"{target} was not tried: {problem.message}")
            return
        seen = peer.look(target, tls, self._asked.settings.peer_server_name)
        yield from peer.judge(seen, tls, self._interfaces)

    def check_gpu(self) -> Iterator[Finding]:
        """GPUs."""
        seen = gpu.look()
        survey = self._probed[0] if seen.present else None
        modules = survey.shipped if survey is not None and not survey.failure else None
        yield from gpu.judge(seen, self._locking.rdma, modules)


#: Every check, in the order in which they are told.
CHECKS: Final[Mapping[str, Callable[[Examination], Iterator[Finding]]]] = {
    SETTINGS: Examination.check_settings,
    library.CHECK: Examination.check_library,
    transport.CHECK: Examination.check_transport,
    ucx.CHECK: Examination.check_ucx,
    network.CHECK: Examination.check_network,
    processes.CHECK: Examination.check_namespaces,
    limits.CHECK: Examination.check_memlock,
    files.CHECK: Examination.check_files,
    memory.CHECK: Examination.check_memory,
    ports.CHECK: Examination.check_ports,
    certificates.CHECK: Examination.check_tls,
    peer.CHECK: Examination.check_peer,
    gpu.CHECK: Examination.check_gpu,
}
