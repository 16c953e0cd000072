"""The checks that come before the library."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.xfer.api import MemoryKind, Span
from kvxfer.xfer.checks import check_rows, check_spans, require_mapped

DRAM, VRAM = MemoryKind.DRAM, MemoryKind.VRAM
SPANS = {1: [Span(1000, 1000)], 2: [Span(2000, 500), Span(1000, 50, DRAM, 1), Span(9000, 50, VRAM, 0)]}
TOP = 2**63


def reason_of(*line: int, spans: dict[int, list[Span]] = SPANS, kind: MemoryKind = DRAM) -> Reason | None:
    try:
        check_rows(np.array([line], dtype=np.uint64), kind, spans, "local")
    except KvxferError as error:
        return error.reason
    return None


@pytest.mark.parametrize(
    "line",
    [(1000, 1000, 0, 1000, 1), (1000, 10, 0, 99, 11), (1999, 1, 0, 0, 1), (2000, 500, 0, 7, 1), (1000, 50, 1, 50, 1)],
)
def test_sound_rows(line: tuple[int, ...]) -> None:
    assert reason_of(*line) is None


@pytest.mark.parametrize(
    "line, reason",
    [
        ((1000, 0, 0, 10, 1), Reason.FIELD_INVALID),
        ((1000, 10, 0, 10, 0), Reason.FIELD_INVALID),
        ((1000, 10, 0, 9, 2), Reason.FIELD_INVALID),
        ((1000, 10, 0, 0, 2), Reason.FIELD_INVALID),
        ((0, 10, 0, 10, 1), Reason.FIELD_INVALID),
        ((1000, 10, 2**31, 10, 1), Reason.FIELD_INVALID),
        ((2**64 - 1, 10, 0, 10, 1), Reason.FIELD_INVALID),
        ((1000, 2**64 - 1, 0, 2**64 - 1, 1), Reason.FIELD_INVALID),
        ((1000, 2**64 - 999, 0, 2**64 - 999, 1), Reason.FIELD_INVALID),
        ((TOP - 10, 11, 0, 11, 1), Reason.FIELD_INVALID),
        ((1000, 1, 0, 2**63, 3), Reason.FIELD_INVALID),
        ((1000, 1, 0, 2**64 - 1, 2), Reason.FIELD_INVALID),
        ((1000, 1, 0, 2**40, 2**30), Reason.FIELD_INVALID),
        ((1000, 1, 0, 1, 2**31), Reason.TOO_MANY_DESCRIPTORS),
        ((1000, 1, 0, 1, 2**64 - 1), Reason.TOO_MANY_DESCRIPTORS),
        ((999, 10, 0, 10, 1), Reason.NOT_REGISTERED),
        ((1991, 10, 0, 10, 1), Reason.NOT_REGISTERED),  # straddles two spans that touch
        ((1000, 10, 0, 99, 12), Reason.NOT_REGISTERED),
        ((2491, 10, 0, 10, 1), Reason.NOT_REGISTERED),
        ((1000, 51, 1, 51, 1), Reason.NOT_REGISTERED),
        ((1000, 10, 2, 10, 1), Reason.NOT_REGISTERED),
        ((9000, 10, 0, 10, 1), Reason.NOT_REGISTERED),  # there, but in device memory
    ],
)
def test_unsound_rows(line: tuple[int, ...], reason: Reason) -> None:
    assert reason_of(*line) is reason


def test_a_sum_of_descriptors_past_int32_is_refused() -> None:
    spans = {1: [Span(1, 2**62)]}
    line = (1, 1, 0, 1, 2**30)
    check_rows(np.array([line], dtype=np.uint64), DRAM, spans, "local")
    with pytest.raises(KvxferError, match="TOO_MANY_DESCRIPTORS"):
        check_rows(np.array([line, line], dtype=np.uint64), DRAM, spans, "local")


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((0, 5), dtype=np.uint64),
        np.ones((1, 4), dtype=np.uint64),
        np.ones(5, dtype=np.uint64),
        np.ones((1, 5), dtype=np.int64),
        [[1000, 1, 0, 1, 1]],
    ],
)
def test_rows_of_another_form(rows: object) -> None:
    with pytest.raises(KvxferError, match="FIELD_INVALID"):
        check_rows(rows, DRAM, SPANS, "local")  # type: ignore[arg-type]


def test_what_comes_back() -> None:
    given_rows = np.array([(1000, 10, 0, 20, 3), (2000, 5, 0, 0, 1)], dtype=np.uint64)
    rows, starts, touched = check_rows(given_rows, DRAM, SPANS, "local")
    assert starts.tolist() == [0, 3, 4]
    assert touched == {1, 2}
    assert rows[1].tolist() == [2000, 5, 0, 5, 1]
    given_rows[:] = 0
    assert rows[0, 0] == 1000
    assert not rows.flags.writeable
    assert not starts.flags.writeable


edges = st.sampled_from(
    [0, 1, 2, 1000, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
)
anything = st.one_of(edges, st.integers(0, 2**64 - 1), st.integers(0, 4000))


@given(st.tuples(anything, anything, st.integers(0, 2), anything, anything))
def test_agrees_with_arithmetic_that_cannot_overflow(line: tuple[int, int, int, int, int]) -> None:
    address, length, device, stride, count = line
    end = address + (count - 1) * (stride if count > 1 else 0) + length
    inside = any(
        s.address <= address and end <= s.address + s.length and s.device == device and s.kind is DRAM
        for spans in SPANS.values()
        for s in spans
    )
    sound = length >= 1 and 1 <= count < 2**31 and (count == 1 or stride >= length) and address >= 1 and inside
    assert (reason_of(*line) is None) == sound


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span(10, 0)],
        [Span(0, 1)],
        [Span(-5, 10)],
        [Span(TOP - 1, 2)],
        [Span(10, 10, DRAM, -1)],
        [Span(10, 10), Span(19, 5)],
        [Span(10, 10), Span(12, 2)],
        [Span(105, 10)],
    ],
)
def test_unsound_spans(spans: list[Span]) -> None:
    with pytest.raises(KvxferError, match="FIELD_INVALID"):
        check_spans(spans, against=[Span(100, 10)])


def test_sound_spans() -> None:
    spans = [Span(10, 10), Span(20, 10), Span(15, 10, DRAM, 1), Span(15, 10, VRAM, 0), Span(TOP - 1, 1)]
    assert check_spans(spans, against=[Span(100, 10)]) == tuple(spans)


def test_memory_that_is_not_mapped() -> None:
    block = mmap.mmap(-1, 8 * 4096)
    address = np.frombuffer(block, dtype=np.uint8).ctypes.data
    require_mapped([Span(address, 8 * 4096), Span(5, 5, VRAM)])
    for bad in (Span(5, 5), Span(address, 2**46)):
        with pytest.raises(KvxferError, match="not mapped"):
            require_mapped([bad])
