"""Models, caches and threads that end in the wrong order."""

from __future__ import annotations

import copy
import gc
import signal
import threading

import torch
from transformers import LogitsProcessorList

from crash.case import ANSWER, PROMPT, case, greedy, load, long, right
from transformers_llamacpp import LlamaCppCache


@case("ClosedError", "from_pretrained", at_exit=True)
def a_closed_model() -> None:
    model = load()
    model.close()
    greedy(model)


@case("ClosedError", "from_pretrained", at_exit=True)
def a_cache_of_a_closed_model() -> None:
    model = load()
    cache = LlamaCppCache(model)
    model(torch.tensor([PROMPT]), cache=cache)
    model.close()
    model(torch.tensor([[5]]), cache=cache)


@case(ANSWER, at_exit=True)
def a_cache_that_outlives_its_model() -> None:
    model = load()
    cache = LlamaCppCache(model)
    model(torch.tensor([PROMPT] * 2), cache=cache)
    model.close()
    del model
    gc.collect()
    for use in (
        lambda: cache.truncate(3),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.reorder_cache(torch.tensor([1, 1])),
        lambda: copy.deepcopy(cache),
        lambda: cache.reset(),
    ):
        try:
            use()
        except Exception as error:
            assert "ClosedError" in type(error).__name__, repr(error)
    cache.close()


@case(ANSWER, at_exit=True)
def a_cache_that_is_collected_after_its_model() -> None:
    model = load()
    cache = LlamaCppCache(model)
    model(torch.tensor([PROMPT] * 2), cache=cache)
    del model
    gc.collect()
    assert cache.get_seq_length() == len(PROMPT)
    del cache
    gc.collect()


@case(ANSWER, at_exit=True)
def everything_left_open_at_exit() -> None:
    """The interpreter ends with a model, a cache, a tokenizer and an output alive."""
    global kept_open
    model = load()
    cache = LlamaCppCache(model)
    output = model.generate(torch.tensor([PROMPT]), past_key_values=cache, return_dict_in_generate=True)
    kept_open = (model, cache, model.tokenizer, output)


@case(ANSWER, at_exit=True)
def a_daemon_thread_still_generates_at_exit() -> None:
    global kept_open
    model = load(n_ctx=0)
    begun = threading.Event()

    def forever() -> None:
        while True:
            greedy(model, n=50)
            begun.set()

    threading.Thread(target=forever, daemon=True).start()
    assert begun.wait(60)
    kept_open = model


@case(ANSWER, at_exit=True)
def daemon_threads_share_decodes_at_exit() -> None:
    global kept_open
    model = load(n_ctx=0)
    begun = threading.Barrier(5)

    def forever(index: int) -> None:
        greedy(model, n=20)
        begun.wait(60)
        while True:
            greedy(model, n=50, do_sample=index % 2 == 1)

    for index in range(4):
        threading.Thread(target=forever, args=(index,), daemon=True).start()
    begun.wait(60)
    kept_open = model


@case(ANSWER, at_exit=True)
def the_tokenizer_outlives_its_model() -> None:
    model = load()
    tokenizer = model.tokenizer
    before = tokenizer("the cat").input_ids
    model.close()
    del model
    gc.collect()
    try:
        assert tokenizer("the cat").input_ids == before
        assert tokenizer.decode(before, skip_special_tokens=True).strip() == "the cat"
    except Exception as error:
        assert "ClosedError" in type(error).__name__, repr(error)


@case("ClosedError", at_exit=True)
def closed_by_a_processor_in_the_middle() -> None:
    model = load()

    def close(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == len(PROMPT) + 2:
            model.close()
        return scores

    greedy(model, logits_processor=LogitsProcessorList([close]))


@case("ClosedError", at_exit=True)
def closed_by_prompt_progress() -> None:
    model = load(n_batch=16)

    def close(done: int, total: int) -> None:
        model.close()

    greedy(model, long(200), prompt_progress=close)


@case("ClosedError", at_exit=True)
def closed_by_another_thread() -> None:
    model = load(n_ctx=0)
    timer = threading.Timer(0.3, model.close)
    timer.start()
    while True:
        greedy(model, n=50)


@case(ANSWER, at_exit=True)
def eight_threads_and_one_closes() -> None:
    model = load(n_ctx=0, n_cells=2048)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            while True:
                greedy(model, [1, 5 + number, 70], n=10)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    threading.Timer(1.0, model.close).start()
    for thread in threads:
        thread.join()
    assert [type(error).__name__ for error in errors] == ["ClosedError"] * 8, errors


@case(ANSWER, at_exit=True)
def control_c_in_the_middle() -> None:
    with load(n_ctx=0) as model:
        threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT)).start()
        try:
            while True:
                greedy(model, n=50)
        except KeyboardInterrupt:
            pass
        right(model)


@case("UnsupportedFeatureError", "cop", at_exit=True)
def a_deep_copy_of_a_model() -> None:
    with load() as model:
        copy.deepcopy(model)


@case(ANSWER, at_exit=True)
def many_models_one_after_the_other() -> None:
    for _ in range(30):
        with load() as model:
            greedy(model, n=1)


@case(ANSWER, at_exit=True)
def models_that_nobody_closes() -> None:
    for _ in range(30):
        greedy(load(), n=1)
    gc.collect()
