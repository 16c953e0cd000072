"""Memory of this process, for a sidecar that is embedded in its engine."""

from __future__ import annotations

from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MemoryKind
from kvxfer.memory.handles import Address, Mappable
from kvxfer.memory.lent import Lender, lenders
from kvxfer.memory.mapping import MemoryIdentity
from kvxfer.memory.oserrors import from_os_error
from kvxfer.memory.policy import MemoryPolicy


class AddressRegion:
    """Memory that somebody else in this process owns: never mapped and never unmapped here.

    What was lent (:mod:`kvxfer.memory.lent`) stays until the region is closed; of other memory its owner has to see to
    that.
    """

    def __init__(self, handle: Address) -> None:
        self.identity: Final = MemoryIdentity((handle.kind.value, handle.device), handle.address, handle.size)
        self.address: Final = handle.address
        self.size: Final = handle.size
        self.kind: Final = handle.kind
        self.device: Final = handle.device
        self._kept: tuple[Lender, ...] = lenders(handle)

    def export(self) -> Mappable | None:
        """None: there is no other side."""
        return None

    def close(self, *, keep: bool = False) -> None:
        """Let go of what was lent; everything else is its owner's affair."""
        self._kept = ()


def open_address(handle: Address, policy: MemoryPolicy) -> AddressRegion:
    """Take memory of this process as it is.

    Host memory must be mapped for reading and writing over its whole length (NIXL registers unmapped addresses without
    a word).  Device memory cannot be checked.

    :raises KvxferError: MEMORY_NOT_ALLOWED, MEMORY_LIMIT, REGION_TOO_SMALL.
    """
    if not policy.allow_address:
        raise KvxferError(
            Reason.MEMORY_NOT_ALLOWED,
            "plain addresses are only taken by a sidecar embedded in its engine",
            field="address",
            address=handle.address,
        )
    policy.check_size(handle.size)
    if handle.kind is MemoryKind.DRAM:
        mapped = _writable_from(handle.address)
        if mapped < handle.size:
            raise KvxferError(
                Reason.REGION_TOO_SMALL,
                f"of {handle.size} bytes at address {handle.address:#x} only the first {mapped} are mapped for writing",
                field="size",
                address=handle.address,
                size=handle.size,
                actual=mapped,
            )
    return AddressRegion(handle)


def _writable_from(address: int) -> int:
    """How many bytes from ``address`` on are mapped readable and writable without a gap."""
    end = address
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                span, permissions = line.split(None, 2)[:2]
                low, high = (int(part, 16) for part in span.split("-"))
                if low <= end < high:
                    if not permissions.startswith("rw"):
                        break
                    end = high
    except OSError as error:
        raise from_os_error(error, "reading this process's memory map", field="address") from error
    return end - address
