"""What answers are compared with: found out ahead, while other tests run."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from tests.engines.vllm.models import MODELS
from tests.engines.vllm.pairs import Workshop
from tests.engines.vllm.processes import Answer


class Baselines:
    """Answers to the prompts: of one engine of a model that computes everything itself, and of two with NixlConnector.

    Each is asked once.  A context manager: what has not begun at the end does not begin.

    :param wanted: names of models whose answers somebody will want, in that order.
    :param rivals: the same for NixlConnector.
    """

    def __init__(self, workshop: Workshop, wanted: Iterable[str], rivals: Iterable[str]) -> None:
        self._workshop = workshop
        self._pool = ThreadPoolExecutor(1)
        self._alone: dict[str, Future[list[Answer]]] = {}
        self._nixl: dict[str, Future[list[Answer]]] = {}
        rivals = list(rivals)
        for name in wanted:
            self._of_one(name)
            if name in rivals:
                self._of_nixl(name)

    def _of_one(self, name: str) -> Future[list[Answer]]:
        if name not in self._alone:
            self._alone[name] = self._pool.submit(self._workshop.monolithic, MODELS[name])
        return self._alone[name]

    def _of_nixl(self, name: str) -> Future[list[Answer]]:
        if name not in self._nixl:
            self._nixl[name] = self._pool.submit(self._workshop.with_nixl, MODELS[name])
        return self._nixl[name]

    def truth(self, name: str) -> list[Answer]:
        """Of the monolithic engine."""
        return self._of_one(name).result()

    def nixl(self, name: str) -> list[Answer]:
        """Of two engines with vLLM's own connector."""
        return self._of_nixl(name).result()

    def __enter__(self) -> Baselines:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
