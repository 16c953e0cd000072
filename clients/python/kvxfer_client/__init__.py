"""What an engine imports to have its caches moved: a client for its sidecar, and everything that goes into its calls.

::

    with Client("unix:/run/kvxfer/kvxfer.sock", engine_id="decode-0") as client:
        client.wait_ready()
        client.register(layout, regions, compatibility_key="my-model@rev/bf16")
        client.read(ticket, grouped(block_ids, layout, num_tokens))

An engine that stays holds its cache with :meth:`Client.session` instead of :meth:`Client.register`: the registration
then ends with the engine's process, and is made again when the sidecar was restarted.

:class:`AsyncClient` has the same methods, to be awaited.  Every failure is a :class:`KvxferError`.
"""

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import (
    Axis,
    AxisKind,
    CacheLayout,
    Component,
    Group,
    GroupKind,
    MemoryKind,
    Rank,
    Region,
    TokenPartition,
    UnitRange,
    View,
)
from kvxfer.core.pairing import PairingOptions
from kvxfer.core.resolve import NULL_BLOCK, BlockList
from kvxfer.memory.handles import Address, CudaIpc, FileHandle, Handle, Memfd, Owned, OwnedBacking, PosixShm
from kvxfer.wire.addresses import RankAddress
from kvxfer.wire.params import prefill_params, ticket_from_params, ticket_to_params
from kvxfer.wire.tickets import Ticket, TicketRank, ticket_from_string, ticket_to_string
from kvxfer_client import layouts
from kvxfer_client.aio import AsyncClient, AsyncWatch
from kvxfer_client.aio_session import AsyncSession
from kvxfer_client.blocks import attention_blocks, grouped, snapshot, state_blocks
from kvxfer_client.calls import RemoteEngine
from kvxfer_client.client import Client, Watch
from kvxfer_client.cuda import DeviceRegion
from kvxfer_client.local import LocalRegion
from kvxfer_client.memory import SharedRegion
from kvxfer_client.results import (
    Counts,
    GroupCost,
    LeaseInfo,
    LeaseReaders,
    LeaseState,
    PeerInfo,
    PeerRole,
    PlanInfo,
    PlanSource,
    Registered,
    RegistrationInfo,
    SourceInfo,
    Status,
    Timings,
    TransferInfo,
    TransferState,
)
from kvxfer_client.session import Session
from kvxfer_client.tickets import make_ticket, new_lease_token

__all__ = [
    "NULL_BLOCK",
    "Address",
    "AsyncClient",
    "AsyncSession",
    "AsyncWatch",
    "Axis",
    "AxisKind",
    "BlockList",
    "CacheLayout",
    "Client",
    "Component",
    "Counts",
    "CudaIpc",
    "DeviceRegion",
    "FileHandle",
    "Group",
    "GroupCost",
    "GroupKind",
    "Handle",
    "KvxferError",
    "LeaseInfo",
    "LeaseReaders",
    "LeaseState",
    "LocalRegion",
    "Memfd",
    "MemoryKind",
    "Owned",
    "OwnedBacking",
    "PairingOptions",
    "PeerInfo",
    "PeerRole",
    "PlanInfo",
    "PlanSource",
    "PosixShm",
    "Rank",
    "RankAddress",
    "Reason",
    "Region",
    "Registered",
    "RegistrationInfo",
    "RemoteEngine",
    "Session",
    "SharedRegion",
    "SourceInfo",
    "Status",
    "Ticket",
    "TicketRank",
    "Timings",
    "TokenPartition",
    "TransferInfo",
    "TransferState",
    "UnitRange",
    "View",
    "Watch",
    "attention_blocks",
    "grouped",
    "layouts",
    "make_ticket",
    "new_lease_token",
    "prefill_params",
    "snapshot",
    "state_blocks",
    "ticket_from_params",
    "ticket_from_string",
    "ticket_to_params",
    "ticket_to_string",
]
