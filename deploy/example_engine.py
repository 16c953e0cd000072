"""Two toy engines, to see a pair of sidecars at work: P makes up caches and hands out tickets, D reads and compares.

    python example_engine.py prefill                                 # answers GET / with a ticket, on port 8000
    python example_engine.py decode http://prefill:8000 --reads 10   # exit status 0: every byte of every read was right

What a real engine does at the same places is said in comments.  Both need a sidecar; the environment says where it is
(KVXFER_ENGINE_SOCKET) and where the cache goes so that the sidecar can map it (CACHE_DIRECTORY).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvxfer_client import (
    BlockList,
    CacheLayout,
    Client,
    Group,
    GroupKind,
    KvxferError,
    Region,
    Session,
    SharedRegion,
    attention_blocks,
    make_ticket,
    new_lease_token,
    ticket_to_string,
)
from kvxfer_client.layouts import attention_block, share

SOCKET = os.environ.get("KVXFER_ENGINE_SOCKET", "/run/kvxfer/socket/kvxfer.sock")
DIRECTORY = Path(os.environ.get("CACHE_DIRECTORY", "/run/kvxfer"))
KEY = "toy-model@1/bf16"
LAYERS, BLOCKS, BLOCK_TOKENS = 4, 64, 16
TOKENS = 250  # of a prompt: the last block is not full
NEEDED = -(-TOKENS // BLOCK_TOKENS)


def toy_layout() -> CacheLayout:
    """Four attention layers of 8 KV heads, each with a region of its own."""
    block = attention_block(share(8, 0, 1), head_dim=128, tokens=BLOCK_TOKENS, dtype="bfloat16")
    views = tuple(block.view(f"layer.{i}", region=i, num_blocks=BLOCKS) for i in range(LAYERS))
    regions = tuple(Region(block.size * BLOCKS) for _ in range(LAYERS))
    return CacheLayout(regions, (Group("attention", GroupKind.ATTENTION, views, BLOCK_TOKENS),))


class Cache:
    """Memory in a place that the sidecar sees as well; a real engine builds its KV tensors on it."""

    def __init__(self, name: str, layout: CacheLayout) -> None:
        self.regions = []
        for i, region in enumerate(layout.regions):
            path = DIRECTORY / f"{name}.{i}"
            path.unlink(missing_ok=True)  # of an engine before this one
            self.regions.append(SharedRegion.create_file(path, region.size))
        # layer, block, head, token, K and V
        shape = (BLOCKS, 8, BLOCK_TOKENS, 2 * 128)
        self.layers = [region.numpy(np.uint16, shape) for region in self.regions]

    def write(self, blocks: list[int], prompt: npt.NDArray[np.uint16]) -> None:
        """What a prefill does."""
        for layer, values in zip(self.layers, prompt, strict=True):
            for i, block in enumerate(blocks):
                part = values[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
                layer[block, :, : len(part)] = part.transpose(1, 0, 2)

    def read(self, blocks: list[int]) -> npt.NDArray[np.uint16]:
        """What attention would see."""
        layers = [np.concatenate([layer[b].transpose(1, 0, 2) for b in blocks])[:TOKENS] for layer in self.layers]
        return np.stack(layers)


def keys_and_values(seed: int) -> npt.NDArray[np.uint16]:
    """A prompt's cache: layer, token, head, K and V."""
    made: npt.NDArray[np.uint16] = np.random.default_rng(seed).integers(
        1, 2**16, (LAYERS, TOKENS, 8, 2 * 128), dtype=np.uint16
    )
    return made


def block_list(blocks: list[int]) -> tuple[BlockList, ...]:
    """One list for each group; here there is one group."""
    return (attention_blocks("attention", blocks),)


