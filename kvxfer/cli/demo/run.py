"""The order of events: processes, memory, registration, ticket, reads, verification."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from kvxfer.cli.demo.by_hand import by_hand
from kvxfer.cli.demo.children import Child, Children
from kvxfer.cli.demo.fit import Fitted
from kvxfer.cli.demo.result import RankResult, Result, groups_of
from kvxfer.cli.tables import READ_PHASES
from kvxfer.core.layout import Rank
from kvxfer.sizes import counted
from kvxfer.wire.tickets import Ticket, TicketRank
from kvxfer_client import make_ticket, new_lease_token, ticket_to_string

#: How long P holds the blocks, seconds; longer where somebody shall try things by hand.
_TTL: Final = 120.0
_KEEP_TTL: Final = 3600.0

Answer = dict[str, Any]


class Progress(Protocol):
    """Who is told how far the demo is."""

    def phase(self, what: str, steps: int) -> None:
        """A phase of so many steps begins."""

    def step(self) -> None:
        """One of them is done."""


@dataclass(frozen=True)
class Setting:
    """How to run.

    :param timeout: how long any phase may take, seconds.
    :param http_port: where the first sidecar serves its metrics, the next ones at the next ports; 0: nobody does.
    :param flip: see :meth:`kvxfer.cli.demo.engine.Engine.verify`.
    """

    memory: Path
    run: Path
    timeout: float
    keep: bool
    flip: str
    http_port: int = 0

    @property
    def call(self) -> float:
        """How long a call may take, seconds: its own error shall come before the phase is given up."""
        return self.timeout * 0.8


class Demo:
    """One run of a scenario over children that end with it."""

    def __init__(self, fitted: Fitted, setting: Setting, children: Children, progress: Progress) -> None:
        self._fitted: Final = fitted
        self._scenario: Final = fitted.scenario
        self._setting: Final = setting
        self._children: Final = children
        self._progress: Final = progress
        self._engines: dict[str, list[Child]] = {"P": [], "D": []}
        self._seconds: dict[str, float] = {}
        self._sockets: dict[str, str] = {}
        self._metrics: dict[str, str] = {}
        self._key: Final = f"kvxfer-demo/{fitted.name}"

    async def run(self) -> Result:
        """Everything from the first process to the last comparison.

        :raises KvxferError: where anything fails or takes too long.
        """
        p, d = self._engines["P"], self._engines["D"]
        begin = time.perf_counter()
        await self._start()
        self._seconds["start"] = time.perf_counter() - begin
        registered = await self._each("register", p + d)
        ticket = await self._publish("demo", registered)
        text = ticket_to_string(ticket)
        plans = await self._each("handshake", d, ticket=text, timeout=self._setting.call)
        await self._each("prepare", d, ticket=text)
        begin = time.perf_counter()
        reads = await self._each("read", d, timeout=self._setting.call)
        self._seconds["read"] = time.perf_counter() - begin
        for phase in READ_PHASES:
            self._seconds[phase] = max(r["timings"].get(phase, 0.0) for r in reads)
        verdicts = await self._each("verify", d, per_child={d[0]: {"flip": self._setting.flip}}, flip="")
        status = await d[0].ask("versions")
        hand: Mapping[str, Any] = {}
        if self._setting.keep:
            # A request of its own, so that the reads above and those by hand have nothing to do with each other.
            ticket = await self._publish("by-hand", registered)
            hand = by_hand(self._setting.run, self._scenario, self._sockets, self._metrics, ticket)
        return Result(
            model=self._fitted.name,
            scaled=self._fitted.note,
            choices=self._scenario.choices,
            nixl=status["nixl"],
            ucx=status["ucx"],
            transport=", ".join(sorted({t for plan in plans for t in plan["transports"]})),
            p_memory=self._scenario.p.memory,
            d_memory=self._scenario.d.memory,
            groups=groups_of(self._scenario),
            ranks=[_rank(i, *told) for i, told in enumerate(zip(plans, reads, verdicts, strict=True))],
            phases=self._seconds,
            warnings=sorted({w for plan in plans for w in plan["warnings"]}),
            by_hand=hand,
        )

    async def _start(self) -> None:
        """Start every process, fill the memory while the sidecars come up, and wait for all."""
        sides = (self._scenario.p, self._scenario.d)
        total = sum(len(side.layouts) for side in sides)
        self._progress.phase(f"starting {counted(total, 'sidecar')} and {counted(total, 'engine')}", 3 * total)
        for side in sides:
            for i in range(len(side.layouts)):
                name = f"{side.name}{i}"
                self._sockets[name] = str(self._setting.run / f"{name}.sock")
                await self._children.start(f"sidecar {name}", "kvxfer.cli.demo.tied", *self._serve(name))
                engine = await self._children.start(f"engine {name}", "kvxfer.cli.demo.engine", pipes=True)
                self._engines[side.name].append(engine)
        work = {
            engine: self._bring_up(engine, side.name, i)
            for side in sides
            for i, engine in enumerate(self._engines[side.name])
        }
        self._seconds["fill"] = max(await self._children.all_of("starting", work, lambda: None))

    async def _bring_up(self, engine: Child, side: str, rank: int) -> float:
        choices = asdict(self._scenario.choices)
        who = {"side": side, "rank": rank, "socket": self._sockets[f"{side}{rank}"], "key": self._key}
        await engine.ask("create", config=self._fitted.config, choices=choices, **who)
        self._progress.step()
        filled = await engine.ask("allocate", directory=str(self._setting.memory))
        self._progress.step()
        await engine.ask("connect", timeout=self._setting.call)
        self._progress.step()
        return float(filled["seconds"])

    def _serve(self, name: str) -> list[str]:
        """The arguments of a rank's sidecar."""
        where = ["--engine-socket", self._sockets[name], "--memory-directory", str(self._setting.memory)]
        if self._setting.http_port:
            port = self._setting.http_port + len(self._metrics)
            where += ["--http-port", str(port)]
            self._metrics[name] = f"http://127.0.0.1:{port}/metrics"
        return ["serve", *where, "--peer-host", "127.0.0.1", "--peer-port", "0", "--log-format", "text"]

    async def _publish(self, request: str, registered: list[Answer]) -> Ticket:
        """Publish P's blocks on every rank, and make the ticket as P's scheduler does."""
        p = self._scenario.p
        token, ttl = new_lease_token(), _KEEP_TTL if self._setting.keep else _TTL
        name = f"{request}-{secrets.token_hex(4)}"
        await self._each("publish", self._engines["P"], request=name, token=token.hex(), ttl=ttl)
        ranks = [
            TicketRank(Rank(i, len(p.layouts)), registered[i]["incarnation"], registered[i]["address"])
            for i in range(len(p.layouts))
        ]
        return make_ticket(
            engine_id=p.engine_id,
            compatibility_key=self._key,
            ranks=ranks,
            request_id=name,
            blocks=p.blocks,
            num_tokens=self._scenario.choices.tokens,
            lease_token=token,
            ttl=ttl,
        )

    async def _each(
        self,
        what: str,
        engines: list[Child],
        per_child: Mapping[Child, Mapping[str, object]] | None = None,
        **values: object,
    ) -> list[Answer]:
        """Give all of some engines a command at once; their answers in order."""
        self._progress.phase(f"{what}: {counted(len(engines), 'rank')}", len(engines))
        special = per_child or {}
        work = {engine: engine.ask(what, **{**values, **special.get(engine, {})}) for engine in engines}
        answers = await self._children.all_of(what, work, self._progress.step)
        self._seconds[what] = max(answer["seconds"] for answer in answers)
        return answers


