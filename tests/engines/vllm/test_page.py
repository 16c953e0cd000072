"""The commands of docs/how-to/use-with-vllm.md, as they stand there, with vLLM's own servers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import urllib.request
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: run `make engines`", allow_module_level=True)

from tests.engines.vllm.models import MODELS
from tests.engines.vllm.pairs import Workshop
from tests.engines.vllm.servers import START
from tests.engines.vllm.settings import ENVIRONMENT, engine_args, flags
from tests.support import console
from tests.support.processes import until

pytestmark = pytest.mark.timeout(900)

PAGE = console.ROOT / "docs/how-to/use-with-vllm.md"
PROMPT = [7 + i % 400 for i in range(200)]


def is_up(process: subprocess.Popen[bytes], log: Path, port: str) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"it has ended:\n{log.read_text()[-6000:]}")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20):
            return True
    except OSError:
        return False


def test_two_commands_more_for_each_role(workshop: Workshop, tmp_path: Path) -> None:
    """Sidecars and servers start with them, a request goes over by hand, and `inspect` shows that it was read."""
    model = MODELS["nemotron_h"]
    # The rest of a user's usual command: $MODEL stands without quotes.
    usual = {k: v for k, v in engine_args(model, str(workshop.directory / model.name)).items() if k != "model"}
    environment = {
        **ENVIRONMENT,
        "MODEL": " ".join([str(workshop.directory / model.name), *flags(usual)]),
        "PYTHONPATH": f"{console.ROOT}:{console.ROOT / 'clients/python'}",
    }
    ports = {"8100": str(console.free_port()), "8200": str(console.free_port())}
    texts = [c.text for c in console.commands(PAGE) if not c.text.startswith("pip ")]
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(console.places(texts, **ports))
        sidecars = [c for c in run if "kvxfer serve" in c]
        engines = [c for c in run if "api_server" in c]
        first, second = (c for c in run if c.startswith("curl"))
        looks = [c for c in run if c.startswith("kvxfer inspect")]
        assert (len(sidecars), len(engines), len(looks)) == (2, 2, 2)
        assert len(run) == 8, "a command of the page is not run"
        up = []
        for number, command in enumerate([*sidecars, *engines]):
            log = tmp_path / f"{number}.log"
            process = stack.enter_context(console.started(command, tmp_path, log, environment))
            up.append((process, log))
        for (process, log), port in zip(up[2:], ports.values(), strict=True):
            until(lambda: is_up(process, log, port), START, f"that the server at {port} is up")  # noqa: B023

        def ask(command: str, params: str | None) -> dict[str, object]:
            command = command.replace('"prompt": "..."', f'"prompt": {json.dumps(PROMPT)}')
            if params is not None:
                command = command.replace('{"do_remote_prefill": true, ...}', params)
            (told,) = console.run([command], tmp_path, timeout=120)
            found: dict[str, object] = json.loads(told)
            assert "error" not in found, found
            return found

        params = ask(first, None)["kv_transfer_params"]
        assert isinstance(params, dict)
        assert ask(second, json.dumps(params))["choices"]
        transfers, leases = console.run(looks, tmp_path, {**environment, "COLUMNS": "400"})
        assert "DONE" in transfers
        assert params["remote_request_id"] in transfers
        assert "RELEASED" in leases
