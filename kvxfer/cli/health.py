"""``kvxfer health``: ask a listener whether it serves, for probes and health checks of containers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.core.errors import KvxferError, Reason


def health(
    target: Annotated[
        str,
        typer.Argument(
            help="Path of a socket, or host:port of a plaintext listener; empty: the engine socket.", show_default=False
        ),
    ] = "",
    engine_socket: Annotated[
        Path, typer.Option(envvar="KVXFER_ENGINE_SOCKET", help="Unix socket of the engine listener.")
    ] = Path("/run/kvxfer/kvxfer.sock"),
    service: Annotated[
        str, typer.Option(help="kvxfer.v1.KvTransfer: ready to move caches; empty: alive.", show_default=False)
    ] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.", min=0.001, max=86_400)] = 3.0,
) -> None:
    """Ask a running sidecar for its health, by grpc.health.v1.

    Prints what it answers.  Exit status 0 where that is SERVING, otherwise 1.

    Examples:

      kvxfer health

      kvxfer health /run/kvxfer/rank0.sock --service kvxfer.v1.KvTransfer

      kvxfer health 127.0.0.1:9000
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub: Any = health_pb2_grpc.HealthStub  # its stubs know nothing of what it has
    where = target if ":" in target else f"unix:{target or engine_socket}"
    with grpc.insecure_channel(where, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = stub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            raise _told(error, where, service) from None
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    typer.echo(status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(1)


def _told(error: object, where: str, service: str) -> KvxferError:
    import grpc

    code = error.code() if isinstance(error, grpc.Call) else None
    if code is grpc.StatusCode.NOT_FOUND:
        return KvxferError(
            Reason.FIELD_INVALID, f"{where} has no service {service!r}", field="service", value=service, target=where
        )
    what = code.name if code else "UNKNOWN"
    return KvxferError(Reason.PEER_UNREACHABLE, f"no answer from {where}: {what}", target=where, grpc_code=what)
