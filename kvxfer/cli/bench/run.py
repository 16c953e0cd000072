"""Two sidecars, their caches, and the rounds."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final, TypeVar

from kvxfer.cli.bench.case import GROUP, Case
from kvxfer.cli.bench.report import PHASES, Outcome
from kvxfer.cli.demo.children import Child, Children
from kvxfer.core.layout import Rank
from kvxfer.core.resolve import BlockList
from kvxfer.wire.tickets import Ticket, TicketRank
from kvxfer_client import SharedRegion, TransferInfo, make_ticket, new_lease_token
from kvxfer_client.aio import AsyncClient

T = TypeVar("T")

#: Rounds before any is measured: the first makes the connection's ways.
WARM_UP: Final = 3
_KEY: Final = "kvxfer-bench"
_TTL: Final = 600.0


class Side:
    """One engine: its sidecar, its memory, its client."""

    def __init__(self, name: str, case: Case, run: Path, memory: Path) -> None:
        self.name: Final = name
        self.socket: Final = run / f"{name}.sock"
        self.blocks: Final = [BlockList(GROUP, case.ids(name))]
        sizes = [region.size for region in case.layout.regions]
        self.regions: Final = [SharedRegion.create_file(memory / f"{name}{i}", s) for i, s in enumerate(sizes)]
        self.bytes: Final = [region.numpy("u1", (region.size,)) for region in self.regions]

    async def start(self, children: Children, memory: Path) -> Child:
        """Start the sidecar."""
        where = ("--engine-socket", str(self.socket), "--memory-directory", str(memory))
        more = ("--peer-host", "127.0.0.1", "--peer-port", "0", "--log-format", "text", "--log-level", "warning")
        return await children.start(f"sidecar {self.name}", "kvxfer.cli.demo.tied", "serve", *where, *more)

    def close(self) -> None:
        """Let go of the memory."""
        self.bytes.clear()
        for region in self.regions:
            region.close()
            region.unlink()


class Bench:
    """One run of a case over children that end with it."""

    def __init__(self, case: Case, children: Children, timeout: float) -> None:
        self._case: Final = case
        self._children: Final = children
        self._timeout: Final = timeout

    async def run(self, p: Side, d: Side, memory: Path, rounds: int, step: Callable[[], None]) -> Outcome:
        """Start everything, and read.

        :raises KvxferError: where anything fails or takes too long.
        """
        case = self._case
        p_child, d_child = [await side.start(self._children, memory) for side in (p, d)]
        for i, region in enumerate(p.bytes):
            case.fill(i, region)
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(f"unix:{side.socket}", engine_id=side.name))
                for side in (p, d)
            ]
            registered = []
            for side, client, child in zip((p, d), clients, (p_child, d_child), strict=True):
                await self._of(child, "starting", client.wait_ready(timeout=self._timeout))
                made = client.register(case.layout, side.regions, compatibility_key=_KEY)
                registered.append(await self._of(child, "register", made))
            source, reader = clients
            address = (registered[0].incarnation, registered[0].peer_address)
            ticket = await self._publish(p_child, source, p, *address)
            plan = await self._of(d_child, "handshake", reader.handshake(ticket, timeout=self._timeout))
            status = await self._of(d_child, "status", reader.status())
            seconds, told, wrong = [], [], 0
            verified = sorted({0, rounds - 1})
            for number in range(-WARM_UP, rounds):
                if number in verified:
                    for region in d.bytes:
                        region[:] = 0
                ticket = await self._publish(p_child, source, p, *address)
                reading = _timed(reader.read(ticket, d.blocks, timeout=self._timeout))
                elapsed, done = await self._of(d_child, "read", reading)
                if number in verified:
                    wrong += sum(case.wrong(*pair) for pair in zip(p.bytes, d.bytes, strict=True))
                if number >= 0:
                    seconds.append(elapsed)
                    told.append(_phases(done))
                    step()
        return Outcome(
            case,
            sorted({s.transport for s in plan.sources}),
            {"nixl": status.nixl_version, "ucx": status.ucx_version},
            done.descriptors,
            seconds,
            told,
            verified,
            wrong,
            plan.warnings,
        )

    async def _publish(self, child: Child, client: AsyncClient, p: Side, incarnation: str, address: str) -> Ticket:
        """A request of its own for each read: one that has been read is over."""
        name, token = f"bench-{secrets.token_hex(8)}", new_lease_token()
        await self._of(child, "publish", client.publish(name, p.blocks, self._case.tokens, token, ttl=_TTL))
        return make_ticket(
            engine_id=p.name,
            compatibility_key=_KEY,
            ranks=[TicketRank(Rank(), incarnation, address)],
            request_id=name,
            blocks=p.blocks,
            num_tokens=self._case.tokens,
            lease_token=token,
            ttl=_TTL,
        )

    async def _of(self, child: Child, what: str, work: Awaitable[T]) -> T:
        """Wait for it, and for the end of any child."""
        (found,) = await self._children.all_of(what, {child: work}, lambda: None)
        return found


async def _timed(work: Awaitable[T]) -> tuple[float, T]:
    """Seconds that it took, and its result."""
    began = time.perf_counter()
    found = await work
    return time.perf_counter() - began, found


def _phases(transfer: TransferInfo) -> dict[str, float]:
    return {name: value for name, value in asdict(transfer.timings).items() if name in PHASES and value is not None}


async def run(case: Case, memory: Path, logs: Path, rounds: int, timeout: float, step: Callable[[], None]) -> Outcome:
    """Run a case, and end every process.

    :param memory: directory with room for both caches; ``logs``: for sockets and logs.
    :param timeout: how long any step may take, seconds.
    """
    with contextlib.ExitStack() as stack:
        p, d = (stack.enter_context(contextlib.closing(Side(name, case, logs, memory))) for name in ("P", "D"))
        async with Children(logs, timeout) as children:
            return await Bench(case, children, timeout * 0.8).run(p, d, memory, rounds, step)
