"""Who may call the peer listener: certificates of the CA, and of these the ones that a pattern allows."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import grpc
import grpc.aio

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.service.interceptors import Context, Tally, abort
from kvxfer.service.metrics import Metrics

#: How many names of a certificate a refusal tells.
_MOST_TOLD: Final = 8


def is_allowed(names: Iterable[str], uris: Iterable[str], patterns: Sequence[str]) -> bool:
    """Whether a certificate with these subject alternative names may call.

    :param names: its DNS names, whose case does not count, and IP addresses.
    :param patterns: globs, whose ``*`` also stands for dots and slashes.  Those with ``://`` are about URIs, all others
        about DNS names and IP addresses.  None at all allow every certificate.
    """
    for_uris = [p for p in patterns if "://" in p]
    for_names = [p.lower() for p in patterns if "://" not in p]
    return (
        not patterns
        or any(fnmatchcase(name.lower(), p) for name in names for p in for_names)
        or any(fnmatchcase(uri, p) for uri in uris for p in for_uris)
    )


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Lets only allowed certificates call, whatever the service; has to come before all other interceptors.

    :param metrics: where refused calls are counted, those of our own services.
    """

    def __init__(self, patterns: Sequence[str], metrics: Metrics) -> None:
        self._patterns = tuple(patterns)
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Put the check before every handler, of whatever kind."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        codecs = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._one(handler.unary_unary, method), *codecs)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._many(handler.unary_stream, method), *codecs)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._one(handler.stream_unary, method), *codecs)
        return grpc.stream_stream_rpc_method_handler(self._many(handler.stream_stream, method), *codecs)

    async def _check(self, context: Context, method: str) -> None:
        try:
            _check(context, self._patterns)
        except KvxferError as error:
            if method.startswith("/kvxfer."):
                Tally(self._metrics, method).refused(error)
            await abort(context, error, method)

    def _one(self, behaviour: Any, method: str) -> Any:
        async def call(request: Any, context: Context) -> Any:
            await self._check(context, method)
            return await behaviour(request, context)

        return call

    def _many(self, behaviour: Any, method: str) -> Any:
        async def call(request: Any, context: Context) -> Any:
            await self._check(context, method)
            async for answer in behaviour(request, context):
                yield answer

        # Those that write to the context return nothing to iterate over.
        return call if inspect.isasyncgenfunction(behaviour) else self._one(behaviour, method)


def _check(context: Context, patterns: Sequence[str]) -> None:
    """See who calls.

    :raises KvxferError: PEER_NOT_ALLOWED.
    """
    told = context.auth_context()
    if not told.get("x509_pem_cert"):  # the handshake has seen to it; nothing may depend on that alone
        raise KvxferError(Reason.PEER_NOT_ALLOWED, "this listener answers only to clients with a certificate")
    names, uris = (
        [value.decode("utf-8", "replace") for key in keys for value in told.get(key, ())]
        for keys in (("peer_dns", "peer_ip"), ("peer_uri",))
    )
    if not is_allowed(names, uris, patterns):
        named = ", ".join([*uris, *names][:_MOST_TOLD]) or "nothing"
        raise KvxferError(
            Reason.PEER_NOT_ALLOWED,
            f"the caller's certificate is not among those that may call this sidecar; it names {named}",
            names=named,
        )
