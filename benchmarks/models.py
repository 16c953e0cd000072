"""The caches of well-known models: descriptors and bytes of a request against the least that there must be.

Two parts.  Plans of whole models, at equal and unequal TP, of every D rank: pure numbers.  And one D rank's read of
each model, done by two sidecars: NIXL's own count of bytes, and every byte compared with P's by the definition of the
layouts, without plan or descriptors.  There P is one rank (TP 1) and D the same, or the first of two; layers are left
out where P's memory would be more than 2 GiB.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.least import least
from benchmarks.prompts import lists_of
from benchmarks.results import Effort, Line, Section
from benchmarks.sidecars import Sidecar, both, phases, publish, read_request, register, timed_read
from kvxfer.cli.demo.truth import Bytes, Part, noise, parts
from kvxfer.core.layout import GroupKind
from kvxfer.memory.handles import FileHandle
from kvxfer.models import EngineOptions, example, scale_down
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.planning import Engine, Pair
from kvxfer.planning.report import least_bytes, padded_bytes
from kvxfer.wire.blocks import block_lists_to_pb
from kvxfer_client.memory import SharedRegion

TITLE = "Models"
TOKENS: Final = 8_192
#: Descriptors of Nemotron 3 Nano at equal TP, one block of each group, at most.
NANO: Final = 40
#: What P's memory may take in a real read.
ROOM: Final = 2 * 2**30
_PAGE: Final = 4096

Config = dict[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """A model, and at which (P, D) sizes of TP it is planned; the first is equal."""

    name: str
    config: str
    sizes: tuple[tuple[int, int], ...]


MODELS: Final = (
    Model("Nemotron 3 Nano", "nemotron-3-nano-30b-a3b", ((1, 1), (2, 2), (1, 2), (2, 1), (2, 8), (8, 2))),
    Model("Nemotron 3 Super", "nemotron-3-super-120b-a12b", ((4, 4), (2, 4), (4, 2), (4, 8))),
    Model("Qwen3-Next", "qwen3-next-80b-a3b", ((4, 4), (2, 4), (4, 2), (2, 8))),
    Model("dense 70B", "llama-3.1-70b", ((8, 8), (4, 8), (8, 4))),
    Model("DeepSeek V3 (MLA)", "deepseek-v3", ((8, 8), (4, 8), (8, 4))),
)


def run(effort: Effort) -> Section:
    """Plan everything, and read."""
    section = Section()
    for model in MODELS:
        for p_tp, d_tp in model.sizes:
            plan(section, model, p_tp, d_tp)
    with sidecars() as (directory, p, d):
        for model in MODELS if effort.share >= 1 else MODELS[:1]:
            for d_tp in (1, 2):
                read(section, model, d_tp, directory, p, d)
    section.lines += promises(section.rows)
    return section


def promises(rows: Mapping[str, Sequence[Row]]) -> Iterator[Line]:
    """A line for each model and part: the worst of its cases."""
    for kind, what in (("models", "bytes of the plans"), ("model_reads", "bytes that NIXL moved")):
        for model in dict.fromkeys(row["model"] for row in rows[kind]):
            worst = max(row["bytes"] / row["least"] for row in rows[kind] if row["model"] == model)
            yield Line("2", f"{what} / least, {model}", worst, 1.0)
    nano = [r for r in rows["models"] if r["model"] == MODELS[0].name and r["p_tp"] == r["d_tp"] and r["one_block"]]
    what = f"descriptors, {MODELS[0].name}, equal TP, a block of each group"
    yield Line("2", what, max(row["descriptors"] for row in nano), NANO)


@contextlib.contextmanager
def sidecars() -> Iterator[tuple[Path, Sidecar, Sidecar]]:
    """P's and D's, and a directory for memory that they may use."""
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-", dir=shared) as name, both(Path(name)) as (p, d):
        yield Path(name), p, d


# -- plans -----------------------------------------------------------------------------------------------------------


def plan(section: Section, model: Model, p_tp: int, d_tp: int) -> None:
    """What all D ranks read: of a long prompt, and of one block of each group."""
    config: Config = example(model.config)
    p, d = (Engine.preset(model.name, config, EngineOptions(tp_size=tp)) for tp in (p_tp, d_tp))
    block = next(g.block_tokens for g in d.layouts[d.first].groups if g.kind is GroupKind.ATTENTION)
    for tokens in (TOKENS, block):
        pair = Pair.of(p, d, tokens)
        reads = {rank: pair.read(rank, tokens) for rank in pair.plans}
        moved, formula = (sum(values) for values in ((r.bytes for r in reads.values()), _each(config, d_tp, tokens)))
        planned = sum(least_bytes(plan, tokens)[0] for plan in pair.plans.values())
        descriptors = max(read.descriptors for read in reads.values())
        section.add(
            "models",
            model=model.name,
            p_tp=p_tp,
            d_tp=d_tp,
            tokens=tokens,
            one_block=tokens == block,
            descriptors=descriptors,
            bytes=moved,
            least=formula,
            least_by_layout=planned,
            padded=sum(padded_bytes(layout, tokens) for layout in pair.d.layouts.values()),
        )
        # Fewer bytes than must be would be no merit.
        if not planned == formula <= moved:
            what = f"{model.name}, TP {p_tp} to {d_tp}, {tokens} tokens"
            raise RuntimeError(f"{what}: {formula} bytes must move, by the layouts {planned}; {moved} do")


def _each(config: Config, tp_size: int, tokens: int) -> Iterator[int]:
    return (least(config, tp_size, tokens) for _ in range(tp_size))


# -- reads -----------------------------------------------------------------------------------------------------------


class Side:
    """One rank of an engine, with memory of its own, registered with a sidecar."""

    def __init__(self, name: str, sidecar: Sidecar, engine: Engine, tokens: int, directory: Path) -> None:
        self.name, self.sidecar, self.rank, self.tokens = name, sidecar, engine.first, tokens
        self.layout = engine.layouts[self.rank]
        self.lists = lists_of(self.layout, tokens, seed=ord(name))
        starts = np.cumsum([0, *(-(-region.size // _PAGE) * _PAGE for region in self.layout.regions)])
        self._file = SharedRegion.create_file(directory / name, int(starts[-1]))
        whole = self._file.numpy(np.uint8, (int(starts[-1]),))
        self.memory: list[Bytes] = [
            whole[at : at + region.size] for at, region in zip(starts, self.layout.regions, strict=False)
        ]
        handles = tuple(
            FileHandle(str(directory / name), int(at), region.size)
            for at, region in zip(starts, self.layout.regions, strict=False)
        )
        self.registered = register(sidecar, name, self.rank, self.layout, handles)

    def close(self) -> None:
        """Give everything back."""
        self.sidecar.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id=self.name), timeout=60)
        self.memory.clear()
        self._file.close()
        self._file.unlink()

    def parts(self) -> Iterator[Part]:
        """Every component of every layer, with the request's blocks."""
        for region in range(len(self.layout.regions)):
            yield from parts(self.layout, self.lists, region)

    def content(self, part: Part) -> npt.NDArray[Any]:
        """What a component holds for the request: an array (token or snapshot, unit, inner...)."""
        blocks = part.array(self.memory[part.view.region])[part.ids]
        return blocks.reshape(-1, *blocks.shape[3:])[: 1 if part.is_state else self.tokens]

    def forget(self, part: Part) -> None:
        """Set to zero what :meth:`content` was of."""
        part.put(self.memory[part.view.region], range(self.tokens), 0)


