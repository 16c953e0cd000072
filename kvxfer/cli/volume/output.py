"""Volumes for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table

from kvxfer.cli.fitting import put
from kvxfer.cli.plan.output import describe, engine_json
from kvxfer.cli.tables import console, new_table, say
from kvxfer.planning import Engine, RankVolume, Refused, Volume
from kvxfer.planning.report import pages_of, refusal_of

#: Evenly spaced points of a curve, beside those where it steps; between them it is straight but for granules.
POINTS: Final = 12
#: The shortest prompt of a table.
_SHORTEST: Final = 512


@dataclass(frozen=True)
class Series:
    """The volumes of one pair.

    :param dtype: of K and V, as it was given.
    :param curve: these and more of them, for a plot.
    """

    dtype: str
    p: Engine
    d: Engine
    volumes: tuple[Volume, ...]
    curve: tuple[Volume, ...]


def doubling(longest: int) -> list[int]:
    """Prompt lengths that double, up to the longest."""
    found = [longest]
    while found[-1] > _SHORTEST:
        found.append(found[-1] // 2)
    return found[::-1]


# -- for machines ----------------------------------------------------------------------------------------------------


def as_json(found: Sequence[Series]) -> str:
    """One JSON object; its keys are described in docs/how-to/transfer-volume.md."""
    return json.dumps({"series": [_series(series) for series in found]})


def _series(series: Series) -> dict[str, Any]:
    return {
        "kv_dtype": series.dtype,
        "p": engine_json(series.p, pages_of(series.p)),
        "d": engine_json(series.d, pages_of(series.d)),
        "volumes": [
            {"tokens": volume.tokens, "ranks": [_rank(rank) for rank in volume.ranks]} for volume in series.volumes
        ],
    }


def _rank(rank: RankVolume) -> dict[str, Any]:
    return {**asdict(rank), "saved_padding": rank.padding, "saved_tail": rank.tail}


def refuse(refusal: Refused, machine: bool) -> None:
    """Tell why a pair is refused."""
    if machine:
        typer.echo(json.dumps({"verdict": "refused", "refusal": refusal_of(refusal)}))
    typer.echo(f"kvxfer: refused: {refusal}", err=True)


# -- for people ------------------------------------------------------------------------------------------------------


def show(found: Sequence[Series]) -> None:
    """Print a table for each pair."""
    out = console()
    for series in found:
        say(out, f"P: {describe(series.p)}")
        say(out, f"D: {describe(series.d)}")
        out.print()
        table = _table(out, series)
        put(out, table)
        if len(table.columns) == 2:
            say(out, "nothing to save: pages have no padding, and no block is longer than what is read at a time")
        out.print()


def _table(out: Console, series: Series) -> Table:
    alike = all(_numbers(rank) == _numbers(volume.ranks[0]) for volume in series.volumes for rank in volume.ranks)
    whose = "each D rank" if alike else "the D rank that reads most"
    title = f"Bytes per rank and request, of {whose}"
    if not any(volume.largest.padded > volume.largest.read for volume in series.volumes):
        table = new_table(out, title, "prompt", "kvxfer reads", left=0)
        for volume in series.volumes:
            table.add_row(f"{volume.tokens:,}", f"{volume.largest.read:,}")
        return table
    sizes = ("padded pages", "whole blocks", "kvxfer reads", "saved", "of it padding", "block ends")
    table = new_table(out, title, "prompt", *sizes, "of padded", left=0)
    for volume in series.volumes:
        rank = volume.largest
        saved = (rank.padded - rank.read, rank.padding, rank.tail)
        numbers = (volume.tokens, rank.padded, rank.whole_blocks, rank.read, *saved)
        table.add_row(*(f"{n:,}" for n in numbers), f"{rank.read / rank.padded:.1%}")
    return table


def _numbers(rank: RankVolume) -> tuple[int, int, int]:
    return rank.padded, rank.whole_blocks, rank.read


def told_plot(path: str) -> None:
    """Say where the plot is."""
    say(console(), f"plot: {path}")
