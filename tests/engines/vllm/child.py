"""An engine's process: vLLM's own engine, stepped as its own loop would, and told through a pipe what to do; or vLLM's
own server.

Imported ahead by the process that these are forked from: importing vLLM takes most of an engine's start.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.engines.vllm.models import make_models

#: Seconds that an idle engine waits for a command before it looks whether its scheduler wants another step.
_IDLE = 0.002
#: Of an answer.
LOGPROBS = 5


def prepare(log: str, environment: Mapping[str, str]) -> None:
    """Become a process of one's own: ends with the one that forked it, and writes into its own file."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)


def import_no_more() -> None:
    """Keep vLLM from importing itself once more, in a process of its own, to look at a model's class: that would be for
    the sake of CUDA."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def serve(log: str, directory: str, environment: Mapping[str, str], module: str, arguments: Sequence[str]) -> None:
    """Be a server: a Python module that is run as a program, in a process group of its own."""
    prepare(log, environment)
    os.setsid()
    os.chdir(directory)
    if module.startswith("vllm"):
        import_no_more()
        # On the CPU vLLM spawns its engine, with an environment for OpenMP's threads: here there is one thread.
        from vllm.v1.engine import utils

        utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def write_models(log: str, directory: str) -> None:
    """A process of its own that makes the models."""
    prepare(log, {})
    make_models(Path(directory))


def run(pipe: Connection, log: str, environment: Mapping[str, str], args: dict[str, Any]) -> None:
    """Start an engine, answer commands, end."""
    prepare(log, environment)
    try:
        engine = InProcess(args)
        pipe.send(("", engine.counts()))
        while True:
            if pipe.poll(0 if engine.wants_a_step() else _IDLE):
                command, arguments = pipe.recv()
                if command == "stop":
                    break
                try:
                    pipe.send(("", getattr(engine, command)(**arguments)))
                except Exception:  # noqa: BLE001 - whatever it was, the test is told
                    traceback.print_exc()
                    pipe.send((traceback.format_exc(), None))
            elif engine.wants_a_step():
                engine.step()
        engine.shutdown()
        pipe.send(("", None))
    except BaseException:  # noqa: BLE001 - ends the process, and the test sees that
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


class InProcess:
    """vLLM's LLMEngine with everything in this process: scheduler, worker, connector."""

    def __init__(self, args: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import_no_more()
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        transfer = args.pop("kv_transfer_config", None)
        config = KVTransferConfig(**transfer) if transfer else None
        self._engine = LLMEngine.from_engine_args(EngineArgs(kv_transfer_config=config, **args))
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler

    def wants_a_step(self) -> bool:
        return bool(self._scheduler.has_requests())

    def step(self) -> list[Any]:
        """What has ended."""
        outputs = self._engine.step()
        if not outputs:
            time.sleep(0.001)  # as vLLM's loop does: whoever moves the bytes wants to run, too
        return [output for output in outputs if output.finished]

    def generate(self, requests: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
        """Answers in the order of the requests: tokens, their logprobs, and what the connector says.

        :param requests: ``request_id``, ``prompt``, ``max_tokens``, ``kv_transfer_params``.
        :raises TimeoutError: it took longer than ``seconds``; what is not done then is aborted.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for request in requests:
            params = request["kv_transfer_params"]
            sampling = SamplingParams(
                temperature=0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                logprobs=LOGPROBS,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            self._engine.add_request(request["request_id"], {"prompt_token_ids": request["prompt"]}, sampling)
        deadline = time.monotonic() + seconds
        done: dict[str, Any] = {}
        while len(done) < len(requests):
            if time.monotonic() > deadline:
                late = [r["request_id"] for r in requests if r["request_id"] not in done]
                self._engine.abort_request(late)
                raise TimeoutError(f"not done after {seconds} s: {late}")
            done.update((output.request_id, output) for output in self.step())
        return [_answer(done[request["request_id"]]) for request in requests]

    def counts(self) -> dict[str, int]:
        """Requests that the scheduler knows, and blocks that are free."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return {"requests": len(self._scheduler.requests), "free_blocks": pool.get_num_free_blocks()}

    def sidecar_is_away(self) -> bool:
        """Whether the connector knows that its sidecar is gone."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return bool(get_kv_transfer_group().worker.mover.away)

    def zero(self, component: str, blocks: list[list[int]]) -> int:
        """Zero one component in some blocks of the cache.

        :param component: ``attention``, ``conv`` or ``ssm``.
        :param blocks: by group, as the scheduler counts them.
        :returns: bytes that were not zero before.
        """
        config = self._scheduler.kv_cache_config
        layers = self._core.vllm_config.compilation_config.static_forward_context
        spoilt = 0
        for group, numbers in zip(config.kv_cache_groups, blocks, strict=True):
            for name in group.layer_names:
                for part in parts_of(layers[name].kv_cache).get(component, ()):
                    spoilt += _zero(part, numbers, config.num_blocks)
        return spoilt

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()


def parts_of(cache: Any) -> dict[str, tuple[Any, ...]]:
    """A layer's cache by component: one tensor for attention, conv and SSM state for the others."""
    if isinstance(cache, (list, tuple)):
        conv, ssm = cache
        return {"conv": (conv,), "ssm": (ssm,)}
    return {"attention": (cache,)}


def _zero(tensor: Any, blocks: list[int], num_blocks: int) -> int:
    ratio, rest = divmod(tensor.shape[0], num_blocks)
    if rest or not ratio:
        raise ValueError(f"a cache of shape {tuple(tensor.shape)} is not one of {num_blocks} blocks")
    spoilt = 0
    for block in blocks:
        part = tensor[block * ratio : (block + 1) * ratio]
        spoilt += int(part.count_nonzero())
        part.zero_()
    return spoilt


def _answer(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            sorted((token, value.logprob) for token, value in step.items()) for step in completion.logprobs or ()
        ],
        "finish_reason": completion.finish_reason,
        "kv_transfer_params": output.kv_transfer_params,
    }
