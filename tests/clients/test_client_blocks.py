"""Block lists from what a scheduler hands out."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.wire.blocks import block_lists_to_pb
from kvxfer_client import BlockList, KvxferError, Reason, attention_blocks, grouped, snapshot, state_blocks
from tests.clients.test_client_sidecars import layout


def shown(blocks: BlockList) -> tuple[str, list[int], list[int] | None]:
    positions = None if blocks.positions is None else np.asarray(blocks.positions).tolist()
    return blocks.group, np.asarray(blocks.ids).tolist(), positions


def test_lists_of_one_group() -> None:
    window = attention_blocks("attn", [4, 5], 32, skip_tokens=48, num_tokens=60)
    assert (window.first_position, window.skip_tokens, window.num_tokens) == (32, 48, 60)
    assert shown(window) == ("attn", [4, 5], None)
    assert shown(state_blocks("ssm", [1, -1, 2], [16, 0, 40])) == ("ssm", [1, -1, 2], [16, 0, 40])
    assert shown(snapshot("ssm", 2, 40)) == ("ssm", [2], [40])


def test_grouped_lists_start_at_0_and_end_with_the_snapshot() -> None:
    attention, state = grouped([[5, 1, 6], [0, 3, 2]], layout(), 40)
    assert shown(attention) == ("attn", [5, 1, 6], None)
    assert attention.first_position == 0
    assert shown(state) == ("ssm", [2], [40])


def test_grouped_lists_may_be_empty_for_attention_only() -> None:
    attention, _ = grouped([[], [2]], layout(), 40)
    assert list(block_lists_to_pb([attention])[0].block_ids) == []
    for ids in ([], [2, -1]):
        with pytest.raises(KvxferError) as caught:
            grouped([[1, 2, 3], ids], layout(), 40)
        assert (caught.value.reason, caught.value.field) == (Reason.STATE_POSITION_MISMATCH, "ids[1]")
        assert caught.value.metadata["group"] == "ssm"


@pytest.mark.parametrize("lists", [[], [[1]], [[1], [2], [3]]])
def test_one_list_for_each_group(lists: list[list[int]]) -> None:
    with pytest.raises(KvxferError) as caught:
        grouped(lists, layout(), 40)
    assert caught.value.reason is Reason.GROUP_MISMATCH
    assert caught.value.metadata["groups"] == "attn, ssm"
