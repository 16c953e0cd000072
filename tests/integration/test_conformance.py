"""The conformance kit: a toy engine that keeps the rules passes, and one that breaks a rule is caught by its name."""

from __future__ import annotations

import re
import sys
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvxfer_client import KvxferError, LeaseInfo, Reason, Registered
from kvxfer_client.testing import RULES, BrokenRule, Check, Make, Sidecars, checks
from kvxfer_client.testing import sidecars as sidecars_module
from kvxfer_client.testing import stage as stage_module
from tests.support.toy_engine import BLOCK, Request, ToyEngine

BY_NAME = {check.name: check for check in checks()}


@pytest.fixture(scope="module")
def sidecars() -> Iterator[Sidecars]:
    """With longer times than the kit's: nobody who stands still for a moment is to be given up."""
    patient = {"engine_grace": 10.0, "handshake_timeout": 10.0, "read_grant": 10.0}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sidecars_module, "SETTINGS", {**sidecars_module.SETTINGS, **patient})
        with Sidecars([sys.executable, "-m", "kvxfer"]) as made:
            yield made


@pytest.mark.parametrize("check", checks(), ids=str)
def test_the_toy_engine_keeps_the_rules(check: Check, sidecars: Sidecars) -> None:
    check(ToyEngine, sidecars)


# -- one that breaks a rule --------------------------------------------------------------------------------------------


class PublishesFirst(ToyEngine):
    """Tells of a request, and lets the device write meanwhile."""

    def prefill(self, request_id: str, tokens: Sequence[int], ttl: float, writing: Callable[[], None]) -> str:
        registered = self.session.wait_registered()
        request = self.requests[request_id] = self.allocate(tokens)
        request.token, request.incarnation = bytes(16), registered.incarnation
        ticket = self.publish(request_id, request, registered, len(tokens) - 1, ttl)
        writing()
        self.compute(request, 0, len(tokens) - 1)
        return ticket


class OneTokenFurther(ToyEngine):
    """The state has seen the last prompt token, and is published as if it had not."""

    def compute(self, request: Request, first: int, end: int) -> None:
        super().compute(request, first, end)
        if request.token:
            super().compute(request, end, end + 1) if end + 1 <= len(request.tokens) else None


class PublishesAll(ToyEngine):
    """N tokens instead of N - 1."""

    def publish(self, request_id: str, request: Request, registered: Registered, n: int, ttl: float) -> str:
        self.compute(request, n, n + 1)
        return super().publish(request_id, request, registered, n + 1, ttl)


class StepInFlight(ToyEngine):
    """One more step runs after publishing, and advances the state in place."""

    def publish(self, request_id: str, request: Request, registered: Registered, n: int, ttl: float) -> str:
        ticket = super().publish(request_id, request, registered, n, ttl)
        self.compute(request, n, n + 1)
        return ticket


class FreesAtOnce(ToyEngine):
    """P's request is over after the prefill, and so are its blocks."""

    def publish(self, request_id: str, request: Request, registered: Registered, n: int, ttl: float) -> str:
        ticket = super().publish(request_id, request, registered, n, ttl)
        self.release(request)
        return ticket


class FreesByItsClock(ToyEngine):
    """P frees when the time that it asked for has passed."""

    def publish(self, request_id: str, request: Request, registered: Registered, n: int, ttl: float) -> str:
        self._pool.submit(lambda: self._closing.wait(ttl) or self._told.put(lambda: self.release(request)))
        return super().publish(request_id, request, registered, n, ttl)


class FreesOnAbort(ToyEngine):
    """P withdraws, and frees whatever it is told."""

    def withdraw(self, request_id: str, request: Request) -> None:
        super().withdraw(request_id, request)
        self.release(request)


class DoesNotWithdraw(ToyEngine):
    """P's abort is not told to the sidecar."""

    def withdraw(self, request_id: str, request: Request) -> None:
        pass


class NeverFreesWhatWasRead(ToyEngine):
    """P does not listen."""

    def on_lease(self, lease: LeaseInfo) -> None:
        pass


class KeepsWhatIsLost(ToyEngine):
    """P does not free what its sidecar took along."""

    def on_lost(self, _: KvxferError, incarnation: str) -> None:
        pass


class IgnoresErrors(ToyEngine):
    """D takes every load for good."""

    def on_load(self, request: Request, loaded: bool) -> None:
        super().on_load(request, True)


class Hangs(ToyEngine):
    """D waits for a load that has failed."""

    def on_load(self, request: Request, loaded: bool) -> None:
        if loaded or request.over:
            super().on_load(request, loaded)


class DoesNotWait(ToyEngine):
    """D frees an aborted request's blocks while they may still be written."""

    def finish(self, request_id: str) -> None:
        request = self.requests[request_id]
        super().finish(request_id)
        self.release(request)


class LeaksOnAbort(ToyEngine):
    """D forgets the blocks of a request that was aborted while it was loading."""

    def on_load(self, request: Request, loaded: bool) -> None:
        if not request.over:
            super().on_load(request, loaded)


class IgnoresThePrefix(ToyEngine):
    """D reads what it has."""

    def decode(self, request_id: str, tokens: Sequence[int], ticket: str, cached_tokens: int) -> None:
        super().decode(request_id, tokens, ticket, 0)


