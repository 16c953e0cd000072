"""The ``kvxfer bench`` command: flags in, exit status out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvxfer.core.errors import KvxferError, Reason

if TYPE_CHECKING:
    from kvxfer.cli.bench.case import Case
    from kvxfer.cli.bench.report import Outcome

_INTERRUPTED: Final = 130
_ORDERS: Final = ("contiguous", "scrambled")


def bench(
    size: Annotated[str, typer.Option(help="Bytes that each read moves: 64MiB, 1GiB, 65536.")] = "64MiB",
    block: Annotated[str, typer.Option(help="Bytes of a block in one layer.")] = "64KiB",
    rounds: Annotated[int, typer.Option(min=1, max=100_000, help="Reads that are measured.")] = 30,
    order: Annotated[str, typer.Option(help="Block IDs: contiguous or scrambled.")] = "scrambled",
    timeout: Annotated[float, typer.Option(min=1, max=3600, help="Seconds that any step may take.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Measure reads between two sidecars on this machine.

    Starts a sidecar for a prefill engine (P) and one for a decode engine (D),
    registers a dense cache with each, and has D's read P's blocks again and
    again over NIXL. The bytes of the first and the last round are compared.

    The time is that of the whole ReadBlocks call as its caller sees it; the
    phases below it are what the sidecar says of itself (medians).

    Examples:

      kvxfer bench

      kvxfer bench --size 256MiB --block 16KiB --order contiguous --rounds 100

      UCX_TLS=tcp kvxfer bench --json
    """
    import json

    from kvxfer.cli.bench import case as cases

    if order not in _ORDERS:
        raise KvxferError(Reason.FIELD_INVALID, f"--order is {order!r}; allowed: {', '.join(_ORDERS)}", field="order")
    case = cases.Case.of(cases.size(size, "size"), cases.size(block, "block"), order == "scrambled")
    try:
        outcome = _run(case, rounds, timeout, as_json)
    except KeyboardInterrupt:
        typer.echo("kvxfer: interrupted; every process has been ended", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        sys.stdout.write(json.dumps(outcome.json(), indent=1) + "\n")
    else:
        from kvxfer.cli.bench.report import show

        show(outcome)
    if outcome.wrong:
        raise typer.Exit(1)


def _run(case: Case, rounds: int, timeout: float, quiet: bool) -> Outcome:
    from kvxfer.cli.bench.report import bar
    from kvxfer.cli.bench.run import run
    from kvxfer.cli.demo.space import memory_directory, run_directory
    from kvxfer.cli.demo.stop import interruptible

    needed = 2 * sum(region.size for region in case.layout.regions)
    with memory_directory(needed) as (memory, note), run_directory() as logs, bar(quiet) as progress:
        if note:
            typer.echo(f"kvxfer: {note}", err=True)
        task = progress.add_task("reading", total=rounds)
        return interruptible(lambda: run(case, memory, logs, rounds, timeout, lambda: progress.advance(task)))
