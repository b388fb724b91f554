"""The HTTP application: OpenAI's routes, health, metrics, and the tuning protocol where it is allowed."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rooftune.engine.metrics import CONTENT_TYPE, Metrics
from rooftune.engine.running import RunningEngine
from rooftune.engine.server.limits import ApiError, answer_api_error, answer_defect, answer_http_error
from rooftune.engine.server.openai import Service, openai_routes
from rooftune.engine.server.tuning import SecretFile, tuning_routes
from rooftune.engine.tuning_source import OwnEngine


def public_app(service: Service, metrics: Metrics, tuning_secret: SecretFile | None) -> Starlette:
    """What the public port serves. The tuning routes are there only with a secret."""
    routes = [*_status_routes(service.engine, metrics), *openai_routes(service)]
    if tuning_secret is not None:
        routes += _tuning_routes(service.engine, tuning_secret)
    return _app(routes)


def private_app(engine: RunningEngine, metrics: Metrics, tuning_secret: SecretFile | None) -> Starlette:
    """What a loopback port or a Unix socket of its own serves: the tuning routes, read-only without a secret."""
    return _app([*_status_routes(engine, metrics), *_tuning_routes(engine, tuning_secret)])


def _tuning_routes(engine: RunningEngine, secret: SecretFile | None) -> list[Route]:
    return tuning_routes(OwnEngine(engine.desk), secret, token_with="--tuning-token-file")


def _app(routes: Sequence[Route]) -> Starlette:
    return Starlette(
        routes=routes,
        exception_handlers={
            ApiError: answer_api_error,
            HTTPException: answer_http_error,
            Exception: answer_defect,
        },
    )


def _status_routes(engine: RunningEngine, metrics: Metrics) -> list[Route]:
    async def health(request: Request) -> Response:
        """503 while the engine drains (a load balancer should look elsewhere) and once it has broken."""
        snapshot = engine.snapshot()
        state = "ok" if snapshot.accepting else "draining"
        if not snapshot.healthy:
            state = "broken"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def page(request: Request) -> Response:
        return Response(metrics.page(), headers={"content-type": CONTENT_TYPE})

    return [Route("/health", health, methods=["GET"]), Route("/metrics", page, methods=["GET"])]
