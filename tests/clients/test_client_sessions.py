"""Sessions of both clients against sidecars that restart, vanish, hang; and caches that engines lose."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Settings
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.sidecar import Sidecar
from kvxfer.xfer.loopback import Fabric, LoopbackEngine
from kvxfer_client import (
    AsyncClient,
    Client,
    KvxferError,
    LeaseState,
    Owned,
    OwnedBacking,
    Reason,
    Registered,
    SharedRegion,
    new_lease_token,
)
from tests.clients.stub import Stub
from tests.clients.test_client_sidecars import KEY, blocks_on_p, layout

#: Long enough for a client that stands still between registering and holding.
GRACE = 2.0
#: Where a test waits for its end; elsewhere nothing ends so.
ENDS = pytest.mark.parametrize("grace", [GRACE])


async def soon(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Poll a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.002)


@dataclass
class Told:
    """What a session has told its owner."""

    lost: list[tuple[Reason, str]] = field(default_factory=list)
    registered: list[str] = field(default_factory=list)
    ended: list[Reason] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def on_lost(self, reason: KvxferError, incarnation: str) -> None:
        self.lost.append((reason.reason, incarnation))
        self.order.append("lost")

    def on_registered(self, registered: Registered) -> None:
        self.registered.append(registered.incarnation)
        self.order.append("registered")

    def on_ended(self, error: KvxferError) -> None:
        self.ended.append(error.reason)
        self.order.append("ended")

    @property
    def callbacks(self) -> dict[str, Any]:
        return {"on_lost": self.on_lost, "on_registered": self.on_registered, "on_ended": self.on_ended}


class Threads:
    """The blocking client, called from threads."""

    def __init__(self, target: str) -> None:
        self.client = Client(target, engine_id="prefill", timeout=5.0)

    async def session(self, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(self.client.session, *args, **kwargs)

    async def do(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(method, *args, **kwargs)

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)


class Tasks:
    """The asyncio client."""

    def __init__(self, target: str) -> None:
        self.client = AsyncClient(target, engine_id="prefill", timeout=5.0)

    async def session(self, *args: Any, **kwargs: Any) -> Any:
        return await self.client.session(*args, **kwargs)

    async def do(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return await method(*args, **kwargs)

    async def close(self) -> None:
        await self.client.close()


class Place:
    """Where a sidecar is, was, and will be again; and an engine with its memory."""

    def __init__(self, directory: Path, kind: type[Threads] | type[Tasks], grace: float) -> None:
        self.directory = directory
        self.fabric = Fabric()
        self.settings = Settings(
            engine_socket=directory / "s.sock", memory_directories=(str(directory),), engine_grace=grace
        )
        self.caller = kind(f"unix:{self.settings.engine_socket}")
        self.regions = [SharedRegion.create_file(directory / f"r{i}", r.size) for i, r in enumerate(layout().regions)]
        self.told = Told()
        self.sidecar: Sidecar | None = None

    async def start(self) -> Sidecar:
        self.sidecar = Sidecar(self.settings, lambda agent, notify: LoopbackEngine(agent, self.fabric, notify))
        await self.sidecar.start()
        return self.sidecar

    async def stop(self) -> None:
        sidecar, self.sidecar = self.sidecar, None
        if sidecar is not None:
            await sidecar.stop()

    async def crash(self) -> None:
        """What of a crash can be had in one process: the sockets close without a word; then it is swept up."""
        sidecar, self.sidecar = self.sidecar, None
        assert sidecar is not None
        await asyncio.gather(*(s.stop(None) for s in sidecar._servers))
        self.settings.engine_socket.unlink(missing_ok=True)
        self._swept = asyncio.ensure_future(sidecar.stop())
        await self._swept

    async def session(self, memory: Any = None, **options: Any) -> Any:
        chosen = {"compatibility_key": KEY, **self.told.callbacks, **options}
        return await self.caller.session(layout(), self.regions if memory is None else memory, **chosen)

    def held(self) -> list[str]:
        """Incarnations that the sidecar holds."""
        assert self.sidecar is not None
        return [r.incarnation for r in self.sidecar.registrations]

    @property
    def files(self) -> list[Path]:
        return sorted(self.directory.glob("kvxfer-*.kv"))


class Proxy:
    """Passes bytes on to a sidecar, and can be cut through."""

    def __init__(self, path: Path, to: Path) -> None:
        self.target = f"unix:{path}"
        self._path, self._to = path, to
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Close every connection; fresh ones are welcome."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(self._to)
        self._writers |= {writer, there[1]}
        await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))

    @staticmethod
    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture
def grace() -> float:
    """How long a sidecar waits for an engine that is gone, seconds."""
    return 60.0


@pytest.fixture(params=[Threads, Tasks])
async def place(request: pytest.FixtureRequest, tmp_path: Path, grace: float) -> AsyncIterator[Place]:
    made = Place(tmp_path, request.param, grace)
    await made.start()
    yield made
    await made.caller.close()
    await made.stop()
    for region in made.regions:
        region.close()
    left = [t.name for t in threading.enumerate() if t.name.startswith("kvxfer session")]
    assert not left


async def test_a_session_holds_and_gives_back(place: Place) -> None:
    session = await place.session()
    first = session.registered.incarnation
    assert place.held() == [first]
    assert place.told.registered == [first]
    assert await place.caller.do(session.wait_registered) == session.registered
    (known,) = (await place.caller.do(place.caller.client.status)).registrations
    assert (known.holders, known.undone_in, known.orphaned) == (1, None, False)
    await place.caller.do(session.close)
    assert place.held() == []
    assert (session.registered, session.error) == (None, None)
    await place.caller.do(session.close)
    assert place.told.order == ["registered"]
    with pytest.raises(KvxferError) as caught:
        await place.caller.do(session.wait_registered)
    assert (caught.value.field, "the session" in caught.value.message) == ("session", True)


@ENDS
async def test_a_session_that_lets_go_is_undone_after_the_grace(place: Place) -> None:
    session = await place.session()
    await place.caller.do(session.close, unregister=False)
    await soon(lambda: next(iter(place.sidecar.registrations)).hold.streams == 0)  # type: ignore[union-attr]
    (known,) = (await place.caller.do(place.caller.client.status)).registrations
    assert known.holders == 0
    assert known.undone_in is not None
    await soon(lambda: place.held() == [])


@ENDS
async def test_closing_the_client_lets_go_too(place: Place) -> None:
    session = await place.session()
    await place.caller.close()
    await soon(lambda: place.held() == [])
    await soon(lambda: session.error is not None)
    assert session.error.field == "client"
    await place.caller.do(session.close)


@ENDS
@pytest.mark.parametrize("how", ["stop", "crash"])
async def test_a_sidecar_that_restarts(place: Place, how: str) -> None:
    session = await place.session()
    old = session.registered.incarnation
    client = place.caller.client
    token = new_lease_token()
    await place.caller.do(client.publish, "r1", blocks_on_p(), 40, token)
    await getattr(place, how)()
    await soon(lambda: session.registered is None)
    await place.start()
    fresh = await place.caller.do(session.wait_registered, 10.0)
    assert fresh.incarnation != old
    assert place.held() == [fresh.incarnation]
    assert place.told.order == ["registered", "lost", "registered"]
    reason, lost = place.told.lost[0]
    assert lost == old
    assert reason is (Reason.SHUTTING_DOWN if how == "stop" else Reason.NOT_REGISTERED)
    # It holds, and the cache is good for publishing again.
    with pytest.raises(KvxferError) as caught:
        await place.caller.do(client.publish, "r1", blocks_on_p(), 40, token, incarnation=old)
    assert caught.value.reason is Reason.STALE_INCARNATION
    assert await place.caller.do(client.publish, "r1", blocks_on_p(), 40, token, incarnation=fresh.incarnation) > 0
    await asyncio.sleep(1.5 * GRACE)  # nothing is to happen
    assert place.held() == [fresh.incarnation]
    await place.caller.do(session.close)
    assert place.held() == []


async def test_it_restarts_again_and_again(place: Place) -> None:
    session = await place.session()
    seen = [session.registered.incarnation]
    for _ in range(3):
        await place.stop()
        await soon(lambda: session.registered is None)
        await place.start()
        seen.append((await place.caller.do(session.wait_registered, 10.0)).incarnation)
    assert len(set(seen)) == 4
    assert place.told.registered == seen
    assert [lost for _, lost in place.told.lost] == seen[:-1]
    await place.caller.do(session.close)


async def test_a_broken_stream_alone_loses_nothing(place: Place) -> None:
    async with Proxy(place.directory / "proxy.sock", place.settings.engine_socket) as proxy:
        direct, place.caller = place.caller, type(place.caller)(proxy.target)
        await place.caller.do(place.caller.client.wait_ready)  # connects again where the proxy was slow to pass it on
        session = await place.session()
        first = session.registered
        for _ in range(3):
            proxy.cut()
            await soon(lambda: session.registered is None)
            assert await place.caller.do(session.wait_registered) == first
        assert place.told.order == ["registered"]
        assert place.held() == [first.incarnation]
        await place.caller.do(session.close)
        await place.caller.close()
        place.caller = direct


async def test_a_sidecar_that_never_comes_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer_client.life.FIRST_PAUSE", 60.0)
    session = await place.session()
    await place.stop()
    await soon(lambda: session.registered is None)
    with pytest.raises(KvxferError) as caught:
        await place.caller.do(session.wait_registered, 1.0)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert session.error is None
    began = time.monotonic()
    await place.caller.do(session.close)
    assert time.monotonic() - began < 10.0  # the pause is longer
    assert place.told.ended == []


@ENDS
async def test_the_first_registration_is_tried_once(place: Place) -> None:
    await place.stop()
    with pytest.raises(KvxferError) as caught:
        await place.session()
    assert caught.value.reason is Reason.PEER_UNREACHABLE
    await place.start()
    await place.caller.do(place.caller.client.wait_ready)
    with pytest.raises(KvxferError) as caught:
        await place.session(place.regions[:1])
    assert caught.value.reason is Reason.FIELD_INVALID
    with pytest.raises(KvxferError) as caught:
        await place.session(keep_leases=True)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "keep_leases")
    assert place.told.order == []
    await soon(lambda: place.held() == [])  # what had been registered was never held


async def test_what_no_retry_helps_ends_it(place: Place) -> None:
    session = await place.session()
    old = session.registered.incarnation
    await place.stop()
    for region in place.regions:
        region.unlink()  # a sidecar that restarts cannot map them any more
    await place.start()
    await soon(lambda: place.told.ended)
    assert session.error.reason is Reason.MEMORY_HANDLE_INVALID
    assert place.told.order == ["registered", "lost", "ended"]
    assert place.told.lost == [(Reason.SHUTTING_DOWN, old)]
    with pytest.raises(KvxferError) as caught:
        await place.caller.do(session.wait_registered)
    assert caught.value is session.error
    await place.caller.do(session.close)


async def test_unregistered_by_somebody_else(place: Place) -> None:
    session = await place.session()
    await place.caller.do(place.caller.client.unregister)
    await soon(lambda: place.told.ended)
    assert place.told.lost == [(Reason.NOT_REGISTERED, place.told.registered[0])]
    assert place.told.ended == [Reason.NOT_REGISTERED]
    assert place.held() == []
    await place.caller.do(session.close)


async def test_two_of_the_same_name_do_not_fight(place: Place) -> None:
    """A second engine of the same name takes the place of the first, which leaves it to the second."""
    first, mine = await place.session(), place.told
    place.told = Told()
    with pytest.raises(KvxferError) as caught:
        await place.session(compatibility_key="other")
    assert caught.value.reason is Reason.REGISTRATION_BUSY
    second = await place.session(compatibility_key="other", replace=True)
    await soon(lambda: mine.ended)
    assert mine.ended == [Reason.STALE_INCARNATION]
    assert place.held() == [second.registered.incarnation]
    await place.caller.do(first.close)
    assert place.held() == [second.registered.incarnation]
    # Whoever comes second after a restart finds the place taken.
    await place.caller.do(second.close)


async def test_a_callback_that_raises_ends_it(place: Place) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a fault of the owner")

    session = await place.session(on_lost=broken)
    await place.stop()
    await soon(lambda: place.told.ended)
    assert session.error.reason is Reason.INTERNAL
    assert "a fault of the owner" in session.error.message
    assert place.told.order == ["registered", "ended"]
    await place.caller.do(session.close)


async def test_a_callback_may_close_the_session(place: Place) -> None:
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def close_now(*_: object) -> Any:
        ending = session.close()
        loop.call_soon_threadsafe(closed.set)
        return ending

    session = await place.session(on_lost=close_now)
    await place.stop()
    await asyncio.wait_for(closed.wait(), 5.0)
    await place.caller.do(session.close)
    assert session.error is None
    assert place.told.order == ["registered"]


async def test_a_cache_that_the_sidecar_owns_survives_it(place: Place) -> None:
    owned = [Owned(r.size) for r in layout().regions]
    session = await place.session(owned, keep_leases=True)
    exported = session.registered.exported
    with contextlib.ExitStack() as stack:
        mapped = [stack.enter_context(SharedRegion.map(exported[i])) for i in range(2)]
        arrays = [m.numpy(np.uint8, (m.size,)) for m in mapped]
        for array in arrays:
            array[:] = 7
        before = place.files
        await place.stop()
        assert place.files == before
        await soon(lambda: session.registered is None)
        await place.start()
        fresh = await place.caller.do(session.wait_registered, 10.0)
        assert fresh.exported == exported
        assert place.files == before
        (known,) = place.sidecar.registrations  # type: ignore[union-attr]
        assert known.owned
        view = SharedRegion.map(fresh.exported[0]).numpy(np.uint8, (8,))
        arrays[0][0] = 9
        assert list(view) == [9, 7, 7, 7, 7, 7, 7, 7]
        del arrays, array, view
    await place.caller.do(session.close, unregister=True)
    assert place.files == []


async def test_a_memfd_of_the_sidecar_is_gone_with_it(place: Place) -> None:
    session = await place.session([Owned(r.size, OwnedBacking.MEMFD) for r in layout().regions])
    await place.stop()
    await place.start()
    await soon(lambda: place.told.ended)
    assert (session.error.reason, session.error.field) == (Reason.MEMORY_HANDLE_INVALID, "memory[0]")
    assert place.told.order == ["registered", "lost", "ended"]
    await place.caller.do(session.close)


@ENDS
async def test_leases_live_on_where_the_session_keeps_them(place: Place) -> None:
    session = await place.session([Owned(r.size) for r in layout().regions], keep_leases=True)
    client = place.caller.client
    token = new_lease_token()
    await place.caller.do(client.publish, "r1", blocks_on_p(), 40, token, ttl=60.0)
    await place.caller.do(session.close)
    await soon(lambda: next(iter(place.sidecar.registrations)).hold.over)  # type: ignore[union-attr]
    (known,) = (await place.caller.do(client.status)).registrations
    assert (known.orphaned, known.published, known.holders) == (True, 1, 0)
    assert place.files
    assert await place.caller.do(client.withdraw, "r1", token) == 0.0
    await soon(lambda: place.held() == [])
    assert place.files == []


async def test_leases_as_data(place: Place) -> None:
    session = await place.session()
    client, do = place.caller.client, place.caller.do
    tokens = {name: new_lease_token() for name in ("r1", "r2", "r3")}
    watch = await do(client.watch_leases)
    for name, token in tokens.items():
        assert 20 < await do(client.publish, name, blocks_on_p(), 40, token) <= 30
    assert 50 < await do(client.renew, "r1", tokens["r1"], ttl=60.0) <= 60
    assert 50 < await do(client.renew, "r1", tokens["r1"]) <= 60  # never shorter
    with pytest.raises(KvxferError) as caught:
        await do(client.renew, "r1", tokens["r2"])
    assert caught.value.reason is Reason.LEASE_TOKEN_MISMATCH
    assert await do(client.withdraw, "r2", tokens["r2"]) == 0.0
    assert await do(client.withdraw, "r2", tokens["r2"]) == 0.0  # it has ended
    listed = client.list_leases(page_size=2)
    found = [x async for x in listed] if isinstance(client, AsyncClient) else await do(list, listed)
    assert [(x.request_id, x.state) for x in found] == [
        ("r3", LeaseState.HELD),
        ("r2", LeaseState.WITHDRAWN),
        ("r1", LeaseState.HELD),
    ]
    assert (found[0].num_tokens, found[0].open_reads, found[0].readers, found[0].ending) == (40, 0, (), False)
    assert found[0].expires_in is not None
    assert (found[1].expires_in, found[1].state.ended) == (None, True)
    held = client.list_leases([LeaseState.WITHDRAWN])
    found = [x async for x in held] if isinstance(client, AsyncClient) else await do(list, held)
    assert [x.request_id for x in found] == ["r2"]
    changes = [await watch.__anext__() if isinstance(client, AsyncClient) else await do(next, watch) for _ in range(4)]
    assert [(c.request_id, c.state) for c in changes] == [
        ("r1", LeaseState.HELD),
        ("r2", LeaseState.HELD),
        ("r3", LeaseState.HELD),
        ("r2", LeaseState.WITHDRAWN),
    ]
    watch.close()
    counts = (await do(client.status)).counts
    assert (counts.published, counts.leases_withdrawn, counts.leases_released, counts.reads_refused) == (2, 1, 0, 0)
    await do(session.close)


# -- sidecars that hang ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Threads, Tasks])
@pytest.mark.parametrize("where", ["HoldRegistration", "RegisterCache", "UnregisterCache"])
async def test_closing_is_prompt_where_the_sidecar_hangs(
    tmp_path: Path, kind: type[Threads] | type[Tasks], where: str
) -> None:
    stub = Stub(tmp_path / "s.sock").start()
    broken = threading.Event()

    def breaks(*_: object) -> Any:
        broken.wait(10)
        return KvxferError(Reason.SHUTTING_DOWN if where == "RegisterCache" else Reason.INTERNAL, "as the test says")

    stub.answers["RegisterCache"] = pb.RegisterCacheResponse(incarnation="one", peer_address="h:1")
    stub.answers["HoldRegistration"] = [pb.HoldRegistrationResponse(), breaks]
    caller = kind(stub.target)
    memory = [SharedRegion.create_file(tmp_path / str(i), r.size) for i, r in enumerate(layout().regions)]
    work: Coroutine[Any, Any, Any] = caller.session(layout(), memory, compatibility_key=KEY)
    session = await work
    assert stub.requests[0].held
    if where != "UnregisterCache":
        stub.answers[where] = [stub.wait] if where == "HoldRegistration" else stub.wait
        asked = len(stub.requests)
        broken.set()
        await soon(lambda: len(stub.requests) > asked)
    began = time.monotonic()
    await caller.do(session.close, unregister=False)
    assert time.monotonic() - began < 3.0  # the first deadline is 5 s away
    broken.set()
    await caller.close()
    stub.stop()
    for region in memory:
        region.close()
