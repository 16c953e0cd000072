"""A function in a process of its own, which says something once it is ready."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T", bound="Aside")


class Aside:
    """Runs ``serve(*arguments)``, whose result is kept as ``told``, until the ``with`` block ends.

    :param serve: gives back what is worth knowing (an address), and whatever must be kept alive.
    :param attend: what to do with the pipe and what is kept until the pipe's other end is closed, which raises.
    """

    def __init__(
        self,
        serve: Callable[..., tuple[Any, Any]],
        *arguments: object,
        attend: Callable[[Connection, Any], None] | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, attend or _wait, serve, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.told: Any = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{serve.__module__}: its process ended with {self._process.exitcode}") from None

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _wait(pipe: Connection, kept: object) -> None:
    """Nothing is asked for."""
    pipe.recv()


def _run(
    pipe: Connection,
    attend: Callable[[Connection, Any], None],
    serve: Callable[..., tuple[Any, Any]],
    *arguments: object,
) -> None:
    told, kept = serve(*arguments)
    pipe.send(told)
    try:
        attend(pipe, kept)
    except (EOFError, OSError):
        del kept
    os._exit(0)  # without the destructors of libraries: NIXL's can crash, and none has anything to say here
