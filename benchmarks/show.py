"""Results as tables, plots and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.results import Line
from scripts.generated import written

Row = Mapping[str, Any]
Results = Mapping[str, Any]
Cell = Callable[[Row], str]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size(count: float) -> str:
    """Bytes as people write them."""
    for unit, one in _UNITS:
        if count >= one:
            return f"{count / one:.3g} {unit}"
    return f"{count:.0f} B"


def of(name: str, form: str = "{}") -> Cell:
    """A column that is a field."""
    return lambda row: form.format(row[name]) if row.get(name) is not None else ""


def spread(name: str) -> Cell:
    """A column that is a median with its quartiles."""
    return lambda row: "{1:.2f} ({0:.2f} to {2:.2f})".format(*row[name])


def rate(name: str) -> Cell:
    """GB/s from milliseconds."""
    return lambda row: f"{row['bytes'] / row[name] / 1e6:.2f}"


def sized(name: str) -> Cell:
    """A column of bytes."""
    return lambda row: size(row[name])


#: Tables by name: which rows, and columns with their heads.
TABLES: Mapping[str, tuple[str, Mapping[str, Cell]]] = {
    "reads": (
        "reads",
        {
            "transport": of("transport"),
            "read": sized("bytes"),
            "blocks of": sized("block"),
            "block IDs": of("order"),
            "ReadBlocks, ms": of("kvxfer_ms"),
            "GB/s": rate("kvxfer_ms"),
            "raw, ms": of("raw_ms"),
            "ReadBlocks / raw": spread("ratio"),
            "longer by, empty calls": of("extra_calls", "{:.1f}"),
        },
    ),
    "bare": (
        "bare",
        {
            "transport": of("transport"),
            "read": sized("bytes"),
            "a call in a call, empty calls": spread("nested_calls"),
            "bare handler, ms": of("bare_ms"),
            "of it the READ": of("bare_read_ms"),
            "around it, empty calls": spread("bare_calls"),
            "empty call, ms": of("empty_ms"),
            "ReadBlocks, ms": of("kvxfer_ms"),
            "of it post and move": of("kvxfer_read_ms"),
            "around them, empty calls": spread("kvxfer_calls"),
            "its empty call, ms": of("kvxfer_empty_ms"),
        },
    ),
    "phases": (
        "reads",
        {
            "transport": of("transport"),
            "read": sized("bytes"),
            "blocks of": sized("block"),
            "block IDs": of("order"),
            "whole call, ms": of("kvxfer_ms"),
            "client and RPC": lambda r: f"{r['kvxfer_ms'] - r['phases_ms']['total'] - r['phases_ms']['resolve']:.3f}",
            "resolve": lambda r: f"{r['phases_ms']['resolve']:.3f}",
            "make": lambda r: f"{r['phases_ms']['make']:.3f}",
            "queue": lambda r: f"{r['phases_ms']['queue']:.3f}",
            "post": lambda r: f"{r['phases_ms']['post']:.3f}",
            "move": lambda r: f"{r['phases_ms']['move']:.3f}",
            "grant": lambda r: f"{r['phases_ms']['open']:.3f}",
            "first read": of("first_ms"),
        },
    ),
    "crowds": (
        "crowds",
        {
            "transport": of("transport"),
            "sizes": of("sizes"),
            "requests": of("requests"),
            "at once": of("at_once"),
            "GB/s": of("gb_per_s"),
            "rate / one after another": spread("ratio_to_one"),
            "slowest / median": spread("slowest_to_median"),
        },
    ),
    "beside": (
        "beside",
        {
            "transport": of("transport"),
            "large read": sized("large"),
            "takes, ms": of("large_ms"),
            "small read alone, ms": of("alone_ms"),
            "beside: median, ms": of("median_ms"),
            "95 %, ms": of("p95_ms"),
            "slowest, ms": of("slowest_ms"),
        },
    ),
    "others": (
        "others",
        {
            "blocks of": sized("block"),
            "ReadBlocks, GB/s": of("kvxfer_gbs"),
            "Mooncake": of("mooncake_gbs"),
            "with 16 connections": of("mooncake_lanes_gbs"),
            "NIXL, UCX's own settings": of("nixl_gbs"),
            "gRPC, a block a message": of("grpc_block_gbs"),
            "1 MiB a message": of("grpc_mib_gbs"),
            "ReadBlocks / Mooncake": spread("rate_to_mooncake"),
            "/ 16 connections": spread("rate_to_mooncake_lanes"),
            "/ NIXL": spread("rate_to_nixl"),
            "/ gRPC, a block": spread("rate_to_grpc_block"),
            "/ 1 MiB": spread("rate_to_grpc_mib"),
        },
    ),
    "idle": (
        "idle",
        {
            "side": of("side"),
            "peers": of("peers"),
            "share of a core": of("share", "{:.2%}"),
        },
    ),
    "handshakes": ("handshakes", {"handshake": of("what"), "ms": of("ms"), "most, ms": of("most_ms")}),
    "memory": (
        "memory",
        {"for each": of("what"), "P, KiB": of("P_kib"), "D, KiB": of("D_kib")},
    ),
    "lasting": (
        "lasting",
        {
            "side": of("side"),
            "reads": of("reads", "{:,}"),
            "reads a second": of("rate"),
            "memory, KiB": of("memory_kib", "{:,}"),
            "files": of("files"),
            "threads": of("threads"),
        },
    ),
    "resolving": (
        "resolving",
        {
            "layout": of("shape"),
            "tokens": of("tokens", "{:,}"),
            "descriptors": of("descriptors", "{:,}"),
            "of vLLM": of("vllm_descriptors", "{:,}"),
            "resolve, ms": of("kvxfer_ms", "{:.3f}"),
            "of arrays": of("kvxfer_arrays_ms", "{:.3f}"),
            "vLLM, ms": of("vllm_ms", "{:.3f}"),
            "its _compute_desc_ids": of("vllm_numbers_ms", "{:.3f}"),
            "resolve / vLLM": spread("ratio"),
            "resolve / _compute_desc_ids": spread("ratio_to_numbers"),
        },
    ),
    "share of a read": (
        "share_of_read",
        {
            "layout": of("shape"),
            "tokens": of("tokens", "{:,}"),
            "read": sized("bytes"),
            "measured with": sized("read_bytes"),
            "raw read, ms": of("read_ms", "{:.0f}"),
            "resolve, ms": of("resolve_ms", "{:.2f}"),
            "share": lambda r: f"{r['share'][1]:.2%}",
        },
    ),
    "pairing": (
        "pairing",
        {
            "descriptors": of("descriptors", "{:,}"),
            "rows": of("rows"),
            "pairing, ms": spread("ms"),
            "memory at its peak": sized("peak_bytes"),
            "kept": sized("kept_bytes"),
            "NIXL's lists, ms": of("nixl_ms"),
            "their memory": sized("nixl_resident_bytes"),
        },
    ),
    "models": (
        "models",
        {
            "model": of("model"),
            "TP": lambda r: f"{r['p_tp']} to {r['d_tp']}",
            "tokens": of("tokens", "{:,}"),
            "descriptors of a rank": of("descriptors", "{:,}"),
            "bytes": of("bytes", "{:,}"),
            "least": of("least", "{:,}"),
            "whole pages": of("padded", "{:,}"),
        },
    ),
    "reads of models": (
        "model_reads",
        {
            "model": of("model"),
            "TP": lambda r: f"{r['p_tp']} to {r['d_tp']}",
            "tokens": of("tokens", "{:,}"),
            "layers left out": of("layers_left_out"),
            "descriptors": of("descriptors", "{:,}"),
            "after merging": of("merged", "{:,}"),
            "bytes that NIXL moved": of("bytes", "{:,}"),
            "least": of("least", "{:,}"),
            "first read, ms": of("ms", "{:.1f}"),
        },
    ),
}


def promises(lines: Iterable[Line]) -> list[list[str]]:
    """Rows of the table of promises, its head first."""
    rows = [["", "promise", "seen", "allowed", "holds"]]
    for line in sorted(lines, key=lambda line: line.promise):
        seen = f"{line.seen:.3g}" if abs(line.seen) < 1000 else f"{line.seen:,.0f}"
        if line.spread is not None:
            seen += f" ({line.spread[0]:.3g} to {line.spread[1]:.3g})"
        allowed = f"{'at least' if line.least else 'at most'} {line.limit:g} {line.unit}".rstrip()
        rows.append([line.promise, line.what, seen, allowed, "yes" if line.holds else "NO"])
    return rows


def filled(results: Results) -> dict[str, list[list[str]]]:
    """Every table that there are rows for, its head first."""
    found = {}
    for name, (kind, columns) in TABLES.items():
        rows: Sequence[Row] = results["rows"].get(kind, ())
        if rows:
            found[name] = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return found


def tables(results: Results, lines: Iterable[Line], console: Console) -> None:
    """Print everything."""
    for name, rows in {**filled(results), "promises": promises(lines)}.items():
        table = Table(*rows[0], title=name, title_justify="left")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    console.print(", ".join(f"{k} {v}" for k, v in results["machine"].items()))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of a document."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *map(list, rows[1:])]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def page(results: Results, lines: Sequence[Line], document: Path) -> None:
    """Write the tables into a document, each between its marks."""
    facts = "".join(f"- {name}: {value}\n" for name, value in results["machine"].items())
    seconds = sum(results["seconds"].values())
    sections = {name: markdown(rows) for name, rows in filled(results).items()}
    sections |= {"promises": markdown(promises(lines)), "machine": f"{facts}- measured in {seconds / 60:.1f} minutes\n"}
    text = document.read_text(encoding="utf-8")
    here = {name: content for name, content in sections.items() if f"<!-- {name}: begin -->" in text}
    document.write_text(written(text, here), encoding="utf-8")
