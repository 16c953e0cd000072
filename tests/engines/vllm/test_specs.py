"""Layouts against the tensors that vLLM itself allocates, for every order in which it may lay them out."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, Component, Rank
from kvxfer.core.pairing import Member, compile_plan

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: run `make engines`", allow_module_level=True)

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvxfer.engines.vllm.groups import CacheGroup
from kvxfer.engines.vllm.specs import compatibility_key_of, engine_id_of, groups_of, layout_from, rank_of

BLOCKS, TOKENS, HEADS, WIDTH = 6, 32, 2, 16
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float16)
PAGE = FULL.page_size_bytes
MAMBA = MambaSpec(
    block_size=TOKENS,
    shapes=((3, 24), (2, 8, 4)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=PAGE,
    mamba_type=MambaAttentionBackendEnum.MAMBA2,
)


class Layers(dict[str, Any]):
    """Modules of attention layers, all of one backend."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        name = SimpleNamespace(get_name=lambda: backend)
        self.module = SimpleNamespace(get_attn_backend=lambda: name, isa="vec")

    def __missing__(self, key: str) -> Any:
        return self.module


def config(tp_size: int = 1, rank: int = 0, kv_heads: int = HEADS, backend: str = "FLASH_ATTN", **changes: Any) -> Any:
    """What is looked at of vLLM's configuration."""
    text = SimpleNamespace(n_groups=1, to_dict=lambda: {"hidden_size": 64, "transformers_version": "5"})
    model = SimpleNamespace(
        hf_text_config=text,
        get_total_num_kv_heads=lambda: kv_heads,
        model="/models/a model",
        revision=None,
        dtype=torch.float16,
        quantization=None,
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        rank=rank,
        data_parallel_index=0,
        data_parallel_size=1,
    )
    found = SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context=Layers(backend)),
    )
    for name, value in changes.items():
        setattr(parallel if hasattr(parallel, name) else found, name, value)
    return found


def cache(layers: dict[str, Any], outermost: str = "L") -> KVCacheConfig:
    """Groups of one layer each over the same bytes; or, block by block, layers beside one another."""
    groups = [KVCacheGroupSpec([name], spec) for name, spec in layers.items()]
    page = max(spec.page_size_bytes for spec in layers.values())
    if outermost == "L":
        size = page * BLOCKS
        tensors = [KVCacheTensor(size, [name], size, page) for name in layers]
    else:
        size = page * BLOCKS * len(layers)
        tensors = [KVCacheTensor(size, [name], page, page * len(layers), page * i) for i, name in enumerate(layers)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)


def made(
    found: KVCacheConfig, order: KVCacheLayout, kernel: int = TOKENS, given: Any = None
) -> tuple[CacheLayout, dict[str, Any], Any]:
    """vLLM's tensors, and the layout of them."""
    sizes = [kernel if not isinstance(g.kv_cache_spec, MambaSpec) else TOKENS for g in found.kv_cache_groups]
    tensors = allocate_kv_cache(found, torch.device("cpu"), order, sizes)
    given = given or config()
    layout, buffer = layout_from(given, found, groups_of(given, found), tensors, Rank())
    return layout, tensors, buffer


