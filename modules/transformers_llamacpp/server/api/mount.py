"""Puts the API on an application."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..host import ModelHost
from ..limits import ServeOptions
from . import errors, internal, openai, status
from .docs import docs_page
from .errors import ApiError
from .metrics import Metrics
from .state import ApiState

__all__ = ["add_api"]


def add_api(app: FastAPI, host: ModelHost, options: ServeOptions) -> ApiState:
    """`/v1`, `/health`, `/metrics`, and their description at `/docs` and `/openapi.json`."""
    state = app.state.api = ApiState(host, options)
    errors.install(app)
    for router in (openai.router, internal.router, status.router):
        app.include_router(router)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    @app.api_route("/v1/{rest:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
    async def nothing(request: Request, rest: str) -> None:
        others = [route for route in app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
        if others:
            raise ApiError(405, f"{request.method} is no method of {request.url.path}")
        raise ApiError(404, f"there is nothing at {request.url.path}")

    app.add_middleware(_Measured, metrics=state.metrics)
    return state


class _Measured:
    """ASGI middleware: counts requests of the API by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 500

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, told)
        finally:
            path = getattr(scope.get("route"), "path", "") or "other"
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - began)
