"""The routes. Each hands a checked body to what does the work; who asks was found out at the edge."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware

from giveway.engine.async_engine import AsyncEngine
from giveway.server.access import Keyring
from giveway.server.api import Api
from giveway.server.description import DescribedApp
from giveway.server.edge import REQUEST_ID_HEADER, Edge
from giveway.server.generation import GenerationDesk
from giveway.server.http_errors import ApiError, answer_api_error, error_body
from giveway.server.metric_families import Rejection
from giveway.server.metrics import ServerMetrics
from giveway.server.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, wrong_shape
from giveway.server.request_book import RequestBook
from giveway.server.settings import ServerLimits

WARNING_HEADER = "X-GiveWay-Warning"
_MAX_WARNING_CHARACTERS = 400
_HEALTH_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What the application is put together from."""

    api: Api
    desk: GenerationDesk
    engine: AsyncEngine
    keyring: Keyring
    book: RequestBook
    metrics: ServerMetrics
    limits: ServerLimits
    routers: Sequence[APIRouter] = ()  # the Batch API
    upload_paths: Sequence[str] = ()
    allowed_hosts: Sequence[str] | None = None  # None: any name in `Host`
    allowed_origins: Sequence[str] = ()


def create_app(parts: Parts) -> FastAPI:
    """Return the ASGI application."""
    app = DescribedApp(
        title="GiveWay",
        summary="OpenAI-compatible; low-priority work gives way and loses nothing.",
        version=parts.api.model.version,
        docs_url=None,  # these pages load scripts from elsewhere; the description itself is at /openapi.json
        redoc_url=None,
        redirect_slashes=False,
    )

    app.include_router(_model_routes(parts))
    app.include_router(_state_routes(parts))
    app.include_router(_refused_routes())
    for router in parts.routers:
        app.include_router(router)

    def rejected(error: ApiError) -> None:
        reason = _rejection_of(error)
        if reason is not None:
            parts.metrics.count_rejection(reason)

    async def answer_and_count(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, ApiError):
            rejected(error)
        return await answer_api_error(request, error)

    app.add_exception_handler(ApiError, answer_and_count)
    app.add_exception_handler(RequestValidationError, _answer_wrong_body)
    app.add_exception_handler(StarletteHTTPException, _answer_http_exception)
    app.add_middleware(
        Edge,
        max_body_bytes=parts.limits.max_body_bytes,
        body_timeout_s=parts.limits.body_timeout_s,
        max_http_requests=parts.limits.max_http_requests,
        identify=parts.keyring.identify,
        upload_paths=parts.upload_paths,
        allowed_hosts=parts.allowed_hosts,
        allowed_origins=parts.allowed_origins,
        seen=parts.metrics.count_answer,
        rejected=rejected,
    )
    if parts.allowed_origins:  # around everything: a browser asks without a key first, and errors must be readable too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(parts.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, WARNING_HEADER, "Retry-After"],
        )
    return app


# What metrics count by. A client's own paths are never labels.
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{name:path}",
    "/v1/requests/{request_id}",
    "/v1/files",
    "/v1/files/{file_id}",
    "/v1/files/{file_id}/content",
    "/v1/batches",
    "/v1/batches/{batch_id}",
    "/v1/batches/{batch_id}/cancel",
    "/tokenize",
    "/detokenize",
    "/health",
    "/version",
    "/metrics",
)

_REJECTIONS = {
    "queue_full": Rejection.QUEUE_FULL,
    "concurrency_limit": Rejection.CONCURRENCY,
    "shutting_down": Rejection.SHUTTING_DOWN,
    "engine_stopped": Rejection.ENGINE_STOPPED,
    "context_length_exceeded": Rejection.TOO_LARGE,
}
_REJECTIONS_BY_STATUS = {
    400: Rejection.INVALID,
    401: Rejection.UNAUTHORIZED,
    403: Rejection.UNAUTHORIZED,
    413: Rejection.TOO_LARGE,
    415: Rejection.INVALID,
}


def _rejection_of(error: ApiError) -> Rejection | None:
    """Return why a request was turned away; None: it was no request to the model, or failed later."""
    return _REJECTIONS.get(error.code or "") or _REJECTIONS_BY_STATUS.get(error.status)


# Routes on the model


def _model_routes(parts: Parts) -> APIRouter:
    router, api = APIRouter(), parts.api

    @router.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Response:
        return _warned(await api.chat(request, body, request.state.caller), api.notices(body, request.state.caller))

    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return _warned(
            await api.completion(request, body, request.state.caller), api.notices(body, request.state.caller)
        )

    @router.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        return _warned(JSONResponse(await api.tokenize(body)), api.notices(body, request.state.caller))

    @router.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        return _warned(JSONResponse(await api.detokenize(body)), api.notices(body, request.state.caller))

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_body(api, name) for name in api.model.names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in api.model.names:
            raise ApiError(404, f"the model {name[:200]!r} is not served here", param="model", code="model_not_found")
        return _model_body(api, name)

    return router


