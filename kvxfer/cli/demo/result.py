"""What came of a demo, as plain data: for the report, and as JSON for machines.

Sizes are bytes, times seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvxfer.cli.demo.scenario import Choices, Scenario
from kvxfer.core.layout import Group, GroupKind


@dataclass(frozen=True, slots=True)
class Page:
    """A block of a group on one side.

    :param block_tokens: tokens in a logical block, ``ratio`` kernel blocks; 0 for a snapshot.
    :param page: bytes from one block to the next, and ``data`` those that mean something.
    """

    block_tokens: int
    ratio: int
    page: int
    data: int


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A cache group: on one rank of P, and on one of D."""

    name: str
    kind: str
    layers: int
    p: Page
    d: Page


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one D rank read.

    :param sources: P's TP ranks that it read from.
    :param rows: runs that its plan keeps.
    :param descriptors: pairs of the request, and ``merged`` what NIXL made of them.
    :param bytes: as the plan says; ``least`` by definition; ``reported`` by NIXL; ``pages`` in whole padded pages.
    :param verified: bytes compared, all of this rank's memory but the unspecified ones.
    :param missing: bytes that had to arrive and are wrong; ``touched`` others that have changed.
    """

    rank: int
    sources: list[int]
    rows: int
    descriptors: int
    merged: int
    bytes: int
    least: int
    reported: int | None
    pages: int
    seconds: float
    verified: int
    missing: int
    touched: int
    first_wrong: str

    @property
    def problems(self) -> list[str]:
        """What is not as it must be."""
        found = []
        if self.missing or self.touched:
            found.append(
                f"{self.missing:,} bytes did not arrive and {self.touched:,} others were touched; the first: "
                f"{self.first_wrong}"
            )
        if self.bytes != self.least:
            found.append(f"{self.bytes:,} bytes were read; the least possible is {self.least:,}")
        if self.reported not in (None, self.bytes):
            found.append(f"NIXL reports {self.reported:,} bytes, the plan says {self.bytes:,}")
        return [f"D rank {self.rank}: {problem}" for problem in found]


@dataclass(frozen=True, slots=True)
class Result:
    """The whole demo.

    :param phases: time of each; where ranks work at once, of the slowest.
    :param by_hand: what to try with grpcurl, where everything has been left running.
    """

    model: str
    scaled: str
    choices: Choices
    nixl: str
    ucx: str
    transport: str
    p_memory: int
    d_memory: int
    groups: list[GroupResult]
    ranks: list[RankResult]
    phases: Mapping[str, float]
    warnings: list[str]
    by_hand: Mapping[str, Any] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """What is not as it must be; empty where every byte is verified."""
        return [problem for rank in self.ranks for problem in rank.problems]

    @property
    def bytes(self) -> int:
        return sum(r.bytes for r in self.ranks)

    @property
    def verified(self) -> int:
        return sum(r.verified for r in self.ranks)

    @property
    def rate(self) -> float:
        """Bytes a second of all D ranks together."""
        return self.bytes / self.phases["read"]

    def json(self) -> dict[str, Any]:
        """Everything, for machines."""
        problems = self.problems
        return {"ok": not problems, "problems": problems, "bytes": self.bytes, "bytes_per_s": self.rate, **asdict(self)}


def groups_of(scenario: Scenario) -> list[GroupResult]:
    """The groups of D, with their blocks on both sides."""
    theirs = {group.name: group for group in scenario.p.layout.groups}
    return [
        GroupResult(
            group.name,
            group.kind.value,
            len({view.layer for view in group.views}),
            _page(theirs.get(group.name, group)),
            _page(group),
        )
        for group in scenario.d.layout.groups
    ]


def _page(group: Group) -> Page:
    first = group.views[0].layer
    views = [view for view in group.views if view.layer == first]
    ratio = views[0].kernel_blocks
    data = sum(c.data_bytes * view.kernel_blocks for view in views for c in view.components)
    tokens = group.block_tokens if group.kind is GroupKind.ATTENTION else 0
    return Page(tokens, ratio, sum(view.block_stride for view in views), data)
