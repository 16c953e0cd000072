"""Checks that come before the transfer library sees anything: spans, rows, indices.

The library takes zero-length descriptors, overlapping or unmapped registrations and ranges that overflow without a
word, and some of them kill the *peer*.  So every number is checked here.  Pure, except :func:`require_mapped`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.xfer.api import MAX_ADDRESS, MAX_DESCRIPTORS, Indices, MemoryKind, RowArray, Rows, Span

_MAX_DEVICE = 2**31 - 1


def _invalid(message: str, field: str, **values: object) -> KvxferError:
    return KvxferError(Reason.FIELD_INVALID, message, field=field, **values)


def check_spans(spans: Sequence[Span], against: Sequence[Span] = ()) -> tuple[Span, ...]:
    """The spans as a tuple, if each is sound and none overlaps another or one of ``against``.

    :raises KvxferError: FIELD_INVALID.
    """
    if not spans:
        raise _invalid("at least one span is needed", "spans")
    for i, span in enumerate(spans):
        where = f"spans[{i}]"
        if span.length < 1:
            raise _invalid("a span must have at least one byte", where, length=span.length)
        if span.address < 1 or span.address + span.length > MAX_ADDRESS:
            raise _invalid("a span must lie within [1, 2^63)", where, address=span.address, length=span.length)
        if not 0 <= span.device <= _MAX_DEVICE:
            raise _invalid("a device number must be within [0, 2^31)", where, device=span.device)
    places: dict[tuple[MemoryKind, int], list[Span]] = defaultdict(list)
    for span in (*against, *spans):
        places[span.kind, span.device].append(span)
    for together in places.values():
        together.sort(key=lambda s: s.address)
        for low, high in itertools.pairwise(together):
            if low.address + low.length > high.address:
                raise _invalid(
                    "spans must not overlap",
                    "spans",
                    address=high.address,
                    length=high.length,
                    other_address=low.address,
                    other_length=low.length,
                )
    return tuple(spans)


def require_mapped(spans: Sequence[Span]) -> None:
    """Check that DRAM spans are mapped readable in this process (registering a hole succeeds and crashes later).

    :raises KvxferError: FIELD_INVALID.
    """
    mapped: list[tuple[int, int]] = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            bounds, rights = line.split(maxsplit=2)[:2]
            if not rights.startswith("r"):
                continue
            low, high = (int(part, 16) for part in bounds.split("-"))
            if mapped and mapped[-1][1] == low:
                mapped[-1] = (mapped[-1][0], high)
            else:
                mapped.append((low, high))
    starts = [low for low, _ in mapped]
    for i, span in enumerate(spans):
        if span.kind is not MemoryKind.DRAM:
            continue
        at = int(np.searchsorted(starts, span.address, side="right")) - 1
        if at < 0 or span.address + span.length > mapped[at][1]:
            raise _invalid(
                "the span is not mapped in this process", f"spans[{i}]", address=span.address, length=span.length
            )


def check_rows(
    rows: RowArray, kind: MemoryKind, owners: Mapping[int, Sequence[Span]], side: str
) -> tuple[RowArray, npt.NDArray[np.int64], frozenset[int]]:
    """Check an N x 5 array ``(address, length, device, stride, count)`` against the spans that it may touch.

    :param owners: the spans allowed, by the number of whoever owns them.
    :param side: ``local`` or ``remote``, for messages.
    :return: a read-only copy, the N + 1 first descriptor numbers, and the owners that the rows touch.
    :raises KvxferError: FIELD_INVALID, NOT_REGISTERED, TOO_MANY_DESCRIPTORS.
    """
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint64 or rows.ndim != 2 or rows.shape[1] != 5:
        shape = getattr(rows, "shape", None)
        raise _invalid("rows must be an N x 5 array of uint64", "rows", shape=shape, dtype=getattr(rows, "dtype", None))
    if rows.shape[0] == 0:
        raise _invalid("at least one row is needed", "rows")
    if rows.shape[0] >= MAX_DESCRIPTORS:
        raise KvxferError(Reason.TOO_MANY_DESCRIPTORS, "too many rows", field="rows", rows=rows.shape[0])
    checked: RowArray = np.array(rows, dtype=np.uint64, order="C")
    address, length, device, stride, count = (checked[:, c] for c in range(5))
    limit, one = np.uint64(MAX_ADDRESS), np.uint64(1)

    def refuse(bad: npt.NDArray[np.bool_], message: str, reason: Reason = Reason.FIELD_INVALID) -> None:
        if bad.any():
            r = int(bad.argmax())
            names = ("address", "length", "device", "stride", "count")
            values = {name: int(checked[r, c]) for c, name in enumerate(names)}
            raise KvxferError(reason, message, field=f"rows[{r}]", side=side, kind=kind.value, **values)

    refuse((length < one) | (length > limit), "a descriptor must have at least one byte")
    refuse(count < one, "a row must have at least one descriptor")
    refuse(device > np.uint64(_MAX_DEVICE), "a device number must be within [0, 2^31)")
    refuse(count >= np.uint64(MAX_DESCRIPTORS), "descriptor numbers are int32", Reason.TOO_MANY_DESCRIPTORS)
    refuse((count > one) & (stride < length), "the descriptors of a row must not overlap: stride below length")
    refuse((address < one) | (address >= limit), "the address must lie within [1, 2^63)")
    # A single descriptor has no stride; the length is a value that the arithmetic and the library both accept.
    np.copyto(stride, length, where=count == one)
    # (count - 1) * stride + length <= 2^63, written so that it cannot wrap around.
    refuse(count - one > (limit - length) // stride, "the row ends past 2^63")
    end = address + (count - one) * stride + length  # both terms are at most 2^63, so uint64 holds the sum
    refuse((end > limit) | (end < address), "the row ends past 2^63")

    starts = np.zeros(checked.shape[0] + 1, dtype=np.int64)
    np.cumsum(count.astype(np.int64), out=starts[1:])  # at most 2^31 rows of less than 2^31: fits int64
    if int(starts[-1]) >= MAX_DESCRIPTORS:
        raise KvxferError(
            Reason.TOO_MANY_DESCRIPTORS,
            "a prepared list must have fewer than 2^31 descriptors",
            field="rows",
            descriptors=int(starts[-1]),
        )

    inside = np.zeros(checked.shape[0], dtype=np.bool_)
    touched: set[int] = set()
    by_device: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for owner, spans in owners.items():
        for span in spans:
            if span.kind is kind:
                by_device[span.device].append((span.address, span.address + span.length, owner))
    for number, ranges in by_device.items():
        ranges.sort()
        low = np.array([r[0] for r in ranges], dtype=np.uint64)
        high = np.array([r[1] for r in ranges], dtype=np.uint64)
        at = np.searchsorted(low, address, side="right") - 1
        here = (device == np.uint64(number)) & (at >= 0) & (end <= high[np.maximum(at, 0)])
        inside |= here
        touched.update(ranges[int(k)][2] for k in np.unique(at[here]))
    refuse(~inside, f"the row does not lie inside one registered {side} span", Reason.NOT_REGISTERED)
    checked.setflags(write=False)
    starts.setflags(write=False)
    return checked, starts, frozenset(touched)


def _check_indices(indices: Indices, total: int, field: str) -> None:
    if not isinstance(indices, np.ndarray) or indices.dtype != np.int32 or indices.ndim != 1:
        raise _invalid("descriptor numbers must be a one-dimensional int32 array", field)
    if indices.size == 0:
        raise _invalid("a read must have at least one descriptor", field)
    low, high = int(np.minimum.reduce(indices)), int(np.maximum.reduce(indices))
    if low < 0 or high >= total:
        raise KvxferError(
            Reason.BLOCK_OUT_OF_RANGE,
            f"descriptor number outside [0, {total})",
            field=field,
            index=low if low < 0 else high,
            total=total,
        )


def check_read(local: Rows, local_indices: Indices, remote: Rows, remote_indices: Indices) -> int:
    """Check the two index arrays of a read; every pair must have equal lengths.

    :return: the bytes that the read moves.
    :raises KvxferError: FIELD_INVALID, BLOCK_OUT_OF_RANGE.
    """
    _check_indices(local_indices, local.total, "local_indices")
    _check_indices(remote_indices, remote.total, "remote_indices")
    if local_indices.size != remote_indices.size:
        raise _invalid(
            "both sides of a read must have equally many descriptors",
            "remote_indices",
            local=local_indices.size,
            remote=remote_indices.size,
        )
    here, there = lengths_of(local, local_indices), lengths_of(remote, remote_indices)
    if isinstance(here, int) and isinstance(there, int):
        if here == there:
            return here * local_indices.size
        unequal = 0
    else:
        differs = np.broadcast_to(np.asarray(here != there), local_indices.shape)
        if not differs.any():
            return int(np.sum(here if not isinstance(here, int) else there, dtype=np.uint64))
        unequal = int(differs.argmax())
    raise _invalid(
        "both descriptors of a pair must have the same length",
        f"local_indices[{unequal}]",
        local=int(np.broadcast_to(here, local_indices.shape)[unequal]),
        remote=int(np.broadcast_to(there, local_indices.shape)[unequal]),
    )


def lengths_of(rows: Rows, indices: Indices) -> int | npt.NDArray[np.uint64]:
    """The length of each descriptor named: one number where all rows have the same (nothing to look up then)."""
    if rows.length is not None:
        return rows.length
    lengths: npt.NDArray[np.uint64] = rows.rows[:, 1][np.searchsorted(rows.starts, indices, side="right") - 1]
    return lengths
