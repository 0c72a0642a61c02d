"""Every failure of a request as OpenAI's clients read it: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ...errors import (
    CacheFullError,
    ClosedError,
    ContextOverflowError,
    DecodeError,
    LlamaCppError,
    ModelLoadError,
    OptionError,
    UnsupportedFeatureError,
)

__all__ = ["ApiError", "as_api_error", "install", "model_gone", "naming", "without_folders"]

logger = logging.getLogger(__name__)

FOLDERS = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[/\\](?:[^\s/\\:'\"]+[/\\])+")
"""The folders of an absolute path."""

RETRY = {"retry-after": "1"}

CODES = {
    400: "invalid_request", 401: "invalid_api_key", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    413: "request_too_large", 415: "unsupported_media_type", 429: "queue_full", 500: "internal_error", 503: "unavailable",
}  # fmt: skip


class ApiError(Exception):
    """A request that is answered with `status`. `param` names the field at fault; `headers` go out with the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or CODES.get(status, "error")
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def model_gone() -> ApiError:
    """For who was written for, or waited for, a model that somebody unloaded."""
    return ApiError(503, "the model was unloaded while this request ran or waited: send it again", code="model_unloaded",
                    headers=RETRY)  # fmt: skip


def as_api_error(error: BaseException) -> ApiError:
    """What a caller is told about `error`. What nobody foresaw is logged, and told as a 500 without its text, which might
    hold some of the prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClosedError):
        return model_gone()
    if isinstance(error, ContextOverflowError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, CacheFullError):
        return ApiError(503, str(error), code="cache_full", headers=RETRY)
    if isinstance(error, ModelLoadError):
        return ApiError(503, without_folders(str(error)), code="no_model", headers=RETRY)
    if isinstance(error, DecodeError):
        return ApiError(500, str(error), code="decode_failed")
    if isinstance(error, OptionError):
        return ApiError(400, str(error), error.option, "invalid_value")
    if isinstance(error, UnsupportedFeatureError):
        return ApiError(400, str(error), error.feature, "unsupported")
    if isinstance(error, (LlamaCppError, ValueError, TypeError, NotImplementedError)):
        return ApiError(400, str(error), code="invalid_value")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: see the server's log")


def _validation(error: RequestValidationError, json: bool) -> ApiError:
    """The first of the fields at fault, by its path: `messages.0.role`. `json`: the request says that its body is JSON."""
    first, *others = error.errors()
    name = _field(first)
    kind = first["type"]
    if not name and kind.endswith("_attributes_type") and not json:
        return ApiError(415, "send the body as JSON, with the header Content-Type: application/json")
    # a field that may be one of several things has a message for each of them
    messages = dict.fromkeys(one["msg"] for one in [first, *others] if _field(one) == name)
    message = ", or: ".join(messages)
    if kind == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', message)}", code="invalid_json")
    if kind == "extra_forbidden":
        return ApiError(400, f"there is no field {name}{_hint(name)}", name, "unknown_field")
    if kind == "missing":
        return ApiError(400, f"{name or 'a JSON body'} is missing", name or None, "missing_field")
    code = "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"
    return ApiError(400, f"{name or 'the body'}: {message.removeprefix('Value error, ')}", name or None, code)


def _hint(name: str) -> str:
    from .fields import SERVER_OWNED  # which, like the schemas, is above this module
    from .schemas import ChatRequest, CompletionRequest

    if name == "num_return_sequences":
        return ": its name here is n"
    if name in SERVER_OWNED:
        return ": in transformers' GenerationConfig it is, and cannot be set here"
    nearest = difflib.get_close_matches(name, {**CompletionRequest.model_fields, **ChatRequest.model_fields}, n=2, cutoff=0.6)
    return f": did you mean {' or '.join(nearest)}?" if nearest else ""


def naming(error: ApiError, fields: Iterable[str]) -> ApiError:
    """`error` with the first of the request's `fields` that its message speaks of, where it names none: what `generate()`
    refuses comes without."""
    if error.param is None and error.status == 400 and error.code == "invalid_value":
        places = {found.start(): name for name in fields if (found := re.search(rf"\b{re.escape(name)}\b", error.message))}
        error.param = places[min(places)] if places else None
    return error


def without_folders(message: str) -> str:
    """Where files lie is the business of who runs the server: their names are enough."""
    return FOLDERS.sub("", message)


def _field(error: Mapping[str, Any]) -> str:
    """pydantic names the member of a union as well; what the caller wrote ends before it."""
    path = [str(part) for part in error["loc"] if part not in ("body", "query", "path")]
    members = ("str", "int", "float", "bool", "dict", "list", "constrained-int", "constrained-str")
    return ".".join(part for part in path if "[" not in part and part not in members)


def install(app: FastAPI) -> None:
    """Answer all errors of `app` in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def told(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _validation(error, "json" in request.headers.get("content-type", "")).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"there is nothing at {request.url.path}" if error.status_code == 404 else str(error.detail)
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(LlamaCppError)
    async def ours(request: Request, error: LlamaCppError) -> JSONResponse:
        return as_api_error(error).response()
