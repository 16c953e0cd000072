"""The checks: each runs a few requests between P and D, with a fault, and looks whether the rules are kept."""

from __future__ import annotations

import secrets
import time
import unittest
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvxfer.core.resolve import NULL_BLOCK
from kvxfer.wire.tickets import Ticket, ticket_to_string
from kvxfer_client.results import TransferState
from kvxfer_client.testing.adapter import Make
from kvxfer_client.testing.rules import (
    COMES_BACK,
    FREED,
    ONE_SHORT,
    QUIET,
    SAME_BYTES,
    SKIPPED,
    UNTOUCHED,
    WRITE_FIRST,
    broken,
)
from kvxfer_client.testing.sidecars import Sidecars
from kvxfer_client.testing.stage import PATIENCE, QUIET_FOR, Stage


@dataclass(frozen=True)
class Check:
    """One check; call it.

    :param name: what it is about.
    :param says: the same in words.
    """

    name: str
    says: str
    run: Callable[[Stage], None]

    def __call__(self, make: Make, sidecars: Sidecars) -> None:
        """Run it with two fresh engines.

        :param make: builds an engine.
        :param sidecars: what they run on; started again where it has to be.
        :raises BrokenRule: an :class:`AssertionError` that says which rule, what was seen, and what to do.
        :raises unittest.SkipTest: where it does not apply, which pytest understands.
        """
        with Stage(make, sidecars) as stage:
            self.run(stage)

    def __str__(self) -> str:
        return self.name


_checks: Final[list[Check]] = []


def _check(run: Callable[[Stage], None]) -> Callable[[Stage], None]:
    says = " ".join((run.__doc__ or "").split())
    _checks.append(Check(run.__name__.replace("_", "-"), says, run))
    return run


def checks() -> tuple[Check, ...]:
    """All of them, for ``pytest.mark.parametrize("check", checks(), ids=str)``."""
    return tuple(_checks)


# -- without a fault ---------------------------------------------------------------------------------------------------


@_check
def transfer(stage: Stage) -> None:
    """A request goes from P to D: the bytes are right, and both free its blocks, P without being told by anybody
    but its sidecar."""
    request_id, ticket = stage.prefill()
    p_blocks = stage.p.blocks(request_id)
    stage.decode(request_id, ticket_to_string(ticket))
    stage.settled(request_id, ticket.num_tokens, fails=False)
    stage.freed(stage.p, p_blocks, f"{request_id} was read")
    d_blocks = stage.d.blocks(request_id)
    stage.d.engine.finish(request_id)
    stage.freed(stage.d, d_blocks, f"{request_id} is finished")


@_check
def several_at_once(stage: Stage) -> None:
    """Requests that overlap do not mix."""
    prompts = [stage.prompt() for _ in range(3)]
    held = [stage.prefill(tokens) for tokens in prompts]
    for (request_id, ticket), tokens in zip(held, prompts, strict=True):
        stage.d.started.append(request_id)
        stage.d.engine.decode(request_id, tokens, ticket_to_string(ticket), 0)
    for (request_id, ticket), tokens in zip(held, prompts, strict=True):
        stage.settled(request_id, ticket.num_tokens, tokens, fails=False)


@_check
def written_before_published(stage: Stage) -> None:
    """When the last bytes are about to be written nobody may read the request yet."""
    request_id = "r-order"
    early: list[str] = []

    def writing() -> None:
        early.append("" if stage.p.lease(request_id) is None else "it was published already")

    stage.p.started.append(request_id)
    stage.p.engine.prefill(request_id, stage.tokens, 60.0, writing)
    if any(early):
        broken(WRITE_FIRST, f"{request_id}: {early[0]} when its last bytes were about to be written")


@_check
def positions(stage: Stage) -> None:
    """With state layers N - 1 tokens are published, every snapshot is of N - 1, and the bytes say the same."""
    request_id, ticket = stage.prefill()
    states = [blocks for blocks in ticket.blocks if blocks.positions is not None]
    allowed = (len(stage.tokens) - 1,) if states else (len(stage.tokens) - 1, len(stage.tokens))
    if ticket.num_tokens not in allowed:
        broken(ONE_SHORT, f"of {len(stage.tokens)} prompt tokens the ticket has {ticket.num_tokens}")
    for blocks in states:
        listed = np.asarray(blocks.positions).tolist()
        if ticket.num_tokens not in listed:
            broken(ONE_SHORT, f"group {blocks.group} has snapshots of {listed} tokens, none of {ticket.num_tokens}")
    stage.compare(ONE_SHORT, stage.p, request_id, stage.tokens[: ticket.num_tokens])


@_check
def prefix_hit(stage: Stage) -> None:
    """What D has in its prefix cache is not read, and the whole cache is right."""
    size = stage.d.engine.block_tokens
    if not stage.d.engine.prefix_caching or not size:
        raise unittest.SkipTest("the engine has no prefix caching")
    request_id, ticket = stage.prefill()
    stage.decode(request_id, ticket_to_string(ticket), cached=size)
    stage.settled(request_id, ticket.num_tokens, fails=False)
    skips = {x.skip_tokens for x in stage.d.transfers() if x.request_id == request_id}
    if skips != {size}:
        broken(SKIPPED, f"{request_id}: {size} tokens were cached, skipped were {sorted(skips)}")


