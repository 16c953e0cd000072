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
    from kvxfer.engines.vllm.connector import KvxferConnector

    return KvxferConnector
