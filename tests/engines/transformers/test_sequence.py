"""P and D with a sidecar each: what D computes is what one process would have computed, in every bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.engines.transformers import MakeMemory, SequenceCache, held
from kvxfer_client import Client, LeaseState, Owned, OwnedBacking, SharedRegion
from tests.support.processes import SidecarProcess, sidecars, until
from tests.support.tiny_models import CONFIGS, config_of, greedy, model_of, prefilled, prompt_of, run

MOVED = [name for name in CONFIGS if name != "gemma2"]
NO_PRESET = {"mamba2", "falcon_mamba", "lfm2"}
TOKENS = 38  # of a prompt: with neither block size is the last block full
KEY = "tiny@1"


@pytest.fixture(scope="module")
def clients(pair: list[SidecarProcess]) -> Iterator[tuple[Client, Client]]:
    p, d = pair
    with Client(str(p.socket), engine_id="p") as on_p, Client(str(d.socket), engine_id="d") as on_d:
        yield on_p, on_d


def sequence(client: Client, model: PreTrainedModel, max_tokens: int = 64, **options: Any) -> SequenceCache:
    return SequenceCache(client, model, max_tokens, **{"compatibility_key": KEY, **options})


request_ids = (f"request-{i}" for i in itertools.count())


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MOVED)
def test_decoding_goes_on_as_if_nothing_had_happened(
    clients: tuple[Client, Client], name: str, dtype: torch.dtype
) -> None:
    model, prompt = model_of(name, dtype), prompt_of(TOKENS)
    wanted = greedy(model, prompt[:, -1:], prefilled(model, prompt[:, :-1]))
    with sequence(clients[0], model) as p, sequence(clients[1], model, 80, block_tokens=8) as d:
        assert p.preset_agrees is (name not in NO_PRESET)
        ticket = p.prefill(prompt, next(request_ids))
        assert torch.equal(greedy(model, prompt[:, -1:], d.read(ticket)), wanted)
        assert d.last_read is not None
        assert d.last_read.bytes == sum(
            part.stride * (-(-(TOKENS - 1) // 8) if part.per_token else 1) for part in d.layout.parts
        )
        # Whichever tensor of those that were moved is missing: it is noticed.
        for part in d.layout.parts:
            cache = d.load(TOKENS - 1)
            (item,) = (x for x in held(cache) if (x.layer, x.name) == (part.layer, part.name))
            item.tensor.zero_()
            missed = (run(model, prompt[:, -1:], cache) - wanted[0]).abs().max()
            assert missed > wanted[0].abs().max() / 1000, f"layer {part.layer}, {part.name} might as well be zero"


@pytest.mark.parametrize("name", ["llama", "nemotron_h"])
def test_generate_goes_on_from_what_was_read(clients: tuple[Client, Client], name: str) -> None:
    model, prompt = model_of(name), prompt_of(TOKENS)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 5, "do_sample": False}
    wanted = model.generate(prompt, cache=prefilled(model, prompt[:, :-1]), **options)
    with sequence(clients[0], model) as p, sequence(clients[1], model) as d:
        cache = d.read(p.prefill(prompt, next(request_ids)))
        assert torch.equal(model.generate(prompt, cache=cache, **options), wanted)
    assert wanted.shape[1] > TOKENS + 1


@pytest.mark.parametrize("tokens", [2, 3, 5, 17, 64])
def test_prompts_of_any_length(clients: tuple[Client, Client], tokens: int) -> None:
    """Also shorter than a convolution, at the end of a block, and as long as there is room for."""
    model, prompt = model_of("falcon_h1"), prompt_of(tokens)
    wanted = greedy(model, prompt[:, -1:], prefilled(model, prompt[:, :-1]))
    with sequence(clients[0], model, 63) as p, sequence(clients[1], model, 63) as d:
        assert torch.equal(greedy(model, prompt[:, -1:], d.read(p.prefill(prompt, next(request_ids)))), wanted)


def test_the_language_model_of_a_larger_one(clients: tuple[Client, Client]) -> None:
    """The cache belongs to the text model, whose config lies inside."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=config_of("qwen3_5_text").to_dict(), vision_config=vision)
    model, prompt = Qwen3_5ForConditionalGeneration(config).eval(), prompt_of(TOKENS)
    wanted = greedy(model, prompt[:, -1:], prefilled(model, prompt[:, :-1]))
    with sequence(clients[0], model) as p, sequence(clients[1], model) as d:
        assert p.preset_agrees
        assert torch.equal(greedy(model, prompt[:, -1:], d.read(p.prefill(prompt, next(request_ids)))), wanted)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memfd", "shm", "file", "owned file", "owned memfd"])
