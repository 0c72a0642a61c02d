"""Whether the server lives, and how much it does."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from .state import state_of

__all__ = ["router"]

router = APIRouter(tags=["status"])


@router.get("/health", summary="Alive, and whether a model is loaded; needs no key")
async def health(request: Request) -> JSONResponse:
    host = state_of(request).host
    ready = host.model is not None
    status = "ok" if ready else "loading" if host.loading else "no model"
    return JSONResponse({"status": status}, 200 if ready else 503)


@router.get("/metrics", summary="For Prometheus")
async def metrics(request: Request) -> Response:
    return Response(state_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
