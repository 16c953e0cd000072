"""What happens around every call: errors become statuses, and everything unforeseen is logged and contained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from kvxfer.core.errors import Fault, KvxferError, Reason
from kvxfer.pb import peer_pb2, transfer_pb2
from kvxfer.service.limits import NAMES
from kvxfer.service.metrics import Metrics
from kvxfer.wire.status import to_status

log = structlog.get_logger()

#: Our own.
SERVICES: Final = (
    transfer_pb2.DESCRIPTOR.services_by_name["KvTransfer"],
    peer_pb2.DESCRIPTOR.services_by_name["KvPeer"],
)

#: Where a request says what it is about, by the names of the log; the first that is there counts.
_ABOUT: Final = (
    ("engine", ("engine_id",), ("spec", "engine_id")),
    ("incarnation", ("incarnation",), ("expected_incarnation",)),
    ("request", ("request_id",), ("ticket", "request_id"), ("spec", "ticket", "request_id")),
    ("transfer", ("transfer_id",), ("spec", "transfer_id")),
    (
        "peer",
        ("reader", "engine_id"),
        ("engine", "engine_id"),
        ("ticket", "engine_id"),
        ("spec", "ticket", "engine_id"),
    ),
    ("peer_incarnation", ("reader", "incarnation")),
)
#: Of what a caller says, so many characters are logged.
_MOST_LOGGED: Final = 128

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns :class:`KvxferError` into a rich status; anything else into INTERNAL, without telling what it was.

    :param metrics: where calls and refusals are counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for name in NAMES:
            metrics.limit_refusals.add((name,), 0)
        for service in SERVICES:
            for called in service.methods:
                metrics.calls.add((service.full_name, called.name, "INTERNAL"), 0)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handlers of our own services, once; health and reflection answer for themselves."""
        method: str = handler_call_details.method
        if (known := self._wrapped.get(method)) is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith("/kvxfer."):
            return handler
        tally = Tally(self._metrics, method)
        if handler.unary_unary is not None:
            wrapped = grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, method, tally), _decoder(handler), handler.response_serializer
            )
        elif handler.unary_stream is not None:
            wrapped = grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, method, tally), _decoder(handler), handler.response_serializer
            )
        else:
            return handler
        self._wrapped[method] = wrapped  # of methods that there are only
        return wrapped


class Tally:
    """Counts the calls of a method, each once.

    :param method: of a service that is served here, ``/service/method``.
    """

    def __init__(self, metrics: Metrics, method: str) -> None:
        self._metrics = metrics
        self._method = method

    def ended(self, code: str) -> None:
        """It has ended with this status code."""
        service, _, method = self._method[1:].partition("/")
        self._metrics.calls.add((service, method, code))

    def refused(self, error: KvxferError) -> None:
        """It has ended with this error."""
        self.ended(error.spec.code.value)
        name = error.metadata.get("limit_name", "")
        # What a peer has refused, and was only handed on, has been counted there.
        if name in NAMES and "said" not in error.metadata:
            self._metrics.limit_refusals.add((name,))


def _decoder(handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[[bytes], Any]:
    """Decodes requests; what is none comes out as the error to answer with, since grpc has no good one."""
    decode = handler.request_deserializer

    def call(data: bytes) -> Any:
        try:
            return data if decode is None else decode(data)
        except DecodeError:
            return KvxferError(Reason.FIELD_INVALID, f"the {len(data)} bytes of the request are no message of its kind")

    return call


def _unary(behaviour: Any, method: str, tally: Tally) -> Any:
    async def call(request: Any, context: Context) -> Any:
        async def refuse(error: KvxferError) -> None:
            tally.refused(error)
            await abort(context, error, method, request)

        began = time.perf_counter()
        try:
            if isinstance(request, KvxferError):
                raise request
            answer = await behaviour(request, context)
        except KvxferError as error:
            await refuse(error)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            if context.cancelled():
                tally.ended("CANCELLED")
                raise
            # Something inside was cancelled, not the call: its caller must hear of it.
            log.warning("a call was cut short", method=method, **about(request))
            await refuse(KvxferError(Reason.SHUTTING_DOWN, "the call was cut short by a shutdown"))
        except Exception:  # the last line of defence: nothing that a caller sends may end the process
            log.exception("a call failed in an unforeseen way", method=method, **about(request))
            await refuse(KvxferError(Reason.INTERNAL, "an internal error; see the sidecar's log"))
        else:
            tally.ended("OK")
            log.debug("call", method=method, seconds=round(time.perf_counter() - began, 6))
            return answer

    return call


def _stream(behaviour: Any, method: str, tally: Tally) -> Any:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            if isinstance(request, KvxferError):
                raise request
            async for answer in behaviour(request, context):
                yield answer
        except KvxferError as error:
            tally.refused(error)
            await abort(context, error, method, request)
        except grpc.aio.AbortError:
            raise
        except (asyncio.CancelledError, GeneratorExit):
            tally.ended("CANCELLED")
            raise
        except Exception:  # as above
            log.exception("a stream failed in an unforeseen way", method=method, **about(request))
            unforeseen = KvxferError(Reason.INTERNAL, "an internal error; see the sidecar's log")
            tally.refused(unforeseen)
            await abort(context, unforeseen, method, request)
        else:
            tally.ended("OK")

    return call


def about(request: Any) -> dict[str, str]:
    """What a request is about, by the names of the log: those of its IDs that it has, cut where they are very long."""
    told = {}
    for name, *paths in _ABOUT:
        values = (_at(request, path) for path in paths)
        if value := next((v for v in values if isinstance(v, str) and v), ""):
            told[name] = value[:_MOST_LOGGED]
    return told


def _at(message: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if not isinstance(message, Message) or name not in message.DESCRIPTOR.fields_by_name:
            return None
        message = getattr(message, name)
    return message


async def abort(context: Context, error: KvxferError, method: str, request: Any = None) -> None:
    """End a call with the rich status of an error.

    :param request: what was asked; ``None`` where nothing of it is to be logged.
    """
    level = log.warning if error.spec.fault is Fault.LOCAL or error.reason is Reason.PEER_NOT_ALLOWED else log.info
    told = about(request)
    level("call refused", method=method, **told, reason=error.reason.value, detail=error.message, field=error.field)
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
