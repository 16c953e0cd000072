"""What the tests of the wire draw: layouts, block lists, tickets."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.core.resolve import MAX_TOKENS, BlockList
from kvxfer.wire.tickets import Ticket, TicketRank
from tests.property.worlds import CHOICES, Recipe, make_world

PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))

names = st.text(PRINTABLE, min_size=1, max_size=12)
tokens = st.integers(0, MAX_TOKENS)
#: Seconds, in whole nanoseconds.
durations = st.integers(1, 86_400 * 10**9).map(lambda nanos: nanos / 1e9)


def _layouts(recipe: bytes) -> list[CacheLayout]:
    world = make_world(Recipe(recipe))
    return [layout for _, layout in (*world.p, *world.d)]


layouts = st.binary(min_size=CHOICES, max_size=CHOICES).map(_layouts).flatmap(st.sampled_from)


@st.composite
def block_lists(draw: st.DrawFn, *, group: str = "group", local: bool = False) -> BlockList:
    ids = draw(st.lists(st.integers(-1, 2**31 - 1), max_size=12))
    positions = None
    if ids and draw(st.booleans()):
        positions = np.array([0 if i < 0 else draw(tokens) for i in ids], dtype=np.int64)
    return BlockList(
        group,
        np.array(ids, dtype=np.int64),
        draw(tokens),
        positions,
        draw(st.none() | tokens) if local else None,
        draw(st.none() | tokens) if local else None,
    )


@st.composite
def lists_of_groups(draw: st.DrawFn, *, local: bool = False) -> tuple[BlockList, ...]:
    groups = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    return tuple(draw(block_lists(group=group, local=local)) for group in groups)


addresses = st.sampled_from(
    ["10.0.0.1:7000", "localhost:1", "p-0.prefill.svc:65535", "[::1]:80", "[fe80::1%eth0]:9", "a_b:12", "h.:1"]
)


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    tp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    ranks = tuple(TicketRank(Rank(t, tp, p, pp), draw(names), draw(addresses)) for p in range(pp) for t in range(tp))
    return Ticket(
        engine_id=draw(names),
        compatibility_key=draw(names),
        tp_size=tp,
        pp_size=pp,
        ranks=ranks,
        request_id=draw(names),
        blocks=draw(lists_of_groups()),
        num_tokens=draw(st.integers(1, MAX_TOKENS)),
        lease_token=draw(st.binary(min_size=16, max_size=16)),
        ttl=draw(durations),
    )


def same_blocks(a: BlockList, b: BlockList) -> bool:
    """Equality, which block lists themselves lack."""

    def plain(values: object) -> object:
        return None if values is None else np.asarray(values).tolist()

    return (
        (a.group, a.first_position, a.skip_tokens, a.num_tokens)
        == (b.group, b.first_position, b.skip_tokens, b.num_tokens)
        and plain(a.ids) == plain(b.ids)
        and plain(a.positions) == plain(b.positions)
    )
