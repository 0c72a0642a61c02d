"""`answer()` around a model that is only Python: progress, stop, errors, and threads that end."""

from __future__ import annotations

import threading
import time
import types
from itertools import pairwise
from typing import Any

import pytest
import torch

from transformers_llamacpp.errors import ContextOverflowError, GenerationCancelled
from transformers_llamacpp.server.chat import Progress, answer, complete, generation_options, statistics

SETTINGS = {"temperature": 0.0, "max_new_tokens": 50, "seed": -1}


class Tokenizer:
    """One token per character."""

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> Any:
        return self("".join(message["content"] for message in messages))

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return {"input_ids": torch.tensor([[ord(char) for char in text]])}

    def decode(self, ids: Any, **kwargs: Any) -> str:
        return "".join(map(chr, [ids] if isinstance(ids, int) else ids))


class Model:
    """Says `text`, after as many decodes as the prompt has characters."""

    def __init__(self, text: str = "", delay: float = 0.0, error: Exception | None = None) -> None:
        self.text, self.delay, self.error = text, delay, error
        self.tokenizer = Tokenizer()
        self.config = types.SimpleNamespace(max_position_embeddings=100)
        self.quantization_config = types.SimpleNamespace(n_sink=None)
        self.options: dict[str, Any] = {}

    def generate(
        self, input_ids: Any, streamer: Any, stopping_criteria: Any, prompt_progress: Any, **options: Any
    ) -> Any:
        self.options = options
        if self.error:
            raise self.error
        streamer.put(input_ids)
        length, said = input_ids.shape[1], 0
        for done in range(1, length + 1):
            time.sleep(self.delay)
            if prompt_progress(done, length) is False:
                raise GenerationCancelled(done, length)
        for char in self.text[: options["max_new_tokens"]]:
            time.sleep(self.delay)
            streamer.put(torch.tensor([ord(char)]))
            said += 1
            if bool(stopping_criteria(input_ids, None).all()):
                break
        streamer.end()
        stats = types.SimpleNamespace(
            prompt_tokens=length, reused_tokens=2, new_tokens=said, prompt_seconds=0.5, generate_seconds=2.0
        )
        return types.SimpleNamespace(stats=stats)


def ask(model: Model, text: str = "hello", stop: threading.Event | None = None, **settings: Any) -> Any:
    return answer(model, [{"role": "user", "content": text}], SETTINGS | settings, stop or threading.Event())


def threads() -> int:
    return threading.active_count()


def test_progress_grows_to_the_whole_text() -> None:
    seen = list(ask(Model("  An answer,\n\twith tabs.", delay=0.01)))
    assert seen[-1].text == "  An answer,\n\twith tabs."
    assert seen[-1].finish == "end"
    assert all(after.text.startswith(before.text) for before, after in pairwise(seen))
    assert len({progress.text for progress in seen}) > 2
    assert all(not progress.finish for progress in seen[:-1])


@pytest.mark.parametrize(("prompt", "wanted", "said", "finish"), [(5, 7, 7, "length"), (95, 50, 5, "context")])
def test_how_it_ends(prompt: int, wanted: int, said: int, finish: str) -> None:
    last = list(ask(Model("x" * 60), "p" * prompt, max_new_tokens=wanted))[-1]
    assert (len(last.text), last.finish) == (said, finish)


def test_a_context_that_slides_ends_nothing() -> None:
    model = Model("x" * 300)
    model.quantization_config.n_sink = 4
    last = list(ask(model, "p" * 95, max_new_tokens=150))[-1]
    assert (len(last.text), last.finish) == (150, "length")


def test_a_prompt_without_room_is_an_error_at_once() -> None:
    with pytest.raises(ContextOverflowError):
        list(ask(Model("x"), "p" * 100))


def test_stop_during_the_answer() -> None:
    stop, last = threading.Event(), Progress()
    for last in ask(Model("word " * 9, delay=0.01), stop=stop):
        if last.text:
            stop.set()
    assert last.finish == "stopped" and 0 < len(last.text) < 45


def test_stop_during_the_prompt() -> None:
    stop, last = threading.Event(), Progress()
    for progress in ask(Model("x", delay=0.01), "p" * 90, stop):
        last = progress
        stop.set()
    assert last.finish == "stopped" and last.stats is None and last.evaluated < 90
    assert "of 90 prompt tokens" in statistics(last)


def test_closing_the_iterator_ends_the_call() -> None:
    before = threads()
    running = ask(Model("word " * 9, delay=0.02))
    next(running)
    running.close()
    assert threads() == before


def test_errors_come_out_of_the_iterator() -> None:
    before = threads()
    with pytest.raises(ZeroDivisionError):
        list(ask(Model(error=ZeroDivisionError())))
    assert threads() == before


def test_a_completion_has_no_template() -> None:
    assert list(complete(Model("abc"), "once", SETTINGS, threading.Event()))[-1].text == "abc"


def test_options_of_generate() -> None:
    greedy = generation_options(
        {"temperature": 0.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "max_new_tokens": 9}
    )
    assert greedy == {"do_sample": False, "max_new_tokens": 9}
    sampled = generation_options({"temperature": 0.7, "top_p": 0.9, "seed": 3})
    assert sampled == {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


def test_what_the_page_shows() -> None:
    last = list(ask(Model("abc")))[-1]
    assert "3 tokens, 1.5 tokens/s; prompt 5 tokens: 2 reused, 3 evaluated" in statistics(last)
