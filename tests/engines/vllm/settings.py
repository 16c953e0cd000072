"""How the engines are set up: small, on one thread, and so that a step has the same shapes wherever it is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.engines.vllm.models import MAX_TOKENS, Model

#: Tokens of a step, and of a block.
STEP: Final = 128
#: Of each engine's cache, bytes.
CACHE: Final = 48 * 2**20

#: For every process that imports vLLM.  Hybrids can be compared with vLLM's own connector only with DS conv states.
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
}


@dataclass(frozen=True)
class Transfer:
    """A connector and what it is told.

    :param environment: what it wants to find there.
    """

    config: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


def nixl(port: int) -> Transfer:
    """vLLM's own connector.

    :param port: TCP port of its handshake, one for each engine.
    """
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    return Transfer(config, {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)})


def kvxfer(socket: Path, engine_id: str, *, module: str = "kvxfer.engines.vllm", **extra: Any) -> Transfer:
    """Ours.

    :param socket: of its sidecar.
    :param module: where the class is found; its name is always the same.
    :param extra: more of ``kv_connector_extra_config``.
    """
    config = {
        "kv_connector": "KvxferConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": engine_id,
        "kv_connector_extra_config": {"engine_socket": str(socket), **extra},
    }
    return Transfer(config)


def engine_args(model: Model, path: str, transfer: Transfer | None = None, **other: Any) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs``; as flags of its server by :func:`flags`."""
    args: dict[str, Any] = {
        "model": path,
        "dtype": model.dtype,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": CACHE,
        "max_model_len": MAX_TOKENS,
        "max_num_batched_tokens": STEP,
        "max_num_seqs": 1,
        "skip_tokenizer_init": True,
    }
    if transfer is not None:
        args["kv_transfer_config"] = transfer.config
    return args | other


def flags(args: Mapping[str, Any]) -> list[str]:
    """The same on the command line of vLLM's server."""
    found = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        match value:
            case bool():
                found.append(f"--{flag}" if value else f"--no-{flag}")
            case dict():
                found += [f"--{flag}", json.dumps(value)]
            case _:
                found += [f"--{flag}", str(value)]
    return found
