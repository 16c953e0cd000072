"""An engine process of the demo: one rank, its memory and its client.

Takes one command a line (JSON) from standard input and answers each with a line; ends with its input.

    python -m kvxfer.cli.demo.engine PARENT_PID
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

from kvxfer.cli.demo.scenario import Choices, Scenario, Side, real
from kvxfer.cli.demo.tied import tie
from kvxfer.cli.demo.truth import Bytes, noise, parts, verify, where, whole_pages
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, Rank
from kvxfer_client import Client, PlanInfo, SharedRegion, TransferInfo

Answer = dict[str, Any]


class Engine:
    """One rank of P or of D."""

    def __init__(
        self, *, config: dict[str, object], choices: dict[str, Any], side: str, rank: int, socket: str, key: str
    ) -> None:
        self.scenario: Final = Scenario.of(config, Choices(**choices))
        self.side: Final[Side] = self.scenario.p if side == "P" else self.scenario.d
        self.rank: Final = Rank(rank, self.side.options.tp_size)
        self.layout: Final[CacheLayout] = self.side.layouts[self.rank]
        self.client: Final = Client(f"unix:{socket}", engine_id=self.side.engine_id)
        self.key: Final = key
        self.regions: list[SharedRegion] = []
        self.memory: list[Bytes] = []
        self.transfer = ""

    def allocate(self, *, directory: str) -> Answer:
        """Make the cache's memory, full of noise; on P with the request's blocks in it."""
        begin = time.perf_counter()
        for i, region in enumerate(self.layout.regions):
            path = Path(directory) / f"{self.side.name}{self.rank.tp_rank}-{i}"
            self.regions.append(SharedRegion.create_file(path, region.size))
            self.memory.append(self.regions[-1].numpy("u1", (region.size,)))
            self.memory[-1][:] = noise(self._seed(i), region.size)
        if self.side.name == "P":
            for i, memory in enumerate(self.memory):
                for part in parts(self.layout, self.side.blocks, i):
                    part.put(memory, range(self.scenario.choices.tokens))
        return {"seconds": time.perf_counter() - begin}

    def connect(self, *, timeout: float) -> Answer:
        """Wait for the sidecar."""
        self.client.wait_ready(timeout=timeout)
        return {}

    def versions(self) -> Answer:
        """What the sidecar runs on."""
        status = self.client.status()
        return {"nixl": status.nixl_version, "ucx": status.ucx_version}

    def register(self) -> Answer:
        """Hand the memory and its layout to the sidecar."""
        begin = time.perf_counter()
        found = self.client.register(self.layout, self.regions, compatibility_key=self.key, rank=self.rank)
        seconds = time.perf_counter() - begin
        for region in self.regions:
            # Both processes have it mapped; without a name nothing is left behind, whatever happens from here on.
            region.unlink()
        return {"seconds": seconds, "incarnation": found.incarnation, "address": found.peer_address}

    def publish(self, *, request: str, token: str, ttl: float) -> Answer:
        """Say that the request's blocks are complete."""
        begin = time.perf_counter()
        tokens = self.scenario.choices.tokens
        self.client.publish(request, self.side.blocks, tokens, bytes.fromhex(token), ttl=ttl)
        return {"seconds": time.perf_counter() - begin}

    def handshake(self, *, ticket: str, timeout: float) -> Answer:
        """Get ready to read from P."""
        begin = time.perf_counter()
        plan = self.client.handshake(ticket, timeout=timeout)
        return {"seconds": time.perf_counter() - begin, **_plan(plan)}

    def prepare(self, *, ticket: str) -> Answer:
        """Have the read validated, resolved and made."""
        begin = time.perf_counter()
        found = self.client.prepare(ticket, self.side.blocks, skip_tokens=self.scenario.choices.skip)
        self.transfer = found.id
        return {"seconds": time.perf_counter() - begin}

    def read(self, *, timeout: float) -> Answer:
        """Read."""
        begin = time.perf_counter()
        found = self.client.read_prepared(self.transfer, timeout=timeout)
        return {"seconds": time.perf_counter() - begin, **_transfer(found)}

    def verify(self, *, flip: str) -> Answer:
        """Compare every byte of this rank's memory with what it must be.

        :param flip: ``inside`` or ``outside``: first damage one byte that was read, or one that was not; to show that
            it would be found.
        """
        begin = time.perf_counter()
        if flip:
            self._flip(flip)
        choices, blocks = self.scenario.choices, self.side.blocks
        tokens = range(choices.skip, choices.tokens)
        before = [self._seed(i) for i in range(len(self.memory))]
        verdict = verify(self.memory, before, self.layout, blocks, tokens, self.scenario.granule)
        first = verdict.first
        return {
            **asdict(verdict),
            "least": verdict.least,
            "where": where(self.layout, first, blocks) if first else "",
            "pages": whole_pages(self.layout, blocks, tokens),
            "seconds": time.perf_counter() - begin,
        }

    def close(self) -> None:
        """Let go of everything."""
        self.client.close()
        self.memory.clear()
        for region in self.regions:
            region.close()
            region.unlink()

    def _seed(self, region: int) -> list[int]:
        return [self.scenario.choices.seed, ord(self.side.name), self.rank.tp_rank, region]

    def _flip(self, which: str) -> None:
        group, blocks = self.layout.groups[0], self.side.blocks[0]
        view = group.views[0]
        pooled = [i for i, pool in enumerate(self.layout.pools) if pool == self.layout.pools[0]]
        used = {int(block) for i in pooled for block in real(self.side.blocks[i])}
        free = [block for block in range(view.num_blocks) if block not in used]
        if which == "outside" and not free:
            raise KvxferError(Reason.FIELD_INVALID, "every block is in use: no byte outside to flip", field="flip")
        block = free[0] if which == "outside" else int(real(blocks)[-1])
        at = view.base + block * view.block_stride + view.components[0].offset
        self.memory[view.region][at] ^= 1


def _plan(plan: PlanInfo) -> Answer:
    return {
        "sources": [s.rank.tp_rank for s in plan.sources],
        "transports": sorted({s.transport for s in plan.sources}),
        "rows": sum(s.local_rows for s in plan.sources),
        "warnings": list(plan.warnings),
        "explanation": plan.explanation,
    }


def _transfer(transfer: TransferInfo) -> Answer:
    merged = [s.reported_descriptors for s in transfer.sources]
    return {
        "state": transfer.state.value,
        "descriptors": transfer.descriptors,
        "merged": sum(m or 0 for m in merged),
        "bytes": transfer.bytes,
        "reported": transfer.reported_bytes,
        "timings": {name: value for name, value in asdict(transfer.timings).items() if value is not None},
    }


def serve(commands: IO[str], answers: IO[str]) -> None:
    """Answer commands until there are no more.  The first one makes the engine."""
    engine: Engine | None = None
    try:
        for line in commands:
            values = json.loads(line)
            what = values.pop("do")
            try:
                if engine is None:
                    engine, answer = Engine(**values), Answer()
                else:
                    method: Callable[..., Answer] = getattr(engine, what)
                    answer = method(**values)
            except KvxferError as error:
                told = {"reason": error.reason.value, "message": error.message, "metadata": dict(error.metadata)}
                answer = {"error": told}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        if engine is not None:
            engine.close()


if __name__ == "__main__":
    tie(int(sys.argv[1]))
    # Only answers may go there, whatever a library prints.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(sys.stdin, answers)
