"""Who may talk to the server: the key, pages of other sites, the size of a body. Outside of everything else."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api.errors import ApiError
from .limits import ServeOptions

__all__ = ["Guard"]

OPEN = frozenset({"/health"})
"""Answered without the key: whether the server lives is no secret from who may reach its port."""


class Guard:
    """ASGI middleware. With `api_key`: `Authorization: Bearer KEY`, or as the password of HTTP Basic authentication, for
    which a browser asks by itself, so that the page needs no login of its own."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self.app, self.options = app, options
        self._key = _digest(options.api_key.encode()) if options.api_key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = self._refused(scope, headers)
        if error is None:
            await self.app(scope, self._counted(receive, headers), send)
        elif scope["type"] == "http":
            await error.response()(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refused(self, scope: Scope, headers: Headers) -> ApiError | None:
        if not self._same_site(headers):
            return ApiError(403, "pages of other sites may not use this server: see --cors-origin", code="cross_origin")
        if self._key and scope["path"] not in OPEN and not self._knows_key(headers.get("authorization", "")):
            scheme = "Bearer" if scope["path"].startswith("/v1/") else 'Basic realm="The password is the API key"'
            message = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
            return ApiError(401, message, headers={"www-authenticate": scheme})
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.options.limits.max_body:
            return _too_large(self.options.limits.max_body)
        return None

    def _same_site(self, headers: Headers) -> bool:
        """A page of another site can send simple requests without asking; browsers tell where they come from."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site") != "cross-site" or headers.get("sec-fetch-mode") == "navigate"
        allowed = self.options.cors_origins
        return origin in allowed or "*" in allowed or urlsplit(origin).netloc == headers.get("host")

    def _knows_key(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        key = given.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "basic":
            try:
                key = base64.b64decode(given.strip(), validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(_digest(key), self._key)  # of digests: the key's length is not told either

    def _counted(self, receive: Receive, headers: Headers) -> Receive:
        """A body without a length is counted while it comes."""
        if "content-length" in headers:
            return receive
        received, limit = 0, self.options.limits.max_body

        async def counting() -> Message:
            nonlocal received
            message: Any = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise HTTPException(413, _too_large(limit).message)
            return message

        return counting


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit:,} bytes: see --max-body", headers={"connection": "close"})
