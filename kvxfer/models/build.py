"""From a model's config and an engine's options to a rank's cache layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.models.fields import Config, Fields, field_error, load_config
from kvxfer.models.options import EngineOptions
from kvxfer.models.place import Kind, place
from kvxfer.models.registry import family_of
from kvxfer.models.shard import Block, Elements, elements_of, kernel_blocks, snapshot
from kvxfer.models.spec import CacheSpec, LayerSpec, ModelSpec, StateSpec


def model_spec(config: Config | str | Path) -> ModelSpec:
    """A model's caches in global sizes.

    :raises KvxferError: FIELD_INVALID for a config that cannot be read or is of no known family.
    """
    family, fields = family_of(Fields(load_config(config)))
    spec = family.read(fields)
    attends = any(not isinstance(layer.cache, StateSpec) for layer in spec.layers)
    return replace(spec, attention_heads=fields.attention_heads() if attends else 0)


def build(config: Config | str | Path, options: EngineOptions, rank: Rank | None = None) -> CacheLayout:
    """The cache layout of one rank.

    :param config: a Hugging Face config: parsed, or the path of ``config.json`` or of its directory.
    :param options: what the engine decides.
    :param rank: which rank; its sizes must be those of ``options``.  ``None``: the first.
    :raises KvxferError: FIELD_INVALID, LAYOUT_INVALID or UNSUPPORTED, naming the key, its value and what is allowed.
    """
    first = Rank(0, options.tp_size, 0, options.pp_size)
    return layout_of(model_spec(config), options, rank or first)


def build_all(config: Config | str | Path, options: EngineOptions) -> dict[Rank, CacheLayout]:
    """The layouts of all ranks of an engine, by rank, pipeline stages outermost.

    :raises KvxferError: as :func:`build`.
    """
    spec = model_spec(config)
    ranks = [
        Rank(tp, options.tp_size, pp, options.pp_size) for pp in range(options.pp_size) for tp in range(options.tp_size)
    ]
    return {rank: layout_of(spec, options, rank) for rank in ranks}


def stage_layers(depth: int, pp_rank: int, pp_size: int) -> range:
    """The layers of a pipeline stage: even shares; what is left over goes to the stages before the last.

    (vLLM's default, ``distributed/utils.py``: the last stage also holds the output head.)

    :param depth: layers of the model, with and without a cache.
    :raises KvxferError: FIELD_INVALID with more stages than layers.
    """
    if pp_size > depth:
        raise field_error("pp_size", pp_size, f"at most the model's {depth} layers")
    sizes = [depth // pp_size] * pp_size
    for i in range(depth % pp_size):
        sizes[-2 - i] += 1
    start = sum(sizes[:pp_rank])
    return range(start, start + sizes[pp_rank])


def layout_of(spec: ModelSpec, options: EngineOptions, rank: Rank) -> CacheLayout:
    """The cache layout of one rank of a model that is described directly, without a config.

    :raises KvxferError: as :func:`build`.
    """
    for name in ("tp_size", "pp_size"):
        if getattr(rank, name) != getattr(options, name):
            raise field_error(f"rank.{name}", getattr(rank, name), f"the options' {name}, {getattr(options, name)}")
    stage = stage_layers(spec.depth, rank.pp_rank, rank.pp_size)
    if not any(layer.index in stage for layer in spec.layers):
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"pp_size is {rank.pp_size}; stage {rank.pp_rank} (layers {stage.start} to {stage.stop - 1}) would hold no "
            "layer with a cache",
            field="pp_size",
            value=rank.pp_size,
            stage=rank.pp_rank,
        )
    kinds = _kinds(spec, elements_of(spec, options), options, rank.tp_rank)
    if spec.attention_heads % options.tp_size:
        raise field_error("tp_size", options.tp_size, f"a divisor of {spec.attention_heads} (num_attention_heads)")
    return place(kinds, stage, options)


def _kinds(spec: ModelSpec, elements: Elements, options: EngineOptions, tp_rank: int) -> list[Kind]:
    """Layers that are alike, in the order in which the model first has them."""
    alike: dict[tuple[str, CacheSpec], list[LayerSpec]] = {}
    for layer in spec.layers:
        alike.setdefault((layer.kind, layer.cache), []).append(layer)
    names = [kind for kind, _ in alike]
    kinds: list[Kind] = []
    for i, ((kind, cache), layers) in enumerate(alike.items()):
        name = kind if names.count(kind) == 1 else f"{kind}-{names[:i].count(kind)}"
        first = layers[0].name
        blocks: tuple[Block, ...]
        if isinstance(cache, StateSpec):
            blocks = (snapshot(first, cache, elements, options, tp_rank),)
        else:
            blocks = kernel_blocks(first, cache, elements, options, tp_rank)
        kinds.append(Kind(name, tuple(layers), blocks, isinstance(cache, StateSpec)))
    return kinds
