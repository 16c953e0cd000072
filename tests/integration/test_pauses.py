"""A sidecar that serves does not stand still for Python's own sake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: Objects that a full collection still looks through once it serves; without the freeze they are some 65,000.
MOST = 20_000

SERVE = """
import gc, os, signal, sys
from kvxfer.config import Settings
from kvxfer.sidecar import serve

def started(sidecar):
    print(gc.get_freeze_count(), len(gc.get_objects()), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

serve(Settings(engine_socket=sys.argv[1]), started)
"""


def test_full_collections_have_little_to_look_through(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVE, str(tmp_path / "kvxfer.sock")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    frozen, looked_through = map(int, done.stdout.split())
    assert looked_through < MOST < frozen
