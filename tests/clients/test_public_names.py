"""The names that engines may rely on.  Taking one away breaks them; adding one is a promise."""

from __future__ import annotations

import inspect

import kvxfer_client
from kvxfer_client import AsyncClient, Client, layouts

NAMES = [
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
    "NULL_BLOCK",
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

METHODS = [
    "cancel",
    "close",
    "get_transfer",
    "handshake",
    "list_leases",
    "list_transfers",
    "prepare",
    "publish",
    "read",
    "read_prepared",
    "register",
    "renew",
    "session",
    "status",
    "unregister",
    "wait_ready",
    "watch",
    "watch_leases",
    "withdraw",
]

LAYOUTS = [
    "Block",
    "attention_apart",
    "attention_block",
    "element",
    "gdn_block",
    "halves",
    "latent_block",
    "mamba1_block",
    "mamba2_block",
    "share",
    "state_block",
]


def public(owner: object) -> list[str]:
    return sorted(name for name in dir(owner) if not name.startswith("_"))


def test_names_of_the_package() -> None:
    assert sorted(kvxfer_client.__all__) == sorted(NAMES)
    for name in NAMES:
        assert getattr(kvxfer_client, name) is not None


def test_both_clients_have_the_same_methods() -> None:
    for client in (Client, AsyncClient):
        methods = [name for name in public(client) if callable(getattr(client, name))]
        assert methods == METHODS


def test_both_clients_take_the_same_arguments() -> None:
    for name in METHODS:
        blocking = inspect.signature(getattr(Client, name)).parameters.values()
        awaiting = inspect.signature(getattr(AsyncClient, name)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in blocking] == [(p.name, p.kind, p.default) for p in awaiting]
        assert getattr(Client, name).__doc__


def test_help_tells_what_a_method_returns() -> None:
    for client in (Client, AsyncClient):
        signature = inspect.signature(client.read)
        assert signature.return_annotation == "TransferInfo"
        assert next(iter(signature.parameters)) == "self"


def test_layout_builders() -> None:
    own = [name for name in public(layouts) if getattr(getattr(layouts, name), "__module__", "") == layouts.__name__]
    assert own == LAYOUTS
