"""What UCX sends at once over TCP, and what it has room for."""

from __future__ import annotations

import pytest

from kvxfer.xfer.environment import DEFAULTS
from kvxfer.xfer.segments import RECEIVED, SENT, Segments, missing, size_of


@pytest.mark.parametrize(
    "text, size",
    [
        ("98304", 98_304),
        ("98304b", 98_304),
        ("96K", 98_304),
        ("96kb", 98_304),
        (" +1M", 1 << 20),
        ("2GB", 2 << 30),
        ("inf", 0),
        ("auto", 0),
        ("-1K", 0),
        ("1.5K", 0),
        ("96KK", 0),
        ("\u0663K", 0),
        ("64B", 64),
        ("120KB ", 122_880),
        ("120KB\n", 122_880),
        ("64KBfoo", 65_536),
        ("64K ", 0),
        ("64\n", 0),
        ("64 K", 0),
        ("8388607T", 8_388_607 << 40),
        ("8388608T", 0),
        ("", 0),
    ],
)
def test_a_size_is_read_as_ucx_reads_it(text: str, size: int) -> None:
    assert size_of(text) == size
    assert Segments.of({RECEIVED: text}) == (8 * 1024, size)
    assert Segments.of({SENT: text}) == (size, 64 * 1024)


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, Segments(57_344, 262_144)),
        ({RECEIVED: "64K"}, Segments(57_344, 65_536)),
        ({RECEIVED: "48K"}, Segments(49_152, 49_152)),
        ({SENT: "1M"}, Segments(1 << 20, 1 << 20)),
        ({SENT: "8K"}, Segments(8_192, 262_144)),
        ({SENT: "64K", RECEIVED: "32K"}, Segments(65_536, 32_768)),
    ],
)
def test_there_is_room_for_what_is_sent(environment: dict[str, str], expected: Segments) -> None:
    """UCX does not start otherwise; what the user sets stays as it is."""
    more = missing(environment, DEFAULTS)
    assert not more.keys() & environment.keys()
    assert more.keys() | environment.keys() == DEFAULTS.keys()
    assert Segments.of({**environment, **more}) == expected


@pytest.mark.parametrize("name, other", [(SENT, RECEIVED), (RECEIVED, SENT)])
def test_what_ucx_will_not_take_is_not_adapted_to(name: str, other: str) -> None:
    assert missing({name: "much"}, DEFAULTS).keys() == DEFAULTS.keys() - {name, other}
