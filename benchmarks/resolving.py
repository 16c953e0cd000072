"""Resolve and pairing: what stands between an engine's block IDs and NIXL, and what a handshake takes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.caches import Case, largest, memory
from benchmarks.prompts import SHAPES, TOLD, Prompt, Shape, thousands
from benchmarks.raw import Raw
from benchmarks.results import Effort, Line, Section, Spread, in_turn
from kvxfer.core.layout import GroupKind, Rank
from kvxfer.core.pairing import Member, compile_plan
from kvxfer.core.plan import Plan
from kvxfer.core.resolve import Request, resolve

TITLE = "Resolve and pairing"
MIB: Final = 2**20

#: Resolve takes at most this share of the read that it belongs to.
SHARE: Final = 0.05
#: Bytes of the read that is measured for it, at most; longer ones are scaled by bytes.
SLICE: Final = 256 * MIB
DESCRIPTORS: Final = (10_000, 100_000, 1_000_000, 10_000_000)
#: Pairing so many takes at most so long, and so much memory.
PAIRED, PAIRED_MS, PAIRED_MIB = 10_000_000, 20.0, 1.0
LAYERS: Final = 80

_ROOT: Final = Path(__file__).resolve().parent.parent
#: What ``scripts/engines.sh`` makes.
_ENGINES: Final = _ROOT / ".venv-engines" / "bin" / "python"


def run(effort: Effort) -> Section:
    """Measure all three."""
    section = Section()
    against_vllm(section, effort)
    share_of_read(section, effort)
    pairing(section, effort)
    return section


def against_vllm(section: Section, effort: Effort) -> None:
    """What :mod:`benchmarks.connector` finds, where vLLM is: here, or in the environment of ``make engines``.

    :raises RuntimeError: where it is in neither.
    """
    if importlib.util.find_spec("vllm") is not None:
        python = sys.executable
    elif _ENGINES.exists():
        python = str(_ENGINES)
    else:
        raise RuntimeError("vLLM is not there; scripts/engines.sh .venv-engines python3 installs it")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [python, "-m", "benchmarks.one", "connector", "--share", str(effort.share), "--out", file.name]
        # Its greeting, and what it misses on a machine without a GPU, would stand between the tables.
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, cwd=_ROOT, env={**os.environ, **quiet}, check=True)
        found = json.loads(Path(file.name).read_text(encoding="utf-8"))
    for kind, rows in found["rows"].items():
        section.rows.setdefault(kind, []).extend(rows)
    section.lines += [Line(**{**line, "spread": line["spread"] and tuple(line["spread"])}) for line in found["lines"]]


def share_of_read(section: Section, effort: Effort) -> None:
    """Resolve beside a bare READ of the same blocks at the rate of this machine's memory, the fastest that there is.

    The read is one of as many layers as :data:`SLICE` holds, with blocks of the same size and number in any order; the
    whole read is taken to last longer in proportion to its bytes.
    """
    prompts = [Prompt.of(shape, TOLD) for shape in SHAPES]
    cases = [_slice(prompt) for prompt in prompts]
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(memory(largest(cases)))
        raw = stack.enter_context(Raw(place))
        for shape, prompt, case in zip(SHAPES, prompts, cases, strict=True):
            bare = raw.prepare(case)
            member = Member(prompt.rank, prompt.layout)
            plan = compile_plan(member, [member])
            request = Request(prompt.lists("D"), prompt.lists("P"), TOLD)
            whole = resolve(plan, request).bytes / case.bytes

            def once(plan: Plan = plan, request: Request = request) -> float:
                began = time.perf_counter()
                resolve(plan, request)
                return time.perf_counter() - began

            def read(bare: Any = bare, whole: float = whole) -> float:
                return float(bare.once().whole * whole)

            what: Mapping[str, Callable[[], float]] = {"resolve": once, "read": read}
            seen = in_turn(what, effort.rounds(12), warm_up=1)
            place.check(case)
            bare.close()
            _tell_share(section, shape, case, seen, whole)


def _tell_share(section: Section, shape: Shape, case: Case, seen: Mapping[str, Sequence[float]], whole: float) -> None:
    share = Spread.ratio(seen["resolve"], seen["read"])
    section.add(
        "share_of_read",
        shape=shape.name,
        tokens=TOLD,
        bytes=round(case.bytes * whole),
        read_bytes=case.bytes,
        resolve_ms=_ms(seen["resolve"]),
        read_ms=_ms(seen["read"]),
        share=share.rounded(5),
    )
    what = f"resolve / the raw CMA read, {shape.name}, {thousands(TOLD)} tokens"
    section.lines.append(Line.median("5", what, share, SHARE))


def _slice(prompt: Prompt) -> Case:
    """The attention blocks of some of a prompt's layers."""
    group = next(group for group in prompt.layout.groups if group.kind is GroupKind.ATTENTION)
    block = group.views[0].block_stride
    blocks = -(-prompt.tokens // group.block_tokens)
    return Case(block, blocks, max(1, min(len(group.views), SLICE // (block * blocks))))


# -- pairing ---------------------------------------------------------------------------------------------------------


def pairing(section: Section, effort: Effort) -> None:
    """What a handshake adds: the plan of a rank's 80 layers, and the rows of both sides as NIXL takes them."""
    for descriptors in DESCRIPTORS:
        # Pairing knows no memory, so that the smallest blocks do.
        case = Case(32, descriptors // LAYERS, LAYERS, spare=1)
        addresses = [2**40 + i * case.region for i in range(LAYERS)]
        seen = [_pair(case, addresses)[0] for _ in range(effort.rounds(15))]
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        kept = _pair(case, addresses)
        after, peak = (count - before for count in tracemalloc.get_traced_memory())
        tracemalloc.stop()
        rows = len(kept[1].sources[0].local)
        prepared = _prepared(case, kept[1])
        time_of = Spread.of([seconds * 1e3 for seconds in seen])
        section.add(
            "pairing",
            descriptors=case.blocks * LAYERS,
            rows=rows,
            ms=time_of.rounded(),
            peak_bytes=peak,
            kept_bytes=after,
            **prepared,
        )
        if descriptors == PAIRED:
            what = f"pairing {PAIRED // 10**6} M descriptors"
            section.lines.append(Line.median("5", what, time_of, PAIRED_MS, unit="ms"))
            section.lines.append(Line("5", f"{what}, at its peak", round(peak / MIB, 3), PAIRED_MIB, unit="MiB"))


def _pair(case: Case, addresses: Sequence[int]) -> tuple[float, Plan, list[npt.NDArray[np.uint64]]]:
    """Seconds, and what is left."""
    member = Member(Rank(), case.layout)
    devices = [0] * len(addresses)
    began = time.perf_counter()
    plan = compile_plan(member, [member])
    rows = [table.bind(addresses, devices) for s in plan.sources for table in (s.local, s.remote)]
    return time.perf_counter() - began, plan, rows


def _prepared(case: Case, plan: Plan) -> dict[str, float]:
    """What NIXL's own part takes, which comes on top: the prepared lists of both sides."""
    from nixl._api import nixl_agent, nixl_agent_config

    from kvxfer.xfer.environment import apply_defaults

    apply_defaults()
    here, there = (nixl_agent(name, nixl_agent_config(enable_prog_thread=False)) for name in ("here", "there"))
    arrays = [np.zeros(case.region * case.layers, dtype=np.uint8) for _ in range(2)]
    registered = [
        agent.register_memory([(array.ctypes.data, array.size, 0, "")], "DRAM")
        for agent, array in zip((here, there), arrays, strict=True)
    ]
    name = here.add_remote_agent(there.get_agent_metadata()).decode()
    addresses = [[array.ctypes.data + i * case.region for i in range(case.layers)] for array in arrays]
    source = plan.sources[0]
    before, began = _resident(), time.perf_counter()
    lists = [
        here.prep_xfer_dlist(whose, table.bind(at, [0] * len(at)), "DRAM")
        for whose, table, at in zip(("NIXL_INIT_AGENT", name), (source.local, source.remote), addresses, strict=True)
    ]
    seconds, grown = time.perf_counter() - began, _resident() - before
    for prepared in lists:
        here.release_dlist_handle(prepared)
    for agent, memory_of in zip((here, there), registered, strict=True):
        agent.deregister_memory(memory_of)
    return {"nixl_ms": round(seconds * 1e3, 3), "nixl_resident_bytes": grown}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)
