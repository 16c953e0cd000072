"""Checks of the memory that an engine hands over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout
from kvxfer.memory.api import MappedRegion
from kvxfer.memory.handles import Handle

if TYPE_CHECKING:
    from kvxfer.service.registrations import Registration


def check_handles(layout: CacheLayout, handles: Sequence[Handle]) -> None:
    """One handle for each region, of its size.

    :raises KvxferError: FIELD_INVALID, REGION_TOO_SMALL.
    """
    if len(handles) != len(layout.regions):
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"the layout has {len(layout.regions)} regions and {len(handles)} memory handles are given",
            field="memory",
            regions=len(layout.regions),
            handles=len(handles),
        )
    for i, (handle, region) in enumerate(zip(handles, layout.regions, strict=True)):
        if handle.size < region.size:
            raise KvxferError(
                Reason.REGION_TOO_SMALL,
                f"region {i} is {region.size} bytes and its memory handle {handle.size}",
                field=f"memory[{i}].size",
                region=region.size,
                handle=handle.size,
            )


def check_apart(regions: Sequence[MappedRegion], others: Sequence[Registration]) -> None:
    """No byte is handed over twice, neither in one registration nor in two.

    :param others: registrations that stay.
    :raises KvxferError: MEMORY_HANDLE_INVALID.
    """
    for i, region in enumerate(regions):
        for j, former in enumerate(regions[:i]):
            if region.identity.meets(former.identity):
                raise KvxferError(
                    Reason.MEMORY_HANDLE_INVALID,
                    f"memory handles {j} and {i} name the same memory; a region is handed over once, and views of "
                    "several groups may lie over it",
                    field=f"memory[{i}]",
                    other=j,
                )
        for other in others:
            if any(region.identity.meets(theirs) for theirs in other.identities):
                raise KvxferError(
                    Reason.MEMORY_HANDLE_INVALID,
                    f"memory handle {i} names memory that engine {other.identity.engine_id} has registered",
                    field=f"memory[{i}]",
                    engine_id=other.identity.engine_id,
                )