def _rank(number: int, plan: Answer, read: Answer, verdict: Answer) -> RankResult:
    first = verdict["first"]
    wrong = ""
    if first:
        what = "was to be read" if first["due"] else "was not to be touched"
        wrong = (
            f"region {first['region']}, byte {first['offset']}, {verdict['where']}: it {what} and is "
            f"{first['got']:#04x}, not {first['want']:#04x}"
        )
    return RankResult(
        rank=number,
        sources=plan["sources"],
        rows=plan["rows"],
        descriptors=read["descriptors"],
        merged=read["merged"],
        bytes=read["bytes"],
        least=verdict["least"],
        reported=read["reported"],
        pages=verdict["pages"],
        seconds=read["seconds"],
        verified=verdict["due"] + verdict["untouched"],
        missing=verdict["missing"],
        touched=verdict["touched"],
        first_wrong=wrong,
    )


async def run(
    fitted: Fitted, setting: Setting, progress: Progress, show: Callable[[Result], None], wait: Callable[[], Any]
) -> Result:
    """Run the demo, show the result, and end every process.

    :param wait: awaited before the end where everything is to be kept running.
    """
    async with Children(setting.run, setting.timeout) as children:
        result = await Demo(fitted, setting, children, progress).run()
        show(result)
        if setting.keep:
            await asyncio.ensure_future(wait())
    return result
