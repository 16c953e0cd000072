"""Networks to break: namespaces joined by a router, whose faults are made with ``ip`` and ``tc`` alone.

Every host has a namespace with one interface (eth0) that leads to the router.  What happens there is a fault of the
network: hosts see packets that do not come, and nothing else.  Packets are dropped by routing rules (``blackhole``),
lost at random by a classic BPF filter, slowed down by a token bucket; a link goes down as an interface does.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

_numbers = itertools.count()

#: Classic BPF: let a packet pass (-1) if a random number is above a bound, else drop it (2 is TC_ACT_SHOT).
_LOSS = "4,32 0 0 4294963256,37 1 0 {bound},6 0 0 2,6 0 0 4294967295"


def run(*command: str) -> str:
    """A command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    namespace: str
    address: str
    port: str
    """The router's interface that leads to it."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """Runs a command there."""
        return ("ip", "netns", "exec", self.namespace)


class Network:
    """Hosts around a router.  :meth:`close` removes everything, also after a failure in the middle."""

    def __init__(self, names: Sequence[str]) -> None:
        self._undo = ExitStack()
        self._tag = f"kvx{os.getpid()}n{next(_numbers)}"
        self._router = f"{self._tag}r"
        self.hosts: dict[str, Host] = {}
        try:
            self._namespace(self._router)
            run("ip", "netns", "exec", self._router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            for number, name in enumerate(names, 1):
                self._host(name, number)
        except BaseException:
            self.close()
            raise

    def _namespace(self, name: str) -> None:
        run("ip", "netns", "add", name)
        self._undo.callback(run, "ip", "netns", "del", name)  # its interfaces go with it
        run("ip", "-n", name, "link", "set", "lo", "up")

    def _host(self, name: str, number: int) -> None:
        host = Host(name, f"{self._tag}{name}", f"10.213.{number}.2", f"v{number}")
        router = f"10.213.{number}.1"
        self._namespace(host.namespace)
        command = ("link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        run("ip", "-n", self._router, *command)
        for namespace, device, address in ((host.namespace, "eth0", host.address), (self._router, host.port, router)):
            run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", namespace, "link", "set", device, "up")
        run("ip", "-n", host.namespace, "route", "add", "default", "via", router)
        self.hosts[name] = host

    def close(self) -> None:
        self._undo.close()

    # -- faults; each lasts as long as its context ---------------------------------------------------------------------

    @contextmanager
    def link_down(self, name: str) -> Iterator[None]:
        """The cable of a host is pulled: on the router's side, so that the host's own interface keeps its routes."""
        device = self.hosts[name].port
        run("ip", "-n", self._router, "link", "set", device, "down")
        try:
            yield
        finally:
            run("ip", "-n", self._router, "link", "set", device, "up")

    @contextmanager
    def drop(self, source: str, target: str, *match: str) -> Iterator[None]:
        """Packets from one host to another vanish; those that ``match`` fits (``dport 1-2``, as for ``ip rule``)."""
        ends = ("from", self.hosts[source].address, "to", self.hosts[target].address)
        rule = (*ends, *(("ipproto", "tcp", *match) if match else ()), "blackhole")
        run("ip", "-n", self._router, "rule", "add", *rule)
        try:
            yield
        finally:
            run("ip", "-n", self._router, "rule", "del", *rule)

    @contextmanager
    def cut(self, one: str, other: str, port_range: str = "") -> Iterator[None]:
        """Nothing passes between two hosts; or nothing from and to ``one``'s ports in a range."""
        to, of = (("dport", port_range), ("sport", port_range)) if port_range else ((), ())
        with self.drop(other, one, *to), self.drop(one, other, *of):
            yield

    @contextmanager
    def loss(self, name: str, share: float) -> Iterator[None]:
        """Packets to a host are lost at random."""
        device, bound = self.hosts[name].port, int(share * 0xFFFFFFFF)
        tc = ("ip", "netns", "exec", self._router, "tc")
        run(*tc, "qdisc", "add", "dev", device, "clsact")
        try:
            run(*tc, "filter", "add", "dev", device, "egress", "bpf", "da", "bytecode", _LOSS.format(bound=bound))
            yield
        finally:
            run(*tc, "qdisc", "del", "dev", device, "clsact")

    @contextmanager
    def slow(self, name: str, rate: str) -> Iterator[None]:
        """What a host sends takes its time."""
        tc = (*self.hosts[name].prefix, "tc", "qdisc")
        run(*tc, "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
        try:
            yield
        finally:
            run(*tc, "del", "dev", "eth0", "root")


def why_not() -> str:
    """Why no network can be made and broken here; empty where one can.  Tries it."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} of iproute2 not installed"
    try:
        network = Network(["a", "b"])
    except OSError as error:
        return f"no network namespaces here: {error}"
    faults: list[Callable[[], AbstractContextManager[None]]] = [
        lambda: network.link_down("a"),
        lambda: network.cut("a", "b", "1000-2000"),
        lambda: network.loss("a", 0.05),
        lambda: network.slow("a", "100mbit"),
    ]
    try:
        for fault in faults:
            with fault():
                pass
    except OSError as error:
        return f"this kernel cannot break a network: {error}"
    finally:
        network.close()
    return ""
