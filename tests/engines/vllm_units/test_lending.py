"""The tensor that vLLM makes its cache in."""

from __future__ import annotations

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer_client import SharedRegion

torch = pytest.importorskip("torch", reason="torch is not installed")

SIZE = 4096


def test_the_cache_lies_in_the_region_and_nothing_else_does() -> None:
    from kvxfer.engines.vllm.lending import Lent

    with SharedRegion.create_memfd(SIZE) as region:
        asked: list[int] = []

        def make(size: int) -> SharedRegion:
            asked.append(size)
            return region

        with Lent(SIZE, make):
            small = torch.zeros(16, dtype=torch.int8)
            other = torch.zeros(SIZE, dtype=torch.float16)
            empty = torch.empty(SIZE, dtype=torch.int8)
            cache = torch.zeros(SIZE, dtype=torch.int8, device="cpu")
        after = torch.zeros(SIZE, dtype=torch.int8)
        assert asked == [SIZE]
        start = region.numpy("u1", (1,)).ctypes.data
        assert cache.data_ptr() == start
        assert all(t.data_ptr() != start for t in (small, other, empty, after))
        cache[5] = 7
        assert region.numpy("i1", (SIZE,))[5] == 7
        # vLLM takes the buffer as its storage, and views it with other types.
        assert cache.untyped_storage().nbytes() == SIZE
        assert cache.as_strided((4, 8), (1024, 1)).view(torch.bfloat16).shape == (4, 4)


def test_a_cache_on_another_device_cannot_be_lent() -> None:
    from kvxfer.engines.vllm.lending import Lent

    with pytest.raises(KvxferError) as caught, Lent(SIZE, lambda _: pytest.fail("not asked for")):
        torch.zeros(SIZE, dtype=torch.int8, device="meta")
    assert caught.value.reason is Reason.UNSUPPORTED
    assert "the cache is on meta" in caught.value.message
