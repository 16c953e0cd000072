"""What the engine decides about its cache, beside the model: parallelism, block sizes, data types, layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

from kvxfer.core.layout import MAX_BLOCKS, MemoryKind
from kvxfer.models.fields import check_int, field_error

ConvLayout = Literal["DS", "SD"]
KvLayout = Literal["HND", "NHD"]
KvPacking = Literal["packed", "block", "halves", "regions"]

MAX_TOKENS: Final = 2**24
MAX_RANKS: Final = 65_536
MAX_SPEC_TOKENS: Final = 4_096

#: Bytes of an element, by the type's name as torch writes it.
ELEMENT_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "uint8": 1,
        "int8": 1,
    }
)
#: Other names that engines use for the same types.
ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "float": "float32",
        "fp32": "float32",
        "half": "float16",
        "fp16": "float16",
        "bf16": "bfloat16",
        "fp8": "float8_e4m3fn",
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
    }
)


def resolve_dtype(key: str, name: str, auto: str = "") -> tuple[str, int]:
    """A type's canonical name and its size in bytes; ``auto`` stands for the argument ``auto``.

    :raises KvxferError: FIELD_INVALID for an unknown name.
    """
    chosen = auto if name == "auto" and auto else name
    chosen = chosen.removeprefix("torch.")
    chosen = ALIASES.get(chosen, chosen)
    if chosen not in ELEMENT_BYTES:
        raise field_error(key, name, f"auto, {', '.join([*ELEMENT_BYTES, *ALIASES])}")
    return chosen, ELEMENT_BYTES[chosen]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """An engine's cache settings.  Tokens, blocks and ranks are counts; nothing here is in bytes.

    :param tp_size: tensor-parallel ranks.
    :param block_tokens: tokens in a kernel (physical) block.
    :param num_blocks: logical blocks in every region.
    :param kv_dtype: type of K and V; ``auto`` is the model's own.
    :param conv_dtype: type of conv states; ``auto`` is the model's own.
    :param ssm_dtype: type of recurrent states; ``auto`` is what the model's config or family says.
    :param conv_layout: ``DS`` (channels, rows) or ``SD`` (rows, channels).
    :param kv_layout: ``HND`` (heads, tokens, content) or ``NHD`` (tokens, heads, content).  No matter for MLA.
    :param kv_packing: ``packed``: one component ``kv`` whose inner axis is K's and V's; ``block``: ``k`` then ``v``
        inside each kernel block; ``halves``: all K blocks, then all V blocks of a region; ``regions``: one region each.
    :param pooled: whether layers of different groups share tensors (a hybrid allocator); else every layer has its own.
    :param pp_size: pipeline stages.
    :param spec_tokens: speculative tokens; each adds a row to the conv states.
    :param logical_block_tokens: tokens of a logical block, or what it must be a multiple of where a state page asks for
        more; a multiple of ``block_tokens``.  0: as small as possible.
    :param state_align_tokens: where an engine keeps state snapshots at block boundaries for prefix reuse, the model's
        scan chunk (``chunk_size``, 128 for Nemotron 3), of which a pooled logical block is then a multiple.  0: none.
    :param state_blocks: rows of a state tensor where nothing is pooled.  0: ``num_blocks``.
    :param memory: where the regions lie.
    :raises KvxferError: FIELD_INVALID, naming the option, its value and what is allowed.
    """

    tp_size: int = 1
    block_tokens: int = 16
    num_blocks: int = 64
    kv_dtype: str = "auto"
    conv_dtype: str = "auto"
    ssm_dtype: str = "auto"
    conv_layout: ConvLayout = "DS"
    kv_layout: KvLayout = "HND"
    kv_packing: KvPacking = "packed"
    pooled: bool = True
    pp_size: int = 1
    spec_tokens: int = 0
    logical_block_tokens: int = 0
    state_align_tokens: int = 0
    state_blocks: int = 0
    memory: MemoryKind = MemoryKind.DRAM

    def __post_init__(self) -> None:
        for name, low, high in (
            ("tp_size", 1, MAX_RANKS),
            ("pp_size", 1, MAX_RANKS),
            ("block_tokens", 1, MAX_TOKENS),
            ("num_blocks", 1, MAX_BLOCKS),
            ("spec_tokens", 0, MAX_SPEC_TOKENS),
            ("logical_block_tokens", 0, MAX_TOKENS),
            ("state_align_tokens", 0, MAX_TOKENS),
            ("state_blocks", 0, MAX_BLOCKS),
        ):
            check_int(name, getattr(self, name), low, high)
        if self.tp_size * self.pp_size > MAX_RANKS:
            raise field_error("pp_size", self.pp_size, f"at most {MAX_RANKS} ranks in all, tp_size x pp_size")
        for name, choices in (("conv_layout", ConvLayout), ("kv_layout", KvLayout), ("kv_packing", KvPacking)):
            if getattr(self, name) not in get_args(choices):
                raise field_error(name, getattr(self, name), ", ".join(get_args(choices)))
        for name in ("kv_dtype", "conv_dtype", "ssm_dtype"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise field_error(name, value, "a string")
            resolve_dtype(name, value, "bfloat16")
        if not isinstance(self.pooled, bool):
            raise field_error("pooled", self.pooled, "true or false")
        if not isinstance(self.memory, MemoryKind):
            raise field_error("memory", self.memory, ", ".join(k.name for k in MemoryKind))
        if self.logical_block_tokens % self.block_tokens:
            raise field_error(
                "logical_block_tokens", self.logical_block_tokens, f"a multiple of block_tokens ({self.block_tokens})"
            )
