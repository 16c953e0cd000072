"""The command: once, or again and again."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Final

import typer

from kvxfer.core.errors import KvxferError, Reason

#: What it is called when nobody answers.
_GONE: Final = frozenset({Reason.PEER_UNREACHABLE, Reason.DEADLINE_EXCEEDED, Reason.FIELD_INVALID})


def inspect(
    socket: Annotated[str, typer.Argument(help="The sidecar's engine socket, as a path.", show_default=False)],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks; means --watch only.")
    ] = 1.0,
    rows: Annotated[
        int, typer.Option(min=1, max=1000, help="Leases and transfers shown of each engine, the newest first.")
    ] = 20,
    only: Annotated[
        str, typer.Option(help="Tables to show, such as transfers,leases; all by default.", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a look, on one line.")] = False,
) -> None:
    """Show what a sidecar holds: registrations, peers, leases, transfers, counts and limits.

    With --watch on a terminal: a line of the sidecar's state, then what fits, the
    most lively first: transfers, leases, peers, lost peers, registrations, counts
    that are not zero and limits that are at least half used or have refused.

    Tables: sidecar, registrations, peers, lost, leases, transfers, counts, limits.
    A registration is "held by N" while N sessions of engines hold it; "registered"
    where none does, which is no fault: it stays until it is unregistered.

    Reads only: it changes nothing, and shows no secrets.  Needs neither NIXL nor
    torch, only the right to use the socket.

    Examples:

      kvxfer inspect /run/kvxfer/rank0.sock

      kvxfer inspect /run/kvxfer/rank0.sock --watch --interval 0.5

      kvxfer inspect /run/kvxfer/rank0.sock --watch --only transfers,leases

      kvxfer inspect /run/kvxfer/rank0.sock --json | jq .status.counts
    """
    from kvxfer.cli.inspect.look import look, target_of
    from kvxfer.cli.inspect.show import names, plain, show

    chosen = names(only)
    view = look(target_of(socket), rows)  # a wrong path is an error, also where it is to be watched
    if watch:
        try:
            _watch(socket, interval, rows, as_json, chosen)
        except KeyboardInterrupt:
            return
        return
    if as_json:
        typer.echo(json.dumps(view.as_json()))
        return
    from rich.console import Console

    if sys.stdout.isatty():
        show(Console(highlight=False), view, chosen)
    else:
        typer.echo(plain(view, chosen))


def _watch(socket: str, interval: float, rows: int, as_json: bool, only: tuple[str, ...]) -> None:
    """Look until Ctrl-C; a sidecar that is gone is waited for."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from kvxfer.cli.inspect.look import View, look, target_of
    from kvxfer.cli.inspect.show import plain
    from kvxfer.cli.inspect.watch import screen

    on_terminal = sys.stdout.isatty() and not as_json
    live = Live(console=Console(), screen=True, auto_refresh=False) if on_terminal else None
    gone_since: float | None = None
    last: View | None = None
    if live is not None:
        live.start()
    try:
        while True:
            began = time.monotonic()
            try:
                last, gone_since, why = look(target_of(socket), rows), None, ""
            except KvxferError as error:
                if error.reason not in _GONE:
                    raise
                gone_since, why = gone_since or began, error.message
            gone = "" if gone_since is None else f"gone for {time.monotonic() - gone_since:.0f} s: {why}"
            if live is not None:
                nothing = Text(f"the sidecar is {gone}", style="bold red")
                live.update(nothing if last is None else screen(live.console, last, only, gone), refresh=True)
            elif as_json:
                typer.echo(json.dumps({"gone": gone} if gone or last is None else last.as_json()))
            else:
                typer.echo(f"the sidecar is {gone}\n" if gone or last is None else f"{plain(last, only)}\n")
            sys.stdout.flush()
            time.sleep(max(0.0, interval - (time.monotonic() - began)))
    finally:
        if live is not None:
            live.stop()
