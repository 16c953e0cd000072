"""A conformance kit: does an engine keep the rules of transfers?

Give it an adapter of your engine (:class:`Adapter`).  It runs real sidecars on loopback, has two of your engines
exchange requests, breaks things, and looks whether the rules are kept::

    from kvxfer_client import testing


    @pytest.fixture(scope="module")
    def sidecars():
        with testing.Sidecars() as made:
            yield made


    @pytest.mark.parametrize("check", testing.checks(), ids=str)
    def test_rules(check, sidecars):
        check(MyAdapter, sidecars)

A rule that is broken is an :class:`AssertionError` which says what was seen and what to do about it.
"""

from kvxfer_client.testing.adapter import Adapter, Make, Place
from kvxfer_client.testing.checks import Check, checks
from kvxfer_client.testing.rules import RULES, BrokenRule, Rule
from kvxfer_client.testing.sidecars import Sidecar, Sidecars

__all__ = ["RULES", "Adapter", "BrokenRule", "Check", "Make", "Place", "Rule", "Sidecar", "Sidecars", "checks"]
