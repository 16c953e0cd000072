"""Which transport UCX finds between two sidecars, by what their containers have in common.

Told by UCX itself: at its log level info it names the transports of every connection that it makes.
"""

from __future__ import annotations

import re

import pytest

from tests.containers.conftest import SUBNET
from tests.containers.containers import Containers
from tests.containers.pods import Pod, pair

#: One line for each configuration of a connection to somebody else, with the transports that it has.
CONNECTION = re.compile(r"(?:inter|intra)-node cfg#\d+ (.*)")


def transports(pod: Pod) -> set[str]:
    """What a sidecar's connections to others may use."""
    return {name for line in CONNECTION.findall(pod.logs()) for name in re.findall(r"(\w+)/", line)}


@pytest.mark.parametrize(
    "namespaces, expected",
    [((), {"tcp"}), (("pid",), {"tcp"}), (("pid", "ipc"), {"tcp", "cma"})],
    ids=["nothing in common", "pid namespace", "pid and ipc namespace"],
)
def test_transport(
    containers: Containers, image: str, network: str, namespaces: tuple[str, ...], expected: set[str]
) -> None:
    """As docs/how-to/run-in-containers.md tells it."""
    shares = tuple(f"--{namespace}=container:{containers.name('prefill')}" for namespace in namespaces)
    with pair(containers, image, network, SUBNET, shares={"decode": shares, "prefill": shares}) as pods:
        pods.check()
        assert transports(pods.decode) == expected, pods.decode.logs()
