import asyncio
import json
import threading
import traceback

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from modules import shared
from modules.logging_colors import logger
from modules.models import unload_model
from modules.text_generation import stop_everything_event
from starlette.concurrency import iterate_in_threadpool

from . import completions, logits, models, tokens
from .errors import OpenAIError
from .events import EventSourceResponse
from .typing import (
    ChatCompletionRequest,
    CompletionRequest,
    DecodeRequest,
    EncodeRequest,
    LoadLorasRequest,
    LoadModelRequest,
    LogitsRequest,
    to_dict,
)

app = FastAPI()


@app.exception_handler(OpenAIError)
async def on_error(request: Request, error: OpenAIError):
    kind = "server_error" if error.code >= 500 else "invalid_request_error"
    found = {"message": error.message, "type": kind, "param": getattr(error, "param", None), "code": None}
    return JSONResponse(status_code=error.code, content={"error": found})


async def _stop_with_client(request, stop_event):
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stop_event.set()


async def _answer(request, body, whole, pieces):
    stop_event = threading.Event()
    if not body["stream"]:
        watch = asyncio.create_task(_stop_with_client(request, stop_event))
        try:
            return JSONResponse(await asyncio.to_thread(whole, body, stop_event=stop_event))
        finally:
            stop_event.set()
            watch.cancel()

    async def events():
        found = pieces(body, stream=True, stop_event=stop_event)
        try:
            async for piece in iterate_in_threadpool(found):
                if await request.is_disconnected():
                    break
                yield {"data": json.dumps(piece)}
            yield {"data": "[DONE]"}
        finally:
            stop_event.set()
            found.close()

    return EventSourceResponse(events(), sep="\n")


@app.post("/v1/completions")
async def post_completions(request: Request, data: CompletionRequest):
    return await _answer(request, to_dict(data), completions.completions, completions.completions_common)


@app.post("/v1/chat/completions")
async def post_chat(request: Request, data: ChatCompletionRequest):
    return await _answer(request, to_dict(data), completions.chat_completions, completions.chat_completions_common)


@app.post("/v1/internal/chat-prompt")
async def post_chat_prompt(data: ChatCompletionRequest):
    return next(completions.chat_completions_common(to_dict(data), prompt_only=True))


@app.get("/v1/models")
async def get_models():
    return {"object": "list", "data": [{"id": shared.model_name, "object": "model", "owned_by": "user"}]}


@app.post("/v1/internal/encode")
async def post_encode(data: EncodeRequest):
    return tokens.token_encode(data.text)


@app.post("/v1/internal/decode")
async def post_decode(data: DecodeRequest):
    return tokens.token_decode(data.tokens)


@app.post("/v1/internal/token-count")
async def post_count(data: EncodeRequest):
    return tokens.token_count(data.text)


@app.post("/v1/internal/logits")
async def post_logits(data: LogitsRequest):
    return JSONResponse(logits._get_next_logits(to_dict(data)))


@app.post("/v1/internal/stop-generation")
async def post_stop():
    stop_everything_event()
    return "OK"


@app.get("/v1/internal/model/info")
async def get_info():
    return models.get_current_model_info()


@app.get("/v1/internal/model/list")
async def get_list():
    return models.list_models()


def _or_error(code, what, call, *args):
    try:
        call(*args)
        return "OK"
    except Exception:
        traceback.print_exc()
        raise HTTPException(status_code=code, detail=what) from None


@app.post("/v1/internal/model/load")
async def post_load(data: LoadModelRequest):
    return _or_error(500, "The model could not be loaded.", models._load_model, to_dict(data))


@app.post("/v1/internal/model/unload")
async def post_unload():
    return _or_error(500, "The model could not be unloaded.", unload_model)


@app.post("/v1/internal/lora/load")
async def post_loras(data: LoadLorasRequest):
    return _or_error(400, "The LoRAs could not be applied.", models.load_loras, data.lora_names)


@app.get("/v1/internal/lora/list")
async def get_loras():
    return models.list_loras()


@app.post("/v1/internal/lora/unload")
async def post_no_loras():
    models.load_loras([])
    return "OK"


def run_server():
    logger.info(f"API on port {shared.args.api_port}")
    uvicorn.run(app, host="127.0.0.1", port=shared.args.api_port, access_log=False, log_level="warning")


_server_started = False


def setup():
    global _server_started
    if _server_started:
        return
    _server_started = True
    if shared.args.nowebui:
        run_server()
    else:
        threading.Thread(target=run_server, daemon=True).start()
