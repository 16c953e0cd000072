"""Readers, as whoever reaches the peer port may claim to be."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.service.readers import ATTENTION, IDLE_TIMEOUT, MAX_READERS, MAX_READS, OPEN_LIMIT, Readers
from kvxfer.service.settings import ServiceSettings
from kvxfer.wire.peer import Reader


class Demands:
    """Counts the demands that are held."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()

    def _take(self, kind: str) -> Any:
        self.held[kind] += 1
        return _Held(self, kind)

    def serving(self) -> Any:
        return self._take("serving")

    def connected(self) -> Any:
        return self._take("connected")


class _Held:
    def __init__(self, demands: Demands, kind: str) -> None:
        self.demands, self.kind = demands, kind

    def close(self) -> None:
        self.demands.held[self.kind] -= 1


@pytest.fixture
def demands() -> Demands:
    return Demands()


@pytest.fixture
def readers(demands: Demands) -> Readers:
    made = Readers()
    made.engine = demands  # type: ignore[assignment]
    return made


def reader(number: int) -> Reader:
    return Reader(f"engine-{number}", Rank(), "incarnation")


def refused(caught: pytest.ExceptionInfo[KvxferError], name: str, limit: int) -> None:
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    assert name in caught.value.message
    assert caught.value.metadata["limit_name"] == name
    assert caught.value.metadata["limit"] == str(limit)


async def test_new_readers_over_the_limit_are_refused_and_known_ones_go_on(readers: Readers, demands: Demands) -> None:
    for number in range(MAX_READERS):
        readers.meet(reader(number), "a:1", connecting=True)
    with pytest.raises(KvxferError) as caught:
        readers.meet(reader(MAX_READERS), "a:1", connecting=True)
    refused(caught, "max_readers", MAX_READERS)
    with pytest.raises(KvxferError) as caught:
        readers.open(reader(MAX_READERS), "t", "a:1")
    refused(caught, "max_readers", MAX_READERS)
    assert len(readers.status()) == MAX_READERS
    assert demands.held == {"connected": MAX_READERS, "serving": MAX_READERS}

    readers.meet(reader(0), "b:2", connecting=True)
    readers.open(reader(0), "t", "b:2")
    readers.leave(reader(1))
    readers.meet(reader(MAX_READERS), "a:1", connecting=False)


def test_no_reader_that_keeps_its_own_limit_meets_this_one() -> None:
    assert 2 * ServiceSettings().max_transfers_per_peer <= MAX_READS


async def test_reads_of_one_reader_over_the_limit_are_refused(readers: Readers, demands: Demands) -> None:
    for number in range(MAX_READS):
        readers.open(reader(0), f"t{number}", "a:1")
    with pytest.raises(KvxferError) as caught:
        readers.open(reader(0), "one more", "a:1")
    refused(caught, "max_reads", MAX_READS)
    assert demands.held["serving"] == readers.open_reads == MAX_READS

    readers.open(reader(0), "t0", "a:1")  # it is open already
    readers.open(reader(1), "one more", "a:1")
    readers.close_read(reader(0), "t0")
    readers.open(reader(0), "one more", "a:1")
    readers.close()
    assert not +demands.held


async def test_a_read_that_waits_for_its_grant_counts_and_costs_nothing(readers: Readers, demands: Demands) -> None:
    for _ in range(2):
        readers.ask(reader(0), "t", "a:1")
    assert (readers.open_reads, demands.held["serving"]) == (1, 0)
    readers.open(reader(0), "t", "a:1")
    assert (readers.open_reads, demands.held["serving"]) == (1, 1)
    readers.ask(reader(0), "never granted", "a:1")
    readers.tick(time.monotonic() + OPEN_LIMIT)
    assert (readers.open_reads, demands.held["serving"]) == (0, 0)
    for end in (lambda: readers.close_read(reader(0), "u"), lambda: readers.leave(reader(0))):
        readers.ask(reader(0), "u", "a:1")
        end()
        assert readers.open_reads == 0


async def test_a_reader_that_only_stays_connected_costs_nothing(readers: Readers, demands: Demands) -> None:
    """It says that it is alive, but attention is for those that were just met, or read."""
    began = time.monotonic()
    readers.meet(reader(0), "a:1", connecting=True)
    readers.tick(began + ATTENTION - 1)
    assert demands.held["connected"] == 1
    met = time.monotonic()
    readers.meet(reader(0), "a:1", connecting=False)
    readers.tick(met + ATTENTION + 1)
    assert not +demands.held
    assert len(readers.status()) == 1

    readers.open(reader(0), "t", "a:1")
    readers.tick(time.monotonic() + 2 * ATTENTION)  # a long read
    assert demands.held == {"connected": 1, "serving": 1}
    closed = time.monotonic()
    readers.close_read(reader(0), "t")
    readers.tick(closed + ATTENTION - 1)
    assert demands.held == {"connected": 1, "serving": 0}
    readers.tick(time.monotonic() + ATTENTION + 1)
    assert not +demands.held
    readers.tick(time.monotonic() + IDLE_TIMEOUT + 1)
    assert not readers.status()


@pytest.mark.parametrize("sign", ["none", "beat", "read"])
def test_only_who_stayed_is_lost(demands: Demands, sign: str) -> None:
    """A reader meets every rank of an engine; those that it does not read from hear no more of it."""
    lost: list[Reader] = []
    readers = Readers(lambda who, address, idle: lost.append(who))
    readers.engine = demands  # type: ignore[assignment]
    readers.meet(reader(1), "somewhere:1", connecting=True)
    if sign == "beat":
        readers.meet(reader(1), "somewhere:1", connecting=False)
    elif sign == "read":
        readers.open(reader(1), "transfer", "somewhere:1")
    readers.tick(time.monotonic() + IDLE_TIMEOUT)
    assert len(readers) == 0
    assert lost == ([] if sign == "none" else [reader(1)])
