"""One call at a time goes on with a cache: everybody else is told so, and nothing is harmed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transformers_llamacpp import ClosedError, InvalidInputError, LlamaCppCache
from transformers_llamacpp.compat import CACHE_NAME

pytestmark = pytest.mark.once

TEXT = [1, *(40 + (7 * at) % 200 for at in range(9))]
NEW = 30


@pytest.fixture
def model(load: Any, tiny_llama_path: Path) -> Any:
    return load(tiny_llama_path, type_k="f32", type_v="f32", flash_attn=False, n_ctx=256, n_cells=1024)


def write(model: Any, text: list[int], **more: Any) -> list[int]:
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | more
    return model.generate(torch.tensor([text]), **options)[0].tolist()


class Standing:
    """A call in another thread that stands still in the middle, until told to go on."""

    def __init__(self, model: Any, cache: LlamaCppCache, **more: Any) -> None:
        self.model, self.cache, self.more = model, cache, more
        self.inside, self.go = threading.Event(), threading.Event()
        self.put_calls, self.result = 0, None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        assert self.inside.wait(60)

    def put(self, value: torch.Tensor) -> None:
        self.put_calls += 1
        if self.put_calls == 5:
            self.inside.set()
            assert self.go.wait(60)

    def end(self) -> None:
        pass

    def run(self) -> None:
        try:
            self.result = write(self.model, TEXT, cache=self.cache, streamer=self, **self.more)
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.go.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


TRIES: dict[str, Callable[[Any, LlamaCppCache, Path], object]] = {
    "generate": lambda model, cache, path: write(model, TEXT, cache=cache),
    "beams": lambda model, cache, path: write(model, TEXT, cache=cache, num_beams=2),
    "forward": lambda model, cache, path: model(torch.tensor([[5]]), **{CACHE_NAME: cache}),
    "crop": lambda model, cache, path: cache.crop(-2),
    "truncate": lambda model, cache, path: cache.truncate(3),
    "reorder": lambda model, cache, path: cache.reorder_cache(torch.tensor([0, 0])),
    "reset": lambda model, cache, path: cache.reset(),
    "copy": lambda model, cache, path: copy.deepcopy(cache),
    "save": lambda model, cache, path: cache.save(path),
}


@pytest.mark.parametrize("name", TRIES)
def test_whoever_else_tries_is_told(model: Any, tmp_path: Path, name: str) -> None:
    expected, again = write(model, TEXT), write(model, [*TEXT, 7])
    model.forget()
    cache = LlamaCppCache(model)
    first = Standing(model, cache)
    with pytest.raises(InvalidInputError, match="another thread goes on with this cache"):
        TRIES[name](model, cache, tmp_path / "cache")
    assert cache.tokens(0)[: len(TEXT)] == TEXT, "reading is no harm"
    assert not list(tmp_path.iterdir())
    first.finish()
    assert first.error is None and first.result == expected
    model.engine.check()
    TRIES[name](model, cache, tmp_path / "cache")  # now it may
    cache.close()
    assert write(model, TEXT) == expected and write(model, [*TEXT, 7]) == again
    model.engine.check()
    assert not [s for s in model.engine.pool.sequences if s.held and len(s) > len(expected)]


def test_the_same_call_in_two_threads_at_once(model: Any) -> None:
    expected = write(model, TEXT)
    for _ in range(20):
        model.forget()
        cache, found, barrier = LlamaCppCache(model), [], threading.Barrier(3)

        def one(cache: LlamaCppCache = cache, found: list[Any] = found, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(30)
            try:
                found.append(write(model, TEXT, cache=cache))
            except InvalidInputError as error:
                found.append(str(error))

        threads = [threading.Thread(target=one) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        right = [answer for answer in found if isinstance(answer, list)]
        assert len(found) == 3 and right and all(answer == expected for answer in right), found
        assert all("another thread" in answer for answer in found if isinstance(answer, str))
        model.engine.check()
        cache.close()
        assert write(model, [*expected, 9])[: len(expected)] == expected
        assert not [s for s in model.engine.pool.sequences if s.held]


def test_one_that_is_closed_meanwhile_ends_its_call(model: Any) -> None:
    expected = write(model, TEXT)
    cache = LlamaCppCache(model)
    first = Standing(model, cache)
    cache.close()
    assert [s for s in model.engine.pool.sequences if s.held], "its rows stay until then"
    first.finish()
    assert isinstance(first.error, ClosedError), first.error
    assert not [s for s in model.engine.pool.sequences if s.held]
    model.engine.check()
    assert write(model, TEXT) == expected
    with pytest.raises(ClosedError):
        write(model, TEXT, cache=cache)


def test_a_call_inside_the_call_is_the_same_thread(model: Any) -> None:
    """As a processor makes one that looks at the cache of the call it is in."""
    cache, seen = LlamaCppCache(model), []

    class Looking:
        def put(self, value: torch.Tensor) -> None:
            seen.append(cache.get_seq_length() and copy.deepcopy(cache).get_seq_length())

        def end(self) -> None:
            pass

    expected = write(model, TEXT)
    assert write(model, TEXT, cache=cache, streamer=Looking()) == expected
    assert max(seen) == len(TEXT) + NEW - 1
    cache.crop(-1)
