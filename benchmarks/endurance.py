"""Many small reads, and what the two sidecars keep of them: memory, file descriptors, threads.

    python benchmarks/endurance.py --reads 100000

Every read is of a request of its own, published right before it and released by it.
"""

from __future__ import annotations

import argparse
import secrets
import time
from pathlib import Path

import numpy as np
from read_blocks import TOKENS, Case, Sidecars, shared

from kvxfer.core.resolve import BlockList
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.blocks import block_lists_to_pb
from kvxfer.wire.requests import PublishBlocks, publish_to_pb
from kvxfer.wire.tickets import ticket_from_pb, ticket_to_pb


def facts(pid: int) -> tuple[float, int, int]:
    """Resident memory in MB, file descriptors, threads."""
    process = Path("/proc") / str(pid)
    pages = int((process / "statm").read_text().split()[1])
    return pages * 4096 / 1e6, len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=10, help="lines that are printed")
    arguments = parser.parse_args()
    case = Case(4096, 8, 2, scrambled=True)
    with shared(case) as (directory, local, remote):
        sidecars = Sidecars(case, directory, local, remote, 1)
        here, there = (
            regions[0].numpy(np.uint8, (case.blocks * case.spare, case.block)) for regions in (local, remote)
        )
        mine, theirs = case.ids(2), case.ids(1)
        lists = block_lists_to_pb([BlockList("attention", mine)])
        try:
            known = ticket_from_pb(sidecars.requests[0][0].spec.ticket)
            print(f"{'reads':>8} {'s':>7}  P: MB  fds threads   D: MB  fds threads")
            began = time.monotonic()
            for n in range(arguments.reads + 1):
                if n % max(1, arguments.reads // arguments.steps) == 0:
                    (p, d), seconds = (facts(pid) for pid in sidecars.pids[:2]), time.monotonic() - began
                    print(
                        f"{n:>8} {seconds:>7.0f}  {p[0]:>5.0f} {p[1]:>4} {p[2]:>7}   {d[0]:>5.0f} {d[1]:>4} {d[2]:>7}"
                    )
                request_id, token = f"r{n}", secrets.token_bytes(16)
                record = PublishBlocks("P", "", request_id, known.blocks, case.blocks * TOKENS, token, 60.0, 1)
                sidecars.p.PublishBlocks(publish_to_pb(record))
                ticket = ticket_to_pb(known)
                ticket.request_id, ticket.lease_token = request_id, token
                there[theirs] = np.uint8(n % 251)
                spec = pb.TransferSpec(engine_id="D0", ticket=ticket, local_blocks=lists)
                sidecars.readers[0].ReadBlocks(pb.ReadBlocksRequest(spec=spec), timeout=60)
                if not (here[mine] == np.uint8(n % 251)).all():
                    raise SystemExit(f"wrong bytes in read {n}")
        finally:
            sidecars.close()


if __name__ == "__main__":
    main()
