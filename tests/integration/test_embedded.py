"""Sidecars in their engines' processes, over real NIXL."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.wire.status import from_rpc_error
from kvxfer_client import Client, SharedRegion, grouped, make_ticket, new_lease_token
from tests.support.embedding import D_IDS, KEY, LAYOUT, P_IDS, TOKENS, Embedding, after_read, embedding, filled
from tests.support.engines import ArrayRegions, Labels, Member, registration
from tests.support.loopback import small_layout
from tests.support.processes import SidecarProcess, until


@pytest.fixture
def p() -> Iterator[Embedding]:
    with embedding("p", 1) as made:
        yield made


@pytest.fixture
def d() -> Iterator[Embedding]:
    with embedding("d", 2) as made:
        yield made


def same(found: list[Any], expected: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_two_engines_with_sidecars_of_their_own(p: Embedding, d: Embedding) -> None:
    assert same(d.ask("read", p.ask("publish")), after_read(1, 2))
    p.ask("stop")
    d.ask("stop")


def test_with_an_ordinary_sidecar_at_the_other_end(p: Embedding, eight: list[SidecarProcess]) -> None:
    """Both ways: the embedded one is read from, and reads."""
    ordinary = eight[0]
    with Client(f"unix:{ordinary.socket}", engine_id="ordinary") as client:
        made = [SharedRegion.create_file(ordinary.directory / f"o{i}", r.size) for i, r in enumerate(LAYOUT.regions)]
        pages = [m.numpy("u1", a.shape) for m, a in zip(made, filled(3), strict=True)]
        for page, data in zip(pages, filled(3), strict=True):
            page[:] = data
        with client.session(LAYOUT, made, compatibility_key=KEY) as session:
            client.read(p.ask("publish"), grouped(D_IDS, LAYOUT, TOKENS))
            assert same(pages, after_read(1, 3))
            for page, data in zip(pages, filled(3), strict=True):
                page[:] = data
            blocks, token = grouped(P_IDS, LAYOUT, TOKENS), new_lease_token()
            client.publish("r", blocks, TOKENS, token)
            ticket = make_ticket(
                engine_id="ordinary",
                compatibility_key=KEY,
                ranks=[session.wait_registered().ticket_rank],
                request_id="r",
                blocks=blocks,
                num_tokens=TOKENS,
                lease_token=token,
                ttl=60,
            )
            assert same(p.ask("read", ticket), after_read(3, 1))
        del pages
        for region in made:
            region.close()
            region.unlink()


def test_memory_that_the_engine_has_let_go_of_stays_until_it_is_unregistered(p: Embedding, d: Embedding) -> None:
    assert p.ask("forget") == [True, True]
    assert same(d.ask("read", p.ask("publish")), after_read(1, 2))
    assert p.ask("unregister") == [False, False]


def test_the_death_of_an_engine_is_that_of_its_sidecar(p: Embedding, d: Embedding) -> None:
    d.ask("read", p.ask("publish"))
    ticket = p.ask("publish")
    p.process.kill()
    p.process.join()
    with pytest.raises(KvxferError) as caught:
        d.ask("read", ticket)
    assert caught.value.reason in (Reason.PEER_LOST, Reason.PEER_UNREACHABLE)
    until(lambda: d.ask("at_rest"), 20, "that nothing writes D's blocks")
    with embedding("p", 4) as successor:  # and D goes on with the next one
        assert d.ask("read", successor.ask("publish"))[0].shape == filled(1)[0].shape


def test_an_engine_that_ends_without_stopping_it(p: Embedding, d: Embedding) -> None:
    """What is granted is waited for, the reader is told, the socket goes, and the exit code is the engine's own."""
    d.ask("read", p.ask("publish"))
    path = Path(p.ask("addresses")[0].removeprefix("unix:"))
    assert path.exists()
    assert p.exit(7) == 7
    assert not path.parent.exists()
    assert d.exit(0) == 0


def test_starting_again_leaves_nothing_behind(p: Embedding) -> None:
    """The libraries keep some threads and descriptors for the process; they are not more after the third time."""
    p.ask("again")
    p.ask("again")
    threads, descriptors = p.ask("counts")
    for _ in range(3):
        p.ask("again")
    p.ask("stop")

    def settled() -> bool:
        now = p.ask("counts")
        return now[0] < threads and now[1] < descriptors

    until(settled, what="an end of its threads and descriptors")


def test_a_forked_child_is_refused_and_the_engine_goes_on(p: Embedding, d: Embedding) -> None:
    assert "UNSUPPORTED: this process was forked from process" in p.ask("fork")
    assert same(d.ask("read", p.ask("publish")), after_read(1, 2))
    p.ask("stop")


def test_the_engine_keeps_its_signals(p: Embedding) -> None:
    """UCX would take SIGHUP.  Python's own is SIGINT."""
    assert int(p.ask("signals"), 16) & 0xFF == 1 << 1


def test_an_ordinary_sidecar_takes_no_addresses(eight: list[SidecarProcess]) -> None:
    layout = small_layout()
    member = Member(Rank(), layout, Labels(), ArrayRegions(layout))
    with pytest.raises(grpc.RpcError) as caught:
        eight[0].stub.RegisterCache(registration("x", member), timeout=10)
    assert from_rpc_error(caught.value).reason is Reason.MEMORY_NOT_ALLOWED


def test_the_example_of_the_guide() -> None:
    guide = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "embed-a-sidecar.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("peers reach it at 127.0.0.1:")
