"""An engine of the tests, inside a container: the toy engine of the image, told what to do one line (JSON) at a time.

python3 agent.py prefill|decode
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

sys.path.insert(0, "/opt/kvxfer/share")

import example_engine as toy

from kvxfer_client import Client, KvxferError

role, answers = sys.argv[1], sys.stdout
sys.stdout = sys.stderr  # what the toy engine prints is no answer
client = Client(f"unix:{toy.SOCKET}", engine_id=role)


class Prefill:
    def __init__(self) -> None:
        self.engine = toy.Prefill(client)

    def ticket(self) -> dict[str, object]:
        return self.engine.ticket()

    def incarnation(self) -> str:
        return self.engine.session.wait_registered(30).incarnation


class Decode:
    def __init__(self) -> None:
        layout = toy.toy_layout()
        self.cache = toy.Cache("decode", layout)
        self.session = client.session(layout, self.cache.regions, compatibility_key=toy.KEY, replace=True)

    def read(self, ticket: str, seed: int, timeout: float) -> dict[str, object]:
        blocks = toy.some_blocks(seed)
        done = client.read(ticket, toy.block_list(blocks), timeout=timeout)
        return {"bytes": done.bytes, "right": bool((self.cache.read(blocks) == toy.keys_and_values(seed)).all())}


client.wait_ready(60)
engine = Prefill() if role == "prefill" else Decode()
print(json.dumps({"answer": "ready"}), file=answers, flush=True)
for line in sys.stdin:
    command = json.loads(line)
    begin = time.monotonic()
    told: dict[str, Any] = {}
    try:
        told["answer"] = getattr(engine, command.pop("do"))(**command)
    except KvxferError as error:
        told["error"] = {"reason": error.reason.value, "message": error.message}
    except RuntimeError as error:
        told["error"] = {"reason": "ENGINE", "message": str(error)}
    told["seconds"] = time.monotonic() - begin
    print(json.dumps(told), file=answers, flush=True)
