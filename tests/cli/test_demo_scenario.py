"""The demo's scenario and its idea of the truth, against the truth model of the tests."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.cli.demo import truth
from kvxfer.cli.demo.fit import fit
from kvxfer.cli.demo.scenario import Choices, Scenario, Side, real
from kvxfer.core.layout import GroupKind, Rank
from kvxfer.models import EXAMPLES
from tests.truth import Blocks, Labels, RankMemory, Want, granules

CASES = [
    ("nemotron-3-nano-30b-a3b", Choices(2, 4)),
    ("nemotron-3-nano-30b-a3b", Choices(4, 1, tokens=4500, skip=48, p_block_tokens=48)),
    ("qwen3-next-80b-a3b", Choices(1, 2, tokens=777, skip=8, d_block_tokens=24)),
    ("jamba-mini", Choices(2, 1, tokens=100, kv_dtype="auto")),
    ("llama-3.1-70b", Choices(1, 2, tokens=33)),
    ("deepseek-v3", Choices(2, 2, tokens=1)),
]


def small(model: str, choices: Choices) -> Scenario:
    return fit(model, choices, 8 * 2**20).scenario


def blocks_of(side: Side) -> dict[str, Blocks]:
    found = {}
    for group, listed in zip(side.layout.groups, side.blocks, strict=True):
        ids = np.asarray(listed.ids)
        state = group.kind is GroupKind.STATE
        at = np.asarray(listed.positions) if state else np.arange(len(ids)) * group.block_tokens
        found[group.name] = Blocks(tuple(ids.tolist()), tuple(at.tolist()))
    return found


@pytest.mark.parametrize("model, choices", CASES)
def test_blocks_are_scrambled_and_apart(model: str, choices: Choices) -> None:
    scenario = small(model, choices)
    for side in (scenario.p, scenario.d):
        for pool in set(side.layout.pools):
            pooled = [b for b, p in zip(side.blocks, side.layout.pools, strict=True) if p == pool]
            ids = np.concatenate([real(blocks) for blocks in pooled])
            assert len(set(ids.tolist())) == len(ids) < side.options.num_blocks
            assert len(ids) < 3 or (np.diff(ids) != 1).any()
    for mine, theirs in zip(scenario.d.blocks, scenario.p.blocks, strict=True):
        assert real(mine)[-1] != real(theirs)[-1]
    assert blocks_of(Scenario.of(fit(model, choices, 8 * 2**20).config, choices).p) == blocks_of(scenario.p)


@pytest.mark.parametrize("model, choices", CASES)
def test_same_bytes_as_the_truth_model(model: str, choices: Choices) -> None:
    """Both ideas of what a read must write, worked out apart, are the same bytes."""
    scenario = small(model, choices)
    labels = Labels()
    p = [RankMemory(layout, labels) for layout in scenario.p.layouts.values()]
    tokens = range(choices.skip, choices.tokens)
    for layout in scenario.d.layouts.values():
        d = RankMemory(layout, labels)
        wants = {group.name: Want(choices.skip, choices.tokens) for group in layout.groups}
        image, free, least = d.expect(blocks_of(scenario.d), wants, granules(d, p))
        memory = [truth.noise([7, i], region.size).copy() for i, region in enumerate(layout.regions)]
        for i, region in enumerate(memory):
            for part in truth.parts(layout, scenario.d.blocks, i):
                part.put(region, tokens)
        seeds = [[7, i] for i in range(len(memory))]
        verdict = truth.verify(memory, seeds, layout, scenario.d.blocks, tokens, scenario.granule)
        assert verdict.first is None
        assert (verdict.due, verdict.rounding) == (int((image != d.image).sum()), int(free.sum()))
        assert verdict.least == sum(least.values())
        # One byte of each kind is damaged, in the middle of the memory where there is one.
        changed = image != d.image
        for kind, expected in ((changed, (1, 0)), (free, (0, 0)), (~changed & ~free, (0, 1))):
            if not kind.any():
                continue
            address = int(np.flatnonzero(kind)[int(kind.sum()) // 2])
            region = int(np.searchsorted(d.region_starts, address, side="right")) - 1
            at = address - int(d.region_starts[region])
            memory[region][at] ^= 0x40
            found = truth.verify(memory, seeds, layout, scenario.d.blocks, tokens, scenario.granule)
            memory[region][at] ^= 0x40
            assert (found.missing, found.touched) == expected
            if found.first is not None:
                assert (found.first.region, found.first.offset, found.first.due) == (region, at, expected == (1, 0))


@pytest.mark.parametrize("model", EXAMPLES)
def test_every_example_fits(model: str) -> None:
    fitted = fit(model, Choices(tokens=20_000), 256 * 2**20)
    assert fitted.scenario.memory <= 256 * 2**20
    assert "scaled down: " in fitted.note
    whole = fit(model, Choices(), 2**40)
    assert whole.note == ""
    assert {g.kind for g in fitted.scenario.d.layout.groups} == {g.kind for g in whole.scenario.d.layout.groups}


def test_values_tell_everything_apart() -> None:
    tokens, units = np.arange(40), np.arange(8)
    found = [truth.values(layer, name, tokens, units, 64) for layer in ("a", "b") for name in ("k", "v")]
    together = np.concatenate([f.ravel() for f in found])
    assert len(np.unique(together)) > 0.9999 * together.size
    # A slice is what it is in the whole.
    assert np.array_equal(truth.values("a", "v", tokens[5:9], units[2:3], 64), found[1][5:9, 2:3])
    # Also the low bytes are spread over all values.
    assert len(np.unique(together.astype(np.uint8))) == 256


def test_whole_pages_count_what_is_touched() -> None:
    scenario = fit("nemotron-3-nano-30b-a3b", Choices(2, 4, skip=2096), 2**30).scenario
    layout = scenario.d.layouts[Rank(0, 4)]
    page = layout.groups[0].views[0].block_stride
    assert truth.whole_pages(layout, scenario.d.blocks, range(2096, 5000)) == (23 + 2 * 6) * page
