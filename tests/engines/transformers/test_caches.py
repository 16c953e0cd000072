"""Caches taken apart and put together: what is held, that nothing is shared, and what is refused."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache, cache_utils
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, LinearAttentionLayer, QuantizedLayer

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.engines.transformers import Held, held, rebuild
from tests.support.console import ROOT
from tests.support.tiny_models import model_of, prefilled, prompt_of, run


def described(items: tuple[Held, ...]) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(item.layer, item.name, tuple(item.tensor.shape)) for item in items]


def test_every_kind_of_layer() -> None:
    """Attention alone, a state alone, both in one layer, a layer without a cache, a convolution without a state."""
    assert described(held(prefilled(model_of("nemotron_h"), prompt_of(5)))) == [
        (0, "conv.0", (192, 4)),
        (0, "recurrent.0", (8, 16, 16)),
        (1, "k", (2, 5, 16)),
        (1, "v", (2, 5, 16)),
        (2, "conv.0", (192, 4)),
        (2, "recurrent.0", (8, 16, 16)),
    ]
    assert described(held(prefilled(model_of("falcon_h1", num_hidden_layers=1), prompt_of(5)))) == [
        (0, "k", (2, 5, 16)),
        (0, "v", (2, 5, 16)),
        (0, "conv.0", (192, 4)),
        (0, "recurrent.0", (8, 16, 16)),
    ]
    assert described(held(prefilled(model_of("lfm2"), prompt_of(5)))) == [
        (0, "conv.0", (64, 3)),
        (1, "k", (2, 5, 16)),
        (1, "v", (2, 5, 16)),
        (2, "conv.0", (64, 3)),
    ]


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "kimi_linear", "mamba2"])
def test_what_is_put_together_is_what_was_taken_apart(name: str) -> None:
    model, prompt = model_of(name), prompt_of(9)
    cache = prefilled(model, prompt)
    copy = rebuild(model.config, held(cache))
    for mine, other in zip(held(copy), held(cache), strict=True):
        assert (mine.layer, mine.name) == (other.layer, other.name)
        assert torch.equal(mine.tensor, other.tensor)
        assert mine.tensor.data_ptr() != other.tensor.data_ptr()
    last = prompt[:, -1:]
    assert torch.equal(run(model, last, copy), run(model, last, cache))


def refused(cache: Any, reason: Reason = Reason.UNSUPPORTED) -> KvxferError:
    with pytest.raises(KvxferError) as caught:
        held(cache)
    assert caught.value.reason is reason
    return caught.value


def of_layer(layer: Any) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), layer]
    return cache


def test_windows_are_refused() -> None:
    error = refused(prefilled(model_of("gemma2"), prompt_of(5)))
    assert error.field == "cache.layers[0]"
    assert "DynamicSlidingWindowLayer" in error.message
    assert "window" in error.message


def test_other_caches_are_refused() -> None:
    config = model_of("llama").config
    assert "take a DynamicCache" in refused(StaticCache(config=config, max_cache_len=8)).message
    assert "two devices" in refused(DynamicCache(config=config, offloading=True)).message
    assert "not known" in refused(None).message

    class Own(DynamicCache):
        """Nobody knows what else it does."""

    assert "cache is of type Own" in refused(Own()).message


def test_other_layers_are_refused() -> None:
    assert "indexer" in refused(of_layer(DynamicIndexedLayer())).message

    class QuantizedOwn(QuantizedLayer):
        def _quantize(self, tensor: Any, axis: Any) -> None: ...
        def _dequantize(self, tensor: Any) -> None: ...

    assert "quantised" in refused(of_layer(object.__new__(QuantizedOwn))).message

    class Own(DynamicLayer):
        """Nobody knows what it keeps."""

    assert "not known" in refused(of_layer(Own())).message


def test_a_state_with_its_past_is_refused() -> None:
    layer = LinearAttentionLayer()
    layer.activate_past_recording()
    error = refused(of_layer(layer))
    assert (error.field, "past states" in error.message) == ("cache.layers[1]", True)


def test_one_sequence_of_one_length() -> None:
    model = model_of("nemotron_h")
    error = refused(prefilled(model, prompt_of(5).repeat(2, 1)), Reason.FIELD_INVALID)
    assert "2 sequences" in error.message
    cache = prefilled(model_of("llama"), prompt_of(5))
    cache.layers[1].crop(-2)
    assert "3 and 5 tokens" in refused(cache, Reason.FIELD_INVALID).message


INIT = str(ROOT / "kvxfer" / "engines" / "transformers" / "__init__.py")


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_what_is_missing_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError) as caught:
        runpy.run_path(INIT)
    told = str(caught.value)
    assert told.startswith("kvxfer.engines.transformers needs torch and Transformers")
    assert "pip install torch 'kvxfer[transformers]'" in told
    assert missing in told
    assert caught.value.name == missing


def test_an_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cache_utils, "DummyLayer")
    with pytest.raises(ImportError, match=r"caches of Transformers 5\.23 or newer, this is 5\."):
        runpy.run_path(INIT)
