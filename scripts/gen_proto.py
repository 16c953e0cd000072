"""Generate kvxfer/pb from proto/, or check that it is up to date.

    python scripts/gen_proto.py            write
    python scripts/gen_proto.py --check    compare; exit 1 and name what differs

proto/kvxfer/v1/NAME.proto becomes kvxfer/pb/NAME_pb2.py, and NAME_pb2_grpc.py where it defines a service, each with a
type stub.  protoc places modules by the path of the .proto file, so kvxfer.v1 is rewritten to kvxfer.pb in the imports;
the descriptors keep their own file names and the package kvxfer.v1.

Run by `make proto` and `make proto-check` with the versions in scripts/proto-requirements.txt.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped,import-not-found,unused-ignore]

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
PACKAGE = "kvxfer/v1"
TARGET = ROOT / "kvxfer" / "pb"

# Modules only: every other mention of kvxfer.v1 is a protobuf name.
REWRITES = (
    (re.compile(r"^(\s*)from kvxfer\.v1 import ", re.MULTILINE), r"\1from kvxfer.pb import "),
    (re.compile(r"\bkvxfer\.v1\.(\w+_pb2(?:_grpc)?)\b"), r"kvxfer.pb.\1"),
)


def generate(out: Path) -> dict[str, str]:
    """Run protoc into ``out`` and return the modules by file name, imports rewritten."""
    sources = sorted(path.relative_to(PROTO_ROOT).as_posix() for path in (PROTO_ROOT / PACKAGE).glob("*.proto"))
    if not sources:
        raise SystemExit(f"no .proto file in {PROTO_ROOT / PACKAGE}")
    tools = Path(sys.executable).parent
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTO_ROOT}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--proto_path={distribution('googleapis-common-protos').locate_file('')}",
            f"--plugin=protoc-gen-mypy={tools / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={tools / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    modules = {path.name: rewrite(path.read_text()) for path in sorted((out / PACKAGE).iterdir()) if path.is_file()}
    return {name: text for name, text in modules.items() if not is_idle_grpc(name, modules)}


def rewrite(text: str) -> str:
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text.rstrip("\n") + "\n"


def is_idle_grpc(name: str, modules: dict[str, str]) -> bool:
    """Whether this is the _grpc module (or stub) of a file that defines no service."""
    stem, _, _ = name.partition(".")
    return stem.endswith("_pb2_grpc") and "class " not in modules[f"{stem}.py"]


def checked_in() -> dict[str, str]:
    return {path.name: path.read_text() for pattern in ("*_pb2*.py", "*_pb2*.pyi") for path in TARGET.glob(pattern)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate kvxfer/pb from proto/.")
    parser.add_argument("--check", action="store_true", help="compare with what is checked in and change nothing")
    check: bool = parser.parse_args().check

    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
    present = checked_in()
    differing = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))

    if check:
        for name in differing:
            print(f"kvxfer/pb/{name} is not what proto/ generates", file=sys.stderr)
        if differing:
            print("run: make proto", file=sys.stderr)
        return 1 if differing else 0

    TARGET.mkdir(parents=True, exist_ok=True)
    for name in differing:
        if name in fresh:
            (TARGET / name).write_text(fresh[name])
            print(f"wrote kvxfer/pb/{name}")
        else:
            (TARGET / name).unlink()
            print(f"removed kvxfer/pb/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
