"""Who may import whom.

The table below is the rule; the tests read every import statement of the sources and fail on an arrow that is not in
it.  A module is judged by the longest entry that is a prefix of its name, and a module with no entry fails: whoever
adds a layer says here what it stands on.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"kvxfer": ROOT / "kvxfer", "kvxfer_client": ROOT / "clients" / "python" / "kvxfer_client"}


@dataclass(frozen=True)
class Layer:
    """What a module may import besides itself and the modules below it; each name stands for all below it, too."""

    ours: tuple[str, ...] = ()
    # Of other distributions: at any time, or only inside a function or under TYPE_CHECKING.
    theirs: tuple[str, ...] = ()
    lazily: tuple[str, ...] = ()
    # Of the standard library, what it must not have.
    without: tuple[str, ...] = ()


WORLD = ("asyncio", "ctypes", "io", "mmap", "multiprocessing", "os", "pathlib", "select", "selectors", "signal")
PURE = (*WORLD, "socket", "subprocess", "tempfile", "threading", "time", "random", "secrets")

GRPC = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google")
BELOW_THE_TOP = ("kvxfer.core", "kvxfer.models", "kvxfer.memory", "kvxfer.xfer", "kvxfer.wire", "kvxfer.pb")
COMPOSITION = (
    *BELOW_THE_TOP,
    "kvxfer.service",
    "kvxfer.sidecar",
    "kvxfer.config",
    "kvxfer.files",
    "kvxfer.logs",
    "kvxfer.tls",
    "kvxfer.web",
)
CLIENT = (
    "kvxfer.core",
    "kvxfer.pb",
    "kvxfer.wire",
    "kvxfer.memory.handles",
    "kvxfer.memory.lent",
    "kvxfer.memory.cuda",
)

LAYERS: dict[str, Layer] = {
    # The package itself is loaded with every part of it, so it loads nothing.
    "kvxfer": Layer(),
    "kvxfer.core": Layer(theirs=("numpy",), without=PURE),
    "kvxfer.models": Layer(ours=("kvxfer.core",), theirs=("numpy",)),
    "kvxfer.planning": Layer(ours=("kvxfer.core", "kvxfer.models"), theirs=("numpy",), without=PURE),
    "kvxfer.pb": Layer(theirs=("google", "grpc")),
    "kvxfer.memory": Layer(ours=("kvxfer.core",), theirs=("numpy",), lazily=("torch",)),
    "kvxfer.memory.handles": Layer(ours=("kvxfer.core",), theirs=("numpy",), without=PURE),
    "kvxfer.memory.lent": Layer(),
    "kvxfer.wire": Layer(
        ours=("kvxfer.core", "kvxfer.pb", "kvxfer.memory.handles"), theirs=("google", "numpy"), without=PURE
    ),
    "kvxfer.xfer": Layer(ours=("kvxfer.core",), theirs=("numpy", "structlog"), lazily=("torch",)),
    "kvxfer.xfer.segments": Layer(without=PURE),
    "kvxfer.xfer.nixl": Layer(
        ours=("kvxfer.core", "kvxfer.files", "kvxfer.xfer"),
        theirs=("numpy", "structlog", "nixl", "nixl_cu12", "nixl_cu13"),
        lazily=("torch",),
    ),
    "kvxfer.service": Layer(
        ours=(
            *("kvxfer.wire", "kvxfer.pb", "kvxfer.core", "kvxfer.files", "kvxfer.memory"),
            *("kvxfer.xfer.api", "kvxfer.xfer.segments"),
        ),
        theirs=(*GRPC, "numpy", "structlog"),
    ),
    "kvxfer.sizes": Layer(without=PURE),
    "kvxfer.files": Layer(ours=("kvxfer.core",)),
    "kvxfer.logs": Layer(theirs=("structlog",)),
    "kvxfer.web": Layer(
        ours=("kvxfer.core", "kvxfer.service.gauges", "kvxfer.service.meters"),
        theirs=("prometheus_client", "structlog"),
    ),
    "kvxfer.tls": Layer(ours=("kvxfer.core",), theirs=("grpc", "structlog")),
    "kvxfer.config": Layer(ours=COMPOSITION, theirs=("pydantic", "pydantic_settings", "tomli")),
    "kvxfer.doctor": Layer(ours=(*COMPOSITION, "kvxfer.sizes"), theirs=(*GRPC, "numpy")),
    "kvxfer.sidecar": Layer(ours=COMPOSITION, theirs=(*GRPC, "numpy", "structlog", "uvloop")),
    "kvxfer.embedded": Layer(ours=(*COMPOSITION, "kvxfer.sidecar"), theirs=("pydantic", "structlog", "uvloop")),
    "kvxfer.cli": Layer(
        ours=("kvxfer", "kvxfer_client"),
        theirs=(*GRPC, "numpy", "pydantic", "pydantic_settings", "rich", "structlog", "typer", "uvloop"),
        lazily=("torch", "nixl", "matplotlib"),
    ),
    "kvxfer.__main__": Layer(ours=("kvxfer.cli",)),
    # These run inside an engine, which is there already when its module here is loaded.
    "kvxfer.engines": Layer(
        ours=(*CLIENT, "kvxfer.models", "kvxfer_client"), theirs=("numpy",), lazily=("torch", "kvxfer.embedded")
    ),
    # Of the connector only what touches vLLM needs it; the rest is tested without.
    "kvxfer.engines.vllm": Layer(ours=(*CLIENT, "kvxfer_client"), theirs=("numpy",), lazily=("kvxfer.embedded",)),
    "kvxfer.engines.vllm.lending": Layer(ours=(*CLIENT, "kvxfer.engines.vllm", "kvxfer_client"), theirs=("torch",)),
    "kvxfer.engines.vllm.specs": Layer(ours=(*CLIENT, "kvxfer.engines.vllm"), theirs=("torch", "vllm")),
    "kvxfer.engines.vllm.connector": Layer(
        ours=(*CLIENT, "kvxfer.engines.vllm", "kvxfer_client"), theirs=("torch", "vllm")
    ),
    "kvxfer.engines.transformers": Layer(
        ours=(*CLIENT, "kvxfer.models", "kvxfer.engines", "kvxfer_client"), theirs=("numpy", "torch", "transformers")
    ),
    "kvxfer_client": Layer(ours=CLIENT, theirs=("grpc", "google.protobuf", "google.rpc", "numpy"), lazily=("torch",)),
}

# Reading a package's name or version brings nothing along, so this arrow is open to all but the core.
OPEN_TO_ALL = "kvxfer"


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    lazy: bool


def within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def home_of(module: str) -> str | None:
    """The entry that judges the module; it and all below it may import each other."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    # The entry of kvxfer is about its __init__ alone, or every new module would have a layer.
    return next((name for name in prefixes if name in LAYERS and (name != "kvxfer" or module == name)), None)


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    yield from _imports(ast.parse(source), module, is_package, lazy=False)


