from __future__ import annotations

import random

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.pb import layout_pb2 as pb
from kvxfer.wire.addresses import RankAddress, addresses_from_pb, addresses_to_pb


def engine(tp: int, pp: int) -> tuple[RankAddress, ...]:
    return tuple(RankAddress(Rank(t, tp, p, pp), f"host-{p}-{t}:7000") for p in range(pp) for t in range(tp))


@pytest.mark.parametrize("tp, pp", [(1, 1), (4, 1), (2, 3)])
def test_round_trip_in_any_order(tp: int, pp: int) -> None:
    messages = addresses_to_pb(engine(tp, pp))
    random.Random(1).shuffle(messages)
    assert addresses_from_pb(messages, tp, pp) == engine(tp, pp)


@pytest.mark.parametrize(
    "tp, pp, messages, field",
    [
        (0, 1, [], "engine.tp_size"),
        (1, 0, [], "engine.pp_size"),
        (65_537, 1, [], "engine.tp_size"),
        (65_536, 65_536, [], "engine.ranks"),
        (2, 1, [pb.RankAddress(address="a:1")], "engine.ranks"),
        (1, 1, [pb.RankAddress(address="a:1")] * 2, "engine.ranks"),
        (2, 1, [pb.RankAddress(address="a:1")] * 2, "engine.ranks[1]"),
        (1, 1, [pb.RankAddress(address="a:1", tp_rank=1)], "engine.ranks[0].tp_rank"),
        (1, 1, [pb.RankAddress(address="a:1", pp_rank=1)], "engine.ranks[0].pp_rank"),
        (1, 1, [pb.RankAddress(address="unix:/x")], "engine.ranks[0].address"),
    ],
)
def test_refuses_and_names_the_field(tp: int, pp: int, messages: list[pb.RankAddress], field: str) -> None:
    with pytest.raises(KvxferError) as caught:
        addresses_from_pb(messages, tp, pp, "ranks", "engine")
    assert (caught.value.field, caught.value.reason) == (field, Reason.FIELD_INVALID)
