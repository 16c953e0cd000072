"""A reader's client of another sidecar's KvPeer service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.pb import peer_pb2 as pb
from kvxfer.pb import peer_pb2_grpc
from kvxfer.wire import fields
from kvxfer.wire.peer import (
    CloseRead,
    ExchangeAnswer,
    ExchangeQuery,
    OpenRead,
    ReadRef,
    answer_from_pb,
    close_to_pb,
    exchange_to_pb,
    granted_from_pb,
    open_to_pb,
    renew_to_pb,
    renewed_from_pb,
)
from kvxfer.wire.status import from_rpc_error

_Answer = TypeVar("_Answer")


def channel_options(message_limit: int) -> list[tuple[str, int]]:
    """How peers' connections are kept: a peer that is stopped or cut off is noticed within 15 seconds."""
    return [
        ("grpc.max_receive_message_length", message_limit),
        ("grpc.max_send_message_length", message_limit),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # What gRPC itself allows a ping is a minute, and while one of its own is out it sends no other.
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # A pod that starts anew has its old name and another address.  gRPC itself would try the old one for 20
        # seconds, and ask for the name's address no more than once in 30.
        ("grpc.min_reconnect_backoff_ms", 3_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        # A rank that restarted listens at the same address: never share a broken connection with a former client.
        ("grpc.use_local_subchannel_pool", 1),
        # The address comes from afar: it is where to connect, never through whom.
        ("grpc.enable_http_proxy", 0),
    ]


class GrpcPeerClient:
    """See :class:`kvxfer.service.link.PeerClient`.

    :param credentials: for TLS; plaintext without.
    :param server_name: what the peer's certificate must name, instead of the host of its address.
    """

    def __init__(
        self,
        address: str,
        message_limit: int,
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str = "",
    ) -> None:
        self._address = address
        self._tls = credentials is not None
        host, port = fields.split_address(address)
        kind = "ipv6" if ":" in host else "ipv4" if host.replace(".", "").isdigit() else "dns"
        target = f"{kind}:[{host}]:{port}" if kind == "ipv6" else f"{kind}:{host}:{port}"
        options: list[tuple[str, Any]] = [*channel_options(message_limit)]
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            if server_name:
                options.append(("grpc.ssl_target_name_override", server_name))
            self._channel = grpc.aio.secure_channel(target, credentials, options=options)
        self._stub = peer_pb2_grpc.KvPeerStub(self._channel)

    @property
    def address(self) -> str:
        """Where the peer listens."""
        return self._address

    async def _ask(self, call: Awaitable[_Answer], what: str) -> _Answer:
        # What is raised must not lead to the call, by its cause or by a frame of its traceback: whoever keeps a call
        # keeps its connection open, also after its channel was closed.  A task that was cancelled keeps how.
        known = None
        try:
            return await call
        except asyncio.CancelledError:
            code, details = grpc.StatusCode.CANCELLED, ""
        except grpc.aio.AioRpcError as error:
            known, code, details = from_rpc_error(error), error.code(), error.details() or ""
        finally:
            del call
        if known is None:
            raise asyncio.CancelledError
        silent = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        if silent and "grpc_code" in known.metadata:  # not the peer, but gRPC says so
            raise KvxferError(
                Reason.PEER_UNREACHABLE,
                f"{what} at {self._address}{self._how(details)}: {details or code.name}",
                address=self._address,
                status=code.name,
                security="tls" if self._tls else "plaintext",
            )
        # What it says of a field is about our call, not about that of our own caller; and that it is about to stop is
        # no word about this side, nor a reason to give up what it still serves.
        reason = Reason.PEER_UNREACHABLE if known.reason is Reason.SHUTTING_DOWN else known.reason
        told = {**known.metadata, "peer": self._address, "said": known.reason.value}
        # Its message speaks of itself as "here".
        raise KvxferError(reason, f"peer {self._address}: {known.message}", **told)

    def _how(self, details: str) -> str:
        """What may be said of TLS: a server that does not accept our certificate only hangs up."""
        details = details.lower()
        if self._tls and ("handshake failed" in details or "verification check failed" in details):
            return ", whose TLS certificate or name is not accepted here, or which has no TLS"
        if "socket closed" not in details:
            return " over TLS" if self._tls else ""
        if self._tls:
            return " over TLS (where it has not just stopped, it does not accept this side's certificate)"
        return " in plaintext (where it has not just stopped, it may want TLS)"

    async def exchange(self, query: ExchangeQuery, timeout: float) -> ExchangeAnswer:
        """See :meth:`kvxfer.service.link.PeerClient.exchange`."""
        answer = await self._ask(
            self._stub.Exchange(exchange_to_pb(query), timeout=timeout),
            f"rank {query.rank} of engine {query.engine_id} did not answer",
        )
        try:
            if not answer.HasField("layout"):  # a sign of life
                return answer_from_pb(answer)
            # Checking a large layout takes a while, and it is a stranger's.
            return await asyncio.to_thread(answer_from_pb, answer)
        except KvxferError as error:
            raise KvxferError(
                error.reason, error.message, **{**error.metadata, "answer_field": error.field, "address": self._address}
            ) from error

    async def goodbye(self, query: ExchangeQuery, timeout: float) -> None:
        """See :meth:`kvxfer.service.link.PeerClient.goodbye`."""
        await self._ask(self._stub.Exchange(exchange_to_pb(query), timeout=timeout), "goodbye was not heard")

    def open_read(self, record: OpenRead, timeout: float) -> Awaitable[float]:
        """See :meth:`kvxfer.service.link.PeerClient.open_read`."""
        # No coroutine: the call is to go out before anything that its caller does next.
        return self._granted(record.ref, self._stub.OpenRead(open_to_pb(record), timeout=timeout))

    async def _granted(self, ref: ReadRef, call: Awaitable[pb.OpenReadResponse]) -> float:
        what = f"rank {ref.rank} of engine {ref.engine_id} did not confirm the read"
        asking = self._ask(call, what)
        del call  # as _ask does
        return granted_from_pb(await asking)

    async def renew_read(self, ref: ReadRef, wanted: float, timeout: float) -> float:
        """See :meth:`kvxfer.service.link.PeerClient.renew_read`."""
        asked = renew_to_pb(ref, wanted)
        return renewed_from_pb(await self._ask(self._stub.RenewRead(asked, timeout=timeout), "a read was not renewed"))

    async def close_reads(self, records: Sequence[CloseRead], timeout: float) -> None:
        """See :meth:`kvxfer.service.link.PeerClient.close_reads`."""
        asked = close_to_pb(records)
        await self._ask(self._stub.CloseReads(asked, timeout=timeout), "the end of a read was not heard")

    async def wait_lost(self) -> None:
        """See :meth:`kvxfer.service.link.PeerClient.wait_lost`."""
        state = self._channel.get_state()
        while state is not grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state()
        await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)

    async def close(self) -> None:
        """See :meth:`kvxfer.service.link.PeerClient.close`."""
        await self._channel.close()
