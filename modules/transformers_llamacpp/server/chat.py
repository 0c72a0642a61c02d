"""One answer of a chat: `model.generate()` in a thread of its own, as an iterator of progress that can be stopped."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from ..errors import ContextOverflowError, GenerationCancelled

__all__ = ["Message", "Progress", "answer", "complete", "generation_options", "statistics"]

Message = Mapping[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`"""

INTERVAL = 0.05
"""Seconds between two updates: tokens may come faster than a page can draw them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where an answer stands. `stats` is there once it is complete; `finish` says how it ended ("" while it runs)."""

    text: str = ""
    evaluated: int = 0
    total: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    finish: str = ""
    """"" | "end" (the model was done) | "length" | "context" (n_ctx is full) | "stopped"."""
    stats: Any = field(default=None, repr=False)


def answer(
    model: Any, messages: Sequence[Message], settings: Mapping[str, Any], stop: threading.Event
) -> Generator[Progress]:
    """The assistant's next message. Closing the iterator, or setting `stop`, ends the call within one decode.

    Raises whatever `generate()` raises, and `TokenizerError` where the model has no usable chat template.
    """
    inputs = model.tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    yield from _run(model, inputs, settings, stop)


def complete(model: Any, prompt: str, settings: Mapping[str, Any], stop: threading.Event) -> Generator[Progress]:
    """The same for a plain text that the model goes on with."""
    yield from _run(model, model.tokenizer(prompt, return_tensors="pt"), settings, stop)


def generation_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`generate()` arguments from the names of the option table; a temperature of 0 is greedy."""
    options = {name: value for name, value in settings.items() if name != "seed" and value is not None}
    if options.get("temperature", 1.0) <= 0:
        # What only sampling reads would be warned about, and a GGUF may carry defaults of its own for it.
        for name in ("temperature", "top_p", "top_k", "min_p"):
            options.pop(name, None)
        return {**options, "do_sample": False}
    return {**options, "do_sample": True}


def statistics(progress: Progress) -> str:
    """One line about a finished answer: speed, and what of the prompt was reused."""
    stats = progress.stats
    if stats is None:
        return f"stopped after {progress.evaluated} of {progress.total} prompt tokens"
    rate = stats.new_tokens / stats.generate_seconds if stats.generate_seconds > 0 else 0.0
    ended = {"length": "; cut at max-new-tokens", "context": "; the context is full", "stopped": "; stopped"}
    return (
        f"{stats.new_tokens} tokens, {rate:.1f} tokens/s; prompt {stats.prompt_tokens} tokens: {stats.reused_tokens} "
        f"reused, {stats.prompt_tokens - stats.reused_tokens} evaluated in {stats.prompt_seconds:.2f} s"
        f"{ended.get(progress.finish, '')}"
    )


class _StopOn(StoppingCriteria):
    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.stop.is_set(), device=input_ids.device, dtype=torch.bool)


class _Text(TextStreamer):
    """Puts `(tokens so far, new text)` on a queue."""

    def __init__(self, tokenizer: Any, events: queue.SimpleQueue[Any]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.events = events
        self.tokens = 0

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.tokens += value.numel()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.events.put(("text", self.tokens, text))


def _run(model: Any, inputs: Any, settings: Mapping[str, Any], stop: threading.Event) -> Generator[Progress]:
    options = generation_options(settings)
    length = int(inputs["input_ids"].shape[-1])
    options["max_new_tokens"], cut = _room(model, length, options["max_new_tokens"])
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    thread = threading.Thread(target=_work, args=(model, inputs, options, settings, stop, events), daemon=True)
    thread.start()
    progress, first_token = Progress(total=length), 0.0
    try:
        while not progress.finish:
            progress = _gather(progress, events)
            if progress.new_tokens:
                first_token = first_token or time.monotonic() - INTERVAL
                progress = replace(progress, seconds=time.monotonic() - first_token)
            if progress.finish == "length" and cut:
                progress = replace(progress, finish="context")
            yield progress
    finally:
        stop.set()  # for the case that nobody listens any more
        thread.join()


def _room(model: Any, length: int, wanted: int) -> tuple[int, bool]:
    """How many tokens may come, and whether the context, not the caller, sets that limit."""
    if model.quantization_config.n_sink is not None:  # a full context slides
        return wanted, False
    n_ctx = model.config.max_position_embeddings
    if length >= n_ctx:
        raise ContextOverflowError(length + 1, n_ctx)
    return min(wanted, n_ctx - length), n_ctx - length < wanted


def _work(
    model: Any,
    inputs: Any,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    stop: threading.Event,
    events: queue.SimpleQueue[Any],
) -> None:
    def prompt_progress(evaluated: int, total: int) -> bool:
        events.put(("prompt", evaluated, total))
        return not stop.is_set()

    try:
        seed = settings.get("seed")
        output = model.generate(
            **inputs,
            **options,
            seeds=seed if seed is not None and seed >= 0 else None,
            streamer=_Text(model.tokenizer, events),
            stopping_criteria=StoppingCriteriaList([_StopOn(stop)]),
            prompt_progress=prompt_progress,
            return_dict_in_generate=True,
        )
        if stop.is_set():
            finish = "stopped"
        elif output.stats.new_tokens >= options["max_new_tokens"]:
            finish = "length"
        else:
            finish = "end"
        events.put(("end", finish, output.stats))
    except GenerationCancelled:
        events.put(("end", "stopped", None))
    except BaseException as error:
        events.put(("error", error, None))


def _gather(progress: Progress, events: queue.SimpleQueue[Any]) -> Progress:
    """Waits for the next event, then takes all that come within `INTERVAL`. Raises what the thread raised."""
    until = None
    while True:
        try:
            # Never without a timeout: on Windows Ctrl-C cannot interrupt such a wait.
            kind, first, second = events.get(timeout=0.2 if until is None else max(0.0, until - time.monotonic()))
        except queue.Empty:
            if until is None:
                continue
            return progress
        until = until or time.monotonic() + INTERVAL
        if kind == "error":
            raise first
        if kind == "end":
            return replace(progress, finish=first, stats=second)
        if kind == "prompt":
            progress = replace(progress, evaluated=first, total=second)
        else:
            progress = replace(progress, text=progress.text + second, new_tokens=first)
