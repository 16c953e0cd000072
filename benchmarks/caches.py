"""Dense caches of two engines in shared memory, over and over in the same two files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvxfer.cli.bench.case import GROUP, TOKENS, dense_layout
from kvxfer.core.layout import CacheLayout
from kvxfer.core.resolve import BlockList
from kvxfer.memory.handles import FileHandle
from kvxfer_client.memory import SharedRegion

Bytes = npt.NDArray[np.uint8]
Order = Literal["contiguous", "scattered", "scrambled"]

#: Regions begin at multiples of so many bytes.
_PAGE = 4096


@dataclass(frozen=True)
class Case:
    """``blocks`` blocks of ``block`` bytes in each of ``layers`` layers, of ``spare`` times as many.

    :param order: of the block IDs: from 0 on; any, in rising order; any, in any order (what a server has after a
        while).
    """

    block: int
    blocks: int
    layers: int
    order: Order = "scrambled"
    spare: int = 2

    @classmethod
    def of(cls, total: int, block: int, order: Order = "scrambled", layers: int = 16) -> Case:
        """One that moves ``total`` bytes, in as many layers as there is a block for."""
        layers = min(layers, total // block)
        return cls(block, total // block // layers, layers, order)

    @property
    def bytes(self) -> int:
        """Bytes that a read moves."""
        return self.block * self.blocks * self.layers

    @property
    def tokens(self) -> int:
        """Tokens that a read moves."""
        return self.blocks * TOKENS

    @property
    def region(self) -> int:
        """Bytes of one layer's cache."""
        return self.blocks * self.spare * self.block

    @property
    def layout(self) -> CacheLayout:
        """Of both sides."""
        return dense_layout(self.block, self.blocks * self.spare, self.layers)

    def ids(self, side: str) -> npt.NDArray[np.int64]:
        """Block IDs of a side, by position."""
        if self.order == "contiguous":
            return np.arange(self.blocks, dtype=np.int64)
        chosen = np.random.default_rng(ord(side)).permutation(self.blocks * self.spare)[: self.blocks]
        return (np.sort(chosen) if self.order == "scattered" else chosen).astype(np.int64)

    def lists(self, side: str) -> list[BlockList]:
        """The same as a request has them."""
        return [BlockList(GROUP, self.ids(side))]


class Memory:
    """P's and D's file, of which a case takes what it needs from the front."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self.files = {side: SharedRegion.create_file(directory / side, size) for side in "PD"}
        self.bytes: dict[str, Bytes] = {s: f.numpy(np.uint8, (size,)) for s, f in self.files.items()}
        noise = np.random.default_rng(0).integers(0, 256, min(size, 2**26), dtype=np.uint8)
        for start in range(0, size, noise.size):
            part = self.bytes["P"][start : start + noise.size]
            part[:] = noise[: part.size]
        self.bytes["D"][:] = 0

    def offsets(self, case: Case) -> list[int]:
        """Where the regions of a case begin in either file."""
        step = -(-case.region // _PAGE) * _PAGE
        return [i * step for i in range(case.layers)]

    def handles(self, case: Case, side: str) -> tuple[FileHandle, ...]:
        """The regions of a case as an engine registers them."""
        path = str(self.directory / side)
        return tuple(FileHandle(path, offset, case.region) for offset in self.offsets(case))

    def check(self, case: Case, blocks: int | None = None) -> None:
        """Raise where D's first blocks (all of the case) are not P's, and forget them."""
        theirs, mine = (case.ids(side)[:blocks] for side in ("P", "D"))
        for offset in self.offsets(case):
            there, here = (
                self.bytes[side][offset : offset + case.region].reshape(-1, case.block) for side in ("P", "D")
            )
            if not np.array_equal(there[theirs], here[mine]):
                raise RuntimeError(f"wrong bytes were read: {case}")
            here[mine] = 0


@contextmanager
def memory(size: int) -> Iterator[Memory]:
    """Two files of ``size`` bytes; P's is full of noise."""
    shared = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="kvxfer-bench-", dir=shared if shared.is_dir() else None))
    try:
        yield Memory(directory, size)
    finally:
        shutil.rmtree(directory)


def largest(cases: list[Case]) -> int:
    """Bytes that the largest of several cases takes on either side."""
    return max(case.layers * (-(-case.region // _PAGE) * _PAGE) for case in cases)
