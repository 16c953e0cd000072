"""How much may be under way: of something countable, in all and for each peer."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvxfer.core.errors import KvxferError, Reason


class Room:
    """What is taken of a limit.

    A single one always goes where nothing is taken, however large it is: refusing it would mean never.

    :param what: in the plural, for messages.
    :param names: the settings that hold the limits: in all, and for each peer.
    """

    def __init__(self, what: str, names: tuple[str, str], in_all: int, each: int) -> None:
        self._what = what
        self._limits: Final = {"": (names[0], in_all), "peer": (names[1], each)}
        self._by_peer: Counter[str] = Counter()
        self.taken = 0
        #: How often it was asked for in vain.
        self.refused = 0

    @property
    def most(self) -> int:
        """What is taken for the peer that has taken most."""
        return max(self._by_peer.values(), default=0)

    def take(self, peer: str, amount: int) -> None:
        """Take room for something that concerns ``peer``; give it back with :meth:`give`.

        :raises KvxferError: LIMIT_EXCEEDED, naming the setting.
        """
        for scope, taken in (("", self.taken), ("peer", self._by_peer[peer])):
            name, limit = self._limits[scope]
            if taken and taken + amount > limit:
                self.refused += 1
                where = f" from engine {peer}" if scope else ""
                raise KvxferError(
                    Reason.LIMIT_EXCEEDED,
                    f"{taken} {self._what}{where} are under way, {amount} more would exceed the limit of {limit} "
                    f"({name})",
                    limit_name=name,
                    limit=limit,
                    taken=taken,
                    asked=amount,
                )
        self.taken += amount
        self._by_peer[peer] += amount

    def give(self, peer: str, amount: int) -> None:
        """Give room back."""
        self.taken -= amount
        self._by_peer[peer] -= amount
        if not self._by_peer[peer]:
            del self._by_peer[peer]
