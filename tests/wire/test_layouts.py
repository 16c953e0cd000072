from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import (
    Axis,
    AxisKind,
    CacheLayout,
    Component,
    Group,
    GroupKind,
    MemoryKind,
    Rank,
    Region,
    TokenPartition,
    UnitRange,
    View,
)
from kvxfer.pb import layout_pb2 as pb
from kvxfer.wire.layouts import layout_from_pb, layout_to_pb, rank_from_pb, rank_to_pb
from tests.wire.strategies import layouts


@given(layouts)
def test_round_trip(layout: CacheLayout) -> None:
    message = pb.Layout.FromString(layout_to_pb(layout).SerializeToString())
    again = layout_from_pb(message)
    assert again == layout
    assert again.fingerprint == layout.fingerprint
    assert layout_to_pb(again) == message


def test_equal_layers_share_a_format() -> None:
    layout = _layout(layers=50)
    message = layout_to_pb(layout)
    assert len(message.formats) == 1
    assert len(message.SerializeToString()) < 50 * 40
    assert layout_from_pb(message) == layout


def test_partition_and_device_travel() -> None:
    plain = _layout()
    layout = CacheLayout((Region(plain.regions[0].size, MemoryKind.VRAM, 3),), plain.groups, TokenPartition(4, 3, 16))
    assert layout_from_pb(layout_to_pb(layout)) == layout


def _layout(layers: int = 1) -> CacheLayout:
    kv = Component(
        "kv",
        "bfloat16",
        2,
        (Axis(AxisKind.UNIT, 2), Axis(AxisKind.TOKEN, 16), Axis(AxisKind.INNER, 64)),
        UnitRange(0, 2, 2),
    )
    views = tuple(View(f"layers.{i}", 0, 4096 * 4 * i, 4096, 4, (kv,)) for i in range(layers))
    return CacheLayout((Region(4096 * 4 * layers),), (Group("full", GroupKind.ATTENTION, views, 16),))


def _set(path: str, value: object) -> Callable[[pb.Layout], None]:
    def change(message: pb.Layout) -> None:
        *way, last = path.split(".")
        target: object = message
        for step in way:
            name, _, index = step.partition("[")
            target = getattr(target, name)
            if index:
                target = target[int(index[:-1])]  # type: ignore[index]
        setattr(target, last, value)

    return change


def _clear(path: str, name: str) -> Callable[[pb.Layout], None]:
    def change(message: pb.Layout) -> None:
        target: object = message
        for step in filter(None, path.split(".")):
            at, _, index = step.partition("[")
            target = getattr(target, at)[int(index[:-1])]
        target.ClearField(name)  # type: ignore[attr-defined]

    return change


VIEW = "groups[0].views[0]"
KV = "formats[0].components[0]"


