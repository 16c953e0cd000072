"""The ``kvxfer volume`` command."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from kvxfer.cli.plan.command import REFUSED, bad_input, check_tokens
from kvxfer.cli.plan.options import chosen, engine_options


@engine_options(without=("kv-dtype",))
def volume(
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(help="Type of K and V; once for each to compare.", show_default="auto: the model's"),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="A prompt length to tell about; may be repeated.", show_default="doubling, up to --up-to"),
    ] = None,
    up_to: Annotated[int, typer.Option(help="The longest prompt, of the table and of the plot.")] = 32_768,
    plot: Annotated[
        str | None,
        typer.Option(
            help="Plot to this file (.svg or .png); needs matplotlib (the extra plot).",
            show_default=False,
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    **values: Any,
) -> None:
    """Transfer volume against prompt length: whole padded pages, and what is read.

    Bytes per D rank and request, of three readers: one that moves every page
    that the prompt takes, padding included; one that leaves the padding out
    but moves attention blocks to their ends; and kvxfer, which moves what is
    needed, to the granule.  Numbers come from compiled plans and resolved
    reads.  Needs no GPU, no NIXL and no peer.

    Status 0: told.  Status 1: the pair is refused, and why.  Status 2: the
    input cannot be.

    Examples:

      kvxfer volume --model nemotron-3-super-120b-a12b --tp 4 --logical-block-tokens 4224 --kv-dtype bf16 --kv-dtype fp8

      kvxfer volume --model nemotron-3-nano-30b-a3b --kv-dtype fp8 --p-tp 2 --d-tp 4 --tokens 2096 --tokens 4176 --json

      kvxfer volume --model ./config.json --tp 2 --up-to 131072 --plot volume.svg
    """
    from kvxfer.cli.volume import output
    from kvxfer.planning import Refused, volumes
    from kvxfer.planning.volume import interesting_lengths

    try:
        with bad_input(as_json):
            from kvxfer.cli.plan.sides import preset

            check_tokens("--up-to", up_to)
            for length in tokens or ():
                check_tokens("--tokens", length)
            if plot is not None:
                from kvxfer.cli.plan.figures import check_target

                check_target("--plot", plot)
            lengths = sorted(set(tokens or output.doubling(up_to)))
            found = []
            for dtype in dict.fromkeys(kv_dtype or ["auto"]):
                p, d = (preset(chosen(side, values, kv_dtype=dtype)) for side in ("P", "D"))
                points = interesting_lengths(d, lengths[-1], output.POINTS) if plot is not None else []
                curve = volumes(p, d, [*lengths, *points])
                told = tuple(volume for volume in curve if volume.tokens in lengths)
                found.append(output.Series(dtype, p, d, told, curve))
            if plot is not None:
                from kvxfer.cli.plan.figures import save
                from kvxfer.cli.volume.plot import draw

                save("--plot", plot, draw(found))
    except Refused as refusal:
        output.refuse(refusal, as_json)
        raise typer.Exit(REFUSED) from None
    if as_json:
        sys.stdout.write(output.as_json(found) + "\n")
        return
    output.show(found)
    if plot is not None:
        output.told_plot(plot)
