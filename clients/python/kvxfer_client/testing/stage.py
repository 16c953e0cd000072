"""What a check works on: P and D of the engine under test, their sidecars, and what to look at them with."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, TypeVar

import grpc

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.pb import peer_pb2_grpc
from kvxfer.wire.peer import CloseRead, OpenRead, Outcome, Reader, ReadRef, close_to_pb, open_to_pb
from kvxfer.wire.tickets import Ticket, ticket_from_string
from kvxfer_client.client import Client
from kvxfer_client.results import LeaseInfo, TransferInfo
from kvxfer_client.testing.adapter import Adapter, Make, Place
from kvxfer_client.testing.rules import (
    COMES_BACK,
    FREED,
    HELD,
    HOOK,
    NEVER_GOOD,
    NO_HANG,
    QUIET,
    SAME_BYTES,
    BrokenRule,
    Rule,
    broken,
)
from kvxfer_client.testing.sidecars import Sidecar, Sidecars

T = TypeVar("T")

#: How long the engine may take for anything that it is to do by itself, seconds.
PATIENCE: Final = 20.0
#: How long nothing may happen before it is taken that nothing does, seconds.
QUIET_FOR: Final = 0.5
#: How often is looked, seconds.
TICK: Final = 0.01

_numbers = itertools.count(1)


class Side:
    """One engine with its sidecar."""

    def __init__(self, role: str, sidecar: Sidecar, make: Make) -> None:
        self.sidecar: Final = sidecar
        self.engine_id: Final = f"{role}-{secrets.token_hex(4)}"
        #: Of its own, so that nothing of the engine's is used to look at it.
        self._client = Client(sidecar.target, engine_id=self.engine_id)
        self._client.wait_ready()
        self.engine: Final[Adapter] = make(Place(self.engine_id, sidecar.target, sidecar.directory))
        self.started: Final[list[str]] = []

    def lease(self, request_id: str) -> LeaseInfo | None:
        """The lease of a request, while the sidecar knows it."""
        return next((x for x in self._ask(self._client.list_leases) if x.request_id == request_id), None)

    def is_being_read(self, request_id: str) -> bool:
        """Whether a read of a request is granted, or is so in a moment."""
        deadline = time.monotonic() + QUIET_FOR
        while (lease := self.lease(request_id)) is None or not lease.open_reads:
            if time.monotonic() > deadline:
                return False
            time.sleep(TICK)
        return True

    def transfers(self) -> list[TransferInfo]:
        """Transfers of the engine that the sidecar knows, newest first."""
        return self._ask(self._client.list_transfers)

    def _ask(self, listing: Callable[[], Iterator[T]]) -> list[T]:
        """What the sidecar says; nothing where it does not know the engine.  One that is coming up is waited for."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return list(listing())
            except KvxferError as error:
                if error.reason is Reason.NOT_REGISTERED:
                    return []
                if error.reason is not Reason.PEER_UNREACHABLE or time.monotonic() > deadline:
                    raise
                time.sleep(TICK)

    def close(self) -> None:
        """Take the engine away."""
        try:
            self.engine.close()
        finally:
            self._client.close()

    def has(self, blocks: Mapping[str, frozenset[int]]) -> bool:
        """Whether all of these are allocated."""
        now = self.engine.allocated()
        return all(ids <= set(now.get(group, ())) for group, ids in blocks.items())

    def blocks(self, request_id: str) -> dict[str, frozenset[int]]:
        """Those of a request."""
        return {group: frozenset(ids) for group, ids in self.engine.blocks(request_id).items()}

    def free(self) -> bool:
        """Whether nothing is allocated."""
        return not any(self.engine.allocated().values())


