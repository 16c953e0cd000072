"""What UCX says in its log.  Read from lines as UCX 1.23 writes them; what is not of that form is left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_HEAD: Final = re.compile(r"^\[[\d.]+\] \[[^\]]*\]\s*(?:\S+\.c:\d+\s+UCX\s+(WARN|ERROR)\s+)?(.*)$")
_UNAVAILABLE: Final = re.compile(
    r"(network device|transport) '([^']*)' is not available, please use one or more of: (.*)"
)
_UNUSED: Final = re.compile(r"(UCX_\w+)(?: \(maybe: ([^?)]*)\?\))?")
_DEVICE: Final = re.compile(r"'([^']+)'\(([^)]*)\)")
_LANE: Final = re.compile(r"\b([a-z]\w*)/([\w.:-]+)")
_READ: Final = "remote memory read by ucp_get"


@dataclass(frozen=True, slots=True)
class ReadPath:
    """How UCX reads a remote range of a size.

    :param sizes: the range of sizes, bytes, as UCX writes it: ``0..inf``.
    :param method: ``zero-copy``, ``software emulation`` and the like.
    :param lanes: transport and device, each once: ``cma/memory``, ``tcp/eth0``.
    """

    sizes: str
    method: str
    lanes: tuple[str, ...]


def _messages(log: str) -> list[tuple[str, str]]:
    """Level (WARN, ERROR or nothing) and text of every line of UCX's."""
    found = (_HEAD.match(line) for line in log.splitlines())
    return [(m[1] or "", m[2].strip()) for m in found if m]


def read_paths(log: str) -> tuple[ReadPath, ...]:
    """How a peer's memory is read, from what ``UCX_PROTO_INFO=y`` logs; loops of an agent to itself do not count."""
    boxes: list[list[list[str]]] = [[]]
    for _, text in _messages(log):
        if text.startswith("|"):
            boxes[-1].append([cell.strip() for cell in text.strip("|").split("|")])
        elif not text.startswith("+"):
            boxes.append([])
    rows = [row for box in boxes for row in box]
    found: dict[ReadPath, None] = {}
    place = title = ""
    for row in rows:
        if len(row) == 1:
            if " cfg#" in row[0]:
                place, title = row[0], ""
            else:
                title = row[0]
        elif len(row) == 3 and row[0] != "Range" and title.startswith(_READ) and " self cfg#" not in place:
            lanes = dict.fromkeys(f"{m[1]}/{m[2]}" for m in _LANE.finditer(row[2]))
            found[ReadPath(row[0], row[1], tuple(lanes))] = None
    return tuple(found)


def devices(log: str) -> dict[str, str] | None:
    """Network device -> its transports, of all that UCX can use; None where the log does not say."""
    for _, text in _messages(log):
        if (m := _UNAVAILABLE.match(text)) and m[1] == "network device":
            return dict(_DEVICE.findall(m[3]))
    return None


def transports(log: str) -> tuple[str, ...] | None:
    """Every transport, and alias of several, that UCX can use; None where the log does not say."""
    for _, text in _messages(log):
        if (m := _UNAVAILABLE.match(text)) and m[1] == "transport":
            return tuple(name.strip() for name in m[3].split(","))
    return None


def unavailable(log: str) -> tuple[tuple[str, str], ...]:
    """``network device`` or ``transport``, and the name, of what was asked for and is not there."""
    found = (_UNAVAILABLE.match(text) for _, text in _messages(log))
    return tuple(dict.fromkeys((m[1], m[2]) for m in found if m))


def unused(log: str) -> dict[str, str]:
    """Variables that UCX does not know -> what may have been meant (perhaps nothing)."""
    found: dict[str, str] = {}
    for _, text in _messages(log):
        if text.startswith("unused environment variable"):
            names = text.partition(":")[2]
            found |= {m[1]: m[2] or "" for m in _UNUSED.finditer(names)}
    return found


def problems(log: str) -> tuple[str, ...]:
    """UCX's errors, each once."""
    return tuple(dict.fromkeys(text for level, text in _messages(log) if level == "ERROR"))


def modules(paths: Sequence[str]) -> tuple[str, ...]:
    """Short names of the UCX transport modules among files: ``libuct_ib_mlx5.so.0`` is ``ib_mlx5``."""
    found = (re.search(r"/libuct_(\w+)\.so[.\d]*$", path) for path in paths)
    return tuple(sorted({m[1] for m in found if m}))
