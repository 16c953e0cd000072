"""Interfaces, judged and looked at."""

from __future__ import annotations

import socket

import pytest

from kvxfer.doctor import network
from kvxfer.doctor.findings import Status
from kvxfer.doctor.network import Interface
from kvxfer.doctor.probe import Survey

LO = Interface("lo", True, True, True, ("127.0.0.1",))
ETH = Interface("eth0", True, True, False, ("10.0.0.2",))


def survey(*devices: str) -> Survey:
    return Survey("1.5.1", "1.23.0", devices=dict.fromkeys(devices, "tcp"))


@pytest.mark.parametrize(
    "interface, why",
    [
        (Interface("x", False, False, False, ()), "it is down"),
        (Interface("x", True, False, False, ("10.0.0.3",)), "it has no link"),
        (Interface("x", True, True, False, ()), "it has no address"),
        (Interface("x", True, True, False, ("fe80::1",)), "it has link-local addresses only"),
        (Interface("x", True, True, False, ("10.0.0.3",)), "UCX does not say why"),
    ],
)
def test_an_interface_that_ucx_cannot_use(interface: Interface, why: str) -> None:
    found = network.judge([LO, ETH, interface], survey("eth0", "lo"), {"UCX_NET_DEVICES": "eth0,x:1"})
    assert [f.status for f in found] == [Status.OK, Status.WARNING]
    assert found[1].what == f"UCX cannot use the interface x: {why}"
    # One that is not asked for is nobody's concern; all such are told of together.
    other = Interface("y", False, False, False, ())
    rest = network.judge([LO, ETH, interface, other], survey("eth0", "lo"), {})
    assert [f.status for f in rest] == [Status.OK, Status.OK]
    assert rest[1].what.endswith(f": x ({why}); y (it is down)")
    # Where none can be used there is a warning, and why.
    none = network.judge([LO, interface], survey("lo"), {})
    assert [f.status for f in none] == [Status.OK, Status.OK, Status.WARNING]


def test_loopback_alone() -> None:
    found = network.judge([LO], survey("lo"), {})
    assert [f.status for f in found] == [Status.OK, Status.WARNING]
    assert "loopback alone" in found[1].what
    assert "no network at all" in network.judge([], survey(), {})[1].what


@pytest.mark.parametrize("nobody", [None, Survey(failure="no NIXL")])
def test_nobody_to_ask(nobody: Survey | None) -> None:
    (found,) = network.judge([LO, ETH], nobody, {})
    assert found.status is Status.UNKNOWN
    assert "lo (up, 127.0.0.1); eth0 (up, 10.0.0.2)" in found.what


def test_the_interfaces_of_this_machine() -> None:
    found = {i.name: i for i in network.look()}
    assert set(found) == {name for _, name in socket.if_nameindex()}
    assert found["lo"].loopback
    assert "127.0.0.1" in found["lo"].addresses
