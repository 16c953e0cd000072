"""A worker's cache: its memory, its registration, and what is under way with it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, MemoryKind, Rank
from kvxfer.engines.vllm.layout import bytes_only
from kvxfer.engines.vllm.mover import Mover
from kvxfer.engines.vllm.settings import ConnectorSettings, MemoryMode, not_in_host_memory
from kvxfer_client import Address, Client, Handle, Owned, Session, SharedRegion

if TYPE_CHECKING:
    from kvxfer.embedded import EmbeddedSidecar

# vLLM shows what is logged below its own name.
log = logging.getLogger("vllm.kvxfer")

#: Pause between two attempts to register, seconds.
PAUSE = 0.5


class WorkerCache:
    """One worker's cache, from before it is allocated.

    :raises KvxferError: where no sidecar answers in time, or none can be started in this process.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        engine_id: str,
        compatibility_key: str,
        rank: Rank,
        dp: tuple[int, int] = (0, 1),
    ) -> None:
        self._settings = settings
        self._key = compatibility_key
        self._rank = rank
        self._dp = dp
        embed = settings.memory is MemoryMode.EMBEDDED
        self._sidecar = started(embedded_settings(settings, rank, dp[0])) if embed else None
        target = settings.socket(rank, dp[0]) if self._sidecar is None else self._sidecar.engine_address
        self.client = Client(target, engine_id=engine_id)
        if self._sidecar is None:
            self._wait_ready()
        self.mover = Mover(self.client, rank, settings.read_timeout)
        self._region: SharedRegion | None = None
        self._early: Session | None = None
        self._session: Session | None = None

    def _wait_ready(self) -> None:
        try:
            self.client.wait_ready(timeout=self._settings.ready_timeout)
        except KvxferError as error:
            self.client.close()
            raise KvxferError(
                error.reason, f"{error.message}; start one: kvxfer serve --engine-socket ...", **error.metadata
            ) from error

    # -- memory ----------------------------------------------------------------------------------------------------

    def lent(self, size: int) -> AbstractContextManager[Any] | None:
        """Inside this context vLLM makes its cache of ``size`` bytes; ``None`` where it may lie anywhere."""
        if self._settings.memory is MemoryMode.EMBEDDED:
            return None
        from kvxfer.engines.vllm.lending import Lent

        return Lent(size, self._borrow if self._settings.memory is MemoryMode.SIDECAR else self._share)

    def _borrow(self, size: int) -> SharedRegion:
        # The tensors are not known yet: registered by its size alone, and again once they are.
        self._early = self._register(bytes_only(size), [Owned(size)], early=True)
        found = self._early.wait_registered()
        self._region = SharedRegion.map(found.exported[0])
        return self._region

    def _share(self, size: int) -> SharedRegion:
        directory = self._settings.memory_directory
        if directory:
            path = Path(directory) / f"vllm-{self._rank}-{secrets.token_hex(8)}"
            self._region = SharedRegion.create_file(path, size)
        else:
            self._region = SharedRegion.create_memfd(size)
        return self._region

    def _handle(self, layout: CacheLayout, address: int) -> Handle:
        """How to name the memory that the cache was made in."""
        found = layout.regions[0]
        if self._settings.memory is MemoryMode.EMBEDDED:
            return Address(address, found.size, found.memory, found.device)
        if found.memory is not MemoryKind.DRAM:
            raise not_in_host_memory(f"GPU {found.device}")
        region = self._region
        if region is None or region.numpy("u1", (1,)).ctypes.data != address:
            raise KvxferError(
                Reason.UNSUPPORTED,
                "vLLM has not made its cache where it was told to (get_mem_pool_context), so that no other process can "
                f"see it: use memory={MemoryMode.EMBEDDED.value}",
            )
        return region.handle

    # -- registration ----------------------------------------------------------------------------------------------

    def register(self, layout: CacheLayout, address: int) -> None:
        """Register the cache, and begin to follow what becomes of it.

        :param address: of the layout's one region.
        """
        session = self._register(layout, [self._handle(layout, address)])
        if self._early is not None:
            self._early.close(unregister=False)
        self._session = session
        self.mover.follow(session)

    def _register(self, layout: CacheLayout, memory: Sequence[Handle], early: bool = False) -> Session:
        deadline = time.monotonic() + self._settings.ready_timeout
        while True:
            try:
                return self.client.session(
                    layout,
                    memory,
                    compatibility_key=self._key,
                    rank=self._rank,
                    dp_rank=self._dp[0],
                    dp_size=self._dp[1],
                    replace=True,
                    keep_leases=self._settings.memory is MemoryMode.SIDECAR and not early,
                    on_lost=None if early else self.mover.lost,
                    on_registered=None if early else self.mover.registered,
                    on_ended=None if early else self.mover.ended,
                )
            except KvxferError as error:
                # A former engine of this name may still have readers.
                if error.reason is not Reason.REGISTRATION_BUSY or time.monotonic() > deadline:
                    raise
                log.info("waiting for the former registration to end: %s", error)
            time.sleep(PAUSE)

    # -- end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take the cache back, and let go of everything; what is published stays where it can.  Idempotent."""
        self.mover.close()
        keep = self.mover.holds and self._settings.memory is MemoryMode.SIDECAR
        for session in (self._session, self._early):
            if session is not None:
                try:
                    session.close(unregister=not keep)
                except KvxferError as error:
                    log.warning("the cache is still in use, its sidecar ends it later: %s", error)
        self._session = self._early = None
        self.client.close()
        if self._sidecar is not None:
            self._sidecar.stop()
        if self._region is not None:
            self._region.unlink()


def started(settings: dict[str, Any]) -> EmbeddedSidecar:
    """A sidecar in this process."""
    from kvxfer.embedded import EmbeddedSidecar

    return EmbeddedSidecar(**settings).start()


def embedded_settings(settings: ConnectorSettings, rank: Rank, dp_rank: int) -> dict[str, Any]:
    """Settings of a sidecar in this process."""
    found: dict[str, Any] = {"peer_host": settings.peer_host, **settings.sidecar}
    if settings.peer_port:
        found["peer_port"] = settings.peer_port + rank.number
    if settings.engine_socket:
        found["engine_socket"] = settings.socket(rank, dp_rank).removeprefix("unix:").replace("//", "", 1)
    return found
