"""What sections do beside measuring, with little effort and without vLLM."""

from __future__ import annotations

import contextlib

import grpc
import pytest

from benchmarks import models, resolving, validation
from benchmarks.caches import Case, largest, memory
from benchmarks.prompts import SHAPES, Prompt
from benchmarks.results import Effort, Section
from benchmarks.sidecars import Pair, Sidecar, timed_read
from kvxfer.core.errors import Reason
from kvxfer.core.layout import AxisKind
from kvxfer.core.pairing import Member, compile_plan
from kvxfer.core.resolve import Request, resolve
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.status import from_rpc_error


def test_pairing_is_timed_and_its_memory_is_counted() -> None:
    section = Section()
    resolving.pairing(section, Effort(0.01))
    rows = section.rows["pairing"]
    assert [row["descriptors"] for row in rows] == [10_000, 100_000, 1_000_000, 10_000_000]
    assert {row["rows"] for row in rows} == {resolving.LAYERS}
    assert all(0 < row["kept_bytes"] < row["peak_bytes"] < 2**20 for row in rows)
    assert [(line.promise, line.unit) for line in section.lines] == [("5", "ms"), ("5", "MiB")]


def test_every_shape_has_a_request_that_resolves() -> None:
    for shape in SHAPES:
        prompt = Prompt.of(shape, 1_000)
        member = Member(prompt.rank, prompt.layout)
        read = resolve(compile_plan(member, [member]), Request(prompt.lists("D"), prompt.lists("P"), prompt.tokens))
        assert read.descriptors > 0
        assert [len(blocks.ids) for blocks in prompt.lists("D")] == [len(blocks.ids) for blocks in prompt.lists("P")]


def test_a_model_is_read_and_what_nixl_counts_is_the_least() -> None:
    section = Section()
    with models.sidecars() as (directory, p, d):
        for d_tp in (1, 2):
            models.read(section, models.MODELS[0], d_tp, directory, p, d)
    rows = section.rows["model_reads"]
    assert [row["d_tp"] for row in rows] == [1, 2]
    assert all(row["bytes"] == row["planned"] == row["least"] for row in rows)
    assert all(0 < row["merged"] <= row["descriptors"] for row in rows)


def test_a_byte_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    read, what = models._read, ""

    def spoilt(source: models.Side, target: models.Side) -> tuple[float, pb.Transfer]:
        found = read(source, target)
        part = next(part for part in target.parts() if part.is_state is (what in ("of a state", "of padding")))
        view, at = part.view, part.view.base + int(part.ids[-1]) * part.view.block_stride
        if what == "of a state":
            at += part.component.offset
        elif what == "of padding":
            at += view.block_stride - 1
        else:
            last = (target.tokens - 1) % part.group.block_tokens + (what == "behind the last token")
            kernel, inside = divmod(last, part.component.tokens)
            token = next(axis for axis in part.component.axes if axis.kind is AxisKind.TOKEN)
            at += kernel * view.kernel_stride + part.component.offset + inside * token.stride
        target.memory[view.region][at] ^= 1
        return found

    monkeypatch.setattr(models, "_read", spoilt)
    with models.sidecars() as (directory, p, d):
        for what in ("of a state", "of the last token", "behind the last token", "of padding"):
            where = "wrong bytes" if what in ("of a state", "of the last token") else "nobody"
            with pytest.raises(RuntimeError, match=where):
                models.read(Section(), models.MODELS[0], 2, directory, p, d)


def test_a_sidecar_that_believes_waits_for_no_grant() -> None:
    """What the cost of leases is measured against must be without them: it reads what P refuses."""
    case = Case(4_096, 4, 2, "scrambled")
    with memory(largest([case])) as place, contextlib.ExitStack() as stack:
        p = stack.enter_context(Sidecar(place.directory, "p"))
        found, why = {}, {}
        for name, main in validation.MAINS.items():
            d = stack.enter_context(Sidecar(place.directory, name, main=main))
            pair = Pair(p, d, case, place, name)
            ticket = pair.ticket()
            ticket.lease_token = bytes(16)
            try:
                timed_read(d, pair.request(ticket))
            except grpc.RpcError as error:
                why[name] = from_rpc_error(error).reason
            found[name] = place.bytes["D"].any()
            place.bytes["D"][:] = 0
            pair.close()
    assert found == {"checked": False, "unchecked": True}
    assert why == {"checked": Reason.LEASE_TOKEN_MISMATCH}


def test_what_leases_cost_is_measured() -> None:
    found = validation.run(Case(4_096, 4, 2, "scrambled"), 1)
    assert {"checked_ms", "checked_grant_ms", "unchecked_ms", "unchecked_grant_ms", "ratio"} < set(found)
