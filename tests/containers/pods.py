"""Pods: an engine and a sidecar with a common network namespace and a volume in memory, and nothing else in common.

As on Kubernetes a third container, which does nothing, holds the network: it outlives the sidecar.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.containers.containers import Containers
from tests.support.processes import until

AGENT = Path(__file__).with_name("agent.py")
#: Reasons that say that it is the peer's doing.
PEER_IS_AWAY = {"PEER_LOST", "PEER_UNREACHABLE", "DEADLINE_EXCEEDED"}
#: Reasons that say that the ticket is of before a restart.
PUBLISHED_BEFORE = {"STALE_INCARNATION", "LEASE_UNKNOWN", "LEASE_EXPIRED"}
#: What a pod's containers may not do.
LOCKED = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


@dataclass(frozen=True)
class Told:
    """What an engine answered."""

    answer: Any
    reason: str
    message: str
    seconds: float


class Agent:
    """The engine's container, which does as it is told."""

    def __init__(self, containers: Containers, name: str, role: str, image: str, *arguments: str) -> None:
        self.containers, self.name = containers, name
        command = [containers.command, "run", "--interactive", "--no-healthcheck", "--name", name, *LOCKED, *arguments]
        command += ["--volume", f"{AGENT}:/agent.py:ro", "--entrypoint", "python3", image, "/agent.py", role]
        self._process = subprocess.Popen(
            command, env=containers.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._receive(60)["answer"] == "ready"

    def __call__(self, do: str, *, within: float = 60, **values: object) -> Told:
        """Have it do something, and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self._process.stdin.flush()
        told = self._receive(within)
        error = told.get("error", {})
        return Told(told.get("answer"), error.get("reason", ""), error.get("message", ""), told["seconds"])

    def _receive(self, seconds: float) -> Any:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                said = self.containers.logs(self.name)
                raise AssertionError(f"engine {self.name} said nothing for {seconds} s:\n{said}")
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"engine {self.name} ended {self._process.wait(10)}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self.containers.remove(self.name)
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=30)


class Pod:
    """A pod on a network, known there by its role."""

    def __init__(
        self,
        containers: Containers,
        image: str,
        network: str,
        role: str,
        address: str,
        *,
        tls: Path | None = None,
        environment: Mapping[str, str] | None = None,
        shares: tuple[str, ...] = (),
    ) -> None:
        self.containers, self.image, self.role, self.network, self.address = containers, image, role, network, address
        self._undo = contextlib.ExitStack()
        settings = {
            "KVXFER_PEER_HOST": "0.0.0.0",
            "KVXFER_ADVERTISE": f"{role}:9000",
            "UCX_TCP_PORT_RANGE": "31000-31999",
            "UCX_LOG_LEVEL": "info",  # tells which transports a connection takes
            **({} if tls else {"KVXFER_INSECURE_PEER": "true"}),
            **(environment or {}),
        }
        mounts: list[str] = []
        if tls:
            settings |= {f"KVXFER_PEER_TLS_{part}": f"/tls/{file}" for part, file in TLS_FILES.items()}
            mounts = ["--volume", f"{tls / role}:/tls:ro"]
        try:
            self.volume = containers.volume(f"{role}-cache", 64)
            self._undo.callback(containers, "volume", "rm", "--force", self.volume)
            place = ("--network", network, "--network-alias", role, "--ip", address)
            self.holder = containers.start(role, *place, "--entrypoint", "sleep", image, "infinity")
            self._undo.callback(containers.remove, self.holder)
            common = (f"--network=container:{self.holder}", *shares, "--volume", f"{self.volume}:/run/kvxfer")
            variables = [part for pair in settings.items() for part in ("--env", "=".join(pair))]
            self.sidecar = containers.start(f"{role}-kvxfer", *LOCKED, *common, *mounts, *variables, image)
            self._undo.callback(containers.remove, self.sidecar)
            self.engine = Agent(containers, containers.name(f"{role}-engine"), role, image, *common)
            self._undo.callback(self.engine.close)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take it away."""
        self._undo.close()

    def healthy(self, service: str = "") -> bool:
        """What a probe inside the sidecar's container finds."""
        return self.containers("exec", self.sidecar, "kvxfer", "health", "--service", service, check=False).startswith(
            "SERVING"
        )

    def restart(self) -> None:
        """Restart the sidecar, alive or not; until its engine has registered again."""
        self.containers("restart", "--time", "15", self.sidecar)
        wait_healthy(self, "kvxfer.v1.KvTransfer")

    @contextlib.contextmanager
    def disconnected(self) -> Iterator[None]:
        """Without its network; in the end it has it back, at the same address."""
        # Podman can keep the hardware address as well, as a cable does that is pulled and put back.
        found = self.containers.inspect(self.holder)["NetworkSettings"]["Networks"][self.network]
        same = ("--mac-address", found["MacAddress"]) if self.containers.podman else ()
        self.containers("network", "disconnect", self.network, self.holder)
        try:
            yield
        finally:
            place = ("--alias", self.role, "--ip", self.address, *same)
            self.containers("network", "connect", *place, self.network, self.holder)

    def logs(self) -> str:
        """What the sidecar has written."""
        return self.containers.logs(self.sidecar)


TLS_FILES = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode pod."""

    prefill: Pod
    decode: Pod

    def ticket(self) -> dict[str, Any]:
        """A fresh request, published."""
        told = self.prefill.engine("ticket")
        assert not told.reason, told
        found: dict[str, Any] = told.answer
        return found

    def read(self, ticket: Mapping[str, Any] | None = None, timeout: float = 30) -> Told:
        """Read a request."""
        return self.decode.engine("read", timeout=timeout, within=timeout + 60, **(ticket or self.ticket()))

    def check(self) -> Told:
        """A read that must succeed, with every byte right."""
        told = self.read()
        assert not told.reason, f"{told}\n{self.prefill.logs()}\n{self.decode.logs()}"
        assert told.answer["right"]
        assert told.answer["bytes"] > 1_000_000
        return told

    def works_again(self, seconds: float = 30) -> None:
        """Requests published after a fault can be read, within a time; until then every failure is the peer's.

        A sidecar that has ended is started again, as whatever runs the containers would do.
        """
        ticket, failures = self.ticket(), []

        def read() -> bool:
            nonlocal ticket
            told = self.read(ticket, timeout=10)
            if not told.reason:
                assert told.answer["right"]
                return True
            failures.append(told)
            # An attempt that failed may still have hold of the local blocks.
            assert told.reason in {*PEER_IS_AWAY, *PUBLISHED_BEFORE, "LOCAL_BLOCK_BUSY"}, told
            if not self.prefill.containers.running(self.prefill.sidecar):
                failures.append(self.prefill.logs()[-2000:])
                self.prefill.containers("start", self.prefill.sidecar)
                wait_healthy(self.prefill, "kvxfer.v1.KvTransfer")
            if told.reason in PUBLISHED_BEFORE:
                ticket = self.ticket()
            return False

        try:
            until(read, seconds, "a read after the fault")
        finally:
            print("until it worked again:", *failures, sep="\n")


@contextlib.contextmanager
def pair(
    containers: Containers,
    image: str,
    network: str,
    subnet: str,
    tls: Path | None = None,
    shares: Mapping[str, tuple[str, ...]] | None = None,
) -> Iterator[Pair]:
    """Both pods."""
    with contextlib.ExitStack() as stack:
        pods = []
        for number, role in enumerate(("prefill", "decode"), 10):
            address = f"{subnet.rpartition('.')[0]}.{number}"
            options = (shares or {}).get(role, ())
            pods.append(Pod(containers, image, network, role, address, tls=tls, shares=options))
            stack.callback(pods[-1].close)
        yield Pair(*pods)


def wait_healthy(pod: Pod, service: str = "", seconds: float = 30) -> None:
    """Until a probe of a pod's sidecar succeeds."""
    until(lambda: pod.healthy(service), seconds, f"health of {pod.role}")
