"""The connector against the vLLM that is installed: its hooks are called as it says, and its schedulers are real."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer_client import TicketRank, prefill_params, ticket_from_params

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: run `make engines`", allow_module_level=True)

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.engines.vllm import KvxferConnector
from kvxfer.engines.vllm.connector import FreshRanks, RankMetadata, StepMetadata
from tests.engines.vllm.child import import_no_more

BLOCK, BLOCKS = 16, 64
#: Tokens of which a state layer keeps no more than one state.
LONGEST = 512


def config_of(place: Path, policy: str = "recompute", **extra: Any) -> VllmConfig:
    """A small dense model's configuration; no weights are looked at."""
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    (place / "config.json").write_text(json.dumps(model))
    transfer = KVTransferConfig(
        kv_connector="KvxferConnector",
        kv_connector_module_path="kvxfer.engines.vllm",
        kv_role="kv_both",
        engine_id="e",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"engine_socket": "/run/none.sock", **extra},
    )
    arguments = EngineArgs(
        model=str(place),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        enable_prefix_caching=False,
        kv_transfer_config=transfer,
    )
    return arguments.create_engine_config()


def cache_of(*, state: bool) -> KVCacheConfig:
    """One attention group, and one with states over the same bytes."""
    page = BLOCK * 2 * 32 * 4
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["a"], attention)]
    tensors = [KVCacheTensor(page * BLOCKS, ["a"], page * BLOCKS, page)]
    if state:
        mamba = MambaSpec(
            block_size=LONGEST,
            shapes=((16, 3), (16, 4)),
            dtypes=(torch.float32, torch.float32),
            page_size_padded=page,
            mamba_type=MambaAttentionBackendEnum.MAMBA1,
        )
        groups.append(KVCacheGroupSpec(["m"], mamba))
        tensors.append(KVCacheTensor(page * BLOCKS, ["m"], page * BLOCKS, page))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)


class Engine:
    """A real scheduler, and a model that is a counter."""

    def __init__(self, config: VllmConfig, kind: type[Scheduler], *, state: bool = True) -> None:
        config.cache_config.num_gpu_blocks = BLOCKS
        with set_current_vllm_config(config):
            self.scheduler = kind(
                vllm_config=config,
                kv_cache_config=cache_of(state=state),
                structured_output_manager=StructuredOutputManager(config),
                block_size=LONGEST if state else BLOCK,
                hash_block_size=BLOCK,
            )
        self.connector: KvxferConnector = self.scheduler.connector
        rank = TicketRank(Rank(), "incarnation", "127.0.0.1:7000")
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): RankMetadata(rank)})

    def add(self, name: str, prompt: int, params: dict[str, Any] | None, max_tokens: int = 1) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": params})
        sampling.ignore_eos = True
        request = Request(name, list(range(prompt)), sampling, None)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        # What the model will sample for: known now, and not any more when later steps have been scheduled.
        output.sampled = {
            n: [] if self.scheduler.requests[n].is_prefill_chunk else [5] for n in output.num_scheduled_tokens
        }
        return output

    def update(self, output: Any, **told: Any) -> list[Any]:
        names = list(output.sampled)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=list(output.sampled.values()),
            kv_connector_output=KVConnectorOutput(**told) if told else None,
        )
        return [o for each in self.scheduler.update_from_output(output, result).values() for o in each.outputs]

    @property
    def free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.fixture(autouse=True, scope="module")
def here() -> None:
    """A configuration takes as long as importing vLLM does, otherwise."""
    import_no_more()


# -- what vLLM calls ---------------------------------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]


@pytest.mark.parametrize("name", sorted(n for n, v in vars(KvxferConnector).items() if inspect.isfunction(v)))
def test_hooks_are_called_as_vllm_says(name: str) -> None:
    """Everything that the connector has in public is vLLM's, and takes what vLLM gives, by the same names."""
    if name.startswith("_") and name != "__init__":
        pytest.skip("not a hook")
    theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
    assert parameters(getattr(KvxferConnector, name)) == parameters(theirs)


def test_nothing_is_left_to_implement() -> None:
    assert not KvxferConnector.__abstractmethods__


def test_vllm_loads_it_by_its_path(tmp_path: Path) -> None:
    transfer = config_of(tmp_path).kv_transfer_config
    assert KVConnectorFactory.get_connector_class(transfer) is KvxferConnector
    assert KVConnectorFactory.supports_hma_config(transfer)


