"""The smallest engine that keeps the rules of transfers: its cache is hashes of the tokens, its model does nothing.

One attention group of blocks of 8 tokens, and one state group; each in a shared file.  It is what
``docs/how-to/add-an-engine.md`` describes, in one class, and the adapter of itself.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from kvxfer_client import (
    Axis,
    AxisKind,
    CacheLayout,
    Client,
    Component,
    Group,
    GroupKind,
    KvxferError,
    LeaseInfo,
    Region,
    Registered,
    SharedRegion,
    UnitRange,
    View,
    attention_blocks,
    make_ticket,
    new_lease_token,
    snapshot,
    ticket_to_string,
)
from kvxfer_client.testing import Place

KEY = "toy@1/hash"
BLOCK, BLOCKS, SNAPSHOTS = 8, 48, 12
TOKEN_BYTES, STATE_BYTES = 32, 64

_HEADS = UnitRange(0, 2, 2)
_KV = Component(
    "kv", "float16", 2, (Axis(AxisKind.TOKEN, BLOCK), Axis(AxisKind.UNIT, 2), Axis(AxisKind.INNER, 8)), _HEADS
)
_SSM = Component("ssm", "float32", 4, (Axis(AxisKind.UNIT, 2), Axis(AxisKind.INNER, 8)), _HEADS)
_PAGE = BLOCK * TOKEN_BYTES
LAYOUT = CacheLayout(
    (Region(_PAGE * BLOCKS), Region(STATE_BYTES * SNAPSHOTS)),
    (
        Group("attention", GroupKind.ATTENTION, (View("0", 0, 0, _PAGE, BLOCKS, (_KV,)),), BLOCK),
        Group("state", GroupKind.STATE, (View("1", 1, 0, STATE_BYTES, SNAPSHOTS, (_SSM,)),)),
    ),
)


def kv_of(tokens: Sequence[int]) -> bytes:
    """What attention keeps of the last of these tokens."""
    return hashlib.sha256(bytes(tokens)).digest()


def state_of(tokens: Sequence[int]) -> bytes:
    """The state after these tokens."""
    return hashlib.sha512(bytes(tokens)).digest()


@dataclass
class Request:
    """One request, on P or on D."""

    tokens: list[int]
    attention: list[int]
    state: int
    token: bytes = b""
    incarnation: str = ""
    load: Future[bool] | None = None
    good: bool = False
    over: bool = False
    #: Blocks that it has still.
    has: bool = True
    cached: int = 0
    transfer_id: str = field(default="")


class ToyEngine:
    """See the module."""

    block_tokens = BLOCK
    prefix_caching = True

    def __init__(self, place: Place) -> None:
        self.free_attention, self.free_state = list(range(BLOCKS)), list(range(SNAPSHOTS))
        self.requests: dict[str, Request] = {}
        self._memory = [
            SharedRegion.create_file(place.directory / f"{place.engine_id}-{i}", r.size)
            for i, r in enumerate(LAYOUT.regions)
        ]
        self.kv = self._memory[0].numpy("u1", (BLOCKS, BLOCK, TOKEN_BYTES))
        self.ssm = self._memory[1].numpy("u1", (SNAPSHOTS, STATE_BYTES))
        self._told: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(8)
        self._closing = threading.Event()
        self.client = Client(place.target, engine_id=place.engine_id)
        self.client.wait_ready()
        self.session = self.client.session(
            LAYOUT, self._memory, compatibility_key=KEY, on_lost=self.on_lost, on_registered=self.on_registered
        )

    # -- what the sidecar tells; on its threads ----------------------------------------------------------------------

    def on_registered(self, _: Registered) -> None:
        watch = self.client.watch_leases(include_current=True)

        def follow() -> None:
            with suppress(KvxferError):  # the end of the registration: on_lost says what that means
                for lease in watch:
                    self._told.put(lambda lease=lease: self.on_lease(lease))  # type: ignore[misc]

        threading.Thread(target=follow, daemon=True).start()

    def on_lost(self, _: KvxferError, incarnation: str) -> None:
        self._told.put(lambda: self.lost(incarnation))

    # -- its loop ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        while not self._told.empty():
            self._told.get()()
        for request in self.requests.values():
            if request.load is not None and request.load.done():
                loaded, request.load = request.load.result(), None
                self.on_load(request, loaded)

    def on_lease(self, lease: LeaseInfo) -> None:
        request = self.requests.get(lease.request_id)
        if lease.state.ended and request is not None and request.token:
            self.release(request)

    def lost(self, incarnation: str) -> None:
        for request in self.requests.values():
            if request.incarnation == incarnation:
                self.release(request)

    def on_load(self, request: Request, loaded: bool) -> None:
        if request.over:
            self.release(request)
            return
        if not loaded:
            self.compute(request, 0, len(request.tokens) - 1)
        request.good = True

    # -- the model and the allocator ---------------------------------------------------------------------------------

    def allocate(self, tokens: Sequence[int]) -> Request:
        count = -(-(len(tokens) - 1) // BLOCK)
        attention = [self.free_attention.pop(0) for _ in range(count)]
        return Request(list(tokens), attention, self.free_state.pop(0))

    def release(self, request: Request) -> None:
        if request.has:
            request.has = False
            self.free_attention += request.attention
            self.free_state.append(request.state)

    def compute(self, request: Request, first: int, end: int) -> None:
        """Write the cache of tokens ``first`` to ``end``, and the state after ``end`` tokens."""
        for i in range(first, end):
            block, place = request.attention[i // BLOCK], i % BLOCK
            self.kv[block, place] = np.frombuffer(kv_of(request.tokens[: i + 1]), "u1")
        self.ssm[request.state] = np.frombuffer(state_of(request.tokens[:end]), "u1")

    # -- as P --------------------------------------------------------------------------------------------------------

    def prefill(self, request_id: str, tokens: Sequence[int], ttl: float, writing: Callable[[], None]) -> str:
        registered = self.session.wait_registered()
        request = self.requests[request_id] = self.allocate(tokens)
        request.token, request.incarnation = new_lease_token(), registered.incarnation
        n = len(tokens) - 1
        try:
            self.compute(request, 0, n - 1)
            writing()
            self.compute(request, n - 1, n)
            return self.publish(request_id, request, registered, n, ttl)
        except BaseException:
            self.release(request)
            raise

    def publish(self, request_id: str, request: Request, registered: Registered, n: int, ttl: float) -> str:
        blocks = (attention_blocks("attention", request.attention), snapshot("state", request.state, n))
        self.client.publish(request_id, blocks, n, request.token, ttl=ttl, incarnation=request.incarnation)
        ticket = make_ticket(
            engine_id=self.client.engine_id,
            compatibility_key=KEY,
            ranks=[registered.ticket_rank],
            request_id=request_id,
            blocks=blocks,
            num_tokens=n,
            lease_token=request.token,
            ttl=ttl,
        )
        return ticket_to_string(ticket)

    # -- as D --------------------------------------------------------------------------------------------------------

    def decode(self, request_id: str, tokens: Sequence[int], ticket: str, cached_tokens: int) -> None:
        request = self.requests[request_id] = self.allocate(tokens)
        request.transfer_id, request.cached = f"{self.client.engine_id}/{request_id}", cached_tokens
        self.compute(request, 0, cached_tokens)
        request.load = self._pool.submit(self.load, request, ticket)

    def load(self, request: Request, ticket: str) -> bool:
        """Read, on a thread; whether every byte is there.  Nothing writes the blocks any more when it returns."""
        n = len(request.tokens) - 1
        mine = (attention_blocks("attention", request.attention), snapshot("state", request.state, n))
        try:
            self.client.read(
                ticket, mine, skip_tokens=request.cached, num_tokens=n, transfer_id=request.transfer_id, timeout=15
            )
        except KvxferError:
            self.wait_quiet(request)
            return False
        return True

    def wait_quiet(self, request: Request) -> None:
        """Cancel, and wait until nothing writes the request's blocks any more."""
        while not self._closing.is_set():
            try:
                if self.client.cancel(request.transfer_id).quiesced:
                    return
            except KvxferError as error:
                # The sidecar knows no such transfer; or it is gone, and its agents with it.
                if error.reason.value != "DEADLINE_EXCEEDED":
                    return

    def ready(self, request_id: str) -> bool | None:
        return self.requests[request_id].good or None

    # -- as either ---------------------------------------------------------------------------------------------------

    def finish(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None or request.over:
            return
        request.over = True
        if request.token:
            self.withdraw(request_id, request)
        elif request.load is None:
            self.release(request)
        else:  # step frees its blocks when the load is over
            self._pool.submit(self.wait_quiet, request)

    def withdraw(self, request_id: str, request: Request) -> None:
        with suppress(KvxferError):  # gone with its registration: on_lost frees
            if self.client.withdraw(request_id, request.token) == 0:
                self.release(request)

    def cache(self, request_id: str, num_tokens: int) -> Mapping[str, bytes]:
        request = self.requests[request_id]
        return {
            "attention": self.kv[request.attention].tobytes()[: num_tokens * TOKEN_BYTES],
            "state": self.ssm[request.state].tobytes(),
        }

    def expected(self, tokens: Sequence[int]) -> Mapping[str, bytes]:
        kv = b"".join(kv_of(tokens[: i + 1]) for i in range(len(tokens)))
        return {"attention": kv, "state": state_of(tokens)}

    def blocks(self, request_id: str) -> Mapping[str, AbstractSet[int]]:
        request = self.requests[request_id]
        return {"attention": set(request.attention), "state": {request.state}}

    def allocated(self) -> Mapping[str, AbstractSet[int]]:
        return {
            "attention": set(range(BLOCKS)) - set(self.free_attention),
            "state": set(range(SNAPSHOTS)) - set(self.free_state),
        }

    def poison(self) -> None:
        self.kv[self.free_attention] = 0xA5
        self.ssm[self.free_state] = 0xA5

    def close(self) -> None:
        self._closing.set()
        with suppress(KvxferError):  # a sidecar that is not there any more
            self.session.close()
        self.client.close()
        self._pool.shutdown(wait=True)
        del self.kv, self.ssm
        for region in self._memory:
            region.close()
            region.unlink()
