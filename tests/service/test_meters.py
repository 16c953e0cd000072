"""Counters and histograms."""

from __future__ import annotations

from kvxfer.service.meters import Counter, Distribution, Histogram, Kind, Spec, gauge

COUNTER = Spec("x_total", Kind.COUNTER, "Counts.", ("a", "b"))
HISTOGRAM = Spec("x_seconds", Kind.HISTOGRAM, "Times.", ("a",), (1.0, 2.0))


def test_a_counter_counts_by_labels() -> None:
    counter = Counter(COUNTER)
    counter.add(("1", "2"))
    counter.add(("1", "2"), 2.5)
    counter.add(("1", "3"))
    assert counter.family().values == {("1", "2"): 3.5, ("1", "3"): 1}


def test_a_bucket_holds_what_is_at_most_its_bound() -> None:
    histogram = Histogram(HISTOGRAM)
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 100.0):
        histogram.observe(("1",), value)
    assert histogram.family().values == {("1",): Distribution((2, 2, 2), 107.5)}


def test_what_is_forgotten_begins_anew_and_the_rest_stays() -> None:
    counter, histogram = Counter(COUNTER, 1), Histogram(HISTOGRAM, 1)
    for labels in (("1", "2"), ("1", "3"), ("2", "2")):
        counter.add(labels)
    counter.forget(("1",))
    assert counter.family().values == {("2", "2"): 1}
    histogram.observe(("1",), 1.0)
    histogram.observe(("2",), 1.0)
    histogram.forget(("1",))
    histogram.observe(("1",), 3.0)
    assert histogram.family().values == {("2",): Distribution((1, 0, 0), 1.0), ("1",): Distribution((0, 0, 1), 3.0)}


def test_forgetting_does_not_look_at_what_stays() -> None:
    """Peers choose their names: with many series each new one would take long."""
    looked = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal looked
            looked += 1
            return str.__eq__(self, other)

    counter, histogram = Counter(COUNTER, 1), Histogram(HISTOGRAM, 1)
    for i in range(1_000):
        counter.add((Name(i), "2"))
        histogram.observe((Name(i),), 1.0)
    looked = 0
    counter.forget((Name(7),))
    histogram.forget((Name(7),))
    assert looked < 20
    assert len(counter.family().values) == len(histogram.family().values) == 999


def test_a_series_can_begin_at_nothing() -> None:
    counter = Counter(COUNTER)
    counter.add(("1", "2"), 0)
    assert counter.family().values == {("1", "2"): 0}
    counter.add(("1", "2"))
    counter.add(("1", "2"), 0)
    assert counter.family().values == {("1", "2"): 1}


def test_a_family_is_a_copy() -> None:
    counter, histogram = Counter(COUNTER), Histogram(HISTOGRAM)
    counter.add(("1", "2"))
    histogram.observe(("1",), 1.0)
    before = counter.family(), histogram.family()
    counter.add(("1", "2"))
    histogram.observe(("1",), 1.0)
    assert before[0].values == {("1", "2"): 1}
    assert before[1].values == {("1",): Distribution((1, 0, 0), 1.0)}


def test_a_gauge_is_what_it_is_given() -> None:
    spec = Spec("x", Kind.GAUGE, "Now.", ("a",))
    assert gauge(spec, [(("1",), 2.0)]).values == {("1",): 2.0}