def read(section: Section, model: Model, d_tp: int, directory: Path, p: Sidecar, d: Sidecar) -> None:
    """One read by D's first rank, counted by NIXL and compared byte by byte."""
    config, left_out = _fitting(example(model.config))
    sides = []
    try:
        for name, sidecar, tp in (("P", p, 1), ("D", d, d_tp)):
            engine = Engine.preset(model.name, config, EngineOptions(tp_size=tp)).holding(TOKENS)
            sides.append(Side(name, sidecar, engine, TOKENS, directory))
        source, target = sides
        for i, memory in enumerate(source.memory):
            memory[:] = np.resize(noise([i], min(memory.size, 2**22 - 1)), memory.size)
        seconds, transfer = _read(source, target)
        _check(source, target)
    finally:
        for side in reversed(sides):
            side.close()
    if not all(s.HasField("reported_bytes") for s in transfer.sources):
        raise RuntimeError(f"NIXL did not say how much it moved: {transfer}")
    moved = sum(s.reported_bytes for s in transfer.sources)
    must = least(config, d_tp, TOKENS)
    section.add(
        "model_reads",
        model=model.name,
        p_tp=1,
        d_tp=d_tp,
        tokens=TOKENS,
        layers_left_out=left_out,
        descriptors=transfer.descriptors,
        merged=sum(s.reported_descriptors for s in transfer.sources),
        bytes=moved,
        planned=transfer.bytes,
        least=must,
        ms=round(seconds * 1e3, 3),
        phases_ms={name: round(value * 1e3, 3) for name, value in phases(transfer).items()},
    )
    if not must <= moved == transfer.bytes:
        raise RuntimeError(f"{model.name}: {must} bytes must move, the plan says {transfer.bytes}, NIXL {moved}")


def _fitting(config: Config) -> tuple[Config, int]:
    """The model with as many of its first layers as have room at TP 1, and how many are missing."""
    depth = int(config["num_hidden_layers"])
    for layers in range(depth, 0, -1):
        cut = scale_down(config, max_layers=layers)
        engine = Engine.preset("", cut, EngineOptions()).holding(TOKENS)
        if sum(region.size for region in engine.layouts[engine.first].regions) <= ROOM:
            return cut, depth - layers
    raise RuntimeError("not one layer has room")


def _read(source: Side, target: Side) -> tuple[float, pb.Transfer]:
    """Publish, shake hands, and read; the read is timed."""
    ticket = publish(source.sidecar, source.name, source.registered, source.lists, TOKENS)
    shake = pb.HandshakeRequest(engine_id=target.name, ticket=ticket)
    target.sidecar.stub.Handshake(shake, timeout=60)
    return timed_read(target.sidecar, read_request(target.name, ticket, block_lists_to_pb(target.lists)))


def _check(source: Side, target: Side) -> None:
    """Raise where D does not hold what P does for its units, or anything else.  D's memory was zero, and is again."""
    theirs = {(part.view.layer, part.component.name): part for part in source.parts()}
    for part in target.parts():
        units, other = part.component.units, theirs[part.view.layer, part.component.name]
        first = units.begin - other.component.units.begin
        if not np.array_equal(target.content(part), source.content(other)[:, first : first + len(units)]):
            raise RuntimeError(f"wrong bytes were read: layer {part.view.layer}, component {part.component.name}")
    for part in target.parts():
        target.forget(part)
    if any(memory.any() for memory in target.memory):
        raise RuntimeError("bytes were written that are nobody's")
