"""``kvxfer demo`` as a user runs it: real processes, real NIXL."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.places import abandoned, shared_places
from tests.support.processes import until

pytestmark = pytest.mark.nixl

KVXFER = (sys.executable, "-c", "from kvxfer.cli import main; main()", "demo")
# Models are scaled down to a few MiB, so that the tests are quick.
SMALL = ("--memory-mib", "16", "--timeout", "60")
DEADLINE = 90.0


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary directory of a demo, which must be empty at its end."""
    path = tmp_path_factory.mktemp("d")
    before = shared_places()
    yield path
    assert list(path.iterdir()) == []
    until(lambda: not abandoned(before))  # another test may be about to remove what a demo that was killed has left


def environment(place: Path) -> dict[str, str]:
    # Settings of the user's own sidecar must not reach the demo's.
    return {**os.environ, "TMPDIR": str(place), "KVXFER_PEER_PORT": "1", "KVXFER_LOG_LEVEL": "nonsense"}


def demo(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*KVXFER, *SMALL, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=DEADLINE, env=environment(place), cwd=place
    )


def told(place: Path, *arguments: str) -> dict[str, Any]:
    done = demo(place, "--json", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"] is True
    assert found["problems"] == []
    for rank in found["ranks"]:
        assert rank["bytes"] == rank["least"] == rank["reported"] <= rank["pages"]
        assert (rank["missing"], rank["touched"]) == (0, 0)
    return found


def test_default(place: Path) -> None:
    found = told(place, "--memory-mib", "1024")
    assert found["scaled"] == ""
    assert (found["choices"]["p_tp"], found["choices"]["d_tp"]) == (2, 4)
    assert [rank["sources"] for rank in found["ranks"]] == [[0], [0], [1], [1]]
    assert [group["layers"] for group in found["groups"]] == [6, 6, 6, 5, 6]
    assert sum(rank["verified"] for rank in found["ranks"]) > 0.9 * found["d_memory"]


@pytest.mark.parametrize(
    "arguments, sources",
    [
        (("--p-tp", "2", "--d-tp", "1", "--skip", "48", "--tokens", "1000"), [[0, 1]]),
        (("--p-tp", "1", "--d-tp", "2", "--model", "qwen3-next-80b-a3b", "--p-block-tokens", "48"), [[0], [0]]),
        (("--p-tp", "2", "--d-tp", "1", "--model", "jamba-mini", "--tokens", "333"), [[0, 1]]),
        (("--p-tp", "2", "--d-tp", "1", "--model", "deepseek-v3", "--tokens", "100"), [[0]]),
    ],
)
def test_others(place: Path, arguments: tuple[str, ...], sources: list[list[int]]) -> None:
    assert [rank["sources"] for rank in told(place, *arguments)["ranks"]] == sources


@pytest.mark.parametrize("where, count", [("inside", "missing"), ("outside", "touched")])
def test_a_wrong_byte_is_found(place: Path, where: str, count: str) -> None:
    done = demo(place, "--json", "--flip", where, "--p-tp", "1", "--d-tp", "1")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert found["ranks"][0][count] == 1
    assert found["ranks"][0]["missing"] + found["ranks"][0]["touched"] == 1
    assert "region 0, byte" in found["problems"][0]


def test_report_for_people(place: Path) -> None:
    done = demo(place, "--p-tp", "1", "--d-tp", "1", "--tokens", "100")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "scaled down:" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("every byte verified: ")
    assert "handshake: 1 rank" in done.stderr


# -- processes that are ended ------------------------------------------------------------------------------------------


class Running:
    """A demo under way."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*KVXFER, *SMALL, "--p-tp", "1", "--d-tp", "1", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(place),
            cwd=place,
        )

    def children(self) -> list[psutil.Process]:
        """The child processes, in the order in which they were started, once all are up."""
        assert self.process.stderr is not None
        while not (line := self.process.stderr.readline()).startswith("register"):
            assert line, "the demo has ended"
        found = psutil.Process(self.process.pid).children()
        assert len(found) == 4
        return sorted(found, key=lambda child: (child.create_time(), child.pid))

    def end(self) -> tuple[int, str, str]:
        out, errors = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, errors


@pytest.fixture
def running(place: Path) -> Iterator[Running]:
    started = Running(place)
    yield started
    started.process.kill()
    started.process.communicate()


def gone(processes: list[psutil.Process]) -> bool:
    return psutil.wait_procs(processes, timeout=10)[1] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(running: Running, number: signal.Signals) -> None:
    children = running.children()
    running.process.send_signal(number)
    status, out, errors = running.end()
    assert (status, out) == (130, "")
    assert errors.splitlines()[-1] == "kvxfer: interrupted; every process has been ended"
    assert gone(children)


@pytest.mark.parametrize("which, name", [(0, "sidecar P0"), (3, "engine D0")])
def test_a_dead_child_is_named(running: Running, which: int, name: str) -> None:
    children = running.children()
    children[which].kill()
    status, _, errors = running.end()
    assert status == 1
    assert f"{name} ended by signal 9; the end of its log:" in errors
    assert gone(children)


def test_children_die_with_the_demo(tmp_path: Path) -> None:
    before = shared_places()
    running = Running(tmp_path)
    children = running.children()
    running.process.kill()
    running.end()
    assert gone(children)
    # Nobody is left to remove the directory; the next demo would, after a while.
    for left in abandoned(before):
        shutil.rmtree(left)


def ports_in_a_row(count: int) -> int:
    """The first of some free TCP ports, below those that the kernel gives to others."""
    for first in range(21_000, 30_000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError("no port is free")


def test_keep_leaves_everything_running(place: Path) -> None:
    running = Running(place, "--keep", "--json", "--http-port", str(ports_in_a_row(2)))
    assert running.process.stdin is not None and running.process.stdout is not None
    found = json.loads(running.process.stdout.readline())
    hand = found["by_hand"]
    assert sorted(hand["sockets"]) == ["D0", "P0"]
    assert Path(hand["sockets"]["D0"]).parent == Path(hand["directory"])
    assert any(command.startswith("kvxfer inspect ") for command in hand["commands"])
    assert hand["ticket"]["engine_id"] == "demo-P"
    for address in hand["metrics"].values():
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert b"kvxfer_ready 1" in answer.read()
    assert sorted(hand["metrics"]) == ["D0", "P0"]
    inspect = shlex.join(KVXFER[:-1])
    grpcurl = Path(sys.executable).with_name("grpcurl")
    for command in hand["commands"]:
        pasted = command.replace("grpcurl", str(grpcurl), 1).replace("kvxfer inspect", f"{inspect} inspect", 1)
        done = subprocess.run(
            ["bash", "-c", pasted], capture_output=True, text=True, check=False, timeout=DEADLINE, cwd=place
        )
        assert done.returncode == 0, command + done.stderr
    last = json.loads(done.stdout)["transfer"]
    assert last["state"] == "TRANSFER_STATE_DONE"
    assert int(last["bytes"]) == found["ranks"][0]["bytes"]
    running.process.stdin.write("\n")
    running.process.stdin.flush()
    status, _, errors = running.end()
    assert status == 0, errors