# -- what P holds ------------------------------------------------------------------------------------------------------


@_check
def untouched_while_held(stage: Stage) -> None:
    """Published blocks stay as they are, whatever P computes meanwhile."""
    request_id, ticket = stage.prefill()
    for _ in range(3):
        stage.prefill(stage.prompt())
        stage.p.engine.poison()
    stage.held(request_id, "other requests came")
    stage.compare(UNTOUCHED, stage.p, request_id, stage.tokens[: ticket.num_tokens])


@_check
def read_past_the_ttl(stage: Stage) -> None:
    """A read that was granted holds the blocks, also when the request's time has passed."""
    request_id, ticket = stage.prefill(ttl=0.5)
    with stage.reading(ticket):
        stage.held(request_id, "its time has passed, and a reader is not done", seconds=1.5)
    stage.lease_ends(request_id)
    stage.freed(stage.p, stage.p.blocks(request_id), f"the lease of {request_id} has ended")


@_check
def expired(stage: Stage) -> None:
    """A ticket whose time has passed: P frees, and uses the blocks for others; D uses no byte of it."""
    request_id, ticket = stage.prefill(ttl=0.3)
    blocks = stage.p.blocks(request_id)
    stage.lease_ends(request_id)
    stage.freed(stage.p, blocks, f"{request_id} has expired")
    stage.p.engine.poison()
    stage.prefill(stage.prompt())
    stage.decode(request_id, ticket_to_string(ticket))
    stage.settled(request_id, ticket.num_tokens, fails=True)


@_check
def p_aborts_under_a_reader(stage: Stage) -> None:
    """P's client hangs up while somebody reads: nothing more is granted, and the blocks stay until the read is over."""
    request_id, ticket = stage.prefill()
    with stage.reading(ticket):
        stage.p.engine.finish(request_id)
        stage.held(request_id, "it was aborted, and a reader is not done")
        if not stage.happens(lambda: (x := stage.p.lease(request_id)) is None or x.ending or x.state.ended):
            broken(FREED, f"{request_id} was aborted on P, and its lease goes on: it was not withdrawn")
    stage.freed(stage.p, stage.p.blocks(request_id), f"{request_id} was aborted on P")
    stage.decode(request_id, ticket_to_string(ticket))
    stage.settled(request_id, ticket.num_tokens, fails=True)


# -- tickets that D must not believe -----------------------------------------------------------------------------------


def _first(ticket: Ticket, change: Callable[[list[int]], list[int]]) -> Ticket:
    """With the block IDs of the first group changed."""
    first, *others = ticket.blocks
    ids = change([int(i) for i in np.asarray(first.ids).tolist()])
    return replace(ticket, blocks=(replace(first, ids=ids), *others))


BAD_TICKETS: Final[dict[str, Callable[[Ticket], Ticket]]] = {
    "never-published": lambda t: replace(t, request_id="never-published"),
    "wrong-token": lambda t: replace(t, lease_token=secrets.token_bytes(16)),
    "stale-incarnation": lambda t: replace(t, ranks=tuple(replace(r, incarnation="0" * 16) for r in t.ranks)),
    "other-model": lambda t: replace(t, compatibility_key="another-model@1"),
    "other-engine": lambda t: replace(t, engine_id="another-engine"),
    "nobody-there": lambda t: replace(t, ranks=tuple(replace(r, address="127.0.0.1:1") for r in t.ranks)),
    "duplicate-block": lambda t: _first(t, lambda ids: [ids[-1], *ids[1:]]),
    "null-block": lambda t: _first(t, lambda ids: [NULL_BLOCK, *ids[1:]]),
    "block-out-of-range": lambda t: _first(t, lambda ids: [2**30, *ids[1:]]),
}


def _bad_ticket(name: str, spoil: Callable[[Ticket], Ticket]) -> None:
    def run(stage: Stage) -> None:
        request_id, ticket = stage.prefill()
        p_blocks = stage.p.blocks(request_id)
        stage.p.engine.finish(request_id)
        stage.freed(stage.p, p_blocks, f"{request_id} was aborted on P")
        stage.p.engine.poison()  # where D reads all the same, it shows
        stage.decode(request_id, ticket_to_string(spoil(ticket)))
        stage.settled(request_id, ticket.num_tokens, fails=True)
        blocks = stage.d.blocks(request_id)
        stage.d.engine.finish(request_id)
        stage.freed(stage.d, blocks, f"{request_id}, whose ticket was bad, is finished")

    _checks.append(Check(f"ticket-{name}", f"A ticket that is wrong ({name}): D uses no byte of it.", run))


for _name, _spoil in BAD_TICKETS.items():
    _bad_ticket(_name, _spoil)


# -- aborts on D -------------------------------------------------------------------------------------------------------


