"""Clients that ask at once, some of whom hang up."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.engines.vllm.processes import Answer
from tests.engines.vllm.proxy import ask

#: Seconds that a client waits at most: no request may hang.
PATIENCE = 240.0

#: Tokens, and the logprob of each.
Said = tuple[list[int], list[float]]


def body(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A completion, decoded greedily."""
    return {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }


def said(answer: dict[str, Any]) -> Said:
    """What a server has answered."""
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def expected(answer: Answer) -> Said:
    """The same of an engine's own answer."""
    return answer.tokens, [dict(step)[token] for token, step in zip(answer.tokens, answer.logprobs, strict=True)]


@dataclass
class Crowd:
    """What became of the requests.

    :param wrong: answers that were not the right ones: prompt's number and what was said.
    """

    finished: int = 0
    aborted: int = 0
    wrong: list[tuple[int, Said]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"{self.finished} finished, {self.aborted} hung up"


def complete(url: str, prompt: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    """One completion, awaited."""

    async def one() -> dict[str, Any]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
            return await ask(session, url, body(prompt, tokens) | more, "")

    return asyncio.run(one())


def crowd(
    url: str,
    prompts: Sequence[Sequence[int]],
    right: Sequence[Said] | None,
    *,
    tokens: int,
    clients: int,
    rounds: int,
    seed: int = 1,
    first_patience: float = 1.0,
) -> Crowd:
    """Have ``clients`` ask ``rounds`` times each, one after the other; every tenth request is hung up on.

    When, is drawn from the time that the last answer took: somewhere between the queue at P and the last token of D.

    :param right: what must be said to each prompt; ``None``: whatever.
    :param first_patience: taken for that time as long as there is no answer, seconds.
    """
    numbers = itertools.count()
    draw = random.Random(seed)
    found = Crowd()
    usual = first_patience

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal usual
        for _ in range(rounds):
            number = next(numbers)
            which = number % len(prompts)
            request = ask(session, url, body(prompts[which], tokens), f"crowd-{seed}-{number}")
            patience = draw.uniform(0, 0.8 * usual) if number % 10 == 3 else PATIENCE
            began = time.monotonic()
            try:
                answer = said(await asyncio.wait_for(request, patience))
            except asyncio.TimeoutError:
                if patience == PATIENCE:
                    found.errors["no answer"] += 1
                else:
                    found.aborted += 1
                continue
            except aiohttp.ClientError as error:
                found.errors[str(error)[:500]] += 1
                continue
            found.finished += 1
            usual = time.monotonic() - began
            if right is not None and answer != right[which]:
                found.wrong.append((which, answer))

    async def everybody() -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            await asyncio.gather(*(client(session) for _ in range(clients)))

    asyncio.run(everybody())
    return found
