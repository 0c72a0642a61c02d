"""text-generation-webui's own routes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ...errors import ModelLoadError
from .errors import ApiError, without_folders
from .job import Gone
from .loading import draft_of, load_options
from .logits import Logits
from .openai import gone
from .plan import make_plan
from .prompts import chat_text, completion_prompts
from .refusals import refuse
from .schemas import ChatRequest, DecodeRequest, EncodeRequest, LoadRequest, LogitsRequest
from .state import state_of

__all__ = ["router"]

router = APIRouter(prefix="/v1/internal", tags=["text-generation-webui"])


@router.get("/health", summary="The server answers")
async def health() -> JSONResponse:
    return JSONResponse({"status": "ok"})


@router.post("/encode", summary="Token ids of a text")
async def encode(request: Request, body: EncodeRequest) -> JSONResponse:
    tokens = await _with_tokenizer(request, lambda tokenizer: tokenizer.encode(body.text))
    return JSONResponse({"tokens": tokens, "length": len(tokens)})


@router.post("/token-count", summary="How many tokens a text has")
async def token_count(request: Request, body: EncodeRequest) -> JSONResponse:
    tokens = await _with_tokenizer(request, lambda tokenizer: tokenizer.encode(body.text))
    return JSONResponse({"length": len(tokens)})


@router.post("/decode", summary="The text of token ids")
async def decode(request: Request, body: DecodeRequest) -> JSONResponse:
    def text(tokenizer: Any) -> str:
        if body.tokens and max(body.tokens) >= len(tokenizer):
            raise ApiError(400, f"token id {max(body.tokens)} is outside the vocabulary 0 .. {len(tokenizer) - 1}", "tokens",
                           "invalid_value")  # fmt: skip
        return str(tokenizer.decode(body.tokens, skip_special_tokens=True))

    return JSONResponse({"text": await _with_tokenizer(request, text)})


@router.post("/chat-prompt", summary="The prompt that a conversation becomes")
async def chat_prompt(request: Request, body: ChatRequest) -> JSONResponse:
    state = state_of(request)
    refuse(body, state.options)
    async with state.job(request) as job:
        return JSONResponse({"prompt": await state.quickly(job, lambda model: chat_text(model, body))})
    raise AssertionError("a job swallows nothing")


async def _with_tokenizer(request: Request, work: Any) -> Any:
    state = state_of(request)
    async with state.job(request) as job:
        return await state.quickly(job, lambda model: work(model.tokenizer))


@router.post("/logits", summary="The likeliest next tokens", response_model=None)
async def logits(request: Request, body: LogitsRequest) -> Response:
    """Token, as the vocabulary spells it, to probability."""
    state = state_of(request)
    refuse(body, state.options)

    def plan(model: Any) -> Any:
        prompt = SimpleNamespace(prompt=body.prompt, add_bos_token=body.add_bos_token, truncation_length=body.truncation_length,
                                 max_tokens=1)  # fmt: skip
        return make_plan(body, model, completion_prompts(model, prompt), state.options, default_tokens=1)

    async with state.job(request) as job:
        try:
            part = Logits(state.host, job, await state.quickly(job, plan), body.top_logits or 50, bool(body.use_samplers))
            async for _ in state.events(job, [part]):
                pass
            return JSONResponse(part.found)
        except Gone:
            return gone()
    raise AssertionError("a job swallows nothing")


@router.post("/stop-generation", summary="End all texts where they are")
async def stop_generation(request: Request) -> JSONResponse:
    state_of(request).stop_all()
    return JSONResponse("OK")


@router.get("/model/info", summary="Which model is loaded")
async def model_info(request: Request) -> JSONResponse:
    host = state_of(request).host
    return JSONResponse({"model_name": host.name or "None", "lora_names": [], "loader": "llamacpp_HF"})


@router.get("/model/list", summary="Which models can be loaded")
async def model_list(request: Request) -> JSONResponse:
    return JSONResponse({"model_names": list(state_of(request).host.sources())})


@router.get("/lora/list", summary="LoRAs: given at loading, so that there are none to choose from")
async def lora_list() -> JSONResponse:
    return JSONResponse({"lora_names": []})


@router.post("/model/load", summary="Load a model in place of the present one")
async def model_load(request: Request, body: LoadRequest) -> JSONResponse:
    """Texts that are being written for the present model end with an error. A file that is none of the list, or is no model at
    all, leaves everything as it is."""
    host = state_of(request).host
    for name in ("instruction_template", "instruction_template_str"):
        if getattr(body, name):
            raise ApiError(400, f"{name}: the model's own chat template is used", name, "unsupported")
    if body.model_name not in host.sources():
        raise ApiError(404, f"there is no model {body.model_name!r}: see /v1/internal/model/list", "model_name",
                       "model_not_found")  # fmt: skip
    options = load_options(body.args or {})
    draft, draft_tokens = draft_of(body.args or {})
    if draft and draft not in host.sources():
        raise ApiError(404, f"there is no model {draft!r}: see /v1/internal/model/list", "args.model_draft", "model_not_found")
    try:
        await asyncio.to_thread(host.load, body.model_name, options, draft, draft_tokens)
    except ModelLoadError as error:
        raise ApiError(400, without_folders(str(error)), "model_name", "model_not_loadable") from error
    return JSONResponse("OK")


@router.post("/model/unload", summary="Free the model's memory")
async def model_unload(request: Request) -> JSONResponse:
    """Texts that are being written end with an error."""
    await asyncio.to_thread(state_of(request).host.unload)
    return JSONResponse("OK")
