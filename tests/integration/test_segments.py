"""Sidecars whose UCX sends and receives other segments over TCP, which UCX itself does not compare."""

from __future__ import annotations

from contextlib import ExitStack

import grpc
import pytest

from kvxfer.core.errors import Reason
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.status import from_rpc_error
from tests.integration.test_stopped_peer import engine, read, request
from tests.support.processes import sidecars
from tests.truth import Labels


def test_nothing_is_read_that_comes_in_larger_segments_than_there_is_room_for() -> None:
    narrow = {"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "48K", "UCX_TCP_RX_SEG_SIZE": "48K"}
    with ExitStack() as stack:
        (ours,) = stack.enter_context(sidecars(["a"], environment={"UCX_TLS": "tcp"}))
        (theirs,) = stack.enter_context(sidecars(["b"], environment=narrow))
        labels = Labels()
        wide, other = engine("a", ours, labels), engine("b", theirs, labels)
        with pytest.raises(grpc.RpcError) as caught:
            theirs.stub.ReadBlocks(request(other, wide), timeout=30)
        error = from_rpc_error(caught.value)
        assert (error.reason, error.metadata["local"]) == (Reason.INCOMPATIBLE_PEER, str(48 * 1024))
        # The other way round nothing is too large; and nobody was harmed.
        assert read(wide, other).state == pb.TRANSFER_STATE_DONE