class SkipsWhatItHasNot(ToyEngine):
    """D skips a block too many."""

    def decode(self, request_id: str, tokens: Sequence[int], ticket: str, cached_tokens: int) -> None:
        compute = self.compute
        self.compute = lambda request, first, end: None  # type: ignore[method-assign]
        super().decode(request_id, tokens, ticket, cached_tokens)
        self.compute = compute  # type: ignore[method-assign]


class MixesBlocks(ToyEngine):
    """D hands the wrong blocks to the read."""

    def load(self, request: Request, ticket: str) -> bool:
        swapped = Request(request.tokens, [*request.attention[1:], request.attention[0]], request.state)
        swapped.transfer_id, swapped.cached = request.transfer_id, request.cached
        return super().load(swapped, ticket)


class RegistersOnce(ToyEngine):
    """Its session ends with the first sidecar."""

    def on_lost(self, error: KvxferError, incarnation: str) -> None:
        super().on_lost(error, incarnation)
        raise RuntimeError("the registration is gone")


class ForgetsTheHook(ToyEngine):
    """The adapter does not say when it writes."""

    def prefill(self, request_id: str, tokens: Sequence[int], ttl: float, writing: Callable[[], None]) -> str:
        return super().prefill(request_id, tokens, ttl, lambda: None)


MUTANTS: list[tuple[Make, str, str]] = [
    (PublishesFirst, "written-before-published", "write-first"),
    (OneTokenFurther, "positions", "one-short"),
    (OneTokenFurther, "transfer", "same-bytes"),
    (PublishesAll, "positions", "one-short"),
    (StepInFlight, "untouched-while-held", "untouched"),
    (FreesAtOnce, "untouched-while-held", "held"),
    (FreesByItsClock, "read-past-the-ttl", "held"),
    (FreesOnAbort, "p-aborts-under-a-reader", "held"),
    (DoesNotWithdraw, "p-aborts-under-a-reader", "freed"),
    (NeverFreesWhatWasRead, "transfer", "freed"),
    (KeepsWhatIsLost, "p-dies-before-the-read", "freed"),
    *((IgnoresErrors, name, "never-good") for name in BY_NAME if name.startswith("ticket-")),
    (IgnoresErrors, "expired", "never-good"),
    (IgnoresErrors, "p-dies-before-the-read", "never-good"),
    (IgnoresErrors, "p-dies-in-mid-read", "never-good"),
    (Hangs, "expired", "no-hang"),
    (DoesNotWait, "d-aborts-in-mid-read", "quiet"),
    (LeaksOnAbort, "d-aborts-in-mid-read", "freed"),
    (IgnoresThePrefix, "prefix-hit", "skipped"),
    (SkipsWhatItHasNot, "prefix-hit", "same-bytes"),
    (MixesBlocks, "several-at-once", "same-bytes"),
    (RegistersOnce, "sidecars-come-back", "comes-back"),
    (ForgetsTheHook, "transfer", "hook"),
]


@pytest.mark.parametrize("make, name, rule", MUTANTS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_an_engine_that_breaks_a_rule_is_caught(
    make: Make, name: str, rule: str, sidecars: Sidecars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "PATIENCE", 4.0)
    with pytest.raises(BrokenRule) as caught:
        BY_NAME[name](make, sidecars)
    assert caught.value.rule.name == rule, caught.value


def test_every_rule_has_a_mutant() -> None:
    assert {rule.name for rule in RULES} == {rule for _, _, rule in MUTANTS}


def test_a_broken_rule_says_what_to_do() -> None:
    error = BrokenRule(RULES[0], "3 of 4 bytes are wrong")
    assert str(error).splitlines() == [
        f"same-bytes: {RULES[0].says}",
        "  seen: 3 of 4 bytes are wrong",
        f"  what to do: {RULES[0].todo}",
    ]
    assert ToyEngine.block_tokens == BLOCK


def test_checks_that_stop_sidecars_are_skipped_with_those_of_somebody_else(sidecars: Sidecars) -> None:
    given = Sidecars(targets=(sidecars.p.target, sidecars.d.target), directory=sidecars.directory)
    BY_NAME["transfer"](ToyEngine, given)
    with pytest.raises(unittest.SkipTest, match="not the kit's"):
        BY_NAME["p-dies-before-the-read"](ToyEngine, given)
    given.stop()
    assert sidecars.directory.exists()


def test_without_a_sidecar_it_says_what_to_install() -> None:
    missing = Sidecars(["/nonexistent/kvxfer"])
    with pytest.raises(KvxferError, match=r"cannot be run.*install kvxfer\[nixl\]"), missing:
        pass
    assert not missing.directory.exists()


def test_the_guide_says_for_every_reason_what_to_do() -> None:
    guide = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "add-an-engine.md"
    table = guide.read_text().split("## What to do on each error")[1].split("\n## ")[0]
    told = [word for row in table.splitlines() if row.startswith("| ") for word in re.findall(r"[A-Z_]{5,}", row)]
    assert sorted(told) == sorted(reason.value for reason in Reason)
