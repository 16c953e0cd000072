"""Interfaces: which there are, and which UCX can use."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer.doctor.findings import Finding, ok, unknown, warning
from kvxfer.doctor.probe import Survey

CHECK: Final = "network"
_SIOCGIFFLAGS: Final = 0x8913
_SIOCGIFADDR: Final = 0x8915
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface.

    :param up: whether it was switched on; ``carrier``: whether a link is there.
    :param addresses: its first IPv4 address, and every IPv6 address.
    """

    name: str
    up: bool
    carrier: bool
    loopback: bool
    addresses: tuple[str, ...]


def look() -> list[Interface]:
    """Ask the kernel."""
    found = []
    for _, name in socket.if_nameindex():
        flags = _flags(name)
        addresses = (*_ipv4(name), *_ipv6(name))
        found.append(Interface(name, bool(flags & _UP), bool(flags & _RUNNING), bool(flags & _LOOPBACK), addresses))
    return found


def _ask(name: str, request: int) -> bytes | None:
    """An ``ifreq`` as the kernel fills it in; None where it has no answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return fcntl.ioctl(any_socket, request, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None


def _flags(name: str) -> int:
    answer = _ask(name, _SIOCGIFFLAGS)
    return int(struct.unpack_from("H", answer, 16)[0]) if answer else 0


def _ipv4(name: str) -> list[str]:
    answer = _ask(name, _SIOCGIFADDR)
    return [socket.inet_ntoa(answer[20:24])] if answer else []


def _ipv6(name: str) -> list[str]:
    try:
        lines = Path("/proc/self/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    fields = (line.split() for line in lines)
    return [str(ipaddress.IPv6Address(bytes.fromhex(f[0]))) for f in fields if f[5] == name]


def why_not(interface: Interface) -> str:
    """Why UCX cannot use an interface, as far as that can be seen."""
    if not interface.up:
        return "it is down"
    if not interface.carrier:
        return "it has no link"
    if not any(not ipaddress.ip_address(address).is_link_local for address in interface.addresses):
        return "it has no address" if not interface.addresses else "it has link-local addresses only"
    return "UCX does not say why"


def judge(interfaces: Sequence[Interface], survey: Survey | None, environment: Mapping[str, str]) -> list[Finding]:
    """:param survey: what UCX can use here; None where it could not be asked.

    :param environment: of it, UCX_NET_DEVICES says which are meant to be used.
    """
    listed = "; ".join(_told(interface) for interface in interfaces) or "none"
    if survey is None or survey.devices is None:
        return [unknown(CHECK, f"interfaces: {listed}; which of them UCX can use: it could not be asked")]
    usable = survey.devices
    wanted = {name.strip().partition(":")[0] for name in environment.get("UCX_NET_DEVICES", "").split(",")}
    findings = [ok(CHECK, f"interfaces: {listed}; devices that UCX can use: {', '.join(usable) or 'none'}")]
    for interface in interfaces:
        if interface.name in wanted and interface.name not in usable:
            findings.append(
                warning(
                    CHECK,
                    f"UCX cannot use the interface {interface.name}: {why_not(interface)}",
                    "No byte of a cache goes over it, and no peer that is behind it alone can be read from.",
                    f"Give it a link and an address (ip link set {interface.name} up; ip addr add ... dev "
                    f"{interface.name}), or leave it out on purpose: UCX_NET_DEVICES={','.join(usable) or 'eth0'}",
                )
            )
    # What is not asked for is nobody's concern as long as there is another way.
    if aside := [i for i in interfaces if i.name not in usable and i.name not in wanted]:
        told = "; ".join(f"{i.name} ({why_not(i)})" for i in aside)
        findings.append(ok(CHECK, f"interfaces that UCX leaves alone, and UCX_NET_DEVICES does not name: {told}"))
    loops = {interface.name for interface in interfaces if interface.loopback}
    if all(name in loops for name in usable):
        findings.append(
            warning(
                CHECK,
                f"UCX can use {'loopback alone' if usable else 'no network at all'}",
                "No sidecar on another machine, or in another pod, can read from here or be read from.",
                "Check the network of this machine or container (docker run --network), and UCX_NET_DEVICES.",
            )
        )
    return findings


def _told(interface: Interface) -> str:
    state = "up" if interface.up and interface.carrier else "no link" if interface.up else "down"
    return f"{interface.name} ({', '.join((state, *interface.addresses))})"
