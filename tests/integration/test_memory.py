"""Every kind of memory that an engine and its sidecar can share, read over real NIXL."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.memory.handles import FileHandle, OwnedBacking
from tests.support.engines import OwnedRegions, Regions, SharedRegions
from tests.support.fleet import Engine, MakeRegions
from tests.support.loopback import small_layout, small_lists
from tests.support.processes import SidecarProcess
from tests.truth import Labels, Want

TOKENS = 10
ONE = [(Rank(), small_layout())]


def owned(backing: OwnedBacking) -> MakeRegions:
    def make(_directory: Path, _name: str, layout: CacheLayout) -> Regions:
        return OwnedRegions(layout, backing)

    return make


def read_and_compare(p: Engine, d: Engine) -> None:
    p_lists, d_lists = small_lists(TOKENS, 3), small_lists(TOKENS, 1)
    p.hold(p_lists)
    ticket = p.ticket(p_lists, TOKENS)
    d.read(0, p, ticket, d_lists, {g.name: Want(0, TOKENS) for g in d.groups})


MEMORY: dict[str, tuple[MakeRegions, MakeRegions]] = {
    "memfd to POSIX shared memory": (SharedRegions.memfds, SharedRegions.posix_shm),
    "POSIX shared memory to memfd": (SharedRegions.posix_shm, SharedRegions.memfds),
    "sidecar-owned files": (owned(OwnedBacking.FILE), owned(OwnedBacking.FILE)),
    "sidecar-owned memfds": (owned(OwnedBacking.MEMFD), owned(OwnedBacking.MEMFD)),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_of_every_kind(eight: list[SidecarProcess], name: str) -> None:
    p_memory, d_memory = MEMORY[name]
    labels = Labels()
    with Engine("p", ONE, eight[:1], labels, p_memory) as p, Engine("d", ONE, eight[1:2], labels, d_memory) as d:
        read_and_compare(p, d)


def test_owned_files_are_private_and_go_with_the_registration(eight: list[SidecarProcess]) -> None:
    with Engine("p", ONE, eight[:1], Labels(), owned(OwnedBacking.FILE)) as engine:
        regions = engine.members[0].regions
        assert isinstance(regions, OwnedRegions)
        (handle,) = regions.mapped
        assert isinstance(handle, FileHandle)
        path = Path(handle.path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.is_relative_to(eight[0].directory)
    assert not path.exists()