def test_vllm_lays_heads_before_tokens(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    names = [["LBNHC", "LBHNC"]]
    assert resolve_kv_cache_layout(config, names).name == KvxferConnector.get_required_kvcache_layout(config)


def test_a_wrong_setting_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(KvxferError) as caught:
        Engine(config_of(tmp_path, memmory="shared"), Scheduler)
    assert caught.value.reason is Reason.FIELD_INVALID


# -- prefill -----------------------------------------------------------------------------------------------------------


def handed_over(engine: Engine, outputs: list[Any]) -> dict[str, Any]:
    (params,) = [o.kv_transfer_params for o in outputs if o.kv_transfer_params]
    return dict(params)


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_step_that_moves_the_states_on_is_under_way_at_the_end(
    tmp_path: Path, kind: type[Scheduler], ahead: int
) -> None:
    """Whatever runs ahead: the steps of a request make N - 1 tokens in all, and none follows."""
    engine = Engine(config_of(tmp_path), kind)
    request = engine.add("r", 200, dict(prefill_params()), max_tokens=7)
    waiting, seen, outputs = [], 0, []
    for _ in range(8):
        output = engine.schedule()
        seen += output.num_scheduled_tokens.get("r", 0)
        waiting.append(output)
        while len(waiting) > ahead:
            outputs += engine.update(waiting.pop(0))
    assert seen == 199
    params = handed_over(engine, outputs)
    assert ticket_from_params(params).num_tokens == 199
    assert request.num_in_flight_tokens == 0


def test_the_same_without_the_rule_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is not shortened is computed to its end, and further while its output is under way."""
    monkeypatch.setattr("kvxfer.engines.vllm.connector.shorten", lambda request, tokens: None)
    engine = Engine(config_of(tmp_path), AsyncScheduler)
    request = engine.add("r", 100, dict(prefill_params()), max_tokens=7)
    first, second = engine.schedule(), engine.schedule()
    assert (first.num_scheduled_tokens["r"], second.num_scheduled_tokens["r"]) == (100, 1)
    engine.update(first)
    assert request.num_in_flight_tokens == 1
    assert engine.connector.handoff._why_not(request) is not None


def test_blocks_are_kept_until_the_workers_say_so(tmp_path: Path) -> None:
    engine = Engine(config_of(tmp_path), Scheduler)
    free = engine.free
    engine.add("r", 40, dict(prefill_params()))
    engine.update(engine.schedule())
    assert engine.free == free - 4
    output = engine.schedule()
    (publication,) = output.kv_connector_metadata.step.publish
    assert publication.request_id == "r" and output.finished_req_ids == {"r"}
    engine.update(output)
    assert engine.free == free - 4 and engine.scheduler.has_requests()
    engine.update(engine.schedule(), finished_sending={"r"})
    assert engine.free == free and not engine.scheduler.has_requests()


def test_an_aborted_prefill_is_free_at_once(tmp_path: Path) -> None:
    from vllm.v1.request import RequestStatus

    engine = Engine(config_of(tmp_path), Scheduler)
    free = engine.free
    engine.add("r", 200, dict(prefill_params()))
    engine.update(engine.schedule())
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert engine.free == free
    assert not engine.schedule().kv_connector_metadata.step


def test_registering_again_changes_tickets(tmp_path: Path) -> None:
    engine = Engine(config_of(tmp_path), Scheduler)
    fresh = FreshRanks({0: TicketRank(Rank(), "second", "127.0.0.1:7000")})
    engine.update(engine.schedule(), kv_connector_worker_meta=fresh.aggregate(FreshRanks({})))
    engine.add("r", 40, dict(prefill_params()))
    params = handed_over(engine, engine.update(engine.schedule()))
    assert ticket_from_params(params).ranks[0].incarnation == "second"


# -- decode ------------------------------------------------------------------------------------------------------------


def ticket(tmp_path: Path, prompt: int, *, state: bool = True) -> dict[str, Any]:
    engine = Engine(config_of(tmp_path), Scheduler, state=state)
    engine.add("on p", prompt, dict(prefill_params()))
    return handed_over(engine, engine.update(engine.schedule()))


@pytest.mark.parametrize("state", [True, False])
def test_d_waits_reads_and_computes_one_token(tmp_path: Path, state: bool) -> None:
    engine = Engine(config_of(tmp_path), Scheduler, state=state)
    engine.add("r", 40, ticket(tmp_path, 40, state=state), max_tokens=3)
    output = engine.schedule()
    assert isinstance(output.kv_connector_metadata, StepMetadata)
    (reading,) = output.kv_connector_metadata.step.read
    assert not output.num_scheduled_tokens and reading.num_tokens == (39 if state else 40)
    engine.update(output, finished_recving={"r"})
    assert engine.schedule().num_scheduled_tokens == {"r": 1}


@pytest.mark.parametrize("state", [True, False])
def test_a_failed_read_is_computed_instead(tmp_path: Path, state: bool) -> None:
    engine = Engine(config_of(tmp_path), Scheduler, state=state)
    free = engine.free
    engine.add("r", 40, ticket(tmp_path, 40, state=state), max_tokens=1)
    engine.update(engine.schedule(), finished_recving={"r"}, failed_recving={"r"})
    output = engine.schedule()
    assert output.num_scheduled_tokens == {"r": 40}
    assert not output.kv_connector_metadata.step.read
    engine.update(output)
    assert engine.free == free


def test_a_failed_read_fails_the_request_where_that_is_wanted(tmp_path: Path) -> None:
    engine = Engine(config_of(tmp_path, policy="fail"), Scheduler)
    engine.add("r", 40, ticket(tmp_path, 40))
    (told,) = engine.update(engine.schedule(), finished_recving={"r"}, failed_recving={"r"})
    assert str(told.finish_reason) == "error"


def test_a_bad_ticket_is_computed_instead(tmp_path: Path) -> None:
    engine = Engine(config_of(tmp_path), Scheduler)
    engine.add("r", 40, ticket(tmp_path, 40) | {"kvxfer_ticket": "nonsense"})
    assert engine.schedule().num_scheduled_tokens == {"r": 40}


def test_aborted_before_it_was_scheduled_its_ticket_is_given_back(tmp_path: Path) -> None:
    from vllm.v1.request import RequestStatus

    engine = Engine(config_of(tmp_path), Scheduler)
    params = ticket(tmp_path, 40)
    engine.add("r", 40, params)
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert engine.schedule().kv_connector_metadata.step.give_back == (params["kvxfer_ticket"],)


def test_aborted_while_it_is_read_its_blocks_wait(tmp_path: Path) -> None:
    from vllm.v1.request import RequestStatus

    engine = Engine(config_of(tmp_path), Scheduler)
    free = engine.free
    engine.add("r", 40, ticket(tmp_path, 40))
    engine.update(engine.schedule())
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert engine.free < free
    output = engine.schedule()
    assert output.kv_connector_metadata.step.cancel == ("r",)
    engine.update(output, finished_recving={"r"}, failed_recving={"r"})
    assert engine.free == free and not engine.scheduler.has_requests()
