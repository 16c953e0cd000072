"""The UCX variables of the environment: what they forbid, misspell, or change of kvxfer's defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from kvxfer.doctor.findings import Finding, error, ok, unknown, warning
from kvxfer.doctor.probe import Pair, Survey
from kvxfer.xfer.environment import DEFAULTS

CHECK: Final = "ucx"

#: Aliases of UCX that stand for several transports, as far as they matter here.
_ALIASES: Final[Mapping[str, frozenset[str]]] = {
    "all": frozenset({"tcp", "cma", "rc", "ud", "dc"}),
    "sm": frozenset({"cma"}),
    "shm": frozenset({"cma"}),
    "ib": frozenset({"rc", "ud", "dc"}),
}
#: Transports that can carry connections between agents, and notice when a peer is gone.
_NETWORK: Final = ("tcp", "rc", "dc", "ud")
#: An agent takes a port on each interface, and one that finds none free hangs.
_FEW_PORTS: Final = 100

#: What becomes of it when another value is in force than the default.
_STAKES: Final[Mapping[str, str]] = {
    "UCX_TCP_TX_SEG_SIZE": "Other segments can halve the TCP throughput; readers need as large a UCX_TCP_RX_SEG_SIZE.",
    "UCX_TCP_RX_SEG_SIZE": "UCX does not start where UCX_TCP_TX_SEG_SIZE is larger; no peer is read from whose own is.",
    "UCX_TCP_USER_TIMEOUT": "With UCX_TCP_KEEPIDLE and UCX_TCP_KEEPINTVL it decides how soon a silent peer is noticed.",
    "UCX_TCP_KEEPIDLE": "With UCX_TCP_USER_TIMEOUT and UCX_TCP_KEEPINTVL it decides how soon a silent peer is noticed.",
    "UCX_TCP_KEEPINTVL": "With UCX_TCP_USER_TIMEOUT and UCX_TCP_KEEPIDLE it decides how soon a silent peer is noticed.",
}


def allows(tls: str, transport: str) -> bool:
    """Whether a value of UCX_TLS lets a transport be used; ``^`` before the list means all but these."""
    text = tls.strip()
    names = {name.strip().removeprefix("\\") for name in text.removeprefix("^").split(",") if name.strip()}
    named = any(
        name == transport or name.startswith(f"{transport}_") or transport in _ALIASES.get(name, ()) for name in names
    )
    return not named if text.startswith("^") else named or not names


def judge(environment: Mapping[str, str], survey: Survey | None, pair: Pair | None) -> list[Finding]:
    """:param environment: that of the sidecar; only ``UCX_*`` is looked at.

    :param survey: what UCX can use here; None, or without an answer, where it could not be asked.
    """
    ucx = {name: value for name, value in environment.items() if name.startswith("UCX_")}
    known = survey if survey is not None and not survey.failure else None
    findings = [*_transports(ucx, known), *_devices(ucx, known), *_changed(ucx), *_ports(ucx)]
    if pair is not None:
        findings += _said(pair, ucx)
    elif ucx:
        findings.append(unknown(CHECK, "whether UCX knows all of the UCX_ variables: there is no UCX to ask"))
    told = ", ".join(f"{name}={value}" for name, value in sorted(ucx.items())) or "none: kvxfer's defaults apply"
    return findings or [ok(CHECK, f"UCX variables: {told}")]


def _transports(ucx: Mapping[str, str], survey: Survey | None) -> Iterator[Finding]:
    tls = ucx.get("UCX_TLS", "")
    if not tls:
        return
    here = survey.transports if survey is not None and survey.transports is not None else None
    usable = [name for name in _NETWORK if here is None or any(t == name or t.startswith(f"{name}_") for t in here)]
    if not any(allows(tls, name) for name in usable):
        yield error(
            CHECK,
            f"UCX_TLS={tls} leaves no transport that connects agents and notices when one is gone",
            f"NIXL cannot create its UCX backend, and the sidecar does not start.  It could use {', '.join(usable)}.",
            "Unset UCX_TLS, or add tcp to it (shared memory and CMA alone are not enough).",
        )
    elif not allows(tls, "cma"):
        yield warning(
            CHECK,
            f"UCX_TLS={tls} leaves CMA out",
            "Reads between sidecars of one host take the network's transports instead.",
            "Unset UCX_TLS, or add cma to it, unless that is what you want.",
        )


def _devices(ucx: Mapping[str, str], survey: Survey | None) -> Iterator[Finding]:
    wanted = [name.strip() for name in ucx.get("UCX_NET_DEVICES", "all").split(",") if name.strip()]
    if wanted == ["all"] or any(name.startswith("^") for name in wanted):
        return
    if survey is None or survey.devices is None:
        yield unknown(CHECK, f"whether UCX can use {', '.join(wanted)} (UCX_NET_DEVICES): it could not be asked")
        return
    missing = [name for name in wanted if name not in survey.devices]
    if not missing:
        return
    left = [name for name in wanted if name in survey.devices]
    told = warning if left else error
    effect = (
        f"UCX uses {', '.join(left)} alone, and only warns."
        if left
        else "No network is left: NIXL cannot create its UCX backend, and the sidecar does not start."
    )
    yield told(
        CHECK,
        f"UCX_NET_DEVICES names {', '.join(missing)}, which UCX cannot use here",
        effect,
        f"Name some of: {', '.join(survey.devices)}; the check of the network says why not that one.",
    )


def _changed(ucx: Mapping[str, str]) -> Iterator[Finding]:
    for name, default in DEFAULTS.items():
        if name in _STAKES and name in ucx and ucx[name].lower() != default.lower():
            yield warning(
                CHECK,
                f"{name}={ucx[name]} replaces kvxfer's default, {default}",
                _STAKES[name],
                f"Unset {name}, unless that is what you want.",
            )


def _ports(ucx: Mapping[str, str]) -> Iterator[Finding]:
    value = ucx.get("UCX_TCP_PORT_RANGE", "")
    if (m := re.fullmatch(r"(\d+)-(\d+)", value)) and 0 < int(m[2]) - int(m[1]) + 1 < _FEW_PORTS and int(m[1]):
        yield warning(
            CHECK,
            f"UCX_TCP_PORT_RANGE={value} has {int(m[2]) - int(m[1]) + 1} ports",
            "An agent takes one on each interface, a sidecar has several agents, and one that finds none hangs.",
            "Make it wide: UCX_TCP_PORT_RANGE=31000-31999.",
        )


def _said(pair: Pair, ucx: Mapping[str, str]) -> Iterator[Finding]:
    # Without TCP, UCX does not know its variables either, and those may be kvxfer's own.
    mine = {name: meant for name, meant in pair.unused.items() if name in ucx}
    for name, meant in mine.items():
        yield warning(
            CHECK,
            f"UCX does not know {name}",
            "It has no effect, and UCX only warns.",
            f"Did you mean {meant}?" if meant else f"Unset {name}.",
        )
    for kind, name in pair.unavailable:
        if kind == "transport":
            yield warning(
                CHECK,
                f"UCX_TLS asks for {name}, which UCX does not have here",
                "UCX goes on with what is left, and only warns.",
                f"Take {name} out of UCX_TLS.",
            )
    for problem in pair.problems:
        if problem.startswith("Invalid value"):
            yield error(CHECK, f"UCX: {problem}", "The sidecar does not start.", "Correct the variable, or unset it.")