def test_every_kind_of_memory(clients: tuple[Client, Client], pair: list[SidecarProcess], kind: str) -> None:
    places = iter(("p.cache", "d.cache"))

    def file(size: int) -> SharedRegion:
        return SharedRegion.create_file(pair[0].directory / next(places), size)

    memory: MakeMemory = {
        "memfd": SharedRegion.create_memfd,
        "shm": SharedRegion.create_shm,
        "file": file,
        "owned file": Owned,
        "owned memfd": lambda size: Owned(size, OwnedBacking.MEMFD),
    }[kind]
    model, prompt = model_of("nemotron_h"), prompt_of(TOKENS)
    wanted = greedy(model, prompt[:, -1:], prefilled(model, prompt[:, :-1]))
    before = set(pair[0].directory.iterdir())
    with sequence(clients[0], model, memory=memory) as p, sequence(clients[1], model, memory=memory) as d:
        assert torch.equal(greedy(model, prompt[:, -1:], d.read(p.prefill(prompt, next(request_ids)))), wanted)
    assert {path for path in pair[0].directory.iterdir() if path.name.endswith(".cache")} <= before


def test_what_was_published_outlives_p_in_memory_of_its_sidecar(
    clients: tuple[Client, Client], pair: list[SidecarProcess]
) -> None:
    model, prompt = model_of("nemotron_h"), prompt_of(TOKENS)
    wanted = greedy(model, prompt[:, -1:], prefilled(model, prompt[:, :-1]))
    with Client(str(pair[0].socket), engine_id="dying") as client:
        ticket = sequence(client, model, memory=Owned).prefill(prompt, next(request_ids))
        # To the sidecar this is what the end of a process is: its streams break, and nothing is undone.
    until(lambda: [r.orphaned for r in clients[0].status().registrations if r.engine_id == "dying"] == [True], 30)
    with sequence(clients[1], model) as d:
        assert torch.equal(greedy(model, prompt[:, -1:], d.read(ticket)), wanted)


# -- one after the other -----------------------------------------------------------------------------------------------


def test_what_may_still_be_read_is_not_written_over(clients: tuple[Client, Client]) -> None:
    model, prompt, other = model_of("nemotron_h"), prompt_of(TOKENS), prompt_of(20, seed=2)
    with sequence(clients[0], model) as p, sequence(clients[1], model) as d:
        first = p.prefill(prompt, next(request_ids))
        for attempt in (lambda: p.save(prefilled(model, other)), lambda: p.read(first)):
            with pytest.raises(KvxferError) as caught:
                attempt()
            assert caught.value.reason is Reason.LOCAL_BLOCK_BUSY
        with pytest.raises(KvxferError) as caught:
            p.wait(timeout=0.1)
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        p.withdraw()
        p.withdraw()
        second = p.prefill(other, next(request_ids))
        with pytest.raises(KvxferError) as caught:
            d.read(first)
        assert caught.value.reason in (Reason.LEASE_EXPIRED, Reason.LEASE_UNKNOWN)
        wanted = greedy(model, other[:, -1:], prefilled(model, other[:, :-1]))
        assert torch.equal(greedy(model, other[:, -1:], d.read(second)), wanted)
        ended = p.wait()
        assert ended is not None
        assert ended.state is LeaseState.RELEASED
        assert p.wait() is None
        # Its reader has read it, so it is free without a word, too, as soon as P's sidecar has heard of that.
        d.read(p.prefill(prompt, next(request_ids)))
        until(lambda: all(lease.state.ended for lease in clients[0].list_leases()), 30, "the end of the lease")
        wanted = greedy(model, prompt[:, -1:], prefilled(model, prompt[:, :-1]))
        assert torch.equal(greedy(model, prompt[:, -1:], d.read(p.prefill(prompt, next(request_ids)))), wanted)


