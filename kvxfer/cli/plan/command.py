"""The ``kvxfer plan`` command: flags in, a report out, the verdict as exit status."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer.cli.plan.options import BAD_INPUT, Chosen, bad, chosen, engine_options
from kvxfer.core.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.planning import Engine

#: The status of a pair that is refused.
REFUSED = 1


@engine_options()
def plan(
    tokens: Annotated[
        int | None, typer.Option(help="Also tell what a prompt of so many tokens moves.", show_default=False)
    ] = None,
    p_layout: Annotated[
        list[str] | None,
        typer.Option(
            help="P's layout instead of a model: the JSON form of kvxfer.v1.Layout, or a RegisterCache request; once "
            "for each rank, in order (stages outermost, see --pp and --p-pp).",
            show_default=False,
        ),
    ] = None,
    d_layout: Annotated[list[str] | None, typer.Option(help="The same for D.", show_default=False)] = None,
    min_run_bytes: Annotated[
        int, typer.Option(help="Shortest run that D takes where the two sides store things in different orders.")
    ] = 64,
    picture: Annotated[
        str | None,
        typer.Option(
            help="Draw the page map to this file (.svg or .png); needs matplotlib (the extra plot).",
            show_default=False,
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    **values: Any,
) -> None:
    """Tell what a pair of engines would do: does it work, and what does it cost.

    Takes a model's config and the options of both engines, or the layouts
    that they register; needs no GPU, no NIXL and no peer.  Plans are
    compiled as a sidecar compiles them at a handshake.

    Status 0: the pair works, perhaps at a cost, which is told.
    Status 1: it is refused, and why.  Status 2: the input cannot be.

    Examples:

      kvxfer plan --model nemotron-3-nano-30b-a3b --kv-dtype fp8 --p-tp 2 --d-tp 4

      kvxfer plan --model ./config.json --tp 4 --tokens 5000 --json

      kvxfer plan --model qwen3-next-80b-a3b --p-tp 2 --d-tp 1 --p-block-tokens 48 --d-block-tokens 64

      kvxfer plan --model nemotron-3-super-120b-a12b --tp 4 --logical-block-tokens 4224 --picture page.svg

      kvxfer plan --model nemotron-3-super-120b-a12b --tp 4 --kv-dtype fp8 --state-align-tokens 128

      kvxfer plan --model jamba-mini --conv-dtype bf16 --state-dtype float32 --conv-layout SD --spec-tokens 2

      kvxfer plan --model llama-3.1-70b --tp 8 --pp 2 --p-kv-layout NHD --kv-packing halves

      kvxfer plan --model jamba-mini --p-pooled --d-no-pooled

      kvxfer plan --p-model p/config.json --d-model d/config.json

      kvxfer plan --p-layout p0.json --p-layout p1.json --d-layout d0.json --min-run-bytes 256
    """
    with bad_input(as_json):
        from kvxfer.cli.plan import output
        from kvxfer.core.pairing import PairingOptions
        from kvxfer.planning import Verdict, page_map, report

        if min_run_bytes < 1:
            raise bad("min_run_bytes", f"--min-run-bytes is {min_run_bytes}; allowed is 1 or more", value=min_run_bytes)
        if tokens is not None:
            check_tokens("--tokens", tokens)
        if picture is not None:
            from kvxfer.cli.plan.figures import check_target

            check_target("--picture", picture)
        p, d = _side(chosen("P", values), p_layout), _side(chosen("D", values), d_layout)
        found = report(p, d, tokens, PairingOptions(min_run_bytes=min_run_bytes))
        if picture is not None and found.pair is not None:
            from kvxfer.cli.plan.figures import save
            from kvxfer.cli.plan.picture import draw

            save("--picture", picture, draw(page_map(found.pair), found.pair))
    if as_json:
        sys.stdout.write(output.as_json(found) + "\n")
    else:
        output.show(found)
        if picture is not None:
            output.told_picture(picture, drawn=found.pair is not None)
    if found.verdict is Verdict.REFUSED:
        raise typer.Exit(REFUSED)


def _side(side: Chosen, layouts: list[str] | None) -> Engine:
    from kvxfer.cli.plan.sides import given, preset

    return given(side, layouts) if layouts else preset(side)


def check_tokens(flag: str, tokens: int) -> None:
    """:raises KvxferError: FIELD_INVALID, naming the flag, where no prompt has so many tokens."""
    from kvxfer.planning.engine import MAX_PROMPT

    if not 1 <= tokens <= MAX_PROMPT:
        raise bad("tokens", f"{flag} is {tokens}; allowed are 1 to {MAX_PROMPT}", value=tokens)


@contextmanager
def bad_input(as_json: bool) -> Iterator[None]:
    """Turn an error of ours into one line, and status 2; a pair that is refused is no mistake and passes."""
    from kvxfer.planning import Refused

    try:
        yield
    except Refused:
        raise
    except KvxferError as error:
        if as_json:
            import json

            from kvxfer.planning.report import refusal_of

            typer.echo(json.dumps({"verdict": "bad_input", "refusal": refusal_of(error)}))
        typer.echo(f"kvxfer: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None
