"""OpenAI's routes: models, completions, chats, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ...errors import LlamaCppError
from .answers import Answer, ChatAnswer, CompletionAnswer
from .embeddings import Embedding, embeddings_body, embeddings_inputs
from .errors import ApiError, as_api_error, naming
from .grammar import check_grammar
from .job import Gone
from .plan import DEFAULT_TOKENS, Plan, make_plan
from .prompts import chat_prompt, completion_prompts
from .refusals import refuse
from .schemas import ChatRequest, CompletionRequest, EmbeddingsRequest
from .state import ApiState, state_of
from .streaming import EventStream
from .work import parts_of

__all__ = ["gone", "router"]

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.get("/models", summary="The loaded model")
async def models(request: Request) -> JSONResponse:
    host = state_of(request).host
    return JSONResponse({"object": "list", "data": [_model(host.name)] if host.name else []})


@router.get("/models/{name:path}", summary="One model")
async def model(request: Request, name: str) -> JSONResponse:
    host = state_of(request).host
    if name != host.name and name not in host.sources():
        raise ApiError(404, f"there is no model {name!r}", "model", "model_not_found")
    return JSONResponse(_model(name))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "user"}


@router.post("/completions", summary="Go on with a text", response_model=None)
async def completions(request: Request, body: CompletionRequest) -> Response:
    def plan(model: Any) -> Plan:
        prompts = completion_prompts(model, body)
        return make_plan(body, model, prompts, state_of(request).options, default_tokens=DEFAULT_TOKENS)

    return await _write(request, body, plan, CompletionAnswer)


@router.post("/chat/completions", summary="Answer a conversation", response_model=None)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    def plan(model: Any) -> Plan:
        prompts = [chat_prompt(model, body)]
        return make_plan(body, model, prompts, state_of(request).options, default_tokens=None)

    return await _write(request, body, plan, ChatAnswer)


async def _write(request: Request, body: Any, plan_with: Callable[[Any], Plan], kind: type[Answer]) -> Response:
    state = state_of(request)
    refuse(body, state.options)
    state.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: only with stream=true", "stream_options", "invalid_value")
    async with AsyncExitStack() as stack:
        try:
            job = await stack.enter_async_context(state.job(request))
            plan, name = await state.quickly(job, lambda model: (_checked(plan_with(model), model, body), state.host.name))
            answer = kind(plan, name, bool(body.stream_options and body.stream_options.include_usage))
            events = state.events(job, parts_of(state.host, job, plan))
            if body.stream:
                first = await anext(events)
                return EventStream(answer, first, events, stack.pop_all())
            async for found in events:
                for event in found:
                    answer.add(event)
            return JSONResponse(answer.body())
        except Gone:
            return gone()
        except (LlamaCppError, ApiError) as error:
            raise naming(as_api_error(error), sorted(body.model_fields_set)) from error
    raise AssertionError("an exit stack swallows nothing here")


def _checked(plan: Plan, model: Any, body: Any) -> Plan:
    if plan.grammar is not None:
        check_grammar(plan.grammar, model, "grammar_string" if body.grammar_string else "response_format")
    return plan


def gone() -> Response:
    """For a client that will not read it."""
    return Response(status_code=499)


@router.post("/embeddings", summary="Vectors of texts", response_model=None)
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    state: ApiState = state_of(request)
    state.check_model(body.model)
    async with state.job(request) as job:
        try:
            texts = await state.quickly(job, lambda model: embeddings_inputs(model, body))
            part = Embedding(state.host, job, texts)
            name = state.host.name
            async for _ in state.events(job, [part]):
                pass
            return JSONResponse(embeddings_body(part.vectors, texts, name, body.encoding_format == "base64"))
        except Gone:
            return gone()
    raise AssertionError("a job swallows nothing")
