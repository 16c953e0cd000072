"""Real sidecar processes: start, watch, kill."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import psutil

from kvxfer.pb import peer_pb2_grpc, transfer_pb2, transfer_pb2_grpc

#: Ends with the process that started it, even where that is killed.
_MAIN = (
    "import ctypes, os, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != {parent}: raise SystemExit\n"
    "from kvxfer.cli import main; main()"
)

#: What a healthy sidecar never logs.
_BAD_SIGNS = ("Traceback", "unforeseen", "a transfer task failed", "never retrieved", "Segmentation", "Assertion")


def until(condition: Callable[[], object], seconds: float = 10.0, what: str = "the condition") -> None:
    """Poll a condition, with a deadline; after it once more, for whoever polls may have stood still meanwhile."""
    deadline = time.monotonic() + seconds
    late = False
    while not condition():
        if late:
            raise AssertionError(f"{what} did not come true within {seconds} s")
        time.sleep(0.005)
        late = time.monotonic() > deadline


@contextlib.contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory in memory, with a path short enough for sockets."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="kvxfer-test-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path)


class SidecarProcess:
    """``kvxfer serve`` in a process of its own.  Starts at once; :meth:`ready` waits for it.

    :param prefix: a command that becomes the one that follows it, such as ``ip netns exec NAME``.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.name = name
        self.socket = directory / f"{name}.sock"
        self.log_path = directory / f"{name}.log"
        self.settings = dict(settings or {})
        self._environment = dict(environment or {})
        self._prefix = tuple(prefix)
        self._channels: list[grpc.Channel] = []
        self.start()

    def start(self) -> None:
        """Start it, also again after it has ended."""
        flags = {"log_format": "json", "log_level": "info", **self.settings}
        command = [
            *self._prefix,
            *(sys.executable, "-c", _MAIN.format(parent=os.getpid()), "serve"),
            *("--engine-socket", str(self.socket), "--memory-directory", str(self.directory)),
            *(part for name, value in flags.items() for part in ("--set", f"{name}={value}")),
        ]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVXFER_", "UCX_", "NIXL_"))}
        self._terminated = False
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**inherited, **self._environment}, cwd=self.directory
            )

    def ready(self, seconds: float = 60.0) -> SidecarProcess:
        """Wait until it serves, and connect."""
        self._close_channels()
        channel = self._channel(f"unix:{self.socket}")
        deadline = time.monotonic() + seconds
        while True:
            waiting = grpc.channel_ready_future(channel)
            try:
                waiting.result(timeout=0.25)
                break
            except grpc.FutureTimeoutError:
                waiting.cancel()
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"sidecar {self.name} does not serve:\n{self.log()}") from None
        self.channel = channel
        self.stub = transfer_pb2_grpc.KvTransferStub(channel)
        return self

    def peer_channel(self, address: str) -> grpc.Channel:
        """A connection to a peer listener."""
        return self._channel(address)

    def peer_stub(self, address: str) -> peer_pb2_grpc.KvPeerStub:
        """The peer service at ``address``."""
        return peer_pb2_grpc.KvPeerStub(self.peer_channel(address))

    def steady_channel(self) -> grpc.Channel:
        """A channel to the engine listener that outlives restarts; its owner closes it."""
        channel = self._channel(f"unix:{self.socket}")
        self._channels.remove(channel)
        return channel

    def _channel(self, target: str) -> grpc.Channel:
        options = [
            ("grpc.max_receive_message_length", 1 << 28),
            ("grpc.max_send_message_length", 1 << 28),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 200),
            ("grpc.enable_http_proxy", 0),
        ]
        channel = grpc.insecure_channel(target, options=options)
        self._channels.append(channel)
        return channel

    def _close_channels(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    @property
    def pid(self) -> int:
        return self.process.pid

    def status(self) -> transfer_pb2.GetStatusResponse:
        """What GetStatus says."""
        return self.stub.GetStatus(transfer_pb2.GetStatusRequest(), timeout=10)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def cpu_seconds(self) -> float:
        """Processor time that the process has used."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def kill(self) -> None:
        """SIGKILL, at once."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> None:
        """Ask it to end, once: a second signal would mean at once."""
        if not self._terminated and self.process.poll() is None:
            self._terminated = True
            self.process.terminate()

    def stop(self, *, seconds: float = 30.0) -> None:
        """A clean end; anything else is a failure."""
        self._close_channels()
        self.terminate()
        if self.process.poll() is None:
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"sidecar {self.name} did not stop:\n{self.log()}") from None
        assert self.process.returncode == 0, f"sidecar {self.name} ended {self.process.returncode}:\n{self.log()}"
        signs = [line for line in self.log().splitlines() if any(sign in line for sign in _BAD_SIGNS)]
        assert not signs, f"sidecar {self.name} logged:\n" + "\n".join(signs)

    def discard(self) -> None:
        """End it in whatever way."""
        self._close_channels()
        if self.process.poll() is None:
            self.kill()


@contextlib.contextmanager
def sidecars(
    names: Sequence[str],
    settings: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[SidecarProcess]]:
    """Several, started at the same time.  At the end all that still live must end well."""
    with shared_directory() as directory, contextlib.ExitStack() as stack:
        started = []
        for name in names:
            started.append(SidecarProcess(directory, name, settings, environment))
            stack.callback(started[-1].discard)
        yield [one.ready() for one in started]
        for one in started:
            one.terminate()
        for one in started:
            if one.process.returncode in (None, 0):
                one.stop()
