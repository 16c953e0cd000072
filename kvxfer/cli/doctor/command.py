"""The ``kvxfer doctor`` command: flags in, exit status out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from kvxfer.cli.serve import serve
from kvxfer.cli.settings import flags
from kvxfer.core.errors import KvxferError, Reason

if TYPE_CHECKING:
    from kvxfer.config import Settings
    from kvxfer.doctor.findings import Finding

_BAD_USAGE: Final = 2
#: Options of ``kvxfer serve`` that are no settings.
_NOT_SETTINGS: Final = ("print_settings",)


def _with_settings_of_serve(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of ``kvxfer serve`` that is a setting, instead of its ``options``."""
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "options"]
    theirs = [p for p in inspect.signature(serve).parameters.values() if p.name not in _NOT_SETTINGS]
    hints = {**get_type_hints(serve, include_extras=True), **get_type_hints(command, include_extras=True)}
    taken = [p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name]) for p in (*own, *theirs)]

    def with_settings(**values: Any) -> None:
        command(**{p.name: values.pop(p.name) for p in own}, options=values)

    with_settings.__doc__ = command.__doc__
    with_settings.__name__ = command.__name__
    with_settings.__annotations__ = {p.name: p.annotation for p in taken} | {"return": None}
    setattr(with_settings, "__signature__", inspect.Signature(taken))  # noqa: B010 - no attribute of functions in stubs
    return with_settings


@_with_settings_of_serve
def doctor(
    peer: Annotated[str, typer.Option(help="host:port of another sidecar's peer listener.", show_default=False)] = "",
    engine_pid: Annotated[
        int | None, typer.Option(min=1, help="Process of the engine, to compare namespaces with.", show_default=False)
    ] = None,
    as_uid: Annotated[
        int | None, typer.Option(min=0, help="Also say what this user may lock; needs root.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Run this check alone; may be repeated.", show_default=False)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Status 1 for warnings, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    *,
    options: dict[str, Any],
) -> None:
    """Find what will go wrong on this machine, before it does.

    Run it where the sidecar will run: as its user, in its container, with its
    environment and settings. It needs neither NIXL nor torch, and says so where
    NIXL is missing. Status 0: nothing is an error; 1: something is; 2: bad usage.

    Checks: settings, library, transport, ucx, network, namespaces, memlock,
    nofile, memory, ports, tls, peer, gpu.

    Examples:

      kvxfer doctor --config kvxfer.toml

      kvxfer doctor --peer rank0.prefill.kv.svc:9000

      kvxfer doctor --engine-pid 4711 --as-uid 1000 --only namespaces --only memlock
    """
    from kvxfer.cli.doctor import report
    from kvxfer.doctor.findings import as_json as as_object
    from kvxfer.doctor.findings import healthy

    try:
        findings = _examine(peer, engine_pid, as_uid, only or [], options)
    except KvxferError as error:
        typer.echo(f"kvxfer: {error}", err=True)
        raise typer.Exit(_BAD_USAGE) from None
    if as_json:
        import json

        sys.stdout.write(json.dumps(as_object(findings, strict=strict), indent=1) + "\n")
    else:
        report.show(findings)
    if not healthy(findings, strict=strict):
        raise typer.Exit(1)


def _examine(
    peer: str, engine_pid: int | None, as_uid: int | None, only: list[str], options: dict[str, Any]
) -> list[Finding]:
    """:raises KvxferError: FIELD_INVALID for what is no question at all."""
    import os

    from kvxfer.cli.doctor import report
    from kvxfer.doctor.checks import CHECKS, Examination, Question
    from kvxfer.wire.fields import address

    if unknown := [name for name in only if name not in CHECKS]:
        raise KvxferError(
            Reason.FIELD_INVALID, f"there is no check {unknown[0]!r}; allowed: {', '.join(CHECKS)}", field="only"
        )
    if peer:
        address(peer, "peer")
    settings, wrong = _settings(options)
    question = Question(settings, tuple(wrong), os.environ.copy(), peer, engine_pid, as_uid)
    examination = Examination(question)
    chosen = [name for name in CHECKS if not only or name in only]
    with report.progress(len(chosen)) as step:
        findings: list[Finding] = []
        for name in chosen:
            step(name)
            findings += CHECKS[name](examination)
    return findings


def _settings(options: dict[str, Any]) -> tuple[Settings, list[str]]:
    """The settings, and why ``kvxfer serve`` would refuse them, as long as each of them means something by itself."""
    from pydantic import ValidationError, model_validator

    from kvxfer.config import Settings, problems

    class Lenient(Settings):
        """Without the checks that look at several settings, and at files."""

        @model_validator(mode="after")
        def _peer_must_be_private(self) -> Lenient:
            return self

        @model_validator(mode="after")
        def _peer_tls_must_work(self) -> Lenient:
            return self

        @model_validator(mode="after")
        def _memory_must_make_sense(self) -> Lenient:
            return self

    file: Path | None = options.pop("config")
    values = flags(options, options.pop("setting") or [])
    try:
        return Settings.load(file, **values), []
    except ValidationError as strict:
        try:
            return Lenient.load(file, **values), problems(strict)
        except ValidationError as error:
            raise KvxferError(Reason.FIELD_INVALID, "; ".join(problems(error))) from error
