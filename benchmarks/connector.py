"""Resolve against the arithmetic of vLLM's NIXL connector, in turn, in one process; needs vLLM.

Both are given the same request: lists of Python integers, logical block IDs of either side, any in any order.

* vLLM expands hybrid models' attention blocks to kernel blocks, trims what a prefix hit leaves out, and numbers
  descriptors: int64, in the order in which the blocks are listed.
* kvxfer checks that every block exists and that none is named twice, that both sides cover the range and that the
  snapshots are of the right position; it sorts by D's blocks, so that neighbours can be merged, says which blocks are
  written, and numbers descriptors: int32, as NIXL takes them.  Whole logical blocks are one descriptor a layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.prompts import PROMPTS, SHAPES, TOLD, Prompt, Shape, thousands
from benchmarks.results import Effort, Line, Section, Spread, in_turn
from kvxfer.core.layout import CacheLayout, GroupKind
from kvxfer.core.pairing import Member, compile_plan
from kvxfer.core.resolve import BlockList, Request, resolve

TITLE = "Resolve against vLLM's connector"
#: Resolve takes at most so many times as long.
MOST = 1.0
#: One rank may name as many descriptors as there are; the service's own limit is lower.
_LIMIT = 2**31 - 1

Groups = list[list[int]]


class Connector:
    """The part of vLLM's worker that turns block IDs into descriptor numbers, for the memory of a layout.

    A real worker needs an engine, so this one is made without its constructor and has just what those methods read, as
    ``register_kv_caches`` would have put it there for the layout's regions, which in a hybrid model all groups share.
    """

    def __init__(self, layout: CacheLayout) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

        kinds = {GroupKind.ATTENTION: FullAttentionSpec, GroupKind.STATE: MambaSpec}
        specs = [kinds[group.kind] for group in layout.groups]
        hybrid = len(layout.groups) > 1
        attention = next(g for g in layout.groups if g.kind is GroupKind.ATTENTION)
        self.ratio = attention.views[0].kernel_blocks
        regions = len(layout.regions)
        self.blocks = attention.num_blocks * self.ratio
        worker: Any = object.__new__(NixlPullConnectorWorker)
        worker._has_mamba = hybrid
        # Mamba2's conv state is read in three parts, x, B and C, beside the recurrent state.
        worker._conv_decomp = SimpleNamespace(local_conv_offsets=[(0, 1)] * 3)
        worker._ssm_region_indices = list(range(regions)) if hybrid else []
        worker._scratch_region_indices = []
        worker._ple_group_index = None
        worker._transfer_layer_group_ids = ()
        worker._group_spec_types = tuple(specs)
        worker.block_len_per_layer = [1] * regions
        worker.num_regions = regions
        # Only the types of the specs are looked at.
        groups = [SimpleNamespace(kv_cache_spec=object.__new__(spec)) for spec in specs]
        worker.kv_cache_config = SimpleNamespace(transfer_groups=groups)
        self._worker = worker
        self._group_ids = [-1 if hybrid else 0] * regions
        self._region_blocks = [self.blocks] * regions

    def kernel(self, block_ids: Groups) -> Groups:
        """Logical blocks to kernel blocks."""
        found: Groups = self._worker._logical_to_kernel_block_ids(block_ids, self.ratio)
        return found

    def numbers(self, block_ids: Groups, ratio: int | None) -> npt.NDArray[np.int64]:
        """Descriptor numbers of kernel blocks, as ``_read_blocks`` asks for them."""
        found: npt.NDArray[np.int64] = self._worker._compute_desc_ids(
            block_ids=block_ids,
            dst_num_blocks=self.blocks,
            block_size_ratio=ratio,
            physical_blocks_per_logical=self.ratio,
            region_num_blocks=self._region_blocks,
            region_group_ids=self._group_ids,
            uses_region_group_mapping=False,
        )
        return found

    def whole(self, local: Groups, remote: Groups) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """All that is done for a request between its block IDs and NIXL, in that order."""
        here, there = self.kernel(local), self.kernel(remote)
        here, there = self._worker._apply_prefix_caching(
            decode_block_ids=here,
            prefill_block_ids=there,
            decode_physical_per_logical=self.ratio,
            prefill_physical_per_logical=self.ratio,
        )
        numbers = self.numbers(there, None)
        return self.numbers(here, 1), numbers


def run(effort: Effort) -> Section:
    """Measure every shape at every length."""
    section = Section()
    for shape in SHAPES:
        for tokens in PROMPTS:
            _measure(section, shape, tokens, effort)
    return section


def _measure(section: Section, shape: Shape, tokens: int, effort: Effort) -> None:
    prompt = Prompt.of(shape, tokens)
    member = Member(prompt.rank, prompt.layout)
    plan, connector = compile_plan(member, [member]), Connector(prompt.layout)
    local, remote = prompt.lists("D"), prompt.lists("P")
    request, held = Request(local, remote, tokens), Request(_arrays(local), _arrays(remote), tokens)
    ours, theirs = _ids(local), _ids(remote)
    kernel = connector.kernel(ours), connector.kernel(theirs)
    read = resolve(plan, request, _LIMIT)
    numbers = connector.whole(ours, theirs)
    if len(prompt.layout.groups) == 1:
        _check_same((read.sources[0].local_indices, read.sources[0].remote_indices), numbers)
    what: Mapping[str, Callable[[], object]] = {
        "kvxfer": lambda: resolve(plan, request, _LIMIT),
        "kvxfer_arrays": lambda: resolve(plan, held, _LIMIT),
        "vllm": lambda: connector.whole(ours, theirs),
        "vllm_numbers": lambda: (connector.numbers(kernel[1], None), connector.numbers(kernel[0], 1)),
    }
    rounds = effort.rounds(30 if len(numbers[0]) < 2**21 else 8)
    seen = in_turn({name: _timed(call) for name, call in what.items()}, rounds)
    ratio, strict = (Spread.ratio(seen["kvxfer"], seen[name]) for name in ("vllm", "vllm_numbers"))
    section.add(
        "resolving",
        shape=shape.name,
        tokens=tokens,
        blocks=sum(len(ids) for ids in ours),
        descriptors=read.descriptors,
        vllm_descriptors=len(numbers[0]),
        rounds=rounds,
        ratio=ratio.rounded(),
        ratio_to_numbers=strict.rounded(),
        **{f"{name}_ms": round(statistics.median(times) * 1e3, 4) for name, times in seen.items()},
    )
    if tokens == TOLD:
        what_it_is = f"{shape.name}, {thousands(tokens)} tokens"
        section.lines.append(Line.median("5", f"resolve / vLLM from block IDs on, {what_it_is}", ratio, MOST))
        section.lines.append(Line.median("5", f"resolve / vLLM's _compute_desc_ids, {what_it_is}", strict, MOST))


def _timed(call: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        # Once before: how much of its memory comes fresh from the kernel, which costs more than the arithmetic, is then
        # its own doing and not that of whoever came before.
        call()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return seconds


def _ids(lists: Sequence[BlockList]) -> Groups:
    return [list(np.asarray(blocks.ids).tolist()) for blocks in lists]


def _arrays(lists: Sequence[BlockList]) -> list[BlockList]:
    """As a sidecar has them."""
    return [replace(blocks, ids=np.asarray(blocks.ids, dtype=np.int64)) for blocks in lists]


def _check_same(ours: Sequence[npt.NDArray[Any]], theirs: Sequence[npt.NDArray[Any]]) -> None:
    """Raise where the two do not pair the same descriptors, in whatever order."""
    both = [[side[np.argsort(pairs[0], kind="stable")] for side in pairs] for pairs in (ours, theirs)]
    if not all(np.array_equal(a, b) for a, b in zip(*both, strict=True)):
        raise RuntimeError("kvxfer and vLLM do not pair the same descriptors")
