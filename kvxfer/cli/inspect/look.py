"""Asks a sidecar for what it holds, over its engine socket."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.json_format import MessageToDict

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from kvxfer.wire.status import from_rpc_error
from kvxfer_client.channel import OPTIONS, told_as_kvxfer_errors

#: How long a call may take, seconds.
TIMEOUT: Final = 5.0
#: Peers of a page; what the service gives at most.
PAGE: Final = 1_000
#: Most pages of peers that are asked for: far more than a sidecar has.
MAX_PAGES: Final = 100
_SCHEME: Final = "unix:"


@dataclass(frozen=True)
class View:
    """What a sidecar has told, at about one moment.

    :param status: with all peers.
    :param leases: of every registration the newest, newest first; likewise ``transfers``.
    """

    status: pb.GetStatusResponse
    leases: tuple[pb.Lease, ...]
    transfers: tuple[pb.Transfer, ...]

    def as_json(self) -> dict[str, Any]:
        """As protobuf writes JSON: 64-bit integers are strings."""

        def plain(message: Any) -> dict[str, Any]:
            made: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
            return made

        return {
            "status": plain(self.status),
            "leases": [plain(lease) for lease in self.leases],
            "transfers": [plain(transfer) for transfer in self.transfers],
        }


def target_of(where: str) -> str:
    """The gRPC target of an engine socket, given as its path or as ``unix:PATH``.

    :raises KvxferError: FIELD_INVALID where there is no such socket, or this user may not use it.
    """
    path = Path(where.removeprefix(_SCHEME)).absolute()
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise _refused(path, "does not exist; is the sidecar running, and is this its --engine-socket?") from None
    except PermissionError:
        raise _refused(path, f"is in a directory that user {os.geteuid()} may not enter") from None
    if not stat.S_ISSOCK(found.st_mode):
        raise _refused(path, "is not a socket; give the path of a sidecar's --engine-socket")
    if not os.access(path, os.R_OK | os.W_OK):
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        why = (
            f"may not be used by user {os.geteuid()}: it is user {found.st_uid}'s, group {found.st_gid}'s, mode {mode}"
        )
        raise _refused(path, f"{why}; run this as that user, or set engine_socket_group and engine_socket_mode")
    return f"{_SCHEME}{path}"


def _refused(path: Path, why: str) -> KvxferError:
    return KvxferError(Reason.FIELD_INVALID, f"{path} {why}", field="socket", path=path)


def look(target: str, most: int) -> View:
    """Ask once, over a connection of its own: a sidecar may have been restarted since the last time.

    :param most: leases and transfers of each registration.
    :raises KvxferError: PEER_UNREACHABLE and DEADLINE_EXCEEDED where it does not answer; what it answers.
    """
    with _connected(target) as stub, told_as_kvxfer_errors(target, "GetStatus", {}):
        status = stub.GetStatus(pb.GetStatusRequest(peers_page_size=PAGE), timeout=TIMEOUT)
        following = status.next_peers_page_token
        for _ in range(MAX_PAGES):
            if not following:
                break
            request = pb.GetStatusRequest(peers_page_size=PAGE, peers_page_token=following)
            page = stub.GetStatus(request, timeout=TIMEOUT)
            status.peers.extend(page.peers)
            following = page.next_peers_page_token
        status.next_peers_page_token = ""
        leases: list[pb.Lease] = []
        transfers: list[pb.Transfer] = []
        for registration in status.registrations:
            engine = registration.engine_id
            with _unless_it_ends():
                held = pb.ListLeasesRequest(engine_id=engine, page_size=most)
                leases.extend(stub.ListLeases(held, timeout=TIMEOUT).leases[:most])
                read = pb.ListTransfersRequest(engine_id=engine, page_size=most)
                transfers.extend(stub.ListTransfers(read, timeout=TIMEOUT).transfers[:most])
    return View(status, tuple(leases), tuple(transfers))


@contextlib.contextmanager
def _connected(target: str) -> Iterator[transfer_pb2_grpc.KvTransferStub]:
    with grpc.insecure_channel(target, options=OPTIONS) as channel:
        try:
            yield transfer_pb2_grpc.KvTransferStub(channel)
        except KvxferError as error:
            if error.reason is not Reason.PEER_UNREACHABLE or not _is_left_over(target.removeprefix(_SCHEME)):
                raise
            why = f"nobody listens on {target.removeprefix(_SCHEME)}: its sidecar has ended without removing it"
            raise KvxferError(error.reason, why, **error.metadata) from None


def _is_left_over(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


@contextlib.contextmanager
def _unless_it_ends() -> Iterator[None]:
    """A registration may end, or be about to, between two calls."""
    try:
        yield
    except grpc.RpcError as error:
        failure: Any = error
        if from_rpc_error(failure).reason not in (Reason.NOT_REGISTERED, Reason.SHUTTING_DOWN):
            raise
