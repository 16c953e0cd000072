"""Which transport UCX finds between two sidecars, by what their containers have in common.

Told by UCX itself: at its log level info it names the transports of every connection that it makes.
"""

from __future__ import annotations

import re

import pytest

from tests.containers.conftest import SUBNET
from tests.containers.containers import Containers
from tests.containers.pods import Pair, Pod, pair

#: One line for each connection's configuration: what remote memory is read with, in brackets.
LANES = re.compile(r"cfg#\d+ .*?rma\(([^)]*)\)")


def transports(pod: Pod) -> set[str]:
    """What a sidecar's connections read with, but those to itself."""
    lines = [line for line in pod.logs().splitlines() if "cfg#" in line and " self " not in line]
    return {lane.partition("/")[0] for line in lines for match in LANES.findall(line) for lane in match.split()}


def of(containers: Containers, *namespaces: str) -> dict[str, tuple[str, ...]]:
    """Both pods' sidecars in the same namespaces: those of the prefill pod's holder."""
    holder = containers.name("prefill")
    return {"decode": tuple(f"--{n}=container:{holder}" for n in namespaces)}


@pytest.mark.parametrize(
    "namespaces, expected",
    [((), "tcp")],
)
def test_transport(containers: Containers, image: str, network: str, namespaces: tuple[str, ...], expected: str) -> None:
    with pair(containers, image, network, SUBNET, shares=of(containers, *namespaces)) as pods:
        both: Pair = pods
        both.check()
        print(*[line for line in both.decode.logs().splitlines() if "UCX" in line][:40], sep="\n")
        assert transports(both.decode) == {expected}
