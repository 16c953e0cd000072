"""``kvxfer inspect`` against sidecars in this process, and against ones that are not there."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvxfer.cli.inspect.look import MAX_PAGES, View, look, target_of
from kvxfer.cli.inspect.show import NAMES, names, plain, sections, show
from kvxfer.cli.inspect.watch import screen
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.service.engine import EngineService
from kvxfer.wire.peer import Reader
from tests.support.errors import refusal
from tests.support.loopback import Cluster, Reading, new_cluster, soon

MAIN = [sys.executable, "-c", "from kvxfer.cli import main; main()", "inspect"]


@pytest.fixture
async def reading() -> AsyncIterator[Reading]:
    async with new_cluster() as cluster:
        yield await pair(cluster)


async def pair(cluster: Cluster) -> Reading:
    p = await cluster.engine("engine-p", [await cluster.node(publish_wait=0.1)])
    d = await cluster.engine("engine-d", [await cluster.node(max_descriptors=9)])
    return Reading(cluster, p, d)


def path_of(reading: Reading, which: str) -> str:
    engine = reading.p if which == "p" else reading.d
    return str(engine.nodes[0].sidecar.settings.engine_socket)


async def run(*arguments: str) -> tuple[int, str, str]:
    done = await asyncio.create_subprocess_exec(
        *MAIN, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "300"}
    )
    out, err = await asyncio.wait_for(done.communicate(), 60)
    return done.returncode or 0, out.decode(), err.decode()


async def seen(reading: Reading, which: str) -> dict[str, list[dict[str, str]]]:
    """The tables, by title, with their rows as dictionaries."""
    view = await asyncio.to_thread(look, target_of(path_of(reading, which)), 20)
    return {s.title: [dict(zip(s.columns, row, strict=True)) for row in s.rows] for s in sections(view)}


async def test_a_read_from_both_ends(reading: Reading) -> None:
    transfer = await reading.good()
    leases = reading.p.nodes[0].sidecar.registrations.get("engine-p").leases
    await soon(lambda: leases.totals.released == 1)
    d, p = await seen(reading, "d"), await seen(reading, "p")
    (row,) = d["Transfers"]
    assert (row["transfer"], row["state"], row["reason"]) == (transfer.transfer_id, "DONE", "-")
    assert (row["bytes"], row["descriptors"]) == (f"{transfer.bytes} B", str(transfer.descriptors))
    (peer,) = d["Peers"]
    assert (peer["role"], peer["peer"], peer["rank"]) == ("source", "engine-p", "tp0/1")
    assert peer["incarnation"] == reading.p.members[0].registered.incarnation
    assert peer["address"] == reading.p.nodes[0].sidecar.peer_address
    (reader,) = p["Peers"]
    assert (reader["role"], reader["peer"]) == ("reader", "engine-d")
    assert reader["heard"].endswith(" ago")
    (lease,) = p["Leases"]
    assert (lease["state"], lease["readers done"]) == ("RELEASED", "engine-d 1/1")
    (registered,) = p["Registrations"]
    assert (registered["engine"], registered["memory"], registered["state"]) == ("engine-p", "2.25 KiB", "registered")
    (limit,) = [x for x in d["Limits"] if x["limit"] == "max_descriptors"]
    assert (limit["value"], limit["used"]) == ("9", "-")
    assert {x["what"]: x["count"] for x in d["Counts"]}["done"] == "1"
    assert d["Sidecar"][0]["state"] == "ready"


async def test_what_goes_wrong_shows_apart(reading: Reading) -> None:
    """One expired lease, one stale read that was refused, one lost peer."""
    await reading.good()
    ticket = reading.p.ticket(reading.p_lists, reading.TOKENS, publish=False)
    reading.p.publish(ticket, ttl=0.01)
    leases = reading.p.nodes[0].sidecar.registrations.get("engine-p").leases
    await soon(lambda: leases.totals.expired == 1)
    request = reading.d.request(ticket, reading.d_lists, transfer_id="late")
    assert (await refusal(reading.stub.ReadBlocks(request))).reason is Reason.LEASE_EXPIRED
    p = await seen(reading, "p")
    assert [x["state"] for x in p["Leases"] if x["request"] == ticket.request_id] == ["EXPIRED"]
    counts = {x["what"]: x["count"] for x in p["Counts"]}
    assert (counts["leases expired"], counts["stale reads refused"], counts["links lost"]) == ("1", "1", "0")
    await reading.p.nodes[0].stop()
    registrations = reading.d.nodes[0].sidecar.registrations
    await soon(lambda: registrations.get("engine-d").events.links_lost == 1)
    d = await seen(reading, "d")
    assert [x["reason"] for x in d["Transfers"] if x["transfer"] == "late"] == ["LEASE_EXPIRED"]
    (lost,) = d["Lost peers"]
    assert (lost["role"], lost["peer"], lost["reason"]) == ("source", "engine-p", "PEER_LOST")
    assert d["Peers"] == []


async def test_plain_columns_where_there_is_no_terminal(reading: Reading) -> None:
    await reading.good()
    status, out, err = await run(path_of(reading, "d"))
    assert (status, err) == (0, "")
    assert out.isascii()
    assert "\nPeers\n  engine    role    peer      rank" in out
    assert "Lost peers\n  none" in out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert all(line == line.rstrip() for line in lines)


async def test_json(reading: Reading) -> None:
    transfer = await reading.good()
    status, out, _ = await run(path_of(reading, "d"), "--json")
    assert status == 0
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["transfers"][0]["transfer_id"] == transfer.transfer_id
    assert found["status"]["registrations"][0]["engine_id"] == "engine-d"
    assert "lease_token" not in out


async def test_tables_on_a_terminal(reading: Reading) -> None:
    await reading.good()
    view = await asyncio.to_thread(look, target_of(path_of(reading, "d")), 20)
    console = Console(force_terminal=True, width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, ASYNC230
    show(console, view)
    text = console.export_text()
    console.file.close()
    assert "│ engine-d │" in text
    assert "DONE" in text


async def test_names_are_not_taken_for_markup(reading: Reading) -> None:
    view = await asyncio.to_thread(look, target_of(path_of(reading, "d")), 20)
    view.status.registrations[0].engine_id = "[red]x[/red]"
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, ASYNC230
    show(console, view)
    assert "[red]x[/red]" in console.export_text()
    console.file.close()
    assert "[red]x[/red]" in plain(view)


def on_terminal(width: int, height: int) -> Console:
    return Console(force_terminal=True, width=width, height=height, record=True, file=io.StringIO())


async def crowded(reading: Reading) -> View:
    """Many transfers, leases and peers, as in a sidecar that is busy."""
    await reading.good()
    view = await asyncio.to_thread(look, target_of(path_of(reading, "d")), 20)
    lease = pb.Lease(engine_id="engine-d", request_id="request-0123456789", num_tokens=123_456)
    lease.readers.add(engine_id="engine-of-a-long-name", done=1, expected=2)
    lost = [view.status.lost_peers.add(engine_id="engine-d", remote_engine_id=f"lost-{i}") for i in range(9)]
    assert lost
    view.status.peers.extend([view.status.peers[0]] * 9)
    return View(view.status, (lease,) * 12, view.transfers * 20)


@pytest.mark.parametrize("width", [80, 100, 200])
async def test_no_cell_is_cut_on_a_narrow_terminal(reading: Reading, width: int) -> None:
    view = await crowded(reading)
    console = on_terminal(width, 30)
    show(console, view)
    text = console.export_text()
    assert "\u2026" not in text
    assert view.status.registrations[0].incarnation in text
    assert "123456" in text


@pytest.mark.parametrize("width, height", [(100, 30), (80, 24), (200, 90), (40, 10)])
async def test_watching_fits_the_terminal(reading: Reading, width: int, height: int) -> None:
    """What one watches comes first, and what is missing is told of."""
    view = await crowded(reading)
    console = on_terminal(width, height)
    console.print(screen(console, view))
    text = console.export_text()
    lines = text.splitlines()
    assert len(lines) <= height
    assert "\u2026" not in text
    assert lines[0].startswith("ready, kvxfer ")
    assert ("lines are not shown: see --only" in " ".join(text.split())) == (height < 90)
    if width >= 80:
        titles = ["Transfers", "Leases", "Peers", "Lost peers"]
        assert [line.split(" (")[0].rstrip() for line in lines if line.startswith(tuple(titles))] == titles


async def test_watching_leaves_out_what_tells_nothing(reading: Reading) -> None:
    view = await asyncio.to_thread(look, target_of(path_of(reading, "d")), 20)
    console = on_terminal(100, 40)
    console.print(screen(console, view, gone="gone for 3 s"))
    text = console.export_text()
    assert text.startswith("the sidecar is gone for 3 s\n")
    for absent in ("Transfers", "Lost peers", "Limits", "not shown"):
        assert absent not in text
    view.status.limits[0].refused = 7
    console.print(screen(console, view))
    assert f"Limits: {view.status.limits[0].name} " in console.export_text()


async def test_some_tables_only(reading: Reading) -> None:
    view = await crowded(reading)
    console = on_terminal(100, 40)
    console.print(screen(console, view, names("peers, leases")))
    text = console.export_text()
    assert text.index("Peers") < text.index("Leases")
    assert "Transfers" not in text and "Counts" not in text
    assert [s.name for s in sections(view, names("leases,counts"))] == ["leases", "counts"]
    with pytest.raises(KvxferError, match="--only has 'nothing'; allowed: sidecar, registrations"):
        names("leases,nothing")
    assert {s.name for s in sections(view)} == set(NAMES)


def test_nothing_that_is_told_rules_the_terminal() -> None:
    """Sidecars take printable ASCII only, but it may be something else that serves the socket."""
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\r\n\x00\u202e\x7f"
    status = pb.GetStatusResponse(version=evil, unready_reason=evil)
    status.registrations.add(engine_id=evil, incarnation=evil, groups=[evil])
    status.peers.add(engine_id=evil, address=evil, transport=evil, role=77)
    status.lost_peers.add(engine_id=evil, address=evil)
    status.limits.add(name=evil, value=1, used=1)
    view = View(status, (pb.Lease(request_id=evil),), (pb.Transfer(transfer_id=evil),))
    once, watched = on_terminal(200, 100), on_terminal(200, 100)
    show(once, view)
    watched.print(screen(watched, view))
    for shown in (plain(view), once.export_text(), watched.export_text()):
        assert all(line.isprintable() for line in shown.split("\n"))
        assert "\\x1b]0;title" in shown


async def test_pages_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that gives the same token again and again is not followed for ever."""
    asked, real = 0, EngineService.GetStatus

    async def again(self: EngineService, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        nonlocal asked
        asked += 1
        request.peers_page_token = ""
        answer = await real(self, request, context)
        answer.next_peers_page_token = "again"
        return answer

    monkeypatch.setattr(EngineService, "GetStatus", again)
    async with new_cluster() as cluster:
        await asyncio.to_thread(look, target_of(path_of(await pair(cluster), "d")), 20)
    assert asked == MAX_PAGES + 1


async def test_many_peers_take_several_pages(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    await reading.good()
    monkeypatch.setattr("kvxfer.cli.inspect.look.PAGE", 1)
    known = reading.d.nodes[0].sidecar.registrations.get("engine-d").readers
    for i in range(3):
        known.meet(Reader(f"reader-{i}", Rank(), "x"), "somewhere:1", connecting=False)
    assert len((await seen(reading, "d"))["Peers"]) == 4


def refused(where: Path | str) -> KvxferError:
    with pytest.raises(KvxferError) as caught:
        target_of(str(where))
    assert caught.value.field == "socket"
    return caught.value


def test_a_wrong_path_is_explained(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nothing.sock").message
    (tmp_path / "file").write_text("x")
    assert "is not a socket" in refused(tmp_path / "file").message
    assert "is not a socket" in refused(f"unix:{tmp_path}").message
    assert "does not exist" in refused(tmp_path / "file" / "below").message


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_no_permission_is_explained() -> None:
    """As another user, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        inner = Path(directory)
        inner.chmod(0o755)
        listener.bind(str(inner / "x.sock"))
        (inner / "x.sock").chmod(0o600)
        program = (
            "import os, sys\n"
            "from kvxfer.cli.inspect.look import target_of\n"
            "from kvxfer.core.errors import KvxferError\n"
            "os.chdir(sys.argv[1]); os.setgid(65534); os.setgroups([]); os.setuid(65534)\n"
            "try: target_of(sys.argv[2])\n"
            "except KvxferError as error: print(error.message)\n"
        )

        def told() -> str:
            command = [sys.executable, "-c", program, str(inner), "x.sock"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

        assert "may not be used by user 65534: it is user 0's, group 0's, mode 0600" in told()
        inner.chmod(0o700)
        assert "is in a directory that user 65534 may not enter" in told()


async def test_a_socket_that_nobody_serves(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    status, _, err = await run(str(path))
    assert status == 1
    why = f"nobody listens on {path}: its sidecar has ended without removing it"
    assert err == f"kvxfer: PEER_UNREACHABLE: {why}\n"


async def test_watching_outlives_the_sidecar(reading: Reading) -> None:
    """It says that it is gone, and goes on when it is back."""
    path = path_of(reading, "d")
    watching = await asyncio.create_subprocess_exec(
        *MAIN, path, "--watch", "--interval", "0.1", "--json", stdout=subprocess.PIPE
    )
    assert watching.stdout is not None

    async def until(wanted: str) -> dict[str, Any]:
        assert watching.stdout is not None
        while True:
            found: dict[str, Any] = json.loads(await asyncio.wait_for(watching.stdout.readline(), 30))
            if wanted in found:
                return found

    try:
        assert (await until("status"))["status"]["registrations"]
        await reading.d.nodes[0].stop()
        while "does not exist" not in (await until("gone"))["gone"]:
            pass  # it is still stopping
        await reading.cluster.node(engine_socket=path)
        assert "registrations" not in (await until("status"))["status"]
    finally:
        watching.terminate()
        await watching.wait()


def test_neither_nixl_nor_torch_is_needed() -> None:
    program = (
        "import sys\n"
        "for name in ('nixl', 'nixl_cu12', 'nixl_cu13', 'torch', 'prometheus_client'): sys.modules[name] = None\n"
        "import kvxfer.cli.inspect.look, kvxfer.cli.inspect.show\n"
        "from kvxfer.cli.main import app\n"
        "from typer.testing import CliRunner\n"
        "done = CliRunner().invoke(app, ['inspect', '--help'])\n"
        "assert done.exit_code == 0 and 'Examples' in done.output, done.output\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
