"""What ``kvxfer volume`` foretells is what NIXL counts: measured bytes on the optimal line."""

from __future__ import annotations

from kvxfer.models import EngineOptions, example, scale_down
from kvxfer.planning import Engine as Planned
from kvxfer.planning import volumes
from tests.support.engines import make_lists
from tests.support.fleet import Engine
from tests.support.processes import SidecarProcess
from tests.truth import Labels, Want

#: Nemotron 3 Super with heads and states a sixteenth as wide: all its layers, groups and shares at TP 4, and pages that
#: are mostly padding.
SUPER = scale_down(example("nemotron-3-super-120b-a12b"), shrink=16)
OPTIONS = EngineOptions(tp_size=4, logical_block_tokens=528, num_blocks=9)
#: A granule and one more, a block, and two blocks and a bit.
LENGTHS = (17, 528, 1_100)


def test_measured_bytes_are_the_optimal_line(eight: list[SidecarProcess]) -> None:
    p_plan, d_plan = (Planned.preset("super", SUPER, OPTIONS) for _ in "pd")
    line = {volume.tokens: volume for volume in volumes(p_plan, d_plan, LENGTHS)}
    labels = Labels()
    members = list(p_plan.layouts.items())
    with Engine("p", members, eight[:4], labels) as p, Engine("d", members, eight[4:], labels) as d:
        for length in LENGTHS:
            p_lists, _ = make_lists(p.groups, length, length)
            d_lists, _ = make_lists(d.groups, length, length + 1)
            p.hold(p_lists)
            ticket = p.ticket(p_lists, length)
            wants = {group.name: Want(0, length) for group in d.groups}
            for number, foretold in enumerate(line[length].ranks):
                d.handshake(number, ticket)
                transfer = d.read(number, p, ticket, d_lists, wants)
                measured = sum(source.reported_bytes for source in transfer.sources)
                assert measured == foretold.read < foretold.padded
