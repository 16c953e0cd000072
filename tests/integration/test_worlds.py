"""Random pairs of engines, as in the property tests of the core, on real sidecars over real NIXL."""

from __future__ import annotations

import random

import pytest

from tests.property.worlds import CHOICES, make_world
from tests.support.fleet import Engine
from tests.support.processes import SidecarProcess
from tests.truth import Labels


@pytest.mark.parametrize("seed", range(30))
def test_every_byte_is_what_it_must_be(eight: list[SidecarProcess], seed: int) -> None:
    world = make_world(random.Random(seed).randbytes(CHOICES))
    labels = Labels()
    p_processes, d_processes = eight[: len(world.p)], eight[len(world.p) :]
    with Engine("p", world.p, p_processes, labels) as p, Engine("d", world.d, d_processes, labels) as d:
        p.hold(world.p_lists)
        ticket = p.ticket(world.p_lists, world.num_tokens)
        for number in range(len(world.d)):
            d.handshake(number, ticket)
            d.read(number, p, ticket, world.d_lists, world.wants, skip_tokens=world.skip_tokens)
        for member in p.members:
            assert not member.differences(member.model.image), "a read has changed the source"
