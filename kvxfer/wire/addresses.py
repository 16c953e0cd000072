"""The ranks of an engine, as messages list them: all of them, each once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol, TypeVar

from kvxfer.core.layout import Rank
from kvxfer.pb import layout_pb2 as pb
from kvxfer.wire.fields import address, at, integer, refuse

#: Most ranks of an engine in one direction, and in all.
MAX_RANKS: Final = 65_536


class RankAddress(NamedTuple):
    """Where the sidecar of one rank listens: ``host:port``."""

    rank: Rank
    address: str


class _Place(Protocol):
    @property
    def tp_rank(self) -> int: ...

    @property
    def pp_rank(self) -> int: ...


PlaceT = TypeVar("PlaceT", bound=_Place, covariant=True)


class _Places(Protocol[PlaceT]):
    """A repeated field of messages that each stand for a rank."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> PlaceT: ...


def all_ranks(
    places: _Places[PlaceT], tp_size: int, pp_size: int, field: str, prefix: str = ""
) -> list[tuple[str, Rank, PlaceT]]:
    """Every rank of an engine, by number: its field path, the rank, its message.

    :param field: name of the list; ``prefix`` is where it stands, together with ``tp_size`` and ``pp_size``.
    :raises KvxferError: FIELD_INVALID where sizes or ranks are out of range, a rank is missing or listed twice.
    """
    integer(tp_size, at(prefix, "tp_size"), 1, MAX_RANKS)
    integer(pp_size, at(prefix, "pp_size"), 1, MAX_RANKS)
    field = at(prefix, field)
    needed = tp_size * pp_size
    if len(places) != needed or needed > MAX_RANKS:
        raise refuse(
            field,
            f"lists {len(places)} ranks; {tp_size} x {pp_size} are needed, and {MAX_RANKS} allowed",
            value=len(places),
            needed=needed,
        )
    found: dict[int, tuple[str, Rank, PlaceT]] = {}
    for i in range(needed):
        place, where = places[i], f"{field}[{i}]"
        integer(place.tp_rank, at(where, "tp_rank"), 0, tp_size - 1)
        integer(place.pp_rank, at(where, "pp_rank"), 0, pp_size - 1)
        rank = Rank(place.tp_rank, tp_size, place.pp_rank, pp_size)
        if rank.number in found:
            raise refuse(where, f"is rank {rank}, which is listed before", rank=rank)
        found[rank.number] = (where, rank, place)
    return [found[number] for number in range(needed)]


def addresses_from_pb(
    places: _Places[pb.RankAddress], tp_size: int, pp_size: int, field: str = "ranks", prefix: str = ""
) -> tuple[RankAddress, ...]:
    """Every rank's address, by rank number.  :raises KvxferError: FIELD_INVALID, as :func:`all_ranks`."""
    return tuple(
        RankAddress(rank, address(place.address, at(where, "address")))
        for where, rank, place in all_ranks(places, tp_size, pp_size, field, prefix)
    )


def addresses_to_pb(ranks: Iterable[tuple[Rank, str]]) -> list[pb.RankAddress]:
    """Ranks and their addresses as messages."""
    return [pb.RankAddress(tp_rank=rank.tp_rank, pp_rank=rank.pp_rank, address=where) for rank, where in ranks]