def _model_body(api: Api, name: str) -> dict[str, Any]:
    model = api.model
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "giveway",
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


def _warned(response: Response, notices: Sequence[str]) -> Response:
    """Tell the client what it should know, in a header that holds nothing but printable ASCII."""
    if notices:
        text = "; ".join(notices).encode("ascii", "backslashreplace").decode()
        shown = "".join(character if character.isprintable() else "?" for character in text)
        response.headers[WARNING_HEADER] = shown[:_MAX_WARNING_CHARACTERS]
    return response


# Routes on the server


def _state_routes(parts: Parts) -> APIRouter:
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        trouble = await _trouble(parts)
        if trouble is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", **error_body(503, trouble, code="unhealthy")}, 503)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": parts.api.model.version}

    @router.get("/metrics")
    async def metrics() -> Response:
        content = await asyncio.to_thread(parts.metrics.exposition)  # takes longer than anything else here
        return Response(content, headers={"Content-Type": parts.metrics.content_type})

    @router.get("/v1/requests/{request_id}")
    async def request_state(request: Request, request_id: str) -> dict[str, Any]:
        owner = request.state.caller.owner
        found = await parts.engine.ask(lambda _: parts.book.describe(request_id, owner))
        if found is None:
            raise ApiError(404, f"there is no request {request_id[:200]!r}", param="request_id", code="not_found")
        return found

    return router


async def _trouble(parts: Parts) -> str | None:
    """Say why the server cannot serve; None: it can, and its loop has just shown that it advances."""
    engine = parts.engine
    if parts.desk.is_draining:
        return "the server is shutting down"
    if not engine.is_running:
        return f"the engine has stopped: {engine.failure}"
    limit_s, running_s = parts.limits.stall_timeout_s, engine.step_running_s()
    if running_s > limit_s:
        return f"the step under way has been running for {running_s:.0f} s; more than {limit_s:g} s counts as stuck"
    if running_s > _HEALTH_TIMEOUT_S:
        return None  # a long step is no fault
    try:
        await asyncio.wait_for(engine.ask(lambda _: None), max(limit_s, _HEALTH_TIMEOUT_S))
    except TimeoutError:
        return "the engine's loop does not answer"
    return None


def _refused_routes() -> APIRouter:
    """Endpoints of OpenAI's API that are not built: a clear word instead of an unknown address."""
    router = APIRouter(include_in_schema=False)

    @router.api_route("/v1/responses", methods=["GET", "POST", "DELETE"])
    @router.api_route("/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"])
    async def responses(rest: str = "") -> Response:
        del rest
        raise ApiError(404, "the Responses API is not supported; use /v1/chat/completions", code="unsupported_endpoint")

    @router.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise ApiError(404, "embeddings are not supported: the model generates text", code="unsupported_endpoint")

    return router


# Errors


async def _answer_wrong_body(request: Request, error: Exception) -> JSONResponse:
    """Answer a body of a wrong shape: 400, with the place and what was expected there, not with what stood there."""
    if not isinstance(error, RequestValidationError):
        raise error
    found: Sequence[Any] = error.errors()
    if not found:
        return JSONResponse(error_body(400, "the request is not valid"), 400)
    first = found[0]
    if first["type"] == "json_invalid":
        return JSONResponse(error_body(400, f"the body is not JSON: {first['ctx']['error']}"), 400)
    if len(first["loc"]) < 2 and "json" not in request.headers.get("content-type", ""):
        return JSONResponse(error_body(415, "send the body as JSON, with Content-Type: application/json"), 415)
    return JSONResponse(wrong_shape(found, num_skipped=1).body(), 400)


_CODES = {404: "unknown_url", 405: "method_not_allowed", 408: "body_timeout", 413: "body_too_large"}


async def _answer_http_exception(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, StarletteHTTPException | HTTPException):
        raise error
    message = str(error.detail)
    if error.status_code == 404 and message == "Not Found":
        message = f"there is no {request.method} {request.url.path[:200]} here"
    if message == "There was an error parsing the body":  # FastAPI's word for whatever JSON's reader raises
        message = "the body cannot be read as JSON: not UTF-8, nested too deeply, or a number of too many digits"
    code = _CODES.get(error.status_code)
    return JSONResponse(error_body(error.status_code, message, code=code), error.status_code, error.headers)
