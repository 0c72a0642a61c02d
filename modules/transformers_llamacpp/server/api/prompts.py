"""From a request's text, tokens or messages to token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import LlamaCppError
from .errors import ApiError, without_folders

__all__ = ["Prompt", "chat_prompt", "chat_text", "completion_prompts"]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what `echo` shows."""

    ids: list[int]
    text: str


def completion_prompts(model: Any, request: Any) -> list[Prompt]:
    """The prompts of a completion. Raises `ApiError`."""
    given = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    prompts = [_completion_prompt(model, one, request.add_bos_token is not False) for one in given]
    if not prompts or not all(prompt.ids for prompt in prompts):
        raise ApiError(400, "prompt is empty: there is nothing to go on from", "prompt", "invalid_value")
    return [_truncated(model, prompt, request) for prompt in prompts]


def _completion_prompt(model: Any, given: str | list[int], add_bos: bool) -> Prompt:
    tokenizer = model.tokenizer
    if isinstance(given, str):
        ids = tokenizer.encode(given)
        if not add_bos and ids and ids[0] == tokenizer.bos_token_id:
            ids = ids[1:]
        return Prompt(ids, given)
    n_vocab = model.config.vocab_size
    for token in given:
        if token >= n_vocab:
            raise ApiError(400, f"token id {token} is outside the vocabulary 0 .. {n_vocab - 1}", "prompt", "invalid_value")
    return Prompt(given, tokenizer.decode(given))


def _truncated(model: Any, prompt: Prompt, request: Any) -> Prompt:
    """The webui's way with prompts that are too long: the beginning goes, but for the token that texts begin with."""
    length = request.truncation_length
    if not length:
        return prompt
    room = length - (request.max_tokens or 0)
    if room < 1:
        raise ApiError(400, f"truncation_length={length} leaves no room for a prompt beside max_tokens={request.max_tokens}",
                       "truncation_length", "invalid_value")  # fmt: skip
    if len(prompt.ids) <= room:
        return prompt
    keeps = prompt.ids[:1] if prompt.ids[0] == model.tokenizer.bos_token_id else []
    ids = [*keeps, *prompt.ids[len(prompt.ids) - room + len(keeps) :]]
    return Prompt(ids, model.tokenizer.decode(ids, skip_special_tokens=True))


def chat_prompt(model: Any, request: Any) -> Prompt:
    """The conversation as the model's template writes it, up to where its answer begins. Raises `ApiError`."""
    text = chat_text(model, request)
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ApiError(400, "the chat template makes no prompt of these messages", "messages", "invalid_value")
    return _truncated(model, Prompt(ids, text), request)


def chat_text(model: Any, request: Any) -> str:
    messages = [_message(at, message) for at, message in enumerate(request.messages)]
    settings = {
        name: getattr(request, name)
        for name in ("reasoning_effort", "enable_thinking", "preserve_thinking", "verbosity")
        if getattr(request, name) is not None
    }
    if request.continue_ and messages[-1]["role"] != "assistant":
        raise ApiError(400, "continue_: the last message is not the assistant's", "continue_", "invalid_value")
    template = request.instruction_template_str or None
    try:
        return str(
            model.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not request.continue_, chat_template=template,
                continue_final_message=bool(request.continue_), **settings,
            )
        )  # fmt: skip
    except LlamaCppError as error:  # there is none, or it does not compile
        raise ApiError(400, without_folders(str(error)), "messages", "no_chat_template") from error
    except Exception as error:  # a template may raise anything, and says by raise_exception() what it does not take
        raise ApiError(400, f"the chat template refuses these messages: {error}", "messages", "invalid_value") from error


def _message(at: int, message: Any) -> dict[str, str]:
    where = f"messages.{at}"
    role = ROLES.get(message.role)
    if role is None:
        why = "tool calls are not supported" if message.role in ("tool", "function") else f"roles are {', '.join(ROLES)}"
        raise ApiError(400, f"{where}.role={message.role!r}: {why}", f"{where}.role", "invalid_value")
    if message.tool_calls or message.function_call:
        raise ApiError(400, f"{where}: tool calls are not supported", f"{where}.tool_calls", "unsupported")
    content = message.content
    if content is None:
        raise ApiError(400, f"{where}.content is missing", f"{where}.content", "missing_field")
    if isinstance(content, str):
        return {"role": role, "content": content}
    texts = []
    for number, part in enumerate(content):
        if part.get("type") not in ("text", "refusal") or not isinstance(part.get(part["type"]), str):
            name = f"{where}.content.{number}"
            raise ApiError(400, f"{name}: only parts of type text are taken, not {part.get('type')!r}", name, "unsupported")
        texts.append(part[part["type"]])
    return {"role": role, "content": "".join(texts)}
