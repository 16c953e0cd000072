"""What was seen, as tables: with frames and colours on a terminal, as plain columns elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from google.protobuf.duration_pb2 import Duration
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvxfer.cli.fitting import put
from kvxfer.cli.inspect.look import View
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.pb import layout_pb2 as layout_pb
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.sizes import short
from kvxfer.wire.status import from_status

_COLOURS: Final = {
    "DONE": "green",
    "RELEASED": "green",
    "ready": "green",
    "FAILED": "red",
    "EXPIRED": "red",
    "DRAINING": "yellow",
    "CANCELLED": "yellow",
    "WITHDRAWN": "yellow",
    "ending": "yellow",
}
_NONE: Final = "-"
#: What tables are called on the command line.
NAMES: Final = ("sidecar", "registrations", "peers", "lost", "leases", "transfers", "counts", "limits")


@dataclass(frozen=True)
class Section:
    """A table.

    :param numbers: columns that are numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Of ``NAMES``."""
        return self.title.split()[0].lower()


def names(text: str) -> tuple[str, ...]:
    """The tables of ``--only``.

    :raises KvxferError: FIELD_INVALID for one that does not exist.
    """
    found = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    for name in found:
        if name not in NAMES:
            raise KvxferError(Reason.FIELD_INVALID, f"--only has {name!r}; allowed: {', '.join(NAMES)}", field="only")
    return found


def sections(view: View, only: Sequence[str] = ()) -> list[Section]:
    """Everything, or some of it, in the order in which it is shown."""
    status = view.status
    found = [
        _sidecar(status),
        _registrations(status.registrations),
        _peers(status.peers),
        _lost(status.lost_peers),
        _leases(view.leases),
        _transfers(view.transfers),
        _counts(status.counts),
        _limits(status.limits),
    ]
    chosen = [section for section in found if not only or section.name in only]
    return [replace(s, rows=tuple(tuple(map(_visible, row)) for row in s.rows)) for s in chosen]


def plain(view: View, only: Sequence[str] = ()) -> str:
    """Columns with two spaces between them; cells have no spaces at their ends, and none is cut."""
    parts = []
    for section in sections(view, only):
        table = [section.columns, *section.rows] if section.rows else [("none",)]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        parts.append("\n".join([section.title, *(f"  {line}" for line in lines)]))
    return "\n\n".join(parts)


def show(out: Console, view: View, only: Sequence[str] = ()) -> None:
    """On a terminal."""
    for section in sections(view, only):
        if not section.rows:
            out.print(Text(f"{section.title}: none\n", style="dim"))
            continue
        table = Table(title=section.title, title_justify="left", title_style="bold", header_style="bold")
        for column in section.columns:
            table.add_column(column, justify="right" if column in section.numbers else "left")
        for row in section.rows:
            table.add_row(*(coloured(cell) for cell in row))
        put(out, table)


def coloured(cell: str) -> Text:
    """A cell; states have colours."""
    return Text(cell, style=_COLOURS.get(cell, ""))


# -- sections ----------------------------------------------------------------------------------------------------------


def _sidecar(status: pb.GetStatusResponse) -> Section:
    ready = f"not ready: {status.unready_reason}" if status.unready_reason else "ready"
    row = (status.version, status.nixl_version or _NONE, status.ucx_version or _NONE, _time(status.uptime), ready)
    return Section("Sidecar", ("kvxfer", "NIXL", "UCX", "up", "state"), (row,))


def _registrations(known: Iterable[pb.RegistrationStatus]) -> Section:
    def state(r: pb.RegistrationStatus) -> str:
        if r.orphaned:
            return "orphaned"
        if r.HasField("undone_in"):
            return f"undone in {_time(r.undone_in)}"
        return f"held by {r.holders}" if r.holders else "registered"

    rows = tuple(
        (
            r.engine_id,
            _rank(r.rank),
            r.incarnation,
            short(r.bytes),
            str(r.regions),
            " ".join(r.groups),
            str(r.published),
            state(r),
        )
        for r in known
    )
    columns = ("engine", "rank", "incarnation", "memory", "regions", "groups", "leases", "state")
    return Section("Registrations", columns, rows, frozenset({"memory", "regions", "leases"}))


def _role(role: int) -> str:
    return _state(pb.PeerRole, role, "PEER_ROLE_").lower()


def _peers(known: Iterable[pb.PeerStatus]) -> Section:
    rows = tuple(
        (
            p.engine_id,
            _role(p.role),
            p.remote_engine_id,
            _rank(p.rank),
            p.address,
            p.transport or _NONE,
            p.incarnation,
            str(p.reads),
            f"{_time(p.idle)} ago" if p.HasField("idle") else _NONE,
        )
        for p in known
    )
    columns = ("engine", "role", "peer", "rank", "address", "transport", "incarnation", "reads", "heard")
    return Section("Peers", columns, rows, frozenset({"reads"}))


def _lost(known: Iterable[pb.LostPeer]) -> Section:
    rows = tuple(
        (
            p.engine_id,
            _role(p.role),
            p.remote_engine_id,
            _rank(p.rank) if p.HasField("rank") else _NONE,
            p.address or _NONE,
            p.incarnation or _NONE,
            from_status(p.error).reason.value,
            f"{_time(p.age)} ago",
        )
        for p in known
    )
    return Section("Lost peers", ("engine", "role", "peer", "rank", "address", "incarnation", "reason", "when"), rows)


def _leases(known: Iterable[pb.Lease]) -> Section:
    def readers(lease: pb.Lease) -> str:
        return " ".join(f"{r.engine_id} {r.done}/{r.expected or '?'}" for r in lease.readers) or _NONE

    rows = tuple(
        (
            x.engine_id,
            x.request_id,
            "ending" if x.ending else _state(pb.LeaseState, x.state, "LEASE_STATE_"),
            _time(x.expires_in) if x.HasField("expires_in") else _NONE,
            readers(x),
            str(x.open_reads),
            str(x.num_tokens),
            _time(x.age),
        )
        for x in known
    )
    columns = ("engine", "request", "state", "left", "readers done", "open reads", "tokens", "age")
    return Section("Leases", columns, rows, frozenset({"open reads", "tokens", "left", "age"}))


def _transfers(known: Iterable[pb.Transfer]) -> Section:
    rows = tuple(
        (
            t.engine_id,
            t.transfer_id,
            t.request_id,
            t.remote_engine_id,
            _state(pb.TransferState, t.state, "TRANSFER_STATE_"),
            from_status(t.error).reason.value if t.HasField("error") else _NONE,
            short(t.bytes),
            str(t.descriptors),
            _time(t.timings.total) if t.timings.HasField("total") else _NONE,
        )
        for t in known
    )
    columns = ("engine", "transfer", "request", "peer", "state", "reason", "bytes", "descriptors", "time")
    return Section("Transfers", columns, rows, frozenset({"bytes", "descriptors", "time"}))


def _counts(counts: pb.Counts) -> Section:
    size = {"bytes_read", "bytes_in_flight"}
    rows = tuple(
        (f.name.replace("_", " "), short(getattr(counts, f.name)) if f.name in size else str(getattr(counts, f.name)))
        for f in pb.Counts.DESCRIPTOR.fields
    )
    return Section("Counts", ("what", "count"), rows, frozenset({"count"}))


def _limits(known: Iterable[pb.LimitStatus]) -> Section:
    def shown(name: str, value: int) -> str:
        return short(value) if "bytes" in name or name == "message_limit" else str(value)

    rows = tuple(
        (
            x.name,
            shown(x.name, x.value),
            shown(x.name, x.used) if x.HasField("used") else _NONE,
            f"{100 * x.used / x.value:.0f} %" if x.HasField("used") and x.value else _NONE,
            str(x.refused),
        )
        for x in known
    )
    return Section("Limits", ("limit", "value", "used", "part", "refused"), rows, frozenset({"value", "used", "part"}))


def _visible(cell: str) -> str:
    """Without what a terminal would obey: whoever serves the socket may be no sidecar."""
    if cell.isprintable():
        return cell
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cell)


# -- cells -------------------------------------------------------------------------------------------------------------


def _state(enum: object, number: int, prefix: str) -> str:
    names: dict[int, str] = {n: name for name, n in getattr(enum, "items")()}  # noqa: B009  protobuf's wrapper
    return names.get(number, str(number)).removeprefix(prefix)


def _rank(rank: layout_pb.Rank) -> str:
    tp = f"tp{rank.tp_rank}/{rank.tp_size}"
    return tp if rank.pp_size == 1 else f"pp{rank.pp_rank}/{rank.pp_size} {tp}"


def _time(duration: Duration) -> str:
    seconds = duration.seconds + duration.nanos / 1e9
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0), ("ms", 0.001)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} us"
