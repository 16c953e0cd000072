"""What the sources of a transfer are told of it: OpenRead, the notification of its READ, CloseReads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvxfer.core.transfers import State
from kvxfer.service.link import Link, LinkSource, RemoteRank
from kvxfer.service.opening import LATER, Opening, announce, looked_at
from kvxfer.service.transfer import Transfer
from kvxfer.wire.fields import MAX_SECONDS
from kvxfer.wire.peer import CloseRead, OpenRead, Outcome, ReadNotice, ReadRef, notice_to_bytes

if TYPE_CHECKING:
    from kvxfer.service.registrations import Registration

#: Nothing is closed before it was answered that it is opened; it is waited for so long, seconds.
ANSWER_TIMEOUT: Final = 5.0


class Telling:
    """Speaks for the transfers of one registration."""

    def __init__(self, registration: Registration) -> None:
        self._registration = registration

    def ref(self, of: Transfer, rank: RemoteRank) -> ReadRef:
        """What a rank knows a transfer by."""
        if (known := of.refs.get(id(rank))) is not None:
            return known
        mine = self._registration.identity.rank
        ref = of.refs[id(rank)] = ReadRef(
            engine_id=rank.facts.engine_id,
            rank=rank.facts.rank,
            incarnation=rank.facts.incarnation,
            request_id=of.request_id,
            lease_token=of.lease_token,
            reader=self._registration.links.reader,
            readers=mine.tp_size * mine.pp_size,
            transfer_id=told_id(of.id, of.number),
        )
        return ref

    def notice(self, of: Transfer, rank: RemoteRank) -> bytes:
        """The payload of its READ's notification."""
        ref = self.ref(of, rank)
        return notice_to_bytes(
            ReadNotice(ref.engine_id, ref.incarnation, ref.request_id, ref.lease_token, ref.reader, ref.transfer_id)
        )

    def announce(self, transfer: Transfer, source: LinkSource, timeout: float) -> None:
        """Tell a source of the read that is about to be posted, within so many seconds; the answer is an opening."""
        rank, began = source.rank, time.perf_counter()
        digests = tuple((b.group, transfer.digest_of(b)) for b in transfer.promised if b.group in rank.groups)
        record = OpenRead(
            self.ref(transfer, rank), transfer.promised_tokens, digests, min(timeout + LATER, MAX_SECONDS)
        )
        opening = transfer.openings[id(rank)] = announce(source, record, timeout)

        def opened(ended: Opening) -> None:
            looked_at(ended)
            transfer.timings.open = max(transfer.timings.open or 0.0, time.perf_counter() - began)

        opening.add_done_callback(opened)

    async def close(
        self, transfer: Transfer, link: Link, openings: Sequence[Opening], read: Collection[int] | None
    ) -> None:
        """Tell of the end, with retries; a loss costs the lease's time.

        Every rank of the ticket is told, for those of which nothing was read would hold their blocks until then, too.
        Of what was never posted only those are told who know of it, and they may be read again.

        :param openings: what was announced; nothing is closed before it is answered, or it would be granted afterwards.
        :param read: identities of the ranks that were read from; ``None`` where nothing was posted.
        """
        if late := [opening for opening in openings if not opening.done()]:
            await asyncio.wait(late, timeout=ANSWER_TIMEOUT)
        if read is not None or openings:
            await asyncio.wait({rank.ends.tell(record) for rank, record in self._ends(transfer, link, read)})

    def _ends(
        self, transfer: Transfer, link: Link, read: Collection[int] | None
    ) -> Iterator[tuple[RemoteRank, CloseRead]]:
        if read is None:
            for source in link.sources:
                yield source.rank, CloseRead(self.ref(transfer, source.rank), Outcome.FAILED, True)
            return
        outcome, again = Outcome[transfer.state.value], transfer.state is State.FAILED
        for rank in link.ranks:
            told = Outcome.NOT_NEEDED if outcome is Outcome.DONE and id(rank) not in read else outcome
            yield rank, CloseRead(self.ref(transfer, rank), told, again)


def told_id(transfer_id: str, number: int) -> str:
    """What sources are told instead of a transfer's ID: an engine may use an ID again once it is forgotten, and that is
    another read."""
    return f"{transfer_id[:200].rstrip()}/{number}"