def _imports(node: ast.AST, module: str, is_package: bool, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, lazy)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, module, is_package)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            # What is taken may be a module or a name inside one.
            yield Import(full if full in MODULES or base == "google" else base, node.lineno, lazy)
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name in {"importlib.import_module", "import_module", "__import__"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(first.value, node.lineno, lazy)
    for field, value in ast.iter_fields(node):
        deferred = lazy or (
            field == "body"
            and (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                or (isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"})
            )
        )
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _imports(child, module, is_package, deferred)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def complaint(module: str, found: Import) -> str | None:
    """Why this import is against the rule, or None."""
    home = home_of(module)
    assert home is not None
    layer, target = LAYERS[home], found.target
    where = f"{module}:{found.line} imports {target}"
    top = target.partition(".")[0]
    if top == "__future__":
        return None
    if top in PACKAGES:
        own = () if module == "kvxfer" else (home,)
        fine = within(target, (*layer.ours, *own)) or (target == OPEN_TO_ALL and home not in {"kvxfer", "kvxfer.core"})
        later = found.lazy and (module == "kvxfer" or within(target, layer.lazily))
        return None if fine or later else f"{where}, which its layer does not stand on"
    if top in sys.stdlib_module_names:
        return f"{where}, which its layer keeps out" if within(target, layer.without) else None
    if within(target, layer.theirs) or (found.lazy and within(target, layer.lazily)):
        return None
    if within(target, layer.lazily):
        return f"{where}, which it may only do inside a function"
    return f"{where}, of another distribution"


def complaints(source: str, module: str, *, is_package: bool = False) -> list[str]:
    told = (complaint(module, found) for found in imports(source, module, is_package=is_package))
    return [text for text in told if text is not None]


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_layer_stands_on(module: str) -> None:
    if home_of(module) is None:
        pytest.fail(f"{module} has no layer: add it to LAYERS")
    path = MODULES[module]
    found = complaints(path.read_text(), module, is_package=path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "module, source",
    [
        ("kvxfer.core.plan", "import time"),
        ("kvxfer.core.plan", "def f():\n    import os.path"),
        ("kvxfer.core.plan", "import grpc"),
        ("kvxfer.core.plan", "from kvxfer.memory import handles"),
        ("kvxfer.core.plan", "from ..memory.handles import Handle"),
        ("kvxfer.core.plan", "import kvxfer"),
        ("kvxfer.memory.handles", "import mmap"),
        ("kvxfer.memory.mapping", "import torch"),
        ("kvxfer.wire.layout", "from kvxfer.memory import api"),
        ("kvxfer.xfer.loopback", "import nixl"),
        ("kvxfer.xfer.loopback", "def f():\n    from nixl import nixl_agent"),
        ("kvxfer.service.engine", "from kvxfer.xfer import nixl"),
        ("kvxfer.service.engine", "from kvxfer.xfer.nixl import NixlEngine"),
        ("kvxfer.service.engine", "def f():\n    import torch"),
        ("kvxfer.service.engine", "def f():\n    importlib.import_module('torch')"),
        ("kvxfer.service.engine", "import kvxfer.sidecar"),
        ("kvxfer.sidecar", "from kvxfer.cli import main"),
        ("kvxfer.config", "import kvxfer.cli"),
        ("kvxfer", "from kvxfer.sidecar import Sidecar"),
        ("kvxfer.engines.vllm.handoff", "import vllm"),
        ("kvxfer_client.client", "from kvxfer.memory.api import open_handle"),
        ("kvxfer_client.client", "import structlog"),
        ("kvxfer_client.client", "from google import cloud"),
        ("kvxfer_client.memory", "import torch"),
        ("kvxfer_client.memory", "try:\n    import torch\nexcept ImportError:\n    pass"),
    ],
)
def test_forbidden_arrow_is_found(module: str, source: str) -> None:
    assert len(complaints(source, module)) == 1


@pytest.mark.parametrize(
    "module, source",
    [
        ("kvxfer.core.plan", "import math\nimport numpy as np\nfrom kvxfer.core.layout import CacheLayout"),
        ("kvxfer.core.plan", "from .layout import CacheLayout"),
        ("kvxfer.memory.mapping", "def f():\n    import torch"),
        ("kvxfer.wire.layout", "from kvxfer.memory import handles\nfrom google.protobuf import duration_pb2"),
        ("kvxfer.xfer.nixl", "import nixl._api"),
        ("kvxfer.service.engine", "from kvxfer import __version__\nimport grpc.aio"),
        ("kvxfer.service.engine", "from kvxfer.xfer.api import TransferEngine"),
        ("kvxfer.sidecar", "from kvxfer.xfer.nixl import NixlEngine"),
        ("kvxfer", "def __getattr__(name):\n    from kvxfer.sidecar import Sidecar\n    return Sidecar"),
        ("kvxfer.cli.serve", "from kvxfer.sidecar import Sidecar\nimport kvxfer_client"),
        ("kvxfer_client.client", "import grpc.aio\nfrom google.rpc import error_details_pb2"),
        ("kvxfer_client.memory", "if TYPE_CHECKING:\n    import torch"),
        ("kvxfer.engines.vllm.connector", "import vllm.config\nimport torch"),
    ],
)
def test_allowed_arrow_is_passed(module: str, source: str) -> None:
    assert complaints(source, module) == []


@pytest.mark.parametrize("package", ["kvxfer.core", "kvxfer.planning", "kvxfer.wire", "kvxfer_client"])
def test_light_packages_load_nothing_heavy(package: str) -> None:
    """What an engine imports must not bring along the sidecar's own dependencies, nor NIXL, nor torch."""
    heavy = {"nixl", "nixl_cu12", "nixl_cu13", "torch", "typer", "rich", "structlog", "pydantic", "uvloop"}
    names = [name for name in MODULES if within(name, (package,))]
    if not names:
        pytest.skip(f"{package} is empty")
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(*sorted({heavy!r} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
