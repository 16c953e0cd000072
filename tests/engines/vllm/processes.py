"""Engines in processes of their own, forked from one that has imported vLLM already."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from tests.engines.vllm import child
from tests.engines.vllm.models import MODELS
from tests.engines.vllm.settings import ENVIRONMENT, Transfer

_numbers = itertools.count()

#: What an engine or a server would import at its start.
PRELOAD = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    *(f"vllm.model_executor.models.{name}" for name in MODELS),
    "transformers",
    "kvxfer.engines.vllm.connector",
    child.__name__,
)

#: Seconds.  An engine starts in four on an idle machine.
START = 120.0
#: A request is answered in less than one.
ANSWER = 60.0


@dataclass(frozen=True)
class Answer:
    """What an engine said.

    :param logprobs: of each token: the most likely ones and their logprobs, as the engine computed them.
    :param params: ``kv_transfer_params``, which P hands out for D.
    """

    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    finish_reason: str
    params: dict[str, Any] | None

    @property
    def said(self) -> tuple[Any, ...]:
        """What must be equal, to the last bit."""
        return self.finish_reason, self.tokens, self.logprobs


def free_port() -> int:
    """A TCP port of this host that nobody uses at the moment.

    It is bound only seconds later: none of those that the kernel hands out to whoever asks for any.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Forks:
    """Where engines are forked from.  There is one, for it takes a while to get ready; it begins at once."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))
        # Whoever starts a process also looks which ones have ended, and of each that can be learnt only once.
        self._lock = threading.Lock()
        with _environment(ENVIRONMENT):
            forkserver.ensure_running()

    def pipe(self) -> tuple[Any, Any]:
        return self._context.Pipe()

    def start(self, target: Any, *args: Any, daemon: bool = True) -> Any:
        """A process that calls ``target``.

        :param daemon: it has no children.
        """
        process = self._context.Process(target=target, args=args, daemon=daemon)
        with self._lock:
            process.start()
        return process

    def ended(self, process: Any, seconds: float = 0) -> int | None:
        """Wait so long for a process's end at most; its exit code, ``None`` where it goes on."""
        connection.wait([process.sentinel], seconds)
        with self._lock:
            code: int | None = process.exitcode
        return code

    def make_models(self, directory: Path) -> None:
        """All the models."""
        log = directory / "models.log"
        log.touch()
        process = self.start(child.write_models, str(log), str(directory))
        if (code := self.ended(process, START)) != 0:
            if code is None:
                process.kill()
            raise AssertionError(f"the models were not made ({code}):\n{log.read_text()}")


class EngineProcess:
    """One vLLM engine, in process, so that tests can look at its cache.  Starts at once; :meth:`ready` waits for it.

    A context manager: ends it, in whatever way.
    """

    def __init__(
        self, forks: Forks, name: str, directory: Path, args: dict[str, Any], transfer: Transfer | None
    ) -> None:
        self.name = f"{name}-{next(_numbers)}"
        self.log_path = directory / f"{self.name}.log"
        self.log_path.touch()
        self._forks = forks
        self._pipe, theirs = forks.pipe()
        variables = transfer.environment if transfer else {}
        self.process = forks.start(child.run, theirs, str(self.log_path), variables, args)
        theirs.close()
        self.at_start: dict[str, int] = {}

    def ready(self) -> EngineProcess:
        """Wait until it is up."""
        self.at_start = self._receive(START)
        return self

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        *,
        seconds: float = ANSWER,
    ) -> Answer:
        """One request, awaited."""
        return self.generate_all([(prompt, max_tokens, params)], seconds=seconds)[0]

    def generate_all(
        self,
        requests: Sequence[tuple[Sequence[int], int, dict[str, Any] | None]],
        *,
        seconds: float = ANSWER,
    ) -> list[Answer]:
        """Several at once.  What is handed over goes through JSON, as it does between servers."""
        told = [
            {
                "request_id": f"{self.name}-request-{next(_numbers)}",
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "kv_transfer_params": json.loads(json.dumps(params)),
            }
            for prompt, max_tokens, params in requests
        ]
        answers = self.call("generate", ANSWER + seconds, requests=told, seconds=seconds)
        return [Answer(a["tokens"], a["logprobs"], a["finish_reason"], a["kv_transfer_params"]) for a in answers]

    def zero(self, component: str, blocks: Sequence[Sequence[int]]) -> int:
        """Zero a component of its cache; bytes that were not."""
        return int(self.call("zero", component=component, blocks=[list(group) for group in blocks]))

    def counts(self) -> dict[str, int]:
        """``requests`` that its scheduler knows, ``free_blocks``."""
        counts: dict[str, int] = self.call("counts")
        return counts

    def call(self, command: str, timeout: float = ANSWER, /, **arguments: Any) -> Any:
        """Have one of the methods of :class:`tests.engines.vllm.child.InProcess` called."""
        self._pipe.send((command, arguments))
        return self._receive(timeout)

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise AssertionError(f"engine {self.name} says nothing for {seconds} s:\n{self.log()}")
            problem, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            code = self._forks.ended(self.process, 10)
            raise AssertionError(f"engine {self.name} has ended ({code}):\n{self.log()}") from None
        if problem:
            raise AssertionError(f"engine {self.name}: {problem}")
        return value

    def log(self) -> str:
        """The end of what it has written."""
        return self.log_path.read_text(errors="replace")[-6000:]

    def log_size(self) -> int:
        """How long its log is."""
        return self.log_path.stat().st_size

    def log_since(self, size: int) -> str:
        """What it has written since."""
        return self.log_path.read_bytes()[size:].decode(errors="replace")

    @property
    def alive(self) -> bool:
        return self._forks.ended(self.process) is None

    def kill(self) -> None:
        """SIGKILL, at once."""
        os.kill(self.process.pid, signal.SIGKILL)
        self._forks.ended(self.process, 10)

    def stop(self) -> None:
        """A clean end; anything else is a failure."""
        self._pipe.send(("stop", {}))
        self._receive(ANSWER)
        code = self._forks.ended(self.process, ANSWER)
        assert code == 0, f"engine {self.name} ended {code}:\n{self.log()}"

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive:
            self.kill()
        self._pipe.close()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    for name in before:
        if name.startswith(("KVXFER_", "NIXL_", "UCX_", "VLLM_")):
            del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
