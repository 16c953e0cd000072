"""Results as pictures: one SVG for each question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]

_BLUE, _RED, _GOLD, _GREY = "#00798c", "#d1495b", "#edae49", "#8a8a8a"
_COLOURS = {"CMA": _BLUE, "TCP": _RED}
MIB, KIB = 2**20, 2**10


def ratios(axes: Axes, rows: Rows) -> None:
    """ReadBlocks / raw against the size of a read."""
    for transport, colour in _COLOURS.items():
        line = [r for r in rows if r["transport"] == transport and r["block"] == 64 * KIB and r["order"] == "scrambled"]
        line.sort(key=lambda r: int(r["bytes"]))
        sizes = [r["bytes"] / MIB for r in line]
        axes.plot(sizes, [r["ratio"][1] for r in line], color=colour, marker="o", markersize=4, label=transport)
        axes.fill_between(
            sizes, [r["ratio"][0] for r in line], [r["ratio"][2] for r in line], color=colour, alpha=0.15, linewidth=0
        )
    axes.axhline(1.0, color=_GREY, linewidth=0.8)
    axes.axhline(1.05, color=_GREY, linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("MiB in one read, in blocks of 64 KiB, scrambled")
    axes.set_ylabel("ReadBlocks / raw NIXL READ")


def blocks(axes: Axes, rows: Rows) -> None:
    """Rates by the size of a block, for both transports."""
    for transport, colour in _COLOURS.items():
        line = [r for r in rows if r["transport"] == transport and r["bytes"] == 64 * MIB and r["order"] == "scrambled"]
        line.sort(key=lambda r: int(r["block"]))
        sizes = [r["block"] / KIB for r in line]
        for name, style, what in (
            ("kvxfer_ms", "-", "ReadBlocks"),
            ("raw_ms", "--", "raw, sorted"),
            ("raw_as_listed_ms", ":", "raw, as listed"),
        ):
            rate = [r["bytes"] / r[name] / 1e6 for r in line if name in r]
            if len(rate) == len(sizes):
                axes.plot(
                    sizes, rate, color=colour, linestyle=style, marker="o", markersize=3, label=f"{transport}, {what}"
                )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("KiB of a block in one layer; reads of 64 MiB, scrambled")
    axes.set_ylabel("GB/s")


def others(axes: Axes, rows: Rows) -> None:
    """Rates over TCP by the size of a block."""
    line = sorted(rows, key=lambda r: int(r["block"]))
    sizes = [r["block"] / KIB for r in line]
    for name, colour, style, what in (
        ("kvxfer_gbs", _BLUE, "-", "ReadBlocks"),
        ("mooncake_gbs", _RED, "-", "Mooncake"),
        ("mooncake_lanes_gbs", _RED, "--", "Mooncake, 16 connections"),
        ("nixl_gbs", _GREY, "-", "NIXL, UCX's own settings"),
        ("grpc_block_gbs", _GOLD, "-", "gRPC stream, a block a message"),
        ("grpc_mib_gbs", _GOLD, "--", "gRPC stream, 1 MiB a message"),
    ):
        axes.plot(sizes, [r[name] for r in line], color=colour, linestyle=style, marker="o", markersize=3, label=what)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("KiB of a block in one layer; reads of 64 MiB over TCP, scrambled")
    axes.set_ylabel("GB/s")


def resolving(axes: Axes, rows: Rows) -> None:
    """Milliseconds to turn block IDs into descriptor numbers, against the length of the prompt."""
    for shape, colour in zip(dict.fromkeys(str(r["shape"]) for r in rows), (_BLUE, _GOLD, _RED), strict=False):
        line = sorted((r for r in rows if r["shape"] == shape), key=lambda r: int(r["tokens"]))
        tokens = [r["tokens"] for r in line]
        for name, style, what in (("kvxfer_ms", "-", "kvxfer"), ("vllm_ms", "--", "vLLM's connector")):
            axes.plot(
                tokens,
                [r[name] for r in line],
                color=colour,
                linestyle=style,
                marker="o",
                markersize=3,
                label=f"{shape}, {what}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("ms to resolve")


#: Pictures by name: the rows that they are made of, and how.
PICTURES: Mapping[str, tuple[str, Callable[[Axes, Rows], None]]] = {
    "bench-ratio": ("reads", ratios),
    "bench-blocks": ("reads", blocks),
    "bench-others": ("others", others),
    "bench-resolve": ("resolving", resolving),
}


def draw(results: Mapping[str, Any], directory: Path) -> Iterable[Path]:
    """Every picture that there are rows for."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "kvxfer"  # the same figures give the same file
    for name, (kind, paint) in PICTURES.items():
        rows = results["rows"].get(kind)
        if not rows:
            continue
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        paint(axes, rows)
        axes.grid(True, color="#e8e8e8", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
        path = directory / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        yield path