@pytest.mark.parametrize(
    "change, field, reason",
    [
        (_clear("", "regions"), "regions", Reason.LAYOUT_INVALID),
        (_clear("", "formats"), f"{VIEW}.format", Reason.LAYOUT_INVALID),
        (_clear("", "groups"), "groups", Reason.LAYOUT_INVALID),
        (_set("regions[0].size", 0), "regions[0].size", Reason.LAYOUT_INVALID),
        (_set("regions[0].size", 2**64 - 1), "regions[0].size", Reason.LAYOUT_INVALID),
        (_set("regions[0].size", 100), VIEW, Reason.LAYOUT_INVALID),
        (_set("regions[0].memory", 0), "regions[0].memory", Reason.FIELD_INVALID),
        (_set("regions[0].memory", 9), "regions[0].memory", Reason.FIELD_INVALID),
        (_set("regions[0].device", 2**32 - 1), "regions[0].device", Reason.LAYOUT_INVALID),
        (_set("groups[0].name", ""), "groups[0].name", Reason.LAYOUT_INVALID),
        (_set("groups[0].kind", 0), "groups[0].kind", Reason.FIELD_INVALID),
        (_set("groups[0].kind", pb.GROUP_KIND_STATE), "groups[0].block_tokens", Reason.LAYOUT_INVALID),
        (_set("groups[0].block_tokens", 17), f"{VIEW}", Reason.LAYOUT_INVALID),
        (_clear("groups[0]", "views"), "groups[0].views", Reason.LAYOUT_INVALID),
        (_set(f"{VIEW}.layer", " "), f"{VIEW}.layer", Reason.LAYOUT_INVALID),
        (_set(f"{VIEW}.region", 1), f"{VIEW}.region", Reason.LAYOUT_INVALID),
        (_set(f"{VIEW}.base", 2**63), f"{VIEW}.base", Reason.LAYOUT_INVALID),
        (_set(f"{VIEW}.base", 1), f"{VIEW}", Reason.LAYOUT_INVALID),
        (_set(f"{VIEW}.block_stride", 0), f"{VIEW}.block_stride", Reason.LAYOUT_INVALID),
        (_set(f"{VIEW}.block_stride", 100), f"{VIEW}.format", Reason.LAYOUT_INVALID),
        (_set(f"{VIEW}.num_blocks", 0), f"{VIEW}.num_blocks", Reason.LAYOUT_INVALID),
        (_set(f"{VIEW}.num_blocks", 2**32 - 1), f"{VIEW}.num_blocks", Reason.LAYOUT_INVALID),
        (_set(f"{VIEW}.format", 1), f"{VIEW}.format", Reason.LAYOUT_INVALID),
        (_clear("formats[0]", "components"), "formats[0].components", Reason.LAYOUT_INVALID),
        (_set("formats[0].kernel_blocks", 2**32 - 1), f"{VIEW}.format", Reason.LAYOUT_INVALID),
        (_set("formats[0].kernel_stride", 2**63), f"{VIEW}.format", Reason.LAYOUT_INVALID),
        (_set(f"{KV}.name", "\n"), f"{KV}.name", Reason.LAYOUT_INVALID),
        (_set(f"{KV}.dtype", ""), f"{KV}.dtype", Reason.LAYOUT_INVALID),
        (_set(f"{KV}.element_bytes", 65), f"{KV}.element_bytes", Reason.LAYOUT_INVALID),
        (_set(f"{KV}.offset", 2**64 - 1), f"{KV}.offset", Reason.LAYOUT_INVALID),
        (_clear(KV, "axes"), f"{KV}.axes", Reason.LAYOUT_INVALID),
        (lambda m: m.formats[0].components[0].axes.extend([pb.Axis()] * 14), f"{KV}.axes", Reason.LAYOUT_INVALID),
        (_set(f"{KV}.axes[1].kind", 0), f"{KV}.axes[1].kind", Reason.FIELD_INVALID),
        (_set(f"{KV}.axes[1].extent", 0), f"{KV}.axes[1].extent", Reason.LAYOUT_INVALID),
        (_set(f"{KV}.axes[1].stride", 1), f"{KV}.axes", Reason.LAYOUT_INVALID),
        (_clear(KV, "units"), f"{KV}.units", Reason.FIELD_INVALID),
        (_set(f"{KV}.units.end", 3), f"{KV}.units.end", Reason.LAYOUT_INVALID),
        (_set(f"{KV}.units.begin", 1), f"{KV}.axes", Reason.LAYOUT_INVALID),
        (_set(f"{KV}.units.total", 2**64 - 1), f"{KV}.units.total", Reason.LAYOUT_INVALID),
        (lambda m: m.partition.SetInParent(), "partition.size", Reason.LAYOUT_INVALID),
        (lambda m: m.groups.append(m.groups[0]), "groups[1].name", Reason.LAYOUT_INVALID),
    ],
)
def test_refuses_and_names_the_field(change: Callable[[pb.Layout], None], field: str, reason: Reason) -> None:
    message = layout_to_pb(_layout())
    change(message)
    with pytest.raises(KvxferError) as caught:
        layout_from_pb(message, "request.layout")
    assert (caught.value.field, caught.value.reason) == (f"request.layout.{field}", reason), str(caught.value)


def test_small_message_for_huge_layout_is_refused_early() -> None:
    message = layout_to_pb(_layout())
    form = message.formats[0]
    form.components.extend(form.components[0] for _ in range(999))
    view = message.groups[0].views[0]
    message.groups[0].views.extend(view for _ in range(999))
    with pytest.raises(KvxferError) as caught:
        layout_from_pb(message)
    assert caught.value.field == "layout.groups"
    assert "1000000 components" in caught.value.message


@pytest.mark.parametrize(
    "name, most", [("regions", 65_536), ("formats", 65_536), ("groups", 1_024)], ids=["regions", "formats", "groups"]
)
def test_too_many_of_anything_is_refused(name: str, most: int) -> None:
    message = layout_to_pb(_layout())
    items = getattr(message, name)
    items.extend(items[0] for _ in range(most))
    with pytest.raises(KvxferError) as caught:
        layout_from_pb(message)
    assert (caught.value.field, caught.value.metadata["value"]) == (f"layout.{name}", str(most + 1))


@given(st.integers(1, 65_536), st.integers(1, 65_536), st.data())
def test_rank_round_trip(tp: int, pp: int, data: st.DataObject) -> None:
    rank = Rank(data.draw(st.integers(0, tp - 1)), tp, data.draw(st.integers(0, pp - 1)), pp)
    assert rank_from_pb(rank_to_pb(rank), "rank") == rank


@pytest.mark.parametrize(
    "message, field",
    [
        (pb.Rank(), "rank.tp_size"),
        (pb.Rank(tp_size=1), "rank.pp_size"),
        (pb.Rank(tp_rank=1, tp_size=1, pp_size=1), "rank.tp_rank"),
        (pb.Rank(tp_size=2**32 - 1, pp_size=1), "rank.tp_size"),
    ],
)
def test_rank_refuses(message: pb.Rank, field: str) -> None:
    with pytest.raises(KvxferError) as caught:
        rank_from_pb(message, "rank")
    assert (caught.value.field, caught.value.reason) == (field, Reason.FIELD_INVALID)
