"""Requests of the webui on their way to the model of `llamacpp_hf.py`, and their answers, on `transformers_llamacpp`.

The webui answers every failure with an empty text and notices a reader who left between two tokens. With this loader's model
a failure is an error on the page and an HTTP status, and a reader who left ends the request.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from modules import llamacpp_hf as host
from modules import models, shared, text_generation, utils
from modules.llamacpp_hf import LOADER, engine
from modules.llamacpp_hf_seams import failure, loaded_model, replace
from modules.logging_colors import logger

__all__ = ["register", "told"]

UNLOADED = "The model was unloaded before the answer was complete."

_turn = threading.Lock()
"""One answer at a time, to its very end. The webui's own lock is free as soon as nobody reads an answer any more, while the
model still writes a token."""


def register() -> None:
    """Idempotent, as `llamacpp_hf.register`, which calls it."""
    replace(text_generation, "generate_reply", _generate_reply)
    replace(text_generation, "encode", _encode)
    replace(utils, "check_model_loaded", _check_model_loaded)
    if getattr(shared.args, "api", False) or getattr(shared.args, "public_api", False):
        _register_api(importlib.import_module("modules.api.script"))


def _generate_reply(old: Any) -> Any:
    def generate_reply(*args: Any, **kwargs: Any) -> Iterator[str]:
        for_ui = bool(kwargs.get("for_ui"))
        try:
            models.load_model_if_idle_unloaded()
        except Exception as error:
            raise told(error, for_ui) from error
        if shared.model is None and failure():
            raise told(RuntimeError(failure()), for_ui)
        ours = loaded_model()
        if ours is None:
            yield from old(*args, **kwargs)
            return
        state = args[1] if len(args) > 1 else kwargs["state"]
        length, new = state["truncation_length"], state["max_new_tokens"]
        if new >= length and not state["auto_max_new_tokens"]:
            reason = f"max_new_tokens={new} leaves no room for a prompt in truncation_length={length}: lower it, or raise that"
            raise told(ValueError(reason), for_ui)
        line = engine("webui.panel").stats_line
        call = engine("webui.call").WebuiCall(
            state.get("stop_event"), lambda *told: logger.info(f"{LOADER}: {line(*told)}")
        )
        if (listener := _listener.get()) is not None:
            listener.begin(call)
        # a list of its own: the webui appends to the one it is given, which several calls may share
        processors = importlib.import_module("transformers").LogitsProcessorList([*_listed(state), call])
        state = {**state, "logits_processor": processors}
        if len(args) > 1:
            args = (args[0], state, *args[2:])
        else:
            kwargs["state"] = state
        with _turn:
            try:
                yield from old(*args, **kwargs)
            except Exception as error:
                raise told(error if loaded_model() is ours else RuntimeError(UNLOADED), for_ui) from error
            finally:
                call.leave()
        if call.error is not None and type(call.error).__name__ != "StopNowException":
            raise told(call.error, for_ui) from call.error
        if not call.began and loaded_model() is not ours:
            raise told(RuntimeError(UNLOADED), for_ui)

    return generate_reply


def _listed(state: dict[str, Any]) -> list[Any]:
    given = state.get("logits_processor")
    return [] if given is None else list(given) if isinstance(given, list) else [given]


class _Last:
    """Why something failed that the API answers for with a sentence of its own."""

    reason = ""


def told(error: BaseException, for_ui: bool) -> Any:
    """The error as who asked can show it: the page in a toast, the API as an HTTP status and JSON."""
    api = sys.modules.get("modules.api.errors")
    if api is not None and isinstance(error, api.OpenAIError) and not for_ui:
        return error
    errors = None if host.problem() else engine("errors")
    message = " ".join(str(error).split()) or type(error).__name__
    if errors is not None and isinstance(error, errors.ContextOverflowError):
        message = (
            f"{error.needed} tokens do not fit into a context of {error.n_ctx}: load the model with ctx-size {error.needed} or "
            "more, or lower truncation_length, which shortens the prompt."
        )
    elif errors is not None and isinstance(error, errors.CacheFullError):
        message = (
            f"{error.needed} KV cells or sequences are needed and there are {error.limit}: rows that are written side by side "
            "(beams, both sides of guidance) share the context. Load the model with a larger ctx-size, or cfg-cache for "
            "guidance, or lower truncation_length."
        )
    if for_ui:
        return importlib.import_module("gradio").Error(message)
    _Last.reason = message
    if api is None:
        return error
    if errors is not None and isinstance(error, errors.ClosedError):
        return api.OpenAIError(UNLOADED, 503)
    if message == UNLOADED:
        return api.OpenAIError(message, 503)
    known = (ValueError, IndexError) if errors is None else (ValueError, IndexError, errors.LlamaCppError)
    if isinstance(error, known) and not (errors is not None and isinstance(error, errors.DecodeError)):
        return api.InvalidRequestError(message, param=getattr(error, "option", None))
    return api.OpenAIError(message, 500)


def _encode(old: Any) -> Any:
    def encode(*args: Any, **kwargs: Any) -> Any:
        if shared.model is None and failure():
            raise told(RuntimeError(failure()), False)
        try:
            return old(*args, **kwargs)
        except ValueError as error:
            if shared.tokenizer is not None or (api := sys.modules.get("modules.api.errors")) is None:
                raise
            raise api.OpenAIError("No model is loaded.", 503) from error

    return encode


def _check_model_loaded(old: Any) -> Any:
    def check_model_loaded() -> tuple[bool, str | None]:
        loaded, message = old()
        return loaded, message if loaded else (failure() or message)

    return check_model_loaded


def _register_api(script: Any) -> None:
    """Errors with their reason: the API knows only that a load failed, and breaks off a stream without a word. And clients that
    leave: it notices them between two tokens, which a long prompt may put off for minutes."""
    replace(importlib.import_module("modules.logits"), "get_next_logits", _get_next_logits)
    if getattr(script, "_llamacpp_hf", False):
        return
    script._llamacpp_hf = True
    default = importlib.import_module("fastapi.exception_handlers").http_exception_handler

    async def with_reason(request: Any, error: Any) -> Any:
        reasons = {"/v1/internal/model/load": failure(), "/v1/internal/lora/load": _Last.reason}
        if reason := reasons.get(request.url.path):
            error = type(error)(status_code=error.status_code, detail=f"{error.detail} {reason}")
        return await default(request, error)

    script.app.add_exception_handler(script.HTTPException, with_reason)
    if not host.problem():
        errors = engine("errors")
        handler = script.app.exception_handlers.get(importlib.import_module("modules.api.errors").OpenAIError)

        async def with_status(request: Any, error: Any) -> Any:
            return await handler(request, told(error, False))

        if handler is not None:
            script.app.add_exception_handler(errors.LlamaCppError, with_status)
    script.app.middleware_stack = None  # built again with the handler, where the API runs already
    if (response := getattr(script, "EventSourceResponse", None)) is not None:
        script.EventSourceResponse = _streaming(response, importlib.import_module("modules.api.errors").OpenAIError)


class _Listener:
    """Who reads a stream, and the request it is the answer to, once that has begun."""

    def __init__(self) -> None:
        self._call: Any = None
        self._left = False

    def begin(self, call: Any) -> None:
        self._call = call
        if self._left:
            call.close()

    def leave(self) -> None:
        self._left = True
        if self._call is not None:
            self._call.close()


_listener: ContextVar[_Listener | None] = ContextVar("llamacpp_hf_listener", default=None)


def _streaming(response: Any, error_type: Any) -> Any:
    class Response(response):  # type: ignore[misc]
        def __init__(self, content: Any, *args: Any, **kwargs: Any) -> None:
            self._listener = _Listener()
            super().__init__(self._until_error(content), *args, **kwargs)

        async def _until_error(self, events: Any) -> Any:
            _listener.set(self._listener)  # the thread that the events are made in takes it over
            try:
                async for event in events:
                    yield event
            except (error_type, *_ours()) as problem:
                error = told(problem, False)
                kind = "server_error" if error.code >= 500 else "invalid_request_error"
                yield {"data": json.dumps({"error": {"message": error.message, "type": kind, "code": error.code}})}

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def watched() -> Any:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self._listener.leave()
                return message

            await super().__call__(scope, watched, send)

    return Response


def _ours() -> tuple[Any, ...]:
    return () if host.problem() else (engine("errors").LlamaCppError,)


def _get_next_logits(old: Any) -> Any:
    """The webui logs what goes wrong and answers with nothing."""

    def get_next_logits(*args: Any, **kwargs: Any) -> Any:
        _Last.reason = ""
        result = old(*args, **kwargs)
        ours = loaded_model() is not None or (shared.model is None and failure())
        if isinstance(result, dict) or not ours or not kwargs.get("return_dict"):
            return result
        reason = result[0] if isinstance(result, tuple) else _Last.reason
        reason = reason or "the logits could not be computed: the log says why"
        raise told(RuntimeError(reason), False)

    return get_next_logits
