"""vLLM's side of the connector: each hook in a few lines, and what is behind it in the other modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvxfer.core.layout import Rank
from kvxfer.engines.vllm.groups import CacheGroup
from kvxfer.engines.vllm.handoff import Handoff
from kvxfer.engines.vllm.settings import settings_from
from kvxfer.engines.vllm.specs import compatibility_key_of, engine_id_of, groups_of, layout_from, rank_of, unsupported
from kvxfer.engines.vllm.steps import Step
from kvxfer.engines.vllm.worker import WorkerCache
from kvxfer.wire.tickets import TicketRank
from kvxfer_client import Registered

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers, with every step."""

    step: Step


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From a worker to the scheduler, once at the start."""

    rank: TicketRank


@dataclass
class FreshRanks(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler, after they have registered again."""

    ranks: dict[int, TicketRank]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FreshRanks:
        """Of several workers."""
        return FreshRanks(self.ranks | other.ranks) if isinstance(other, FreshRanks) else self


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands requests over between vLLM engines through kvxfer sidecars."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings_from(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._groups: tuple[CacheGroup, ...] = groups_of(vllm_config, kv_cache_config)
        key = self._settings.compatibility_key or compatibility_key_of(vllm_config)
        engine_id = engine_id_of(vllm_config)
        self._handoff: Handoff | None = None
        self._worker: WorkerCache | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._handoff = Handoff(self._groups, engine_id, key, self._settings.lease_ttl)
            if vllm_config.kv_transfer_config.kv_load_failure_policy == "fail":
                log.warning(
                    "Requests that cannot be read fail; to have them computed here, set kv_load_failure_policy to "
                    '"recompute" in --kv-transfer-config.'
                )
        else:
            parallel = vllm_config.parallel_config
            self._rank: Rank = rank_of(vllm_config)
            dp = (parallel.data_parallel_index, parallel.data_parallel_size)
            self._worker = WorkerCache(self._settings, engine_id, key, self._rank, dp)
            self._registered: Registered | None = None
            self._caches: dict[str, list[torch.Tensor]] = {}
            self._device = torch.device("cpu")

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """What vLLM shall choose unless it is told otherwise (``VLLM_KV_CACHE_LAYOUT``): heads before tokens.

        A rank's heads then lie in one piece, also for a reader that has fewer of them.  Compressed caches have one.
        """
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    # -- scheduler -------------------------------------------------------------------------------------------------

    @property
    def handoff(self) -> Handoff:
        """The scheduler's side."""
        if self._handoff is None:
            raise RuntimeError("this is a worker's connector")
        return self._handoff

    def on_new_request(self, request: Request) -> None:
        """P: leave the end of the prompt to D where it must be."""
        if not request.skip_reading_prefix_cache:  # else D does not read either, and computes the whole prompt
            shorten(request, self.handoff.tokens_to_leave(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """D: what can be read."""
        found = self.handoff.matched(request, num_computed_tokens)
        return found, found > 0

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups are read."""
        return tuple(range(len(self._groups)))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """D: where to read it to."""
        self.handoff.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """What the workers shall do."""
        return StepMetadata(self.handoff.step())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers have told."""
        self.handoff.loaded(tuple(connector_output.finished_recving or ()))
        if isinstance(connector_output.kv_connector_worker_meta, FreshRanks):
            self.handoff.ranks.update(connector_output.kv_connector_worker_meta.ranks)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished_all_groups`, of one group."""
        return self.handoff.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """P: keep the blocks, and answer with a ticket."""
        return self.handoff.finished(request, block_ids)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """All workers have registered; without pipeline stages."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): each for rank, each in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers have registered."""
        found = [each.rank for each in metadata.values() if isinstance(each, RankMetadata)]
        self.handoff.ranks = {rank.rank.number: rank for rank in found}

    # -- worker ----------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> WorkerCache:
        """The worker's side."""
        if self._worker is None:
            raise RuntimeError("this is the scheduler's connector")
        return self._worker

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Where the cache is allocated."""
        tensors = self._kv_cache_config.kv_cache_tensors
        return self.worker.lent(tensors[0].size) if tensors else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The cache is allocated."""
        layout, buffer = layout_from(self._vllm_config, self._kv_cache_config, self._groups, kv_caches, self._rank)
        self.worker.register(layout, buffer.data_ptr())
        self._registered = self.worker.mover.take_registered()
        self._device = buffer.device
        for group, spec in zip(self._groups, self._kv_cache_config.kv_cache_groups, strict=True):
            self._caches[group.name] = [kv_caches[name] for name in spec.layer_names]

    def get_handshake_metadata(self) -> RankMetadata | None:
        """This worker, for tickets."""
        return RankMetadata(self._registered.ticket_rank) if self._registered is not None else None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin what the scheduler wants."""
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepMetadata):
            raise unsupported("metadata of another connector", f"{type(metadata).__name__} is not its own")
        if not metadata.step:
            return
        for reading in metadata.step.read:
            for group, block in reading.partly.items():
                self._clear(group, block)
        self.worker.mover.begin(metadata.step, after_device(self._device))

    def _clear(self, group: str, block: int) -> None:
        # What is read leaves the block's end as it was, and attention multiplies that by 0: it must not be NaN.
        for cache in self._caches[group]:
            ratio = cache.shape[0] // self._kv_cache_config.num_blocks
            cache[block * ratio : (block + 1) * ratio].zero_()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded while a model runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing is saved: peers read the cache where it is."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As :meth:`get_transfer_results`, without a word about failures."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Whose blocks are free, whose have been read, and whose could not be."""
        results = self.worker.mover.take()
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def build_connector_worker_meta(self) -> FreshRanks | None:
        """This worker, where it has registered again."""
        found = self.worker.mover.take_registered()
        if found is None:
            return None
        self._registered = found
        return FreshRanks({found.rank.number: found.ticket_rank})

    def shutdown(self) -> None:
        """Let go of everything."""
        if self._worker is not None:
            self._worker.close()


def shorten(request: Request, tokens: int) -> None:
    """Take tokens off the end of a new request's prompt, and let it generate one token only.

    With that one step sees the prompt's end, and none after it moves the states on.
    """
    if tokens == 0 or (request.prompt_token_ids is None and request.prompt_embeds is None):
        return
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[-tokens:]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-tokens]
    del request._all_token_ids[-tokens:]
    request.num_prompt_tokens -= tokens
    request.max_tokens = 1


def after_device(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done what it was given so far."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return cast("Callable[[], None]", event.synchronize)
