"""Structured logs to standard error: readable on a terminal, JSON otherwise.  Secrets never reach them."""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

import structlog
from structlog.typing import EventDict, WrappedLogger

#: Keys whose values are secrets, however they got here.
SECRETS: Final = frozenset({"token", "lease_token", "metadata", "agent_metadata"})


def redact(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Replace secrets."""
    for key in SECRETS & event.keys():
        event[key] = "<redacted>"
    return event


def configure(level: str, form: str) -> None:
    """Set up structlog, and send what libraries log through logging the same way.

    :param level: least level: debug, info, warning, error.
    :param form: ``text``, ``json``, or ``auto``: text on a terminal.
    """
    text = form == "text" or (form == "auto" and sys.stderr.isatty())
    threshold = logging.getLevelName(level.upper())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    last: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)


def use_logging() -> None:
    """Send what is logged through structlog to :mod:`logging`, under the names of the modules that log.

    For a process that is not ours: what is done with it there, and from which level on, is its owner's affair.  Where
    structlog was configured already it stays as it is.
    """
    if not structlog.is_configured():
        structlog.configure(
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.contextvars.merge_contextvars,
                redact,
                _as_record,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
            logger_factory=structlog.stdlib.LoggerFactory(),
        )


def _as_record(_: WrappedLogger, __: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """As one line, ``what happened key=value``; a traceback is logging's to print."""
    what, error = event.pop("event"), event.pop("exc_info", None)
    return (" ".join([str(what), *(f"{key}={value!r}" for key, value in event.items())]),), {"exc_info": error}
