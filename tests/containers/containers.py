"""Podman or Docker, by their common command line.

Podman gets a storage, networks and a configuration of its own, so that nothing of the user's is touched and nothing is
left behind; Docker's objects carry a label and a prefix, and are removed by them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.processes import until

#: runc and cgroupfs also work inside a container or a small machine, where crun and systemd's cgroups may not.
PODMAN_CONFIGURATION = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{run}/libpod"
volume_path = "{storage}/volumes"
[network]
network_backend = "netavark"
network_config_dir = "{storage}/networks"
"""
PODMAN_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{storage}/storage"
runroot = "{run}/storage"
"""


class Failed(Exception):
    """A command of the container engine failed; says what it said."""


class Containers:
    """A container engine.  Everything it makes is called ``prefix`` and something."""

    def __init__(self, command: str, environment: dict[str, str]) -> None:
        self.command = command
        self.prefix = f"kvxfer-test-{os.getpid()}"
        self.environment = {**os.environ, **environment}

    @property
    def podman(self) -> bool:
        return self.command == "podman"

    def __call__(self, *arguments: str | Path, timeout: float = 60, check: bool = True, errors: bool = False) -> str:
        """Run a command of the engine; what it wrote to standard output, and to standard error where ``errors``."""
        done = subprocess.run(
            [self.command, *map(str, arguments)],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if errors else subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout,
        )
        if check and done.returncode:
            shown = " ".join(map(str, arguments))
            raise Failed(f"{self.command} {shown} ended {done.returncode}: {done.stderr or ''}\n{done.stdout}")
        return done.stdout

    def name(self, suffix: str) -> str:
        """The name of an object of ours."""
        return f"{self.prefix}-{suffix}"

    def inspect(self, name: str) -> Any:
        """All that is known of a container or an image."""
        return json.loads(self("inspect", name))[0]

    def running(self, name: str) -> bool:
        """Whether a container runs."""
        return bool(self.inspect(name)["State"]["Running"])

    def logs(self, name: str) -> str:
        """What a container has written."""
        return self("logs", name, check=False, errors=True)

    def start(self, suffix: str, *arguments: str | Path) -> str:
        """Run a container in the background; its name."""
        name = self.name(suffix)
        # Podman has systemd run health checks, which is not everywhere; the tests ask for the health themselves.
        self("run", "--detach", "--no-healthcheck", "--name", name, *arguments)
        return name

    def remove(self, *names: str) -> None:
        """Kill and remove containers, also where they are gone already."""
        at_once = ("--time", "0") if self.podman else ()
        if names:
            self("rm", "--force", "--volumes", *at_once, *names, check=False)

    def volume(self, suffix: str, megabytes: int) -> str:
        """A volume in memory that only the image's user may use, as compose.yaml makes it."""
        name = self.name(suffix)
        options = ("type=tmpfs", "device=tmpfs", f"o=nr_blocks={megabytes * 256},uid=10001,gid=10001,mode=0700")
        self("volume", "create", *(part for option in options for part in ("--opt", option)), name)
        return name

    @contextlib.contextmanager
    def network(self, suffix: str, subnet: str) -> Iterator[str]:
        """A bridge with names, and no way out."""
        name = self.name(suffix)
        self("network", "create", "--internal", "--subnet", subnet, name)
        try:
            yield name
        finally:
            self("network", "rm", name)

    def leftovers(self) -> list[str]:
        """Names of ours that still exist."""
        listed = [
            *self("ps", "--all", "--format", "{{.Names}}").split(),
            *self("network", "ls", "--format", "{{.Name}}").split(),
            *self("volume", "ls", "--format", "{{.Name}}").split(),
        ]
        return [name for name in listed if self.prefix in name]


def docker_answers() -> bool:
    """Whether there is a Docker daemon."""
    if shutil.which("docker") is None:
        return False
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(["docker", "version"], capture_output=True, timeout=20).returncode == 0
    return False


@contextlib.contextmanager
def found() -> Iterator[Containers]:
    """Docker where its daemon answers, otherwise Podman."""
    if docker_answers():
        yield Containers("docker", {})
        return
    if shutil.which("podman") is None:
        raise Failed("neither a Docker daemon nor podman is here; `scripts/containers.sh engine` says what to install")
    with contextlib.ExitStack() as stack:
        places = (tempfile.TemporaryDirectory(prefix="kvxfer-podman-", dir=where) for where in ("/var/tmp", "/run"))
        storage, run = (Path(stack.enter_context(place)) for place in places)
        yield stack.enter_context(_podman(storage, run))


@contextlib.contextmanager
def _podman(storage: Path, run: Path) -> Iterator[Containers]:
    files = {"CONTAINERS_CONF": PODMAN_CONFIGURATION, "CONTAINERS_STORAGE_CONF": PODMAN_STORAGE}
    environment = {}
    for variable, text in files.items():
        path = storage / variable.lower()
        path.write_text(text.format(storage=storage, run=run))
        environment[variable] = str(path)
    socket = run / "podman.sock"
    environment["DOCKER_HOST"] = f"unix://{socket}"
    containers = Containers("podman", environment)
    try:
        with _service(containers, socket):
            yield containers
    finally:
        containers("rm", "--force", "--all", "--time", "0", check=False)
        containers("network", "prune", "--force", check=False)
        containers("volume", "rm", "--force", "--all", check=False)
        containers("rmi", "--force", "--all", check=False)
        # Mounts of the storage itself, which would keep its directory.
        containers("system", "reset", "--force", check=False)


@contextlib.contextmanager
def _service(containers: Containers, socket: Path) -> Iterator[None]:
    """Podman's answer to Docker's API, for Compose."""
    service = subprocess.Popen(
        ["podman", "system", "service", "--time", "0", f"unix://{socket}"],
        env=containers.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(socket.exists, 30, "podman's service")
        yield
    finally:
        service.terminate()
        service.wait(30)
