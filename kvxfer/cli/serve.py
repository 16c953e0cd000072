"""``kvxfer serve``: run a sidecar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.cli.settings import as_toml, flags, unknown_variables
from kvxfer.core.errors import KvxferError, Reason


def serve(
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.", show_default=False)] = None,
    engine_socket: Annotated[
        Path | None, typer.Option(help="Unix socket of the engine listener.", show_default=False)
    ] = None,
    peer_host: Annotated[
        str | None, typer.Option(help="Address that the peer listener binds.", show_default=False)
    ] = None,
    peer_port: Annotated[int | None, typer.Option(help="Its TCP port; 0 takes a free one.", show_default=False)] = None,
    advertise: Annotated[
        str | None, typer.Option(help="host:port under which peers reach it.", show_default=False)
    ] = None,
    insecure_peer: Annotated[
        bool | None, typer.Option("--insecure-peer", help="Allow plaintext peers off loopback.", show_default=False)
    ] = None,
    peer_tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate for mutual TLS between peers, PEM.", show_default=False)
    ] = None,
    peer_tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.", show_default=False)] = None,
    peer_tls_ca: Annotated[Path | None, typer.Option(help="CA of the peers, PEM.", show_default=False)] = None,
    peer_allowed_san: Annotated[
        list[str] | None,
        typer.Option(help="Name, as a glob, whose certificates may call; may be repeated.", show_default=False),
    ] = None,
    http_host: Annotated[
        str | None, typer.Option(help="Address that metrics and probes are served at.", show_default=False)
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="Their TCP port; they are served only where it is set.", show_default=False)
    ] = None,
    memory_directory: Annotated[
        list[str] | None,
        typer.Option(help="Directory whose files engines may hand over; may be repeated.", show_default=False),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default=False)] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, text or json.", show_default=False)] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, as name=value; may be repeated.", show_default=False),
    ] = None,
    print_settings: Annotated[
        bool, typer.Option("--print-settings", help="Show every setting, as TOML that --config reads, and stop.")
    ] = False,
) -> None:
    """Run a sidecar until it is told to stop.

    Every setting may also come from the environment (KVXFER_PEER_PORT=9000) or from a TOML file; flags win.

    Examples:

      kvxfer serve --engine-socket /run/kvxfer/rank0.sock --peer-port 9000

      kvxfer serve --config kvxfer.toml --set max_transfers=10000
    """
    from pydantic import ValidationError

    from kvxfer.config import Settings, problems

    options: dict[str, Any] = {
        "engine_socket": engine_socket,
        "peer_host": peer_host,
        "peer_port": peer_port,
        "advertise": advertise,
        "insecure_peer": insecure_peer,
        "peer_tls_cert": peer_tls_cert,
        "peer_tls_key": peer_tls_key,
        "peer_tls_ca": peer_tls_ca,
        "peer_allowed_san": peer_allowed_san,
        "http_host": http_host,
        "http_port": http_port,
        "memory_directory": memory_directory,
        "log_level": log_level,
        "log_format": log_format,
    }
    try:
        settings = Settings.load(config, **flags(options, setting or []))
    except ValidationError as error:
        raise KvxferError(Reason.FIELD_INVALID, "; ".join(problems(error))) from error
    if print_settings:
        typer.echo(as_toml(settings.model_dump()))
        return

    from kvxfer import sidecar
    from kvxfer.xfer.environment import hard_exit

    for unknown in unknown_variables(os.environ):
        typer.echo(f"kvxfer: {unknown}", err=True)
    status = 0
    try:
        sidecar.serve(settings)
    except KvxferError as error:
        typer.echo(f"kvxfer: {error}", err=True)
        status = 1
    # Some NIXL builds crash in a destructor when the process ends by itself; everything of ours is closed by now.
    hard_exit(status)
