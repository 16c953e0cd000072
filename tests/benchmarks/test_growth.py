"""What counts as growth of memory."""

from __future__ import annotations

import pytest

from benchmarks.lasting import growth


@pytest.mark.parametrize(
    "looks, expected",
    [
        ([100.0] * 10, 0.0),
        ([100.0 + i for i in range(10)], 0.09),
        ([100.0 - i for i in range(10)], -0.09),
        # What only the first and the last tell counts half: a slope of (4.5 + 4.5) / 82.5.
        ([99.0, *[100.0] * 8, 101.0], 9 * (9 / 82.5) / (100 - 4.5 * 9 / 82.5)),
    ],
)
def test_growth_is_that_of_a_straight_line(looks: list[float], expected: float) -> None:
    assert growth(looks) == pytest.approx(expected, rel=0.01)