@pytest.mark.parametrize("order", list(KVCacheLayout), ids=lambda order: order.name)
@pytest.mark.parametrize("kernel", [TOKENS, TOKENS // 2])
def test_every_cell_of_attention_is_where_vllm_has_it(order: KVCacheLayout, kernel: int) -> None:
    if kernel < TOKENS and not order.is_block_compact:
        pytest.skip("vLLM does not split blocks whose heads lie apart")
    found = cache({"a": FULL})
    tensors = found.kv_cache_tensors[0]
    if order is KVCacheLayout.LHBNC:
        tensors.block_stride = PAGE // HEADS  # all blocks of a head, then those of the next
    elif order is KVCacheLayout.BHLNC:
        tensors.layer_stride = PAGE // HEADS  # all layers of a head, then those of the next
    layout, made_tensors, buffer = made(found, order, kernel)
    tensor, view = made_tensors["a"], layout.groups[0].views[0]
    (kv,) = view.components
    origin, bits = buffer.data_ptr(), tensor.element_size()
    axes = {axis.kind.value: axis.stride for axis in kv.axes}
    assert layout.regions[0].size == PAGE * BLOCKS and kv.dtype == "float16"
    ratio = TOKENS // kernel
    for block, part, head, token in itertools.product(*map(range, (BLOCKS, ratio, HEADS, kernel))):
        expected = tensor[block * ratio + part, head, token].data_ptr() - origin
        at = view.base + block * view.block_stride + part * view.kernel_stride + kv.offset
        assert at + head * axes["unit"] + token * axes["token"] == expected
    assert axes["inner"] == bits and kv.inner[0].extent == 2 * WIDTH


@pytest.mark.parametrize("outermost", ["L", "B"])
def test_states_are_where_their_layers_have_them(outermost: str) -> None:
    found = cache({"a": FULL, "m": MAMBA}, outermost)
    order = KVCacheLayout.LBHNC if outermost == "L" else KVCacheLayout.BLHNC
    layout, tensors, buffer = made(found, order)
    assert [g.name for g in layout.groups] == ["0.attention", "1.mamba2"]
    view = layout.groups[1].views[0]
    parts = {part.name: part for part in view.components}
    # As vLLM's layers cut their pages: the conv state, then the recurrent one (MambaBase.bind_kv_cache).
    pages = tensors["m"].squeeze(dim=(1, 2))
    first = prod(MAMBA.shapes[0]) * 2
    conv = pages[:, :first].view(torch.bfloat16).view(-1, *MAMBA.shapes[0])
    ssm = pages[:, first : first + prod(MAMBA.shapes[1]) * 4].view(torch.float32).view(-1, *MAMBA.shapes[1])
    origin = buffer.data_ptr()
    for block in range(BLOCKS):
        at = view.base + block * view.block_stride
        for name, begin, width in (("conv.x", 0, 16), ("conv.B", 16, 4), ("conv.C", 20, 4)):
            for row, channel in itertools.product(range(3), range(width)):
                axes = {axis.kind.value: axis.stride for axis in parts[name].axes}
                mine = at + parts[name].offset + row * axes["inner"] + channel * axes["unit"]
                assert mine == conv[block, row, begin + channel].data_ptr() - origin
        for head in range(2):
            mine = at + parts["ssm"].offset + head * parts["ssm"].axes[0].stride
            assert mine == ssm[block, head].data_ptr() - origin


def test_compressed_caches_have_one_vector_a_token() -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    layout, _, _ = made(cache({"a": spec}), KVCacheLayout.LBHNC, given=config(backend="FLASHMLA"))
    (part,) = layout.groups[0].views[0].components
    assert (part.name, part.dtype, part.inner[0].extent, str(part.units)) == ("mla", "bfloat16", 576, "[0, 1) of 1")


def component(backend: str, block: int = TOKENS, tp_size: int = 1, slots: int | None = None) -> Component:
    """The one component of an attention layer."""
    spec = replace(FULL, block_size=block, num_head_slots=slots)
    layout, _, _ = made(cache({"a": spec}), KVCacheLayout.LBHNC, block, config(tp_size, backend=backend))
    return layout.groups[0].views[0].components[0]


def test_what_a_backend_arranges_in_its_own_way_has_a_name_of_its_own() -> None:
    assert component("FLASH_ATTN").name == "kv"
    assert component("CPU_ATTN").name == "kv.cpu_vec.32"
    assert component("CPU_ATTN", 64).name == "kv.cpu_vec.64"
    assert component("FLASHINFER").name == "kv.flashinfer.32.tp1"
    assert component("TRITON_ATTN", slots=2 * HEADS).name == "kv.triton_attn.32.tp1"


def test_blocks_of_other_sizes_are_refused_where_tokens_have_no_place() -> None:
    """Or D would attend to K and V of a wrong order, and nothing would say so."""

    def member(backend: str, block: int) -> Member:
        spec = replace(FULL, block_size=block)
        layout, _, _ = made(cache({"a": spec}), KVCacheLayout.LBHNC, block, config(backend=backend))
        return Member(Rank(), layout)

    assert compile_plan(member("FLASH_ATTN", 64), [member("FLASH_ATTN", 32)]).sources
    with pytest.raises(KvxferError) as caught:
        compile_plan(member("CPU_ATTN", 64), [member("CPU_ATTN", 32)])
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    assert "kv.cpu_vec.32" in caught.value.message


def test_layers_of_a_group_may_differ() -> None:
    wide = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=2 * WIDTH, dtype=torch.float16)
    specs = {"a": FULL, "b": wide}
    found = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(3 * PAGE * BLOCKS, ["a"], PAGE * BLOCKS, PAGE),
            KVCacheTensor(3 * PAGE * BLOCKS, ["b"], 2 * PAGE * BLOCKS, 2 * PAGE, PAGE * BLOCKS),
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(["a", "b"], UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs))
        ],
    )
    layout, _, _ = made(found, KVCacheLayout.LBHNC)
    views = layout.groups[0].views
    assert [(v.layer, v.base, v.block_stride, v.components[0].inner[0].extent) for v in views] == [
        ("a", 0, PAGE, 2 * WIDTH),
        ("b", PAGE * BLOCKS, 2 * PAGE, 4 * WIDTH),
    ]


