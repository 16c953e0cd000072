"""Our connector, and a witness in every worker that takes the images of all blocks that are handed over.

On P when they are published and when their lease has ended, on D when they have been read and before a step uses them.
Written to the file that KVXFER_TEST_IMAGES names, a JSON object a line; named by ``kv_connector_module_path``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvxfer.core.resolve import BlockList
from kvxfer.engines.vllm.connector import KvxferConnector as Ours
from kvxfer.engines.vllm.connector import StepMetadata
from kvxfer_client import ticket_from_string


class KvxferConnector(Ours):
    """Looks on."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._seen_caches = kv_caches
        self._handed: dict[str, tuple[str, Sequence[BlockList], int]] = {}
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if isinstance(metadata, StepMetadata):
            for out in metadata.step.publish:
                self._handed[out.request_id] = (out.id, out.blocks, out.num_tokens)
                self._tell("published", out.request_id)
            for into in metadata.step.read:
                name = ticket_from_string(into.ticket).request_id
                self._handed[into.request_id] = (name, into.blocks, into.num_tokens)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            self._tell("failed" if request_id in results.failed_recving else "read", request_id)
        for request_id in results.finished_sending:
            self._tell("ended", request_id)
        return results

    def _tell(self, what: str, request_id: str) -> None:
        name, blocks, num_tokens = self._handed[request_id]
        groups = self._kv_cache_config.kv_cache_groups
        images = {}
        for each, group in zip(blocks, groups, strict=True):
            for layer in group.layer_names:
                images[layer] = self._image(layer, np.asarray(each.ids).tolist(), num_tokens)
        with open(os.environ["KVXFER_TEST_IMAGES"], "a") as file:
            file.write(json.dumps({"what": what, "request": name, "images": images}) + "\n")

    def _image(self, layer: str, blocks: list[int], num_tokens: int) -> str:
        """A digest of what is handed over of one layer: the tokens, or the snapshot without its padding."""
        cache = self._seen_caches[layer]
        ratio = cache.shape[0] // self._kv_cache_config.num_blocks
        rows = [row for block in blocks for row in range(block * ratio, (block + 1) * ratio)]
        found = cache[rows]
        if found.dim() == 4:  # block, head, token, content
            heads, content = found.shape[1], found.shape[3]
            found = found.transpose(1, 2).reshape(-1, heads, content)[:num_tokens]
        else:
            found = found[:, : self._state_bytes(layer)]
        return hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

    def _state_bytes(self, layer: str) -> int:
        for group in self._kv_cache_config.kv_cache_groups:
            if layer in group.layer_names:
                spec: Any = group.kv_cache_spec
                return sum(
                    torch.Size(shape).numel() * dtype.itemsize
                    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
                )
        raise KeyError(layer)
