"""errno becomes a reason."""

from __future__ import annotations

import errno
import os

import pytest

from kvxfer.core.errors import Reason
from kvxfer.memory.oserrors import from_os_error


@pytest.mark.parametrize(
    "number, reason",
    [
        (errno.ENOENT, Reason.MEMORY_HANDLE_INVALID),
        (errno.EACCES, Reason.MEMORY_NOT_ALLOWED),
        (errno.EPERM, Reason.MEMORY_NOT_ALLOWED),
        (errno.ELOOP, Reason.MEMORY_NOT_ALLOWED),
        (errno.ENOMEM, Reason.MEMORY_LIMIT),
        (errno.ENOSPC, Reason.MEMORY_LIMIT),
        (errno.EMFILE, Reason.LIMIT_EXCEEDED),
        (errno.ENODEV, Reason.UNSUPPORTED),
        (errno.EIO, Reason.INTERNAL),
        (0, Reason.INTERNAL),
    ],
)
def test_reasons(number: int, reason: Reason) -> None:
    error = from_os_error(OSError(number, os.strerror(number)), "opening 'x'", field="path", path="x")
    assert error.reason is reason
    assert error.field == "path"
    assert error.metadata["path"] == "x"
    assert error.metadata["errno"] in error.message
    assert error.message.startswith("opening 'x' failed")
