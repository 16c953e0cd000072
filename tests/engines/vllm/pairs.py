"""P and D: one model, two engines, what is handed over from the one to the other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from kvxfer.pb import transfer_pb2 as pb
from kvxfer_client import Client, TransferInfo, prefill_params
from tests.engines.vllm.models import Model, prompt
from tests.engines.vllm.processes import Answer, EngineProcess, Forks, free_port
from tests.engines.vllm.settings import Transfer, engine_args, kvxfer, nixl
from tests.support.processes import SidecarProcess, until

#: Every test asks these: one, two and three full steps and a token.
PROMPTS: Final = tuple(prompt(number, chunks) for number, chunks in enumerate((1, 2, 1, 3, 2, 1)))
#: Tokens of an answer.
TOKENS: Final = 12

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Workshop:
    """What engines are made from.

    :param directory: models and logs.
    """

    forks: Forks
    directory: Path

    def engine(self, name: str, model: Model, transfer: Transfer | None = None, **args: Any) -> EngineProcess:
        """An engine that is starting."""
        path = str(self.directory / model.name)
        told = engine_args(model, path, transfer, **args)
        return EngineProcess(self.forks, f"{model.name}-{name}", self.directory, told, transfer)

    def monolithic(self, model: Model, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Answer]:
        """The truth: answers of an engine that knows of no other, one request at a time."""
        with self.engine("monolithic", model) as engine:
            engine.ready()
            answers = [engine.generate(each, TOKENS) for each in prompts]
            engine.stop()
        return answers

    def with_nixl(self, model: Model) -> list[Answer]:
        """Answers of two engines with vLLM's own connector."""
        with (
            self.engine("nixl-p", model, nixl(free_port())) as p,
            self.engine("nixl-d", model, nixl(free_port())) as d,
        ):
            p.ready()
            d.ready()
            answers = [d.generate(each, TOKENS, hand_over(p, each)) for each in PROMPTS]
            d.stop()
            p.stop()
        return answers


def hand_over(p: EngineProcess, prompt: Sequence[int]) -> dict[str, Any]:
    """Have P compute a prompt; what it answers for D."""
    params = p.generate(prompt, 1, prefill_params()).params
    assert params is not None and params["do_remote_prefill"], f"{p.name} hands nothing over: {params}\n{p.log()}"
    return params


@dataclass
class Side:
    """An engine and its sidecar."""

    engine: EngineProcess
    sidecar: SidecarProcess
    engine_id: str

    @cached_property
    def client(self) -> Client:
        """The test's own connection to the sidecar, as this engine."""
        return Client(str(self.sidecar.socket), engine_id=self.engine_id)

    def transfers(self) -> list[TransferInfo]:
        """Newest first."""
        return list(self.client.list_transfers())

    def assert_nothing_left(self) -> None:
        """No request, block, lease or transfer is taken by what has ended."""

        def left() -> list[str]:
            counts, start = self.engine.counts(), self.engine.at_start
            held = [lease.request_id for lease in self.client.list_leases() if not lease.state.ended]
            open_ = [t.id for t in self.transfers() if not (t.state.ended and t.quiesced)]
            found = [f"{name}: {counts[name]} != {start[name]}" for name in start if counts[name] != start[name]]
            return [*found, *held, *open_]

        until(lambda: not left(), 30, f"that nothing of {self.engine_id} is left ({left()})")


@dataclass
class Pair:
    """P and D of one model, each with a sidecar."""

    model: Model
    p: Side
    d: Side
    workshop: Workshop = field(repr=False)

    @property
    def wanted(self) -> dict[str, Any]:
        """What a router tells P."""
        return prefill_params()

    def hand_over(self, prompt: Sequence[int]) -> dict[str, Any]:
        return hand_over(self.p.engine, prompt)

    def read(self, prompt: Sequence[int], params: dict[str, Any]) -> Answer:
        """What D says to a prompt that P has computed."""
        return self.d.engine.generate(prompt, TOKENS, params)

    def transfer_of(self, params: dict[str, Any]) -> TransferInfo | None:
        """The read of what P has handed over, as D's sidecar tells it; None where it knows of none."""
        return next((t for t in self.d.transfers() if t.request_id == params["remote_request_id"]), None)


@contextlib.contextmanager
def side(
    workshop: Workshop,
    name: str,
    model: Model,
    sidecar: SidecarProcess,
    extra: dict[str, Any],
    *,
    leave_none: bool = True,
    **args: Any,
) -> Iterator[Side]:
    """An engine that is starting, on a sidecar.

    :param leave_none: wait in the end until the sidecar has nothing of it: what nobody has read is held for a while.
    """
    engine_id = f"{model.name}-{name}-{next(_numbers)}"
    transfer = kvxfer(sidecar.socket, engine_id, **extra)
    with workshop.engine(name, model, transfer, **args) as engine:
        found = Side(engine, sidecar, engine_id)
        yield found
        if engine.alive:
            engine.stop()
            if leave_none:
                gone(sidecar, engine_id)
        found.client.close()


@contextlib.contextmanager
def pair(
    workshop: Workshop,
    model: Model,
    sidecars: Sequence[SidecarProcess],
    *,
    p: dict[str, Any] | None = None,
    d: dict[str, Any] | None = None,
    **args: Any,
) -> Iterator[Pair]:
    """Engines that are up.

    :param p: more settings of P's connector; ``d``: of D's.
    :param args: more arguments of both, as for :func:`side`.
    """
    with (
        side(workshop, "p", model, sidecars[0], p or {}, **args) as left,
        side(workshop, "d", model, sidecars[1], d or {}, **args) as right,
    ):
        left.engine.ready()
        right.engine.ready()
        yield Pair(model, left, right, workshop)


def registered(sidecar: SidecarProcess) -> dict[str, pb.RegistrationStatus]:
    """What a sidecar has, by engine."""
    return {each.engine_id: each for each in sidecar.status().registrations}


def gone(sidecar: SidecarProcess, engine_id: str) -> None:
    """Wait until a sidecar has nothing of an engine that has ended."""
    if sidecar.process.poll() is None:
        until(lambda: engine_id not in registered(sidecar), 90, f"the end of {engine_id}'s registration")