def test_what_was_published_once_is_not_published_again(llama: SequenceCache) -> None:
    llama.save(prefilled(llama.model, prompt_of(5)))
    llama.publish(next(request_ids))
    with pytest.raises(KvxferError) as caught:
        llama.publish(next(request_ids))
    assert caught.value.reason is Reason.LOCAL_BLOCK_BUSY
    llama.withdraw()


def test_memory_that_a_failed_read_may_still_write_is_not_used(
    llama: SequenceCache, clients: tuple[Client, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    with sequence(clients[1], llama.model, 32) as p:
        ticket = p.prefill(prompt_of(20), next(request_ids))
        read, asked = llama.client.read, []

        def lost(*args: Any, **options: Any) -> Any:
            read(*args, **options)
            raise KvxferError(Reason.PEER_LOST, "gone")

        def cancel(transfer_id: str) -> Any:
            asked.append(transfer_id)
            return SimpleNamespace(quiesced=len(asked) > 1)

        monkeypatch.setattr(llama.client, "read", lost)
        with pytest.raises(KvxferError, match="gone"):
            llama.read(ticket)
        with monkeypatch.context() as patched:
            patched.setattr(llama.client, "cancel", cancel)
            with pytest.raises(KvxferError) as caught:
                llama.save(prefilled(llama.model, prompt_of(5)))
        assert caught.value.reason is Reason.LOCAL_BLOCK_BUSY
        assert asked == [caught.value.metadata["other_transfer_id"]]
        # The sidecar itself knows it, and that it is at rest.
        assert llama.save(prefilled(llama.model, prompt_of(5))) == 5


def test_later_steps_of_p_do_not_change_what_is_published(clients: tuple[Client, Client]) -> None:
    model, prompt = model_of("falcon_h1"), prompt_of(TOKENS)
    with sequence(clients[0], model) as p, sequence(clients[1], model) as d:
        cache = prefilled(model, prompt[:, :-1])
        assert p.save(cache) == TOKENS - 1
        ticket = p.publish(next(request_ids))
        wanted = greedy(model, prompt[:, -1:], cache)  # P decodes, too
        assert torch.equal(greedy(model, prompt[:, -1:], d.read(ticket)), wanted)


def test_a_sidecar_that_comes_back_is_used_again() -> None:
    model, prompt = model_of("llama"), prompt_of(TOKENS)
    wanted = greedy(model, prompt[:, -1:], prefilled(model, prompt[:, :-1]))
    with (
        sidecars(["p", "d"]) as (on_p, on_d),
        Client(str(on_p.socket), engine_id="p") as first,
        Client(str(on_d.socket), engine_id="d") as second,
        sequence(first, model) as p,
        sequence(second, model) as d,
    ):
        lost = p.prefill(prompt, next(request_ids))
        before = p.session.wait_registered().incarnation
        on_p.kill()
        on_p.start()
        on_p.ready()
        until(lambda: (now := p.session.registered) is not None and now.incarnation != before, 30)
        with pytest.raises(KvxferError) as caught:
            d.read(lost)
        assert caught.value.reason in (Reason.STALE_INCARNATION, Reason.PEER_LOST, Reason.PEER_UNREACHABLE)
        ticket = p.prefill(prompt, next(request_ids))
        assert torch.equal(greedy(model, prompt[:, -1:], d.read(ticket)), wanted)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(pair: list[SidecarProcess]) -> Iterator[SequenceCache]:
    with Client(str(pair[0].socket), engine_id="refusing") as client, sequence(client, model_of("llama"), 32) as made:
        yield made


@pytest.mark.parametrize("shape", [(1, 1), (1, 0), (2, 5), (5,)])
def test_prompts_that_are_none(llama: SequenceCache, shape: tuple[int, ...]) -> None:
    with pytest.raises(KvxferError, match="at least 2") as caught:
        llama.prefill(torch.zeros(shape, dtype=torch.long), "request")
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "input_ids")


def test_more_tokens_than_there_is_room_for(llama: SequenceCache, clients: tuple[Client, Client]) -> None:
    with pytest.raises(KvxferError, match="num_tokens is 39; allowed: 1 to 32"):
        llama.prefill(prompt_of(40), "request")
    with pytest.raises(KvxferError, match="num_tokens is 40; allowed: 1 to 32"):
        llama.save(prefilled(llama.model, prompt_of(40)))
    with sequence(clients[1], llama.model, 64) as larger:
        ticket = larger.prefill(prompt_of(TOKENS), next(request_ids))
        with pytest.raises(KvxferError, match="num_tokens is 37; allowed: 1 to 32"):
            llama.read(ticket)


def test_caches_that_are_not_this_models(llama: SequenceCache) -> None:
    with pytest.raises(KvxferError, match=r"layer 0, k: \(2, 5, 16\) of bfloat16; expected was .* of float32"):
        llama.save(prefilled(model_of("llama", torch.bfloat16), prompt_of(5)))
    with pytest.raises(KvxferError, match=r"holds nothing; expected was layer 0, k"):
        llama.save(DynamicCache(), 5)
    with pytest.raises(KvxferError, match="num_tokens is needed"):
        llama.save(DynamicCache())
    with pytest.raises(KvxferError, match="nothing was saved"):
        llama.publish("request")


def test_other_keys_and_other_models_do_not_read_from_each_other(clients: tuple[Client, Client]) -> None:
    model, prompt = model_of("llama"), prompt_of(8)
    with sequence(clients[0], model) as p:
        ticket = p.prefill(prompt, next(request_ids))
        for other, key, reason in (
            (model, "tiny@2", Reason.INCOMPATIBLE_PEER),
            (model_of("llama", torch.bfloat16), KEY, Reason.LAYOUT_MISMATCH),
            (model_of("llama", num_key_value_heads=1), KEY, Reason.LAYOUT_MISMATCH),
        ):
            with sequence(clients[1], other, compatibility_key=key) as d, pytest.raises(KvxferError) as caught:
                d.read(ticket)
            assert caught.value.reason is reason


def test_a_model_that_a_preset_reads_otherwise_is_refused(
    clients: tuple[Client, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    monkeypatch.setattr(model.config, "num_key_value_heads", 4)
    with pytest.raises(KvxferError, match=r"layer 0, attention: .*\(2, 64\).*\(4, 128\)") as caught:
        sequence(clients[0], model)
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    with sequence(clients[0], model, check_preset=False) as made:
        assert not made.preset_agrees


def test_a_closed_one_says_so(clients: tuple[Client, Client]) -> None:
    made = sequence(clients[0], model_of("llama"))
    made.close()
    made.close()
    with pytest.raises(KvxferError, match="closed"):
        made.load(1)
    with sequence(clients[0], model_of("llama")):  # nothing is left registered
        pass


def test_memory_goes_when_registering_fails(clients: tuple[Client, Client]) -> None:
    regions: list[SharedRegion] = []

    def memory(size: int) -> SharedRegion:
        regions.append(SharedRegion.create_memfd(size + 64))
        return regions[0]

    with pytest.raises(KvxferError) as caught:
        sequence(clients[0], model_of("llama"), memory=memory)
    assert caught.value.field.startswith("memory")
    assert regions[0].closed


def test_a_model_without_a_cache_is_refused(clients: tuple[Client, Client]) -> None:
    class Model(torch.nn.Module):
        config = config_of("llama")
        device = torch.device("cpu")

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(KvxferError, match="forward takes no cache") as caught:
        sequence(clients[0], Model())  # type: ignore[arg-type]
    assert caught.value.reason is Reason.UNSUPPORTED
