"""A router: has P compute a prompt and D answer it, as vLLM's own example proxies do.

It knows nothing of kvxfer: what P answers as ``kv_transfer_params`` is passed on to D as it is.  A client that hangs up
is hung up on behalf of at P or D, too.

    python -m tests.engines.vllm.proxy --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
"""

from __future__ import annotations

import argparse
import uuid
from typing import Any

import aiohttp
from aiohttp import web

PATH = "/v1/completions"
#: What P is told beside the request.
PREFILL: dict[str, Any] = {
    "max_tokens": 1,
    "stream": False,
    "kv_transfer_params": {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    },
}


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """One completion.

    :raises aiohttp.ClientError: no answer, or one that is an error.
    """
    async with session.post(url + PATH, json=body, headers={"X-Request-Id": request_id}) as response:
        if response.status != 200:
            raise aiohttp.ClientResponseError(
                response.request_info, (), status=response.status, message=(await response.text())[:1000]
            )
        answer: dict[str, Any] = await response.json()
        return answer


class Router:
    """Passes completions on."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode

    async def sessions(self, _: web.Application) -> Any:
        """As long as the application runs."""
        # As many at once as there are clients, for as long as they want.  A connection is used once: a server may close
        # one that is idle at the very moment in which it is used again.
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
        ) as self._session:
            yield

    async def complete(self, request: web.Request) -> web.Response:
        """P first, then D."""
        body = await request.json()
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        try:
            prefilled = await ask(self._session, self._prefill, body | PREFILL, request_id)
            params = prefilled.get("kv_transfer_params")
            answer = await ask(self._session, self._decode, body | {"kv_transfer_params": params}, request_id)
        except aiohttp.ClientError as error:
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=502)
        return web.json_response(answer)

    async def health(self, _: web.Request) -> web.Response:
        """It is there."""
        return web.Response()


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    told = parser.parse_args()
    router = Router(told.prefill, told.decode)
    application = web.Application()
    application.cleanup_ctx.append(router.sessions)
    application.add_routes([web.post(PATH, router.complete), web.get("/health", router.health)])
    web.run_app(application, host="127.0.0.1", port=told.port, handler_cancellation=True, print=None, access_log=None)


if __name__ == "__main__":
    main()