@_check
def d_aborts_at_once(stage: Stage) -> None:
    """D's client hangs up right after the request has come."""
    request_id, ticket = stage.prefill()
    stage.decode(request_id, ticket_to_string(ticket))
    blocks = stage.d.blocks(request_id)
    stage.d.engine.finish(request_id)
    stage.quiet(blocks, f"{request_id} was aborted at once")
    stage.freed(stage.d, blocks, f"{request_id} was aborted on D")


@_check
def d_aborts_in_mid_read(stage: Stage) -> None:
    """D's client hangs up while its read is under way: the blocks stay until nothing can write them any more."""
    request_id, _ = _in_mid_read(stage)
    blocks = stage.d.blocks(request_id)
    stage.d.engine.finish(request_id)
    if stage.happens(lambda: not stage.d.has(blocks), QUIET_FOR) and not all(x.quiesced for x in stage.d.transfers()):
        broken(QUIET, f"{request_id} was aborted in mid-read, and its blocks were free before its transfer was over")
    stage.sidecars.p.resume()
    stage.quiet(blocks, f"{request_id} was aborted in mid-read")
    stage.freed(stage.d, blocks, f"{request_id} was aborted on D")


@_check
def d_aborts_after_the_read(stage: Stage) -> None:
    """D's client hangs up when the cache is there."""
    request_id, ticket = stage.prefill()
    p_blocks = stage.p.blocks(request_id)
    stage.decode(request_id, ticket_to_string(ticket))
    stage.settled(request_id, ticket.num_tokens, fails=False)
    for _ in range(2):
        stage.d.engine.finish(request_id)
    stage.freed(stage.d, stage.d.blocks(request_id), f"{request_id} was aborted on D")
    stage.freed(stage.p, p_blocks, f"{request_id} was read")


def _in_mid_read(stage: Stage) -> tuple[str, Ticket]:
    """A request of D's whose read is under way, and does not get on: P's sidecar has granted it, and is paused.

    Over TCP nothing moves without P.  It answers while D's sidecar is paused, which hears of it and posts the READ when
    P's is paused again.
    """
    first, ticket = stage.prefill(stage.prompt())  # the peers meet
    stage.decode(first, ticket_to_string(ticket))
    stage.happens(lambda: stage.d.engine.ready(first) is not None)
    stage.d.engine.finish(first)
    request_id, ticket = stage.prefill()
    stage.sidecars.p.pause()
    stage.decode(request_id, ticket_to_string(ticket))

    def posted() -> bool:
        return any(x.request_id == request_id and x.state is TransferState.POSTED for x in stage.d.transfers())

    if not stage.happens(posted):
        broken(SAME_BYTES, f"{request_id}: no transfer of it was posted on D")
    deadline = time.monotonic() + PATIENCE
    granted = False
    while not granted and time.monotonic() < deadline:  # D's may have been paused before it had asked
        stage.sidecars.d.pause()
        stage.sidecars.p.resume()
        granted = stage.p.is_being_read(request_id)
        stage.sidecars.p.pause()
        stage.sidecars.d.resume()
    if not granted:
        broken(SAME_BYTES, f"{request_id}: P's sidecar has not granted its read")
    return request_id, ticket


# -- sidecars and peers that die ---------------------------------------------------------------------------------------


@_check
def p_dies_before_the_read(stage: Stage) -> None:
    """P's sidecar is gone when D comes: D does without.  P learns that nobody reads its blocks any more."""
    request_id, ticket = stage.prefill()
    blocks = stage.p.blocks(request_id)
    stage.sidecars.p.kill()
    stage.decode(request_id, ticket_to_string(ticket))
    stage.settled(request_id, ticket.num_tokens, fails=True)
    stage.sidecars.start()
    stage.freed(stage.p, blocks, "P's sidecar has died and was started again")


@_check
def p_dies_in_mid_read(stage: Stage) -> None:
    """P's sidecar dies while D reads: no byte counts, and D's blocks stay until nothing can write them."""
    request_id, ticket = _in_mid_read(stage)
    blocks = stage.d.blocks(request_id)
    stage.sidecars.p.kill()
    stage.settled(request_id, ticket.num_tokens, fails=True)
    stage.d.engine.finish(request_id)
    stage.quiet(blocks, f"{request_id} has lost its source, and is finished")
    stage.freed(stage.d, blocks, f"{request_id} is finished")


@_check
def sidecars_come_back(stage: Stage) -> None:
    """Both sidecars are killed and started again: the engines register anew, and go on."""
    stage.sidecars.p.kill()
    stage.sidecars.d.kill()
    stage.sidecars.start()
    stage.prefill_again()
    for _ in range(20):
        request_id, ticket = stage.prefill()
        stage.decode(request_id, ticket_to_string(ticket))
        if stage.happens(lambda r=request_id: bool(stage.d.engine.ready(r)), 3.0):  # type: ignore[misc]
            stage.settled(request_id, ticket.num_tokens, fails=False)
            if any(x.request_id == request_id and x.state is TransferState.DONE for x in stage.d.transfers()):
                return
        for side in (stage.d, stage.p):
            side.engine.finish(request_id)
        stage.happens(lambda: False, QUIET_FOR)
    broken(COMES_BACK, "D reads nothing after both sidecars were started again")