class Prefill:
    """Makes up a cache for whoever asks, and says in a ticket where it lies."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.lock = threading.Lock()
        self.free = list(range(BLOCKS))
        self.held: dict[str, list[int]] = {}
        self.requests = 0
        layout = toy_layout()
        self.cache = Cache("prefill", layout)
        self.session: Session = client.session(
            layout,
            self.cache.regions,
            compatibility_key=KEY,
            replace=True,
            on_lost=self.lost,
            on_registered=lambda now: print(f"registered as {now.incarnation}", flush=True),
        )

    def lost(self, reason: KvxferError, incarnation: str) -> None:
        """The sidecar is gone: nobody reads any more what was published with it."""
        print(f"lost {incarnation}: {reason}", flush=True)
        with self.lock:
            self.held.clear()
            self.free = list(range(BLOCKS))

    def reclaim(self) -> None:
        """Free the blocks of leases that have ended, and no others.  A real engine follows `watch_leases`."""
        ended = [lease.request_id for lease in self.client.list_leases() if lease.state.ended]
        for request in ended:
            self.free += self.held.pop(request, [])

    def ticket(self) -> dict[str, object]:
        """Run a prefill and publish it; a real engine puts the ticket into its answer to the router."""
        now = self.session.wait_registered(10)
        with self.lock:
            self.reclaim()
            if len(self.free) < NEEDED:
                raise RuntimeError(f"{len(self.free)} blocks are free, {NEEDED} are needed: ask again later")
            self.requests += 1
            request = f"request-{os.getpid()}-{self.requests}"
            blocks = [self.free.pop() for _ in range(NEEDED)]
            self.held[request] = blocks
        seed, token = time.time_ns(), new_lease_token()
        self.cache.write(blocks, keys_and_values(seed))
        lists = block_list(blocks)
        self.client.publish(request, lists, TOKENS, token, ttl=30, incarnation=now.incarnation)
        ticket = make_ticket(
            engine_id=self.client.engine_id,
            compatibility_key=KEY,
            ranks=[now.ticket_rank],
            request_id=request,
            blocks=lists,
            num_tokens=TOKENS,
            lease_token=token,
            ttl=30,
        )
        return {"ticket": ticket_to_string(ticket), "seed": seed}


def prefill(port: int) -> int:
    """Serve tickets until told to stop."""
    with Client(f"unix:{SOCKET}", engine_id="prefill-0") as client:
        client.wait_ready(60)
        engine = Prefill(client)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                try:
                    status, answer = 200, engine.ticket()
                except (KvxferError, RuntimeError) as error:
                    status, answer = 503, {"error": str(error)}
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        with HTTPServer(("", port), Handler) as server:
            print(f"tickets at port {port}", flush=True)
            server.serve_forever()
    return 0


def some_blocks(seed: int) -> list[int]:
    """As many blocks as a prompt needs, in no order."""
    return [int(block) for block in np.random.default_rng(seed).permutation(BLOCKS)[:NEEDED]]


def ask(url: str, seconds: float) -> tuple[str, int]:
    """A ticket, and what the cache was made from; waits for a prefill engine that is not there yet."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=20) as response:
                answer = json.load(response)
                return str(answer["ticket"]), int(answer["seed"])
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no ticket from {url}: {error}") from error
            time.sleep(0.5)


def decode(url: str, reads: int) -> int:
    """Read and compare."""
    layout = toy_layout()
    cache = Cache("decode", layout)
    with Client(f"unix:{SOCKET}", engine_id="decode-0") as client:
        client.wait_ready(60)
        with client.session(layout, cache.regions, compatibility_key=KEY, replace=True):
            for number in range(1, reads + 1):
                ticket, seed = ask(url, 60)
                # Other blocks than on P, as a scheduler of its own would choose.
                blocks = some_blocks(number)
                done = client.read(ticket, block_list(blocks))
                wrong = int((cache.read(blocks) != keys_and_values(seed)).sum())
                milliseconds = 1000 * (done.timings.total or 0)
                verdict = "every byte is right" if wrong == 0 else f"{wrong} elements are WRONG"
                print(f"read {number}: {done.bytes} bytes in {milliseconds:.1f} ms, {verdict}", flush=True)
                if wrong:
                    return 1
    return 0


def main() -> int:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="A toy prefill or decode engine.")
    roles = parser.add_subparsers(dest="role", required=True)
    roles.add_parser("prefill").add_argument("--port", type=int, default=8000)
    other = roles.add_parser("decode")
    other.add_argument("prefill", help="URL of the prefill engine")
    other.add_argument("--reads", type=int, default=10)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        return prefill(chosen.port) if chosen.role == "prefill" else decode(chosen.prefill, chosen.reads)
    except (KvxferError, RuntimeError) as error:
        print(f"{chosen.role}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
