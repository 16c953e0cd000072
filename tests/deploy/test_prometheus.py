"""The alert rules and the dashboard: they are sound, they fire on what they should, and what they name exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.service import gauges
from kvxfer.service.limits import NAMES
from kvxfer.service.meters import Family, Kind
from kvxfer.service.metrics import READS_REFUSED, STALE, Metrics
from kvxfer.service.transport import Transport
from kvxfer.web import as_metric

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "kvxfer.json").read_text())
SPECS = {spec.name: spec for spec in (*Metrics().specs, *gauges.SPECS)}
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()

#: Labels that Prometheus adds, or that a histogram has.
GIVEN = {"job", "instance", "le"}
#: Metrics of the process, and Prometheus's own.
OTHERS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}

needs_promtool = pytest.mark.skipif(
    not (Path(sys.executable).with_name("promtool").exists() or shutil.which("promtool")),
    reason="promtool is not there; on Debian and Ubuntu `make promtool` gets it",
)


def promtool(*arguments: str, given: str = "") -> str:
    beside = Path(sys.executable).with_name("promtool")
    program = str(beside) if beside.exists() else shutil.which("promtool") or ""
    done = subprocess.run(
        [program, *arguments], input=given, capture_output=True, text=True, timeout=60, check=False, cwd=RULES.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_the_rules_are_sound() -> None:
    assert "SUCCESS" in promtool("check", "rules", RULES.name)
    promtool("check", "config", "--syntax-only", "scrape.yaml")


@needs_promtool
def test_the_rules_fire_on_what_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yaml")


@needs_promtool
def test_promtool_has_nothing_to_say_about_the_metrics() -> None:
    """Of the text of everything that there is."""
    from prometheus_client import generate_latest

    class All:
        def collect(self) -> Iterator[Any]:
            yield from (as_metric(Family(spec, {})) for spec in SPECS.values())

    promtool("check", "metrics", given=generate_latest(All()).decode())  # type: ignore[arg-type]


def panels() -> Iterator[Any]:
    """Every panel, also those in rows that are folded."""
    for panel in DASHBOARD["panels"]:
        yield panel
        yield from panel.get("panels", ())


def expressions() -> dict[str, str]:
    """Every query, by where it stands."""
    text = RULES.read_text()
    found = {}
    for rule in re.split(r"^ {6}- alert: ", text, flags=re.M)[1:]:
        name = rule.split("\n", 1)[0]
        body = re.search(r"^ {8}expr: (?:\|\n(.*?)|([^\n]*))\n {8}\w", rule, re.M | re.S)
        assert body, name
        found[name] = body[1] or body[2]
    for panel in panels():
        for i, target in enumerate(panel.get("targets", ())):
            found[f"{panel['title']} {i}"] = target["expr"]
    return found


EXPRESSIONS = expressions()


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_what_is_asked_for_exists(where: str) -> None:
    query = EXPRESSIONS[where]
    named = re.findall(r"\b(kvxfer_\w+|process_\w+|up)\b(?:\{([^}]*)\})?", query)
    assert named
    known: set[str] = set(GIVEN)
    for name, selector in named:
        spec = SPECS.get(name) or SPECS.get(re.sub(r"_(bucket|sum|count)$", "", name))
        if spec is None:
            assert name in OTHERS, f"{name} is told by nobody"
            continue
        if spec.kind is Kind.HISTOGRAM:
            assert name != spec.name, f"{name} has no samples of its own"
        labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector))
        assert labels <= {*spec.labels, *GIVEN}, (name, labels)
        known.update(spec.labels)
    for grouped in re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", query):
        assert set(re.findall(r"\w+", grouped)) <= known, grouped


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_labels_have_values_that_occur(where: str) -> None:
    """A misspelt reason would never fire."""
    from kvxfer.core.errors import Reason

    values = {
        "reason": {*(r.value for r in Reason), "NONE"},
        "outcome": {"done", "failed", "cancelled"},
        "phase": {"resolve", "make", "queue", "post", "move", "open", "total"},
        "code": {"INTERNAL"},
        "limit": set(NAMES),
        "transport": {"", *(t.value for t in Transport)},
        "role": {"source", "reader"},
        "state": {"prepared", "posted", "draining", "released", "expired", "withdrawn"},
    }
    for label, value in re.findall(r'(\w+)\s*(?:=~|!=|!~|=)\s*"([^"]*)"', EXPRESSIONS[where]):
        if label in values:
            assert set(value.split("|")) <= values[label], (label, value)
        else:
            assert label in {"job", "instance", "engine"}, f"whether {label} can be {value!r} is not known here"


def test_what_is_stale_is_the_same_everywhere() -> None:
    stale = {reason.value for reason in STALE}
    told = [set(v.split("|")) for e in EXPRESSIONS.values() for v in re.findall(r'reason=~"(LEASE_[^"]*)"', e)]
    assert told == [stale] * 2
    listed = re.search(r"stale \(([^)]*)\)", READS_REFUSED.help)
    assert listed
    assert set(listed[1].split(", ")) == stale
    rows = OPERATIONS.partition("### KvxferStaleReadsRefused")[2].partition("\n### ")[0]
    assert set(re.findall(r"^\| ([A-Z_]+) \|", rows, re.M)) == stale


def test_the_port_of_the_examples_is_one() -> None:
    named = ("README.md", "docs/operations.md", "docs/how-to/read-the-metrics.md", "deploy/prometheus/scrape.yaml")
    for name in named:
        text = (ROOT / name).read_text()
        ports = re.findall(r"--http-port (\d+)|127\.0\.0\.1:(\d+)(?=[/\"])", text)
        assert ports, name
        assert {a or b for a, b in ports} == {"9100"}, name


def test_every_alert_has_a_runbook() -> None:
    text = RULES.read_text()
    alerts = re.findall(r"^ +- alert: (\w+)$", text, re.M)
    links = re.findall(r"runbook_url: docs/operations\.md#(\w+)$", text, re.M)
    assert links == [alert.lower() for alert in alerts]
    assert alerts == re.findall(r"^### (Kvxfer\w+)$", OPERATIONS, re.M)
    tried = set(re.findall(r"alertname: (\w+)", (RULES.parent / "alerts_test.yaml").read_text()))
    assert tried == set(alerts)


def test_the_dashboard_is_whole() -> None:
    assert len({p["id"] for p in panels()}) == len(list(panels()))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells
    variables = {v["name"] for v in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval", "__range", "__all"} == variables


def test_every_metric_is_on_the_dashboard_or_in_a_rule() -> None:
    """What nobody looks at need not be measured."""
    everything = "\n".join(EXPRESSIONS.values())
    assert not [name for name in SPECS if name not in everything]


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in ("operations.md", "how-to/read-the-metrics.md", "reference/metrics.md"):
        path = ROOT / "docs" / document
        for link in re.findall(r"\]\(([^)#]*)(?:#[\w-]+)?\)", path.read_text()):
            assert not link or (path.parent / link).exists(), (document, link)
