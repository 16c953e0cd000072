"""The cache layouts of real models, narrower but with all their layers' shapes, between real sidecars."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from kvxfer.core.layout import CacheLayout, GroupKind, Rank
from kvxfer.models import EngineOptions, build_all, example, scale_down
from kvxfer.pb import transfer_pb2 as pb
from tests.support.engines import groups_of, make_lists
from tests.support.fleet import Engine
from tests.support.processes import SidecarProcess
from tests.truth import Labels, Want

NEMOTRON = ("nemotron-3-nano-30b-a3b", 9, 8)
QWEN = ("qwen3-next-80b-a3b", 8, 8)
JAMBA = ("jamba-mini", 8, 64)
LLAMA = ("llama-3.1-70b", 3, 16)
DEEPSEEK = ("deepseek-v3", 3, 16)
FALCON = ("falcon-h1-7b", 2, 8)
GRANITE = ("granite-4.0-h-small", 7, 8)
KIMI = ("kimi-linear-48b-a3b", 5, 8)

Members = list[tuple[Rank, CacheLayout]]


class Case(NamedTuple):
    """A model (name, layers, shrink) and the options of both engines."""

    model: tuple[str, int, int]
    p: EngineOptions
    d: EngineOptions


def options(tp: int, **more: object) -> EngineOptions:
    return replace(EngineOptions(tp_size=tp, kv_dtype="fp8", num_blocks=1), **more)  # type: ignore[arg-type]


CASES = {
    # Two, four and eight sidecars; Mamba2 with attention over pooled tensors.
    "nemotron 1 to 1": Case(NEMOTRON, options(1), options(1)),
    "nemotron 2 to 2": Case(NEMOTRON, options(2), options(2)),
    "nemotron 4 to 4": Case(NEMOTRON, options(4), options(4)),
    "nemotron 2 to 4": Case(NEMOTRON, options(2), options(4)),
    "nemotron 4 to 2": Case(NEMOTRON, options(4), options(2)),
    "nemotron 1 to 4": Case(NEMOTRON, options(1), options(4)),
    "nemotron 4 to 1": Case(NEMOTRON, options(4), options(1)),
    "nemotron, not pooled, 2 to 4": Case(NEMOTRON, options(2, pooled=False), options(4, pooled=False)),
    "nemotron, pooled to not pooled, 2 to 1": Case(NEMOTRON, options(2), options(1, pooled=False)),
    "nemotron, SD, 2 to 4": Case(NEMOTRON, options(2, conv_layout="SD"), options(4, conv_layout="SD")),
    "nemotron, blocks 16 and 32, 2 to 2": Case(NEMOTRON, options(2), options(2, block_tokens=32)),
    "nemotron, blocks 48 and 32, 1 to 2": Case(NEMOTRON, options(1, block_tokens=48), options(2, block_tokens=32)),
    "nemotron, two stages to one": Case(NEMOTRON, options(2, pp_size=2), options(2)),
    "nemotron, one stage to two": Case(NEMOTRON, options(1), options(2, pp_size=2)),
    "GDN 2 to 4": Case(QWEN, options(2), options(4)),
    "GDN 4 to 2": Case(QWEN, options(4), options(2)),
    "GDN 4 to 4": Case(QWEN, options(4), options(4)),
    "Mamba1 2 to 4": Case(JAMBA, options(2), options(4)),
    "Mamba1 4 to 1": Case(JAMBA, options(4), options(1)),
    "Mamba1, blocks 16 and 64, 2 to 2": Case(JAMBA, options(2), options(2, block_tokens=64)),
    "dense 2 to 4": Case(LLAMA, options(2), options(4)),
    "dense, HND and NHD of one head, 4 to 4": Case(LLAMA, options(4), options(4, kv_layout="NHD")),
    "dense, blocks 16 and 128, halves, 4 to 2": Case(
        LLAMA, options(4, kv_packing="halves"), options(2, block_tokens=128, kv_packing="halves")
    ),
    "dense, two stages, K and V apart, 2 to 4": Case(
        LLAMA, options(2, pp_size=2, kv_packing="regions"), options(4, kv_packing="regions")
    ),
    "MLA 4 to 2": Case(DEEPSEEK, options(4), options(2)),
    "Mamba2 and attention in one layer, 2 to 4": Case(FALCON, options(2), options(4)),
    "B and C on every rank, 4 to 2": Case(GRANITE, options(4), options(2)),
    "KDA and MLA, 2 to 4": Case(KIMI, options(2), options(4)),
}


def build(model: tuple[str, int, int], chosen: EngineOptions, blocks: int) -> Members:
    name, layers, shrink = model
    config = scale_down(example(name), max_layers=layers, shrink=shrink)
    return list(build_all(config, replace(chosen, num_blocks=blocks)).items())


def sized(model: tuple[str, int, int], chosen: EngineOptions, num_tokens: int) -> tuple[Members, int]:
    """Ranks with room for two requests of so many tokens, and the blocks that one takes."""
    shapes = groups_of(layout for _, layout in build(model, chosen, 1))
    _, needed = make_lists(shapes, num_tokens, 0)
    return build(model, chosen, 2 * needed + 1), needed


def tokens_for(case: Case) -> int:
    """Somewhat more than a block of the larger kind, and not at the end of one."""
    sizes = [
        g.block_tokens
        for chosen in (case.p, case.d)
        for g in groups_of(layout for _, layout in build(case.model, chosen, 1))
        if g.kind is GroupKind.ATTENTION
    ]
    return max(sizes) + max(sizes) // 3 + 1


def wanted(engine: Engine, tokens: int) -> dict[str, Want]:
    return {g.name: Want(0, tokens) for g in engine.groups}


@pytest.mark.parametrize("name", CASES)
def test_every_byte_and_no_byte_too_many(eight: list[SidecarProcess], name: str) -> None:
    case = CASES[name]
    tokens = tokens_for(case)
    labels = Labels()
    (p_members, p_needed), (d_members, d_needed) = (sized(case.model, c, tokens) for c in (case.p, case.d))
    p_processes, d_processes = eight[: len(p_members)], eight[len(p_members) :]
    with Engine("p", p_members, p_processes, labels) as p, Engine("d", d_members, d_processes, labels) as d:
        for round_ in range(2):
            p_lists, _ = make_lists(p.groups, tokens, round_, first=round_ * p_needed)
            d_lists, _ = make_lists(d.groups, tokens, round_ + 9, first=1 + round_ * d_needed)
            p.hold(p_lists)
            ticket = p.ticket(p_lists, tokens, request_id=f"request-{round_}")
            for number in range(len(d.members)):
                plan = d.handshake(number, ticket)
                transfer = d.read(number, p, ticket, d_lists, wanted(d, tokens))
                assert len(transfer.sources) == len(plan.sources)
                if case.p == case.d:
                    check_runs(transfer, plan)
        for member in p.members:
            assert not member.differences(member.model.image), "a read has changed the source"


def check_runs(transfer: pb.Transfer, plan: pb.Plan) -> None:
    """Equal engines: one source, and a snapshot is one run a layer."""
    assert len(transfer.sources) == 1
    for group in plan.sources[0].groups:
        assert group.snapshot_descriptors <= group.layers


def test_the_real_nemotron_at_equal_tp_comes_to_a_run_a_layer(eight: list[SidecarProcess]) -> None:
    """A request of one block of the real layout at TP 2: 29 descriptors, not one for each of 261 kernel blocks."""
    labels = Labels()
    members = list(build_all(example(NEMOTRON[0]), options(2, num_blocks=5)).items())[:1]
    # One rank of two is enough: the ranks of equal engines do not meet.
    alone = [(Rank(), layout) for _, layout in members]
    with Engine("p", alone, eight[:1], labels) as p, Engine("d", alone, eight[1:2], labels) as d:
        tokens = 4176
        p_lists, _ = make_lists(p.groups, tokens, 1)
        d_lists, _ = make_lists(d.groups, tokens, 2)
        p.hold(p_lists)
        transfer = d.read(0, p, p.ticket(p_lists, tokens), d_lists, wanted(d, tokens))
    assert transfer.bytes == 23 * (18_432 + 1_048_576) + 6 * tokens * 256
    assert transfer.descriptors == transfer.sources[0].reported_descriptors == 23 + 6
