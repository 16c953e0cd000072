"""The wheel works where there is nothing but what it asks for: no repository, no NIXL, no torch."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.once import once

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

USE = """
from kvxfer_client import Rank, TicketRank, grouped, make_ticket, new_lease_token, ticket_from_string, ticket_to_string
from kvxfer.models import EngineOptions, build, example

layout = build(example("nemotron-3-nano-30b-a3b"), EngineOptions(tp_size=2), Rank(0, 2))
blocks = grouped([[i + 1] for i in range(len(layout.groups))], layout, 16)
ranks = [TicketRank(Rank(i, 2), f"incarnation-{i}", f"10.0.0.{i + 1}:9000") for i in range(2)]
ticket = make_ticket(
    engine_id="p", compatibility_key="k", ranks=ranks, request_id="r", blocks=blocks, num_tokens=16,
    lease_token=new_lease_token(), ttl=60,
)
text = ticket_to_string(ticket)
assert ticket_to_string(ticket_from_string(text)) == text
import sys
assert not {"nixl", "nixl_cu12", "nixl_cu13", "torch"} & set(sys.modules)
print("used", __import__("kvxfer_client").__file__)
"""


@dataclass(frozen=True)
class Installed:
    """A wheel and the environment that it is installed in."""

    wheel: Path
    environment: Path
    site: Path

    def run(self, *command: str, status: int = 0) -> str:
        """Run a program of the environment, far from the repository; all that it has written."""
        program, *arguments = command
        done = subprocess.run(
            [str(self.environment / "bin" / program), *arguments],
            cwd=self.environment,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.environment), "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in a fresh environment, with what it asks for, and nothing else.

    The distributions that it asks for are those that the tests run with, linked: nothing is fetched.
    """
    with once(tmp_path_factory, "wheel") as (place, fresh):
        if fresh:
            install(place)
    (wheel,) = (place / "dist").iterdir()
    (site,) = place.glob("environment/lib/python*/site-packages")
    return Installed(wheel, place / "environment", site)


def install(place: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(place / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = (place / "dist").iterdir()
    environment = place / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    (site,) = environment.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--disable-pip-version-check"]
    options = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run([*pip, *options], check=True, capture_output=True, timeout=60)
    (kvxfer,) = importlib.metadata.distributions(name="kvxfer", path=[str(site)])
    for distribution in required_by(kvxfer):
        link(distribution, site)
    # Whatever pip finds missing or of a wrong version is an error.
    subprocess.run([*pip, "check"], check=True, timeout=60)


def required_by(distribution: importlib.metadata.Distribution) -> Iterator[importlib.metadata.Distribution]:
    """What a distribution requires, without extras, as it is installed here; and what that requires, once each."""
    seen: set[str] = set()
    waiting = [(distribution, frozenset({""}))]
    while waiting:
        one, extras = waiting.pop()
        for line in one.requires or ():
            wanted = Requirement(line)
            name = canonicalize_name(wanted.name)
            applies = wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras)
            if applies and name not in seen:
                seen.add(name)
                found = importlib.metadata.distribution(name)
                yield found
                waiting.append((found, frozenset({"", *wanted.extras})))


def link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Make a distribution importable from another environment."""
    for file in distribution.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).symlink_to(Path(str(file.locate())).resolve())


def test_the_wheel_holds_the_packages_and_no_more(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = set(wheel.namelist())
    tops = {name.split("/")[0] for name in names}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"kvxfer", "kvxfer_client", info}
    assert {"kvxfer/py.typed", "kvxfer_client/py.typed", f"{info}/licenses/LICENSE"} <= names
    strange = [
        n for n in names if not n.startswith(info) and Path(n).suffix not in (".py", ".pyi", ".json", ".typed", ".md")
    ]
    assert not strange
    assert not [n for n in names if "test" in Path(n).name or "benchmark" in n or "__pycache__" in n]
    source = {f.relative_to(ROOT).as_posix() for f in (ROOT / "kvxfer").rglob("*.py")}
    assert source <= names


def test_neither_nixl_nor_torch_is_there(installed: Installed) -> None:
    there = {canonicalize_name(d.name) for d in importlib.metadata.distributions(path=[str(installed.site)])}
    assert "kvxfer" in there
    assert not {name for name in there if name.startswith(("nixl", "torch"))}


def test_every_command_has_help(installed: Installed) -> None:
    listing = "from typer.main import get_command; from kvxfer.cli.main import app; print(*get_command(app).commands)"
    commands = installed.run("python", "-c", listing).split()
    assert set(commands) == {"bench", "demo", "doctor", "health", "inspect", "plan", "serve", "volume"}
    assert "Commands" in installed.run("kvxfer", "--help")
    for command in commands:
        assert f"kvxfer {command}" in installed.run("kvxfer", command, "--help")


def test_the_client_can_be_used(installed: Installed) -> None:
    assert f"used {installed.site}" in installed.run("python", "-I", "-c", USE)


def test_serving_without_nixl_says_what_to_install(installed: Installed) -> None:
    flags = ("--engine-socket", str(installed.environment / "s"), "--memory-directory", str(installed.environment))
    told = installed.run("kvxfer", "serve", *flags, status=1)
    assert "Traceback" not in told
    assert "kvxfer[nixl]" in told


def test_the_engine_for_transformers_says_what_to_install(installed: Installed) -> None:
    told = installed.run("python", "-c", "import kvxfer.engines.transformers", status=1).splitlines()[-1]
    assert told.startswith("ImportError: kvxfer.engines.transformers needs torch and Transformers")
    assert "pip install torch 'kvxfer[transformers]'" in told
