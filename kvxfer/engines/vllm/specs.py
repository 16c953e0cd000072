"""What vLLM's configuration says about its cache, in the words of this package."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, MemoryKind, Rank
from kvxfer.engines.vllm.groups import CacheGroup
from kvxfer.engines.vllm.layout import AttentionPages, Pages, StatePages, layout_of

#: Kinds of state layers whose parts are known, by vLLM's name for their backend.
STATE_KINDS: Final = {"MAMBA1": "mamba1", "MAMBA2": "mamba2", "GDN_ATTN": "gdn"}
#: Where model configurations say how many B and C groups there are.
GROUP_FIELDS: Final = ("n_groups", "mamba_n_groups", "mamba_ngroups")
#: Attention backends that keep K and V of a token and head where the tensor's shape says, beside one another.
PLAIN: Final = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"})
#: Likewise for compressed caches: a vector a token.
PLAIN_MLA: Final = frozenset(
    {"CPU_MLA", "TRITON_MLA", "FLASHMLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA", "FLASHMLA_SPARSE"}
)


def unsupported(what: str, instead: str) -> KvxferError:
    """An error about a feature of vLLM that cannot be used together with the connector."""
    return KvxferError(Reason.UNSUPPORTED, f"KvxferConnector cannot be used with {what}: {instead}")


def rank_of(config: VllmConfig) -> Rank:
    """This worker's place."""
    parallel = config.parallel_config
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise unsupported("context parallelism", "it spreads a block's tokens over ranks; use tensor parallelism")
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    number = parallel.rank % (tp_size * pp_size)
    return Rank(number % tp_size, tp_size, number // tp_size, pp_size)


def groups_of(config: VllmConfig, cache: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """The scheduler's groups.

    :raises KvxferError: UNSUPPORTED.
    """
    found = tuple(_group(i, group) for i, group in enumerate(cache.kv_cache_groups))
    if config.speculative_config is not None and any(g.is_state for g in found):
        raise unsupported("speculative decoding of models with states", "switch it off")
    return found


def _group(number: int, group: KVCacheGroupSpec) -> CacheGroup:
    if group.host_resident or not group.enable_kv_transfer:
        raise unsupported("cache groups that are not on the device", "do without host-resident caches")
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if isinstance(spec, MambaSpec):
        kind = STATE_KINDS.get(spec.mamba_type.name, "state")
        return CacheGroup(f"{number}.{kind}", 0, scratch=spec.num_speculative_blocks)
    name, tokens = f"{number}.attention", spec.block_size
    if isinstance(spec, SlidingWindowSpec) and not spec.prefix_replay_tokens:
        return CacheGroup(name, tokens, window=spec.sliding_window + spec.extra_retained_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return CacheGroup(name, tokens, chunk=spec.attention_chunk_size)
    if isinstance(spec, FullAttentionSpec):
        return CacheGroup(name, tokens)
    raise unsupported(f"a cache of kind {type(spec).__name__}", "it is not known how its blocks are listed")


def layout_from(
    config: VllmConfig,
    cache: KVCacheConfig,
    groups: tuple[CacheGroup, ...],
    tensors: Mapping[str, torch.Tensor],
    rank: Rank,
) -> tuple[CacheLayout, torch.Tensor]:
    """The layout of the tensors that vLLM has made, and the buffer that all of them lie in, as bytes.

    :raises KvxferError: LAYOUT_INVALID, UNSUPPORTED.
    """
    first = next(iter(tensors.values()))
    storage = first.untyped_storage()
    buffer = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
    per_group = []
    for group, spec in zip(groups, cache.kv_cache_groups, strict=True):
        layers = []
        for name in spec.layer_names:
            tensor = tensors[name]
            if tensor.untyped_storage().data_ptr() != storage.data_ptr():
                raise unsupported("a cache of several buffers", "all layers are expected in one")
            layers.append(_pages(name, _spec_of(spec, name), tensor, config))
        per_group.append((group, layers))
    device = first.device
    memory = MemoryKind.DRAM if device.type == "cpu" else MemoryKind.VRAM
    return layout_of(per_group, cache.num_blocks, storage.nbytes(), rank, memory, device.index or 0), buffer


def _spec_of(group: KVCacheGroupSpec, layer: str) -> KVCacheSpec:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _pages(layer: str, spec: KVCacheSpec, tensor: torch.Tensor, config: VllmConfig) -> Pages:
    size = tensor.element_size()
    offset = tensor.storage_offset() * size
    if isinstance(spec, MambaSpec):
        text = config.model_config.hf_text_config
        groups = next((getattr(text, field) for field in GROUP_FIELDS if hasattr(text, field)), 0)
        return StatePages(
            layer,
            offset,
            tensor.stride(0) * size,
            STATE_KINDS.get(spec.mamba_type.name, spec.mamba_type.name.lower()),
            tuple(tuple(shape) for shape in spec.shapes),
            tuple(_name(dtype) for dtype in spec.dtypes),
            get_conv_state_layout(),
            spec.tp_replicated,
            # One group for all heads is held by every rank; more are dealt out, and known by what each rank holds.
            int(groups == 1),
        )
    if not isinstance(spec, AttentionSpec) or spec.tokens_per_state != 1 or tensor.dim() != 4:
        raise unsupported(f"a cache of kind {type(spec).__name__}", "it is not known how its tokens are stored")
    total = config.model_config.get_total_num_kv_heads()
    tp_size = config.parallel_config.tensor_parallel_size
    shape, stride = tensor.shape, tensor.stride()
    return AttentionPages(
        layer,
        offset,
        (shape[0], shape[1], shape[2], shape[3]),
        (stride[0] * size, stride[1] * size, stride[2] * size, stride[3] * size),
        _name(tensor.dtype),
        isinstance(spec, MLAAttentionSpec),
        # Some models have layers with another number of heads: those are dealt out evenly.
        total if shape[1] == max(1, total // tp_size) else 0,
        _arrangement(layer, spec, shape[2], config),
    )


def _arrangement(layer: str, spec: AttentionSpec, tokens: int, config: VllmConfig) -> str:
    """What the layer's backend makes of a block's bytes, where that is not what the tensor's shape says.

    The CPU's keeps, head by head, all K of a kernel block and then all V, in tiles that depend on the instructions that
    it uses.  Of others nothing is known, not even that a head's bytes are in one piece.
    """
    module = config.compilation_config.static_forward_context[layer]
    backend = module.get_attn_backend().get_name()
    if backend in (PLAIN_MLA if isinstance(spec, MLAAttentionSpec) else PLAIN) and spec.num_heads == spec.num_kv_heads:
        return ""
    if backend == "CPU_ATTN":
        return f"cpu_{module.isa}.{tokens}"
    return f"{backend.lower()}.{tokens}.tp{config.parallel_config.tensor_parallel_size}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compatibility_key_of(config: VllmConfig) -> str:
    """What changes the meaning of the bytes: the model, its revision and configuration, quantisation, data types."""
    model = config.model_config
    described = model.hf_text_config.to_dict()
    for unstable in ("_name_or_path", "transformers_version"):
        described.pop(unstable, None)
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:16]
    name = re.sub(r"[^!-~]", "_", str(model.model))[-400:]
    parts = (name, model.revision or "", _name(model.dtype), config.cache_config.cache_dtype, model.quantization or "")
    return "/".join(("vllm", *(str(part) for part in parts), digest))


def engine_id_of(config: VllmConfig) -> str:
    """The engine; data-parallel replicas are engines of their own."""
    transfer: Any = config.kv_transfer_config
    replica = config.parallel_config.data_parallel_index
    return f"{transfer.engine_id}.dp{replica}" if config.parallel_config.data_parallel_size > 1 else transfer.engine_id
