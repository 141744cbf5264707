"""The routes of files and batches. What they mean is in the tables and in `BatchJobs`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from pydantic import WithJsonSchema
from starlette.requests import ClientDisconnect

from giveway.core.errors import OutputFileError
from giveway.server.batch_jobs.ids import parse_batch_id, parse_file_id
from giveway.server.batch_jobs.jobs import BatchJobs
from giveway.server.batch_jobs.upload import UploadForm
from giveway.server.batch_jobs.wire import (
    CreateBatch,
    batch_object,
    file_object,
    list_object,
    parse_new_batch,
    parse_page,
)
from giveway.server.http_errors import ApiError
from giveway.server.refused_body import pass_over

_MAX_BODY_BYTES = 1 << 20  # of the JSON that creates a batch
_MAX_FORM_BYTES = 1 << 16  # of an upload, around its file
_PASS_OVER_S = 30.0
_MAX_FILES, _MAX_BATCHES, _BATCHES = 10_000, 100, 20  # OpenAI's limits of lists, and its default for batches

# Checked in `wire.parse_page`, which says what is wrong in OpenAI's words; here for the description only.
_Limit = Annotated[str | None, WithJsonSchema({"type": "integer", "minimum": 1}), Query()]
_Order = Annotated[str | None, WithJsonSchema({"type": "string", "enum": ["asc", "desc"]}), Query()]

OwnerOf = Callable[[Request], str]

_FORM_DESCRIPTION = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                }
            }
        },
    }
}
_CREATE_BATCH = CreateBatch.model_json_schema(ref_template="#/components/schemas/{model}")
_BATCH_DESCRIPTION = {
    # Its `$defs` go where these references point when the server describes itself.
    "requestBody": {"required": True, "content": {"application/json": {"schema": _CREATE_BATCH}}}
}


class _Route(APIRoute):
    """A route that answers a full disk in words."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except OutputFileError as error:
                raise ApiError(507, f"the server cannot store this now: {error}", code="storage_error") from error

        return handle


def batch_router(jobs: BatchJobs, owner_of: OwnerOf) -> APIRouter:
    """Return the routes below `/v1/files` and `/v1/batches`.

    owner_of: who asks, or ApiError (401). The application must handle ApiError.
    """
    router = APIRouter(route_class=_Route)
    _add_files(router, jobs, owner_of)
    _add_batches(router, jobs, owner_of)
    return router


def _add_files(router: APIRouter, jobs: BatchJobs, owner_of: OwnerOf) -> None:
    files = jobs.store.files

    @router.post("/v1/files", openapi_extra=_FORM_DESCRIPTION)
    async def upload_file(request: Request) -> JSONResponse:
        jobs.check_open()
        return await _upload(request, jobs, owner_of(request))

    @router.get("/v1/files")
    async def list_files(
        request: Request,
        limit: _Limit = None,
        order: _Order = None,
        after: str | None = None,
        purpose: str | None = None,
    ) -> JSONResponse:
        owner = owner_of(request)
        wanted = parse_page(limit, order, after, default_limit=_MAX_FILES, max_limit=_MAX_FILES, parse_id=parse_file_id)
        page = await jobs.in_thread(files.page, owner, wanted, purpose)
        return JSONResponse(list_object(page, file_object))

    @router.get("/v1/files/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> JSONResponse:
        return JSONResponse(file_object(await jobs.in_thread(files.get, owner_of(request), file_id)))

    @router.get("/v1/files/{file_id}/content", response_class=FileResponse)
    async def retrieve_file_content(request: Request, file_id: str) -> FileResponse:
        record = await jobs.in_thread(files.get, owner_of(request), file_id)
        path = await jobs.in_thread(files.content_path, record)
        # Of a fixed name and type: what an owner called it, or put into it, must mean nothing to a browser.
        headers = {
            "Content-Disposition": f'attachment; filename="{record.id}.jsonl"',
            "X-Content-Type-Options": "nosniff",
        }
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    @router.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> JSONResponse:
        jobs.check_open()
        deleted = await jobs.in_thread(files.delete, owner_of(request), file_id)
        return JSONResponse({"id": deleted, "object": "file", "deleted": True})


def _add_batches(router: APIRouter, jobs: BatchJobs, owner_of: OwnerOf) -> None:
    batches = jobs.store.batches

    @router.post("/v1/batches", openapi_extra=_BATCH_DESCRIPTION)
    async def create_batch(request: Request) -> JSONResponse:
        jobs.check_open()
        owner = owner_of(request)
        wanted = parse_new_batch(await _small_body(request))
        return JSONResponse(batch_object(await jobs.create(owner, wanted)))

    @router.get("/v1/batches")
    async def list_batches(
        request: Request,
        limit: _Limit = None,
        order: _Order = None,
        after: str | None = None,
    ) -> JSONResponse:
        owner = owner_of(request)
        wanted = parse_page(
            limit, order, after, default_limit=_BATCHES, max_limit=_MAX_BATCHES, parse_id=parse_batch_id
        )
        return JSONResponse(list_object(await jobs.in_thread(batches.page, owner, wanted), batch_object))

    @router.get("/v1/batches/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str) -> JSONResponse:
        return JSONResponse(batch_object(await jobs.in_thread(batches.get, owner_of(request), batch_id)))

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> JSONResponse:
        jobs.check_open()
        return JSONResponse(batch_object(await jobs.cancel(owner_of(request), batch_id)))


async def _upload(request: Request, jobs: BatchJobs, owner: str) -> JSONResponse:
    max_bytes = jobs.store.limits.max_file_bytes
    pieces = request.stream()
    try:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > max_bytes + _MAX_FORM_BYTES:
            raise ApiError(413, f"the file is larger than {max_bytes} bytes, the limit", param="file")
        upload = await jobs.in_thread(jobs.store.files.begin_upload, owner)
        try:
            form = UploadForm(request.headers.get("content-type", ""), upload)
            await form.read(pieces, jobs.in_thread)
            record = await jobs.in_thread(form.keep)
        finally:
            await jobs.in_thread(upload.close)
    except ClientDisconnect as error:
        raise ApiError(400, "the connection was closed before the file was whole") from error
    except (ApiError, OutputFileError):
        await pass_over(pieces, max_bytes=max_bytes, wait_s=_PASS_OVER_S, pause_s=_PASS_OVER_S)
        raise
    return JSONResponse(file_object(record))


async def _small_body(request: Request) -> bytes:
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > _MAX_BODY_BYTES:
            raise ApiError(413, f"the body is longer than {_MAX_BODY_BYTES} bytes, the limit")
    return bytes(content)
