"""Failed calls, as kvxfer errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.wire.status import from_rpc_error, status_of


def told(failure: Any, *, internal: bool = False) -> KvxferError:
    """The error behind a failed call, whose status code must be that of its reason; INTERNAL only where allowed."""
    error = from_rpc_error(failure)
    assert status_of(failure).details, f"a status without details: {failure}"
    assert failure.code().name == error.spec.code.value, (failure.code(), error)
    assert internal or error.reason is not Reason.INTERNAL, error
    return error


def refused(call: Callable[[], object]) -> KvxferError:
    """Make a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return told(caught.value)


async def refusal(call: Awaitable[object]) -> KvxferError:
    """Await a call that must fail, and soon."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 20)
    return told(caught.value)