class Stage:
    """P and D for one check; a context manager that sees to it that nothing is left in the end."""

    def __init__(self, make: Make, sidecars: Sidecars) -> None:
        self.sidecars: Final = sidecars
        sidecars.start()
        self.p: Final = Side("p", sidecars.p, make)
        try:
            self.d: Final = Side("d", sidecars.d, make)
        except BaseException:
            self.p.close()
            raise
        self.tokens: Final = self.prompt()

    def prompt(self) -> list[int]:
        """A prompt like no other, that fills two blocks and a bit."""
        number = next(_numbers)
        length = 2 * self.p.engine.block_tokens + 3
        return [(7 * number + 13 * i) % 251 for i in range(length)]

    # -- what a request goes through -------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int] | None = None, *, ttl: float = 60.0, name: str = "") -> tuple[str, Ticket]:
        """Have P compute and publish a prompt; the request's ID and its ticket."""
        request_id = name or f"r{next(_numbers)}"
        called: list[None] = []
        self.p.started.append(request_id)
        raw = self.p.engine.prefill(
            request_id, self.tokens if tokens is None else tokens, ttl, lambda: called.append(None)
        )
        if len(called) != 1:
            broken(HOOK, f"prefill of {request_id} has called it {len(called)} times")
        return request_id, ticket_from_string(raw)

    def prefill_again(self) -> None:
        """Have P take a request after its sidecar was started again; what it refuses meanwhile is its own affair."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.prefill(self.prompt())
                return
            except BrokenRule:
                raise
            except Exception as error:  # noqa: BLE001  whatever its engine raises
                if time.monotonic() > deadline:
                    broken(COMES_BACK, f"P takes no request after its sidecar was started again: {error!r}")
                self.happens(lambda: False, QUIET_FOR)

    def decode(self, request_id: str, ticket: str, tokens: Sequence[int] | None = None, cached: int = 0) -> None:
        """Have D take a request on; the rest of its cache is filled with nonsense before."""
        self.d.engine.poison()
        self.d.started.append(request_id)
        self.d.engine.decode(request_id, self.tokens if tokens is None else tokens, ticket, cached)

    def settled(self, request_id: str, num_tokens: int, tokens: Sequence[int] | None = None, *, fails: bool) -> None:
        """Wait for D to be ready, and compare its cache with what it has to be.

        :param fails: the load cannot come about: the engine may also fail the request.
        """
        engine = self.d.engine
        if not self.happens(lambda: engine.ready(request_id) is not None):
            broken(NO_HANG, f"{PATIENCE:g} s later {request_id} is neither ready nor has it failed")
        if not engine.ready(request_id):
            if not fails:
                broken(SAME_BYTES, f"{request_id} has failed, though nothing was in its way")
            return
        all_tokens = self.tokens if tokens is None else tokens
        rule = NEVER_GOOD if fails else SAME_BYTES
        self.compare(rule, self.d, request_id, all_tokens[:num_tokens])

    def compare(self, rule: Rule, side: Side, request_id: str, tokens: Sequence[int]) -> None:
        """Whether a request's cache is that of these tokens."""
        found, expected = side.engine.cache(request_id, len(tokens)), side.engine.expected(tokens)
        for group, right in expected.items():
            given = found.get(group, b"")
            if given != right:
                wrong = sum(a != b for a, b in zip(given, right, strict=False)) + abs(len(given) - len(right))
                broken(rule, f"{request_id}: {wrong} of {len(right)} bytes of group {group} are wrong")

    # -- waiting ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One turn of either engine."""
        self.p.engine.step()
        self.d.engine.step()

    def happens(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Let both engines run until a condition holds; whether it does in time."""
        deadline = time.monotonic() + (PATIENCE if seconds is None else seconds)
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.step()
            time.sleep(TICK)
        return True

    def freed(self, side: Side, blocks: Mapping[str, frozenset[int]], why: str) -> None:
        """See that blocks become free."""

        def none_left() -> bool:
            now = side.engine.allocated()
            return not any(ids & set(now.get(group, ())) for group, ids in blocks.items())

        if not self.happens(none_left):
            broken(FREED, f"{why}, and {PATIENCE:g} s later some of its blocks are allocated")

    def stays(self, side: Side, blocks: Mapping[str, frozenset[int]], rule: Rule, why: str, seconds: float) -> None:
        """See that blocks stay allocated for a while."""
        if self.happens(lambda: not side.has(blocks), seconds):
            broken(rule, f"{why}, and the engine has freed blocks of it")

    def held(self, request_id: str, why: str, seconds: float = QUIET_FOR) -> None:
        """See that P keeps what a lease still holds."""
        self.stays(self.p, self.p.blocks(request_id), HELD, f"{why}: the lease of {request_id} has not ended", seconds)

    def lease_ends(self, request_id: str) -> None:
        """Wait until P's sidecar holds a request no more."""
        if not self.happens(lambda: (x := self.p.lease(request_id)) is None or x.state.ended):
            broken(FREED, f"the lease of {request_id} has not ended within {PATIENCE:g} s")

    def quiet(self, blocks: Mapping[str, frozenset[int]], why: str) -> None:
        """See that D keeps blocks until none of its transfers can write them; then wait for that."""
        deadline = time.monotonic() + PATIENCE
        while not all(x.quiesced for x in self.d.transfers()):
            if not self.d.has(blocks):
                # They may have been freed just now, after it had ended.
                if all(x.quiesced for x in self.d.transfers()):
                    return
                broken(QUIET, f"{why}: its transfer has not quiesced, and blocks of it are free")
            if time.monotonic() > deadline:
                return
            self.step()
            time.sleep(TICK)

    @contextmanager
    def reading(self, ticket: Ticket) -> Iterator[None]:
        """A reader that has been granted a read of P's blocks, and is slow."""
        place = ticket.ranks[0]
        ref = ReadRef(
            ticket.engine_id,
            place.rank,
            place.incarnation,
            ticket.request_id,
            ticket.lease_token,
            Reader("slow-reader", Rank(), "1"),
            1,
            "slow",
        )
        with grpc.insecure_channel(place.address) as channel:
            peer = peer_pb2_grpc.KvPeerStub(channel)
            peer.OpenRead(open_to_pb(OpenRead(ref)), timeout=PATIENCE)
            try:
                yield
            finally:
                peer.CloseReads(close_to_pb([CloseRead(ref, Outcome.DONE)]), timeout=PATIENCE)

    # -- the end ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.sidecars.start()
            if kind is None:
                for side in (self.d, self.p):
                    for request_id in side.started:
                        side.engine.finish(request_id)
                for side in (self.d, self.p):
                    if not self.happens(side.free):
                        left = {group: sorted(ids) for group, ids in side.engine.allocated().items() if ids}
                        broken(FREED, f"all requests are over, and {side.engine_id} still has {left}")
        finally:
            try:
                self.d.close()
            finally:
                self.p.close()
