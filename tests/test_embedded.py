"""Sidecars in the engine's process; over real NIXL they are tested in integration/test_embedded.py."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from kvxfer.config import Settings
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.embedded import EmbeddedSidecar
from kvxfer.xfer.loopback import Fabric, LoopbackEngine
from kvxfer_client import Client


def embedded(**named: object) -> EmbeddedSidecar:
    """One whose transfer engine copies memory."""
    fabric = Fabric()
    return EmbeddedSidecar(make_engine=lambda name, on: LoopbackEngine(name, fabric, on), **named)


def test_it_serves_and_goes_without_a_trace() -> None:
    sidecar = embedded()
    assert (sidecar.engine_address, sidecar.peer_address) == ("", "")
    with sidecar as started:
        assert started is sidecar.start()
        path = Path(sidecar.engine_address.removeprefix("unix:"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with Client(sidecar.engine_address) as client:
            client.wait_ready()
            assert client.status().serving
    sidecar.stop()
    assert not path.parent.exists()
    assert (sidecar.engine_address, sidecar.peer_address) == ("", "")
    assert "kvxfer-sidecar" not in {t.name for t in threading.enumerate()}


def test_bad_settings() -> None:
    with pytest.raises(KvxferError, match=r"peer_port: .*; lanes: ") as caught:
        EmbeddedSidecar(peer_port=-1, lanes=0)
    assert caught.value.reason is Reason.FIELD_INVALID
    with pytest.raises(KvxferError, match="not both"):
        EmbeddedSidecar(Settings(), lanes=1)
