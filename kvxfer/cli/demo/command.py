"""The ``kvxfer demo`` command: flags in, exit status out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.core.errors import KvxferError, Reason

if TYPE_CHECKING:
    from kvxfer.cli.demo.fit import Fitted
    from kvxfer.cli.demo.result import Result

_INTERRUPTED = 130


def demo(
    p_tp: Annotated[int, typer.Option(min=1, max=16, help="Tensor-parallel ranks of the prefill engine.")] = 2,
    d_tp: Annotated[int, typer.Option(min=1, max=16, help="Tensor-parallel ranks of the decode engine.")] = 4,
    model: Annotated[
        str, typer.Option(help="An example's name, or the path of a config.json.")
    ] = "nemotron-3-nano-30b-a3b",
    tokens: Annotated[int, typer.Option(min=1, max=2**24, help="Tokens whose cache is moved.")] = 5000,
    skip: Annotated[int, typer.Option(min=0, help="Tokens that D has already, and that must stay untouched.")] = 0,
    blocks: Annotated[
        int, typer.Option(min=0, help="Logical blocks of each engine; 0: what is needed and some more.")
    ] = 0,
    p_block_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens in a kernel block of P.")] = 16,
    d_block_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens in a kernel block of D.")] = 16,
    kv_dtype: Annotated[str, typer.Option(help="Type of K and V; auto is the model's own.")] = "fp8",
    seed: Annotated[int, typer.Option(min=0, help="Of block IDs and noise.")] = 1,
    memory_mib: Annotated[
        int, typer.Option(min=1, help="Most memory for all caches; a larger model is scaled down to it.")
    ] = 1024,
    timeout: Annotated[float, typer.Option(min=1, max=3600, help="Seconds that any phase may take.")] = 120,
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running until Enter or Ctrl-C.")] = False,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            help="Serve metrics: of the first sidecar at this port of 127.0.0.1, of the others at the next ones.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    flip: Annotated[str, typer.Option(hidden=True, help="inside or outside: damage one byte before verifying.")] = "",
) -> None:
    """Move a cache between two engines on this machine, and verify every byte.

    Starts an engine process and a sidecar process for each rank of a prefill
    engine (P) and a decode engine (D), fills P's caches, reads them into D's
    over NIXL, and compares all of D's memory with what it must be.  Status 0
    says that every byte is right and that none was moved in vain.

    Examples:

      kvxfer demo

      kvxfer demo --p-tp 4 --d-tp 2 --model qwen3-next-80b-a3b

      kvxfer demo --keep --http-port 9100
    """
    import json

    from kvxfer.cli.demo.fit import fit
    from kvxfer.cli.demo.scenario import Choices

    if flip not in ("", "inside", "outside"):
        raise KvxferError(Reason.FIELD_INVALID, f"--flip is {flip!r}; allowed: inside, outside", field="flip")
    choices = Choices(p_tp, d_tp, tokens, skip, blocks, p_block_tokens, d_block_tokens, kv_dtype, seed)
    try:
        fitted = fit(model, choices, memory_mib * 2**20)
        result = _run(fitted, timeout, keep, as_json, flip, http_port or 0)
    except KvxferError as error:
        if as_json:
            typer.echo(json.dumps({"ok": False, "problems": [str(error)], "reason": error.reason.value}))
        raise
    except KeyboardInterrupt:
        typer.echo("kvxfer: interrupted; every process has been ended", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if result.problems:
        raise typer.Exit(1)


def _run(fitted: Fitted, timeout: float, keep: bool, as_json: bool, flip: str, http_port: int) -> Result:
    import json
    from contextlib import ExitStack

    from kvxfer.cli.demo import report
    from kvxfer.cli.demo.run import Setting, run
    from kvxfer.cli.demo.space import memory_directory, run_directory
    from kvxfer.cli.demo.stop import enter, interruptible

    with ExitStack() as stack:
        memory, note = stack.enter_context(memory_directory(fitted.scenario.memory))
        setting = Setting(memory, stack.enter_context(run_directory()), timeout, keep, flip, http_port)
        reporter = stack.enter_context(report.Reporter(quiet=as_json))

        def show(result: Result) -> None:
            reporter.stop()
            if as_json:
                sys.stdout.write(json.dumps(result.json()) + "\n")
                sys.stdout.flush()
                return
            report.show(result, [note])
            if keep:
                report.show_by_hand(result)

        return interruptible(lambda: run(fitted, setting, reporter, show, enter))
