"""The tuning protocol in vLLM's API server: its access rules, its sockets and the calls to the engine's process.

vLLM's own API key guards its own prefixes only, so these routes guard themselves: with a token file they are on the
public port; without one only on a loopback port or a Unix socket of their own, read-only.
"""

import asyncio
import contextlib
import logging
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from starlette.applications import Starlette
from starlette.types import ASGIApp

from rooftune.engine.server.limits import ApiError
from rooftune.engine.server.run import address_of, bind_private, make_server
from rooftune.engine.server.tuning import PREFIX, SecretFile, tuning_routes
from rooftune.engine.tuning_source import Change, Read
from rooftune.engine.vllm.plugin import METHOD
from rooftune.engine.vllm.scrape import Series
from rooftune.policies import wire
from rooftune.policies.errors import InputError, bad_value

LOG = logging.getLogger("vllm.rooftune")
TOKEN_FILE, PORT, SOCKET = "ROOFTUNE_TOKEN_FILE", "ROOFTUNE_TUNING_PORT", "ROOFTUNE_TUNING_SOCKET"
# A step of a long prompt may take seconds, and the engine answers between two steps.
_ANSWER_S = 60.0


class EngineProcess:
    """The engine in vLLM's other process, reached by its utility call."""

    def __init__(self) -> None:
        self.client: Any = None  # vLLM's engine client, once the engine is ready

    async def read(self, what: Read, after: int) -> str:
        return (await self._call(what, str(after)))[1]

    async def change(self, what: Change, message: wire.Message) -> tuple[int, str]:
        return await self._call(what, message.model_dump_json())

    async def _call(self, what: str, body: str) -> tuple[int, str]:
        core = getattr(self.client, "engine_core", None)
        if core is None:
            raise ApiError(503, "the engine is still starting; retry", code="engine_unavailable", retry_after_s=1)
        try:
            async with asyncio.timeout(_ANSWER_S):
                status, text = await core.call_utility_async(METHOD, what, body)
        except TimeoutError:
            raise _unavailable(f"no answer within {_ANSWER_S:g} s") from None
        except Exception as error:  # vLLM raises Exception itself for a failed or dead engine
            raise _unavailable(str(error)[:300]) from error
        if status == 503 and not text.startswith("{"):
            raise _unavailable(text)
        return status, text


def _unavailable(why: str) -> ApiError:
    return ApiError(503, f"the engine cannot be reached: {why}", code="engine_unavailable", retry_after_s=1)


class TuningPlugin:
    """The interface that vLLM requires of an endpoint plugin."""

    name = "rooftune"
    required_tasks = ("generate",)

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._token_file, self._port, self._socket = (environment.get(name) for name in (TOKEN_FILE, PORT, SOCKET))
        self._engine = EngineProcess()
        self._private: ASGIApp | None = None
        self._serving: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None

    def attach_router(self, app: Any) -> None:
        """Add the routes to the public port, when there is a token and no separate port or socket."""
        try:
            secret = SecretFile(Path(self._token_file)) if self._token_file else None
            own_door = self._own_door()
        except InputError as error:
            LOG.error("rooftune: %s; no tuning routes are served", error)
            return
        if secret is None and not own_door:
            remedy = f"set {TOKEN_FILE} to a file with a token, or {PORT} for read-only access"
            LOG.warning("rooftune: no tuning routes: %s", remedy)
            return
        routes = tuning_routes(self._engine, secret, token_with=TOKEN_FILE)
        if own_door:
            self._private = Starlette(routes=routes)
        else:
            app.router.routes.extend(routes)
            LOG.info("rooftune: tuning protocol at %s of the public port, with the token", PREFIX)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """The engine is ready: open the private port or socket."""
        self._engine.client = engine_client
        if engine_client is not None and self._following is None:
            series = Series()
            REGISTRY.register(series)
            self._following = asyncio.create_task(series.follow(self._engine.read))
        if self._private is not None and self._serving is None:
            self._serving = asyncio.create_task(self._serve(self._private))

    def _own_door(self) -> bool:
        port = self._port
        if port and self._socket:
            raise InputError(f"{PORT} and {SOCKET} are both set; keep one")
        if port and not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65_535):
            raise bad_value(PORT, port, "within 0..65535", "give a port number")
        return bool(port or self._socket)

    async def _serve(self, app: ASGIApp) -> None:
        port, path = int(self._port) if self._port else None, Path(self._socket) if self._socket else None
        with contextlib.ExitStack() as doors:
            try:
                bound = bind_private(doors, port, path, 30.0)
            except InputError as error:
                LOG.error("rooftune: %s; no tuning routes are served", error)
                return
            assert bound is not None  # _own_door said so
            LOG.info("rooftune: tuning protocol at %s of %s", PREFIX, address_of(bound))
            await make_server(app).serve(sockets=[bound])
