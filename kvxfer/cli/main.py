"""The command's root."""

from __future__ import annotations

import errno
import os
import sys

import typer

from kvxfer import __version__
from kvxfer.cli import bench, demo, doctor, health, plan, serve, volume
from kvxfer.cli.inspect import inspect
from kvxfer.core.errors import KvxferError

app = typer.Typer(
    name="kvxfer",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Moves KV caches and state snapshots between LLM engines over NIXL.",
)
app.command("serve")(serve.serve)
app.command("health")(health.health)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("volume")(volume.volume)
app.command("inspect")(inspect)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvxfer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Options that every subcommand takes."""


def main() -> None:
    """Entry point: errors of ours are one line and exit status 1, and so is standard output that takes no more."""
    try:
        app()
    except KvxferError as error:
        typer.echo(f"kvxfer: {error}", err=True)
        sys.exit(1)
    except (OSError, SystemExit) as ended:
        # Only standard output can tell whether it was the one that failed; what is small waits in its buffer until now.
        fault = _output_fault(probe=b"\n" if isinstance(ended, OSError) else b"")
        if fault is None:
            raise
        if fault.errno != errno.EPIPE:  # a reader that has seen enough is no news
            typer.echo(f"kvxfer: standard output: {fault.strerror}", err=True)
        sys.stdout = None  # or the interpreter would try it once more, and complain
        sys.exit(1)


def _output_fault(probe: bytes) -> OSError | None:
    """What keeps standard output from being written, if anything does."""
    if sys.stdout is None:
        return None
    try:
        sys.stdout.flush()
        if probe:
            os.write(sys.stdout.fileno(), probe)
    except OSError as fault:
        return fault
    return None