def test_groups_as_the_scheduler_has_them() -> None:
    sizes = {"num_kv_heads": HEADS, "head_size": WIDTH, "dtype": torch.float16}
    window = SlidingWindowSpec(block_size=TOKENS, sliding_window=100, extra_retained_tokens=2, **sizes)
    chunk = ChunkedLocalAttentionSpec(block_size=TOKENS, attention_chunk_size=64, **sizes)
    found = cache({"a": FULL, "w": window, "c": chunk, "m": MAMBA})
    assert groups_of(config(), found) == (
        CacheGroup("0.attention", TOKENS),
        CacheGroup("1.attention", TOKENS, window=102),
        CacheGroup("2.attention", TOKENS, chunk=64),
        CacheGroup("3.mamba2", 0),
    )


def test_what_cannot_be_handed_over() -> None:
    odd = EncoderOnlyAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float16)
    host = cache({"a": FULL})
    host.kv_cache_groups[0].host_resident = True
    refused = [
        lambda: groups_of(config(), cache({"a": odd})),
        lambda: groups_of(config(), host),
        lambda: groups_of(config(speculative_config=object()), cache({"m": MAMBA})),
        lambda: rank_of(config(decode_context_parallel_size=2)),
        lambda: rank_of(config(prefill_context_parallel_size=2)),
    ]
    for attempt in refused:
        with pytest.raises(KvxferError) as caught:
            attempt()
        assert caught.value.reason is Reason.UNSUPPORTED
        assert caught.value.message.startswith("KvxferConnector cannot be used with ")


def test_tensors_in_several_buffers_are_refused() -> None:
    found = cache({"a": FULL, "b": FULL})
    tensors = {"a": torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH), "b": torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH)}
    with pytest.raises(KvxferError, match="several buffers"):
        layout_from(config(), found, groups_of(config(), found), tensors, Rank())


@pytest.mark.parametrize("number", range(4))
def test_a_worker_knows_its_place(number: int) -> None:
    assert rank_of(config(2, number, pipeline_parallel_size=2)) == Rank(number % 2, 2, number // 2, 2)


def test_replicas_are_engines_of_their_own() -> None:
    assert engine_id_of(config()) == "e"
    assert engine_id_of(config(data_parallel_size=2, data_parallel_index=1)) == "e.dp1"


def test_the_compatibility_key_names_what_changes_the_bytes() -> None:
    key = compatibility_key_of(config())
    assert key.startswith("vllm//models/a_model//float16/auto//") and " " not in key
    other = config()
    other.cache_config.cache_dtype = "fp8"
    newer = config()
    newer.model_config.hf_text_config.to_dict = lambda: {"hidden_size": 64, "transformers_version": "6"}
    larger = config()
    larger.model_config.hf_text_config.to_dict = lambda: {"hidden_size": 65, "transformers_version": "5"}
    assert compatibility_key_of(newer) == key
    assert len({compatibility_key_of(c) for c in (config(), other, larger)}) == 3
