"""OpenAI's bodies for what was written: whole, or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from .job import Done, Written
from .plan import Plan
from .writer import Piece, TokenScore

__all__ = ["ChatAnswer", "CompletionAnswer", "spelled"]


def spelled(data: bytes) -> str:
    """A token as text; one that is a part of a character is spelled `bytes:\\\\xe2`, as OpenAI does."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _Choice:
    """What is known of one text, of prompt `number`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.text = ""
        self.tokens: list[TokenScore] = []
        self.reason = ""
        self.begun = False

    def add(self, event: Written) -> None:
        self.text += event.piece.text
        self.tokens += event.piece.tokens
        self.reason = event.reason or self.reason

    @property
    def likelihood(self) -> float:
        """The mean log-probability of its tokens."""
        found = [token.logprob for token in self.tokens if token.logprob is not None]
        return sum(found) / len(found) if found else float("-inf")


class Answer:
    """Takes a job's events; gives a body, or a chunk for each event. The kinds of request differ in `_choice` and `_delta`."""

    prefix = kind = chunk_kind = ""

    def __init__(self, plan: Plan, model: str, include_usage: bool = False) -> None:
        self.plan, self.include_usage = plan, include_usage
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._choices = [_Choice(index // plan.rows) for index in range(len(plan.prompts) * plan.rows)]
        self._done: list[Done] = []

    def add(self, event: Written | Done) -> None:
        if isinstance(event, Done):
            self._done.append(event)
        else:
            self._choices[event.index].add(event)

    def body(self) -> dict[str, Any]:
        """The whole answer, after all events."""
        plan, found = self.plan, []
        for number in range(len(plan.prompts)):
            mine = self._choices[number * plan.rows : (number + 1) * plan.rows]
            if plan.rows > plan.n:
                mine = sorted(mine, key=lambda choice: -choice.likelihood)[: plan.n]
            found += mine
        choices = [self._choice(index, choice) for index, choice in enumerate(found)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def chunks(self, event: Written | Done) -> Iterator[dict[str, Any]]:
        """What is sent for an event."""
        if isinstance(event, Done):
            self._done.append(event)
            return
        choice = self._choices[event.index]
        choice.reason = event.reason or choice.reason
        for delta in self._deltas(event, choice):
            usage = {"usage": None} if self.include_usage else {}
            yield {**self._head, "object": self.chunk_kind, "choices": [delta], **usage}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(prompt.ids) for prompt in self.plan.prompts)
        written = sum(done.written for done in self._done)
        drafted = sum(done.stats.drafted_tokens for done in self._done if done.stats is not None)
        accepted = sum(done.stats.accepted_tokens for done in self._done if done.stats is not None)
        return {
            "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted,
            },
        }  # fmt: skip

    @property
    def cached_tokens(self) -> int:
        """Of each prompt what was not evaluated; rows that share their prompt evaluate it once."""
        cached: dict[int, int] = {}
        for done in self._done:
            if done.stats is not None:
                evaluated = done.stats.prompt_tokens - done.stats.reused_tokens
                mine = max(0, done.prompt_tokens - evaluated)
                cached[done.number] = min(mine, cached.get(done.number, mine))
        return sum(cached.values())

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, event: Written, choice: _Choice) -> Iterator[dict[str, Any]]:
        raise NotImplementedError


class ChatAnswer(Answer):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        logprobs = self._logprobs(choice.tokens)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}

    def _deltas(self, event: Written, choice: _Choice) -> Iterator[dict[str, Any]]:
        base: dict[str, Any] = {"index": event.index, "logprobs": None, "finish_reason": None}
        if not choice.begun:
            choice.begun = True
            yield {**base, "delta": {"role": "assistant", "content": "", "refusal": None}}
        if event.piece.text or event.piece.tokens:
            yield {**base, "delta": {"content": event.piece.text}, "logprobs": self._logprobs(event.piece.tokens)}
        if event.reason:
            yield {**base, "delta": {}, "finish_reason": event.reason}

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        if not self.plan.tells_logprobs:
            return None
        content = [
            {
                **_entry(token.text, token.logprob),
                "top_logprobs": [_entry(text, logprob) for _, text, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.tokens, choice)
        return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.reason}

    def _deltas(self, event: Written, choice: _Choice) -> Iterator[dict[str, Any]]:
        piece: Piece = event.piece
        if piece.text or piece.tokens or event.reason:
            yield {
                "index": event.index, "text": piece.text, "logprobs": self._logprobs(piece.tokens, choice),
                "finish_reason": event.reason or None,
            }  # fmt: skip

    def _logprobs(self, tokens: Any, choice: _Choice) -> dict[str, Any] | None:
        plan, prompt = self.plan, self.plan.prompts[choice.number]
        if not plan.tells_logprobs:
            return None
        # an echoed prompt comes first; the offsets of what follows count from its beginning
        n_prompt = len(prompt.ids) if plan.echo and not choice.begun and tokens else 0
        choice.begun = choice.begun or bool(tokens)
        after = len(prompt.text) if plan.echo else 0
        return {
            "tokens": [spelled(token.text) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens] if plan.logprobs else None,
            "text_offset": [token.offset + (0 if at < n_prompt else after) for at, token in enumerate(tokens)],
        }


def _likeliest(token: TokenScore) -> dict[str, float] | None:
    """The likeliest tokens, and the one that was chosen."""
    if token.logprob is None:
        return None
    return {spelled(text): logprob for _, text, logprob in token.top} | {spelled(token.text): token.logprob}


def _entry(text: bytes, logprob: float | None) -> dict[str, Any]:
    # the value for "very unlikely" in OpenAI's documentation
    value = -9999.0 if logprob is None or logprob < -9999.0 else logprob
    return {"token": spelled(text), "logprob": value, "bytes": list(text)}
