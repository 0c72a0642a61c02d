"""What `chat.py` compares: one answer to a prompt of token ids, each contender with its own way to know what came before."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp

from bare import Bare, peak_bytes

WARM_UP = list(range(100, 116))


@dataclass
class Turn:
    """One answer. `new`: tokens of the prompt that were not in any earlier prompt or answer of this contender."""

    answer: list[int]
    evaluated: int
    """Tokens of the prompt that were evaluated."""
    first_seconds: float
    seconds: float
    new: int = 0

    @property
    def step(self) -> float:
        """Seconds for each token after the first one."""
        return (self.seconds - self.first_seconds) / max(len(self.answer) - 1, 1)


class Clock:
    """A streamer that notes when tokens come; the first entry is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Ours:
    """`generate()`, the whole history as ids; the pool finds what it knows."""

    def __init__(self, path: str, threads: int, **options: Any) -> None:
        import torch

        from transformers_llamacpp import LlamaCppConfig, LlamaCppForCausalLM

        config = LlamaCppConfig(n_threads=threads, n_threads_batch=threads, **options)
        self.model: Any = LlamaCppForCausalLM.from_pretrained(path, quantization_config=config)
        self.tensor = torch.tensor
        self.times: list[float] = []
        self.turn(0, WARM_UP, 2)
        self.model.forget()

    def turn(self, chat: int, ids: list[int], n: int) -> Turn:
        tensor, mask, clock = self.tensor([ids]), self.tensor([[1] * len(ids)]), Clock()
        call = {"max_new_tokens": n, "eos_token_id": None, "do_sample": False, "streamer": clock}
        started = time.perf_counter()
        output = self.model.generate(tensor, attention_mask=mask, **call)
        seconds = time.perf_counter() - started
        stats, self.times = self.model.last_stats, clock.times
        answer = output[0, len(ids) :].tolist()
        return Turn(answer, stats.prompt_tokens - stats.reused_tokens, clock.times[1] - started, seconds)


class Single:
    """The bare API. With `keep`, one sequence for each chat, and only what it does not hold is evaluated; `shared`, which
    all chats begin with, is evaluated once and copied. Without, everything is evaluated in every turn."""

    def __init__(
        self, path: str, threads: int, n_ctx: int, chats: int = 1, shared: Sequence[int] = (), unified: bool = False,
        keep: bool = True,
    ) -> None:  # fmt: skip
        n_seq = chats + 1 if shared else chats
        self.bare = Bare(path, n_ctx * n_seq, threads, n_seq, unified)
        self.texts: list[list[int]] = [[] for _ in range(n_seq)]
        self.shared, self.keep = list(shared), keep
        self.bare.decode(WARM_UP)
        self.bare.clear()

    def turn(self, chat: int, ids: list[int], n: int) -> Turn:
        chat = chat if self.keep else 0
        started = time.perf_counter()
        known = evaluated = 0
        if self.keep:
            if self.shared and not self.texts[chat]:
                evaluated = self.begin(chat)
            known = min(common(self.texts[chat], ids), len(ids) - 1)
        self.bare.rewind(known, chat)
        answer = [self.bare.decode(ids[known:], chat)]
        first = time.perf_counter() - started
        while len(answer) < n:
            answer.append(self.bare.decode(answer[-1:], chat))
        self.texts[chat] = ids + answer[:-1]
        return Turn(answer, evaluated + len(ids) - known, first, time.perf_counter() - started)

    def begin(self, chat: int) -> int:
        """Let the chat start with what all share; how many tokens had to be evaluated."""
        evaluated = 0
        if not self.texts[-1]:
            self.bare.decode(self.shared, len(self.texts) - 1)
            self.texts[-1], evaluated = self.shared, len(self.shared)
        self.bare.copy(len(self.texts) - 1, chat)
        self.texts[chat] = self.shared
        return evaluated


class CountingLlama(llama_cpp.Llama):
    evaluated = 0

    def eval(self, tokens: Any) -> None:
        self.evaluated += len(tokens)
        super().eval(tokens)


class Cached:
    """`Llama` with a `LlamaRAMCache`: what `create_completion` does around `generate`, for token ids."""

    def __init__(self, path: str, threads: int, n_ctx: int, capacity: int) -> None:
        self.llama = CountingLlama(path, n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, verbose=False)
        for _ in zip(range(2), self.greedy(WARM_UP), strict=False):
            pass
        self.llama.reset()
        self.llama.set_cache(llama_cpp.LlamaRAMCache(capacity_bytes=capacity))

    def greedy(self, ids: list[int]) -> Any:
        return self.llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)

    def turn(self, chat: int, ids: list[int], n: int) -> Turn:
        llama, cache = self.llama, self.llama.cache
        assert cache is not None
        answer: list[int] = []
        before, started, first, evaluated = llama.evaluated, time.perf_counter(), 0.0, 0
        try:
            saved = cache[ids]
            prefix = llama.longest_token_prefix
            if prefix(saved.input_ids.tolist(), ids) > prefix(llama._input_ids.tolist(), ids):
                llama.load_state(saved)
        except KeyError:
            pass
        for token in self.greedy(ids):
            if not answer:
                first, evaluated = time.perf_counter() - started, llama.evaluated - before
            answer.append(token)
            if len(answer) == n:
                break
        cache[ids + answer] = llama.save_state()
        return Turn(answer, evaluated, first, time.perf_counter() - started)


class Remote:
    """A contender in a process of its own."""

    def __init__(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, make, args, kwargs), daemon=True)
        self.process.start()
        theirs.close()
        self.problem: str | None = self.pipe.recv()

    def turn(self, *args: Any) -> Turn:
        answer = self.ask(args)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def ask(self, request: Any) -> Any:
        self.pipe.send(request)
        return self.pipe.recv()

    def peak(self) -> int:
        """Ends the process; the most memory it had."""
        peak: int = self.ask(None)
        self.process.join()
        return peak


def serve(pipe: Any, make: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        contender = make(*args, **kwargs)
        pipe.send(None)
        while (request := pipe.recv()) is not None:
            pipe.send(contender.turn(*request))
        pipe.send(peak_bytes())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
