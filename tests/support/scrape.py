"""What a sidecar tells of itself over HTTP."""

from __future__ import annotations

import http.client
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    status: int
    body: str
    type: str


def get(port: int, path: str, *, method: str = "GET", accept: str = "", timeout: float = 10.0) -> Answer:
    """Ask once; blocking."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, headers={"Accept": accept} if accept else {})
        response = connection.getresponse()
        return Answer(response.status, response.read().decode(), response.getheader("Content-Type") or "")
    finally:
        connection.close()


class Scraped:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def of(self, name: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The samples of this name that have these labels, by all their labels."""
        return {
            tuple(sorted(s.labels.items())): s.value
            for s in self.samples
            if s.name == name and labels.items() <= s.labels.items()
        }

    def moved(self, name: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Of these the ones that are not 0."""
        return {key: value for key, value in self.of(name, **labels).items() if value}

    def sum(self, name: str, **labels: str) -> float:
        """Of all that have these labels."""
        return sum(self.of(name, **labels).values())


def scrape(port: int) -> Scraped:
    """What ``/metrics`` says; blocking."""
    answer = get(port, "/metrics")
    assert answer.status == 200, answer
    return Scraped(answer.body)
