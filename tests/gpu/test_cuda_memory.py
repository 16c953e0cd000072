"""What NIXL takes as device memory, and which transports then work between two processes on one GPU.

Not run yet: there was no GPU.  The answers belong into docs/decisions/0016-gpu-memory.md.
"""

from __future__ import annotations

import pytest

from tests.gpu.questions import SIZE, WAYS, ask, why_no_gpu

WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=f"no GPU that CUDA can use: {WHY}")]

#: What UCX may use; none: whatever it likes.
TRANSPORTS = {
    "all": {},
    "cuda_ipc": {"UCX_TLS": "cuda_copy,cuda_ipc,tcp"},
    "through the host": {"UCX_TLS": "cuda_copy,tcp"},
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", WAYS)
def test_nixl_reads_it(way: str, transport: str) -> None:
    assert ask(way, TRANSPORTS[transport]) == f"{SIZE} bytes"
