"""An engine with a sidecar in its own process, driven from another one through a pipe."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.embedded import EmbeddedSidecar
from kvxfer.xfer.nixl import preload
from kvxfer_client import (
    CacheLayout,
    Client,
    Group,
    GroupKind,
    KvxferError,
    LocalRegion,
    Reason,
    Region,
    UnitRange,
    grouped,
    layouts,
    make_ticket,
    new_lease_token,
    ticket_to_string,
)

KEY = "model@1/bf16"
BLOCKS, TOKENS, BLOCK_TOKENS = 16, 40, 16

_KV = layouts.attention_block(UnitRange(0, 2, 2), head_dim=16, tokens=BLOCK_TOKENS, dtype="bfloat16")
_SSM = layouts.mamba2_block(UnitRange(0, 4, 4), 16, UnitRange(0, 2, 2), state=16, kernel=4)
LAYOUT = CacheLayout(
    (Region(_KV.size * BLOCKS), Region(_SSM.size * BLOCKS)),
    (
        Group("attention", GroupKind.ATTENTION, (_KV.view("0", 0, BLOCKS),), BLOCK_TOKENS),
        Group("mamba", GroupKind.STATE, (_SSM.view("1", 1, BLOCKS),)),
    ),
)
P_IDS, D_IDS = [[3, 7, 5], [2]], [[10, 11, 12], [4]]

Pages = npt.NDArray[np.uint8]


def filled(seed: int) -> list[Pages]:
    """What an engine's cache holds: an array of pages for each region."""
    noise = np.random.default_rng(seed)
    return [noise.integers(0, 256, (BLOCKS, r.size // BLOCKS), dtype=np.uint8) for r in LAYOUT.regions]


def after_read(p_seed: int, d_seed: int) -> list[Pages]:
    """What D's cache holds after it has read P's blocks into its own."""
    p, d = filled(p_seed), filled(d_seed)
    for source, target, theirs, mine in zip(p, d, P_IDS, D_IDS, strict=True):
        target[mine] = source[theirs]
    return d


class EmbeddingEngine:
    """What the other process does; its methods are called by name."""

    def __init__(self, engine_id: str, seed: int, settings: dict[str, Any]) -> None:
        self.sidecar = EmbeddedSidecar(**settings).start()
        self.client = Client(self.sidecar.engine_address, engine_id=engine_id)
        self.client.wait_ready()
        self.arrays = filled(seed)
        self.seen = [weakref.ref(a) for a in self.arrays]
        self.session = self.client.session(LAYOUT, [LocalRegion(a) for a in self.arrays], compatibility_key=KEY)

    def addresses(self) -> tuple[str, str]:
        return self.sidecar.engine_address, self.sidecar.peer_address

    def publish(self, ttl: float = 60.0) -> str:
        blocks, token = grouped(P_IDS, LAYOUT, TOKENS), new_lease_token()
        self.client.publish(token.hex(), blocks, TOKENS, token, ttl=ttl)
        ticket = make_ticket(
            engine_id=self.client.engine_id,
            compatibility_key=KEY,
            ranks=[self.session.wait_registered().ticket_rank],
            request_id=token.hex(),
            blocks=blocks,
            num_tokens=TOKENS,
            lease_token=token,
            ttl=ttl,
        )
        return ticket_to_string(ticket)

    def read(self, ticket: str) -> list[Pages]:
        """Read, and say what is in the whole cache then."""
        self.client.read(ticket, grouped(D_IDS, LAYOUT, TOKENS))
        return self.arrays

    def at_rest(self) -> bool:
        """Whether nothing writes its blocks any more."""
        return all(transfer.quiesced for transfer in self.client.list_transfers())

    def forget(self) -> list[bool]:
        """Let go of the arrays; which of them are still there."""
        self.arrays = []
        return self.there()

    def there(self) -> list[bool]:
        gc.collect()
        return [ref() is not None for ref in self.seen]

    def unregister(self) -> list[bool]:
        self.session.close()
        del self.session  # a session names its memory again when the sidecar was restarted
        return self.there()

    def fork(self) -> str:
        """What a forked child is told that starts a sidecar."""
        receive, send = os.pipe()
        if os.fork() == 0:
            try:
                EmbeddedSidecar().start()
                os.write(send, b"started")
            except KvxferError as error:
                self.sidecar.stop()  # not the child's
                os.write(send, str(error).encode())
            finally:
                os._exit(0)
        os.close(send)
        with open(receive, "rb") as told:
            said = told.read().decode()
        os.wait()
        return said

    def again(self) -> None:
        """Stop, and start once more."""
        self.client.close()
        self.sidecar.stop()
        self.sidecar.start()
        self.client = Client(self.sidecar.engine_address, engine_id=self.client.engine_id)
        self.client.wait_ready()
        self.session = self.client.session(LAYOUT, [LocalRegion(a) for a in self.arrays], compatibility_key=KEY)

    def signals(self) -> str:
        """Which signals this process handles."""
        with open("/proc/self/status") as status:
            return next(line.split()[1] for line in status if line.startswith("SigCgt"))

    def counts(self) -> tuple[int, int]:
        """Threads and descriptors of the process."""
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def stop(self) -> None:
        self.client.close()
        self.sidecar.stop()


def _main(pipe: Connection, engine_id: str, seed: int, settings: dict[str, Any]) -> None:
    preload()  # without torch: this is no real engine, and a process of our own
    engine = EmbeddingEngine(engine_id, seed, settings)
    pipe.send(None)
    while True:
        try:
            name, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        if name == "exit":
            sys.exit(args[0])
        try:
            pipe.send(getattr(engine, name)(*args))
        except Exception as error:  # noqa: BLE001  the other process raises it
            reason = error.reason if isinstance(error, KvxferError) else Reason.INTERNAL
            pipe.send(Failed(reason, traceback.format_exc()))


@dataclass
class Failed:
    """What a method has raised."""

    reason: Reason
    message: str


class Embedding:
    """A process with such an engine."""

    def __init__(self, engine_id: str, seed: int, **settings: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.seed = seed
        self.process = spawn.Process(target=_main, args=(theirs, engine_id, seed, settings), daemon=True)
        self.process.start()
        theirs.close()
        self._answer()

    def ask(self, name: str, *args: Any) -> Any:
        """Call a method of the engine; what it returns, or raises."""
        self._pipe.send((name, args))
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(60), "no answer"
        answer = self._pipe.recv()
        if isinstance(answer, Failed):
            raise KvxferError(answer.reason, answer.message)
        return answer

    def exit(self, code: int) -> int | None:
        """Have it end without stopping anything; the exit code."""
        self._pipe.send(("exit", (code,)))
        self.process.join(30)
        return self.process.exitcode

    def close(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def embedding(engine_id: str, seed: int, **settings: Any) -> Iterator[Embedding]:
    """One, for as long as a test needs it."""
    made = Embedding(engine_id, seed, **settings)
    try:
        yield made
    finally:
        made.close()
