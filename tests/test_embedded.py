"""Sidecars in the engine's process; over real NIXL they are tested in integration/test_embedded.py."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from kvxfer import embedded as module
from kvxfer.config import Settings
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.embedded import EmbeddedSidecar
from kvxfer.sidecar import serve
from kvxfer.xfer.loopback import Fabric, LoopbackEngine
from kvxfer_client import AsyncClient, Client, LocalRegion, grouped, make_ticket, new_lease_token
from tests.support.embedding import D_IDS, KEY, LAYOUT, P_IDS, TOKENS, after_read, filled


def embedded(**named: Any) -> EmbeddedSidecar:
    """One whose transfer engine copies memory."""
    fabric = named.pop("fabric", None) or Fabric()
    return EmbeddedSidecar(make_engine=lambda name, on: LoopbackEngine(name, fabric, on), **named)


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("kvxfer")}


def test_it_serves_and_goes_without_a_trace() -> None:
    sidecar = embedded()
    assert (sidecar.engine_address, sidecar.peer_address) == ("", "")
    sidecar.stop()
    for _ in range(2):
        with sidecar as started:
            assert started is sidecar.start()
            path = Path(sidecar.engine_address.removeprefix("unix:"))
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert repr(sidecar) == f"<EmbeddedSidecar {sidecar.peer_address}>"
            with Client(sidecar.engine_address) as client:
                client.wait_ready()
                assert client.status().serving
        sidecar.stop()
        assert not path.parent.exists()
        assert (sidecar.engine_address, sidecar.peer_address) == ("", "")
        assert not threads()


def test_bad_settings() -> None:
    with pytest.raises(KvxferError, match=r"peer_port: .*; lanes: ") as caught:
        EmbeddedSidecar(peer_port=-1, lanes=0)
    assert caught.value.reason is Reason.FIELD_INVALID
    with pytest.raises(KvxferError, match="not both"):
        EmbeddedSidecar(Settings(), lanes=1)


def test_what_fails_at_the_start_is_raised_and_undone(tmp_path: Path) -> None:
    with embedded(engine_socket=tmp_path / "a" / "engine.sock") as first:
        port = int(first.peer_address.rpartition(":")[2])
        taken = embedded(peer_port=port)
        with pytest.raises(KvxferError, match="the peer listener cannot bind") as caught:
            taken.start()
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "peer_port")
        with pytest.raises(KvxferError, match="is served by another sidecar"):
            embedded(engine_socket=tmp_path / "a" / "engine.sock").start()
        with Client(first.engine_address) as client:
            client.wait_ready()  # it has lost nothing
        assert threads() == {"kvxfer-sidecar"}
    with taken:  # now there is room
        assert taken.peer_address.endswith(f":{port}")


def test_a_start_that_hangs_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(module, "START_LIMIT", 0.05)
    monkeypatch.setattr(EmbeddedSidecar, "_run", lambda *_: go_on.wait())
    with pytest.raises(KvxferError, match="forked from one that has used gRPC's asyncio API") as caught:
        embedded().start()
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    go_on.set()


def test_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(KvxferError, match=r"pip install 'kvxfer\[nixl\]'") as caught:
        EmbeddedSidecar().start()
    assert caught.value.reason is Reason.UNSUPPORTED


def test_from_several_threads() -> None:
    sidecar = embedded()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: sidecar.start(), range(8)))
        assert len(threads()) == 1
        list(pool.map(lambda _: sidecar.stop(), range(8)))
    assert not threads()


async def test_beside_an_event_loop_of_the_engine() -> None:
    unseen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    sidecar = await asyncio.to_thread(embedded().start)
    async with AsyncClient(sidecar.engine_address) as client:
        await client.wait_ready()
        for answer in await asyncio.gather(*(client.status() for _ in range(20))):
            assert answer.serving
    await asyncio.to_thread(sidecar.stop)
    assert not unseen


def test_it_leaves_alone_what_is_the_engines(capfd: pytest.CaptureFixture[str]) -> None:
    def owned_by_the_engine() -> object:
        handlers = [signal.getsignal(s) for s in signal.valid_signals()]
        root = logging.getLogger()
        mask = os.umask(0o22)
        os.umask(mask)
        return handlers, list(root.handlers), root.level, sys.getswitchinterval(), mask, os.getcwd()

    before = owned_by_the_engine()
    with embedded():
        assert owned_by_the_engine() == before
    assert owned_by_the_engine() == before
    assert capfd.readouterr().out == ""


def test_what_it_logs_goes_to_logging(caplog: pytest.LogCaptureFixture) -> None:
    known = structlog.get_config()
    structlog.reset_defaults()
    try:
        with caplog.at_level(logging.INFO, "kvxfer"), embedded():
            pass
    finally:
        structlog.configure(**known)
    assert ("kvxfer.sidecar", logging.INFO, "stopped") in caplog.record_tuples
    assert any(text.startswith("serving version=") for _, _, text in caplog.record_tuples)


def test_addresses_are_for_embedded_sidecars_only() -> None:
    assert embedded(allow_address=False).settings.allow_address
    with pytest.raises(KvxferError, match="embedded in its engine") as caught:
        serve(Settings(allow_address=True))
    assert caught.value.field == "allow_address"


def test_a_read_between_arrays_of_this_process() -> None:
    fabric = Fabric()
    with embedded(fabric=fabric) as p_side, embedded(fabric=fabric) as d_side:
        p_arrays, d_arrays = filled(1), filled(2)
        with (
            Client(p_side.engine_address, engine_id="p") as p,
            Client(d_side.engine_address, engine_id="d") as d,
            p.session(LAYOUT, [LocalRegion(a) for a in p_arrays], compatibility_key=KEY) as session,
            d.session(LAYOUT, [LocalRegion(a) for a in d_arrays], compatibility_key=KEY),
        ):
            blocks, token = grouped(P_IDS, LAYOUT, TOKENS), new_lease_token()
            p.publish("r", blocks, TOKENS, token)
            ticket = make_ticket(
                engine_id="p",
                compatibility_key=KEY,
                ranks=[session.wait_registered().ticket_rank],
                request_id="r",
                blocks=blocks,
                num_tokens=TOKENS,
                lease_token=token,
                ttl=60,
            )
            d.read(ticket, grouped(D_IDS, LAYOUT, TOKENS))
        assert all(np.array_equal(a, b) for a, b in zip(d_arrays, after_read(1, 2), strict=True))


ENDS = """
import sys
from kvxfer.embedded import EmbeddedSidecar
from kvxfer.xfer.loopback import Fabric, LoopbackEngine
fabric = Fabric()
sidecar = EmbeddedSidecar(make_engine=lambda name, on: LoopbackEngine(name, fabric, on), http_port=0).start()
print(sidecar.engine_address)
{end}
"""


@pytest.mark.parametrize("end, code", [("", 0), ("sys.exit(7)", 7), ("raise ValueError", 1)])
def test_an_engine_that_ends_takes_it_along(end: str, code: int) -> None:
    """It is stopped, also where nobody has said so, and the exit code is the engine's."""
    program = ENDS.format(end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr.replace("Traceback", "", end == "raise ValueError")
    assert not Path(done.stdout.strip().removeprefix("unix:")).parent.exists()
