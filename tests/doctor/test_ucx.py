"""UCX's variables, judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvxfer.doctor import ucx
from kvxfer.doctor.findings import Finding, Status
from kvxfer.doctor.probe import Pair, Survey
from kvxfer.xfer.environment import DEFAULTS

SURVEY = Survey("1.5.1", "1.23.0", ("cma",), ("cma",), {"eth0": "tcp", "lo": "tcp"}, ("cma", "self", "sm", "tcp"))
NOTHING = Pair()
RDMA = replace(SURVEY, transports=("cma", "rc_mlx5", "rc", "tcp"))


def bad(environment: dict[str, str], survey: Survey | None = SURVEY, pair: Pair | None = NOTHING) -> list[Finding]:
    return [f for f in ucx.judge(environment, survey, pair) if f.status is not Status.OK]


@pytest.mark.parametrize(
    "tls, transport, allowed",
    [
        ("tcp", "tcp", True),
        ("tcp,cma", "cma", True),
        ("tcp", "cma", False),
        ("all", "tcp", True),
        ("all", "cma", True),
        ("", "tcp", True),
        ("self", "tcp", False),
        ("sm,tcp", "cma", True),
        ("^tcp", "tcp", False),
        ("^tcp", "cma", True),
        ("^sm", "cma", False),
        ("^sm", "tcp", True),
        ("rc_mlx5", "rc", True),
        ("ib", "rc", True),
        ("^ib", "rc", False),
    ],
)
def test_what_ucx_tls_allows(tls: str, transport: str, allowed: bool) -> None:
    assert ucx.allows(tls, transport) is allowed


@pytest.mark.parametrize(
    "environment, survey, status, says",
    [
        ({"UCX_TLS": "self"}, SURVEY, Status.ERROR, "leaves no transport"),
        ({"UCX_TLS": "sm,self,cma"}, SURVEY, Status.ERROR, "leaves no transport"),
        ({"UCX_TLS": "rc"}, SURVEY, Status.ERROR, "leaves no transport"),
        ({"UCX_TLS": "rc"}, RDMA, Status.WARNING, "leaves CMA out"),
        ({"UCX_TLS": "^tcp"}, None, Status.OK, ""),
        ({"UCX_TLS": "tcp"}, SURVEY, Status.WARNING, "leaves CMA out"),
        ({"UCX_NET_DEVICES": "x0"}, SURVEY, Status.ERROR, "names x0, which UCX cannot use"),
        ({"UCX_NET_DEVICES": "eth0,x0"}, SURVEY, Status.WARNING, "names x0, which UCX cannot use"),
        ({"UCX_NET_DEVICES": "eth0"}, SURVEY, Status.OK, ""),
        ({"UCX_NET_DEVICES": "all"}, SURVEY, Status.OK, ""),
        ({"UCX_NET_DEVICES": "eth0"}, None, Status.UNKNOWN, "could not be asked"),
        ({"UCX_TCP_USER_TIMEOUT": "1m"}, SURVEY, Status.WARNING, "replaces kvxfer's default, 3s"),
        ({"UCX_TCP_TX_SEG_SIZE": "56k"}, SURVEY, Status.OK, ""),
        ({"UCX_TCP_PORT_RANGE": "31000-31009"}, SURVEY, Status.WARNING, "has 10 ports"),
        ({"UCX_TCP_PORT_RANGE": "31000-31999"}, SURVEY, Status.OK, ""),
        ({"PATH": "/bin"}, SURVEY, Status.OK, ""),
        (dict(DEFAULTS), SURVEY, Status.OK, ""),
    ],
)
def test_variables(environment: dict[str, str], survey: Survey | None, status: Status, says: str) -> None:
    found = bad(environment, survey)
    if status is Status.OK:
        assert found == []
        return
    assert [f.status for f in found] == [status]
    assert says in found[0].what


def test_without_a_survey_tls_is_judged_for_any_machine() -> None:
    assert bad({"UCX_TLS": "self"}, None)[0].status is Status.ERROR


def test_what_ucx_said() -> None:
    pair = Pair(
        unused={"UCX_TLSS": "UCX_TLS", "UCX_X": "", "UCX_TCP_KEEPIDLE": ""},
        unavailable=(("transport", "rcc"), ("network device", "x0")),
        problems=("Invalid value for RX_SEG_SIZE: 'abc'", "another"),
    )
    found = bad({"UCX_TLSS": "tcp", "UCX_X": "1"}, SURVEY, pair)
    assert [(f.status, f.what, f.todo) for f in found] == [
        (Status.WARNING, "UCX does not know UCX_TLSS", "Did you mean UCX_TLS?"),
        (Status.WARNING, "UCX does not know UCX_X", "Unset UCX_X."),
        (Status.WARNING, "UCX_TLS asks for rcc, which UCX does not have here", "Take rcc out of UCX_TLS."),
        (Status.ERROR, "UCX: Invalid value for RX_SEG_SIZE: 'abc'", "Correct the variable, or unset it."),
    ]
    assert bad({"UCX_A": "1"}, None, None)[0].status is Status.UNKNOWN
