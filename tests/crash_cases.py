"""Inputs that must not kill the process: every one ends in a right answer or in one clear Python exception.

`child.py` runs them, `model/test_no_crash.py` judges. A case that returns has checked its answer itself.
"""

from __future__ import annotations

import copy
import gc
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers_llamacpp import LlamaCppCache, LlamaCppConfig, LlamaCppForCausalLM

ANSWER = "answer"
EITHER = "either"  # a right answer, or any error of the package's own

PROMPT = [1, 70, 120, 200, 31, 77, 78, 250, 99, 14]


@dataclass(frozen=True)
class Case:
    run: Callable[[], None]
    expect: str
    """`ANSWER`, `EITHER`, or the name of an exception class."""
    says: tuple[str, ...] = ()
    """What the message must contain: the numbers, the option that cures it."""


CASES: dict[str, Case] = {}


def case(expect: str, *says: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__.replace("_", " ")] = Case(function, expect, says)
        return function

    return register


def load(kind: str = "llama", **options: Any) -> LlamaCppForCausalLM:
    options = {"n_ctx": 256, "n_threads": 1} | options
    return LlamaCppForCausalLM.from_pretrained(models.tiny(kind), quantization_config=LlamaCppConfig(**options))


def greedy(model: LlamaCppForCausalLM, tokens: list[int] = PROMPT, n: int = 4, **kwargs: Any) -> list[int]:
    kwargs = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": n} | kwargs
    output = model.generate(torch.tensor([tokens]), **kwargs)
    return output[0, len(tokens) :].tolist()


def expected(kind: str = "llama", tokens: list[int] = PROMPT, n: int = 4) -> list[int]:
    """The answer of a model loaded with nothing unusual."""
    with load(kind, n_ctx=512) as model:
        return greedy(model, tokens, n)


def right(model: LlamaCppForCausalLM, kind: str = "llama", tokens: list[int] = PROMPT, n: int = 4) -> None:
    got, want = greedy(model, tokens, n), expected(kind, tokens, n)
    assert got == want, f"{got} is not {want}"
    model.engine.check()


# -- options -------------------------------------------------------------------------------------------------------


def option(expect: str, *says: str, kind: str = "llama", loads: bool = False, **options: Any) -> None:
    """Load with `options` and generate. `loads`: the answer is not the usual one, it is enough that there is one."""

    def run() -> None:
        with load(kind, **options) as model:
            if loads:
                assert len(greedy(model)) == 4
            else:
                right(model, kind)

    name = ", ".join(f"{name}={value!r}" for name, value in options.items())
    CASES[name if kind == "llama" else f"{kind}: {name}"] = Case(run, expect, says)


for size in (1, 2, 3, 7, 10, 11, 256, 257, 100_000, 2**31 - 1, 2**31, 2**32 - 1):
    option(ANSWER, n_batch=size)
for size in (0, 1, 3, 10, 1000, 2**32 - 1):
    option(ANSWER, n_ubatch=size)
option(ANSWER, n_batch=5, n_ubatch=2)
option(ANSWER, n_batch=2, n_ubatch=5)
option(ANSWER, n_batch=1, n_ubatch=1, kind="mamba")
option(ANSWER, n_batch=3, n_ubatch=2, kind="hybrid")
option(ANSWER, n_batch=3, n_ubatch=2, kind="swa", swa_full=False)
for value in (0, -1, 2**32, 2**70):
    option("OptionError", "n_batch", str(value), n_batch=value)
for value in (-1, 2**32):
    option("OptionError", "n_ubatch", str(value), n_ubatch=value)
for value in ("512", 1.5, True, [1], b"1"):
    option("OptionTypeError", "n_batch", "int", n_batch=value)

option(ANSWER, n_ctx=0)
for value in (1, 2, 9):
    option("ContextOverflowError", "n_ctx", str(value), n_ctx=value)
for value in (14, 255, 257, 1000):
    option(ANSWER, n_ctx=value)
for value in (-1, 2**31, 2**40):
    option("OptionError", "n_ctx", str(value), n_ctx=value)
for value in ("4096", 1.0, True, float("nan")):
    option("OptionTypeError", "n_ctx", "int", n_ctx=value)
option("ModelLoadError", "n_ctx", n_ctx=2**31 - 1)
option("ModelLoadError", "n_ctx", n_ctx=2**31 - 1, kind="hybrid")
for value in (1, 2, 20):
    option(ANSWER, n_cells=value)  # llama.cpp rounds up to 256
option("OptionError", "n_cells", n_cells=0)

for value in (1, 2, 256):
    option(ANSWER, n_seq_max=value)
    option(ANSWER, n_seq_max=value, kind="mamba")
for value in (0, -1, 257, 2**31, 2**40):
    option("OptionError", "n_seq_max", str(value), n_seq_max=value)
for value in (1, 2, 64):
    option(ANSWER, n_threads=value)
for value in (0, -1, -(2**31), 2**31):
    option("OptionError", "n_threads", str(value), n_threads=value)
    option("OptionError", "n_threads_batch", str(value), n_threads_batch=value)
option(EITHER, n_threads=100_000)
option(EITHER, n_threads_batch=2**31 - 1)
for value in (-1, 0, 1, 99, 2**31 - 1):
    option(ANSWER, n_gpu_layers=value)
option("OptionError", "n_gpu_layers", n_gpu_layers=-2)
for value in (-1, 5, 2**31 - 1):
    option(EITHER, main_gpu=value)
for value in (-1, 3, 99):
    option(EITHER, split_mode=value)
option("OptionError", "tensor_split", tensor_split=[1.0] * 1000)
option(EITHER, tensor_split=[-1.0])
option(EITHER, tensor_split=[float("nan")])

# The heads of the tiny model have 16 numbers, and the blocks of all quantised types 32: these must be refused.
for value in ("q8_0", "q4_0", "iq4_nl"):
    option(EITHER, "type", type_k=value)
    option(EITHER, "type", type_v=value, flash_attn=True)
    option("OptionError", "type_v", "flash_attn", type_v=value, flash_attn=False)
for value in ("f32", "f16", "bf16"):
    option(ANSWER, type_k=value, type_v=value)
    option(ANSWER, type_k=value, flash_attn=True)
for value in (-1, 3, 15, 16, 40, 99, 1000, 2**31 - 1):
    option(EITHER, type_k=value)
    option(EITHER, type_v=value)
option("OptionError", "type_k", "f16", type_k="float16")
for value in (-7, 2, 99):
    option(EITHER, flash_attn_type=value, loads=True)
    option(EITHER, rope_scaling_type=value, loads=True)
    option(EITHER, pooling_type=value, loads=True)
    option(EITHER, attention_type=value, loads=True)
for value in (0, 1, 2, 3, 4):
    option(EITHER, pooling_type=value, embeddings=True, loads=True)
option(EITHER, attention_type=1, loads=True)  # not causal
for value in (0.0, -1.0, float("nan"), float("inf")):
    option(EITHER, rope_freq_base=value, loads=True)
    option(EITHER, rope_freq_scale=value, loads=True)
    option(EITHER, yarn_ext_factor=value, loads=True)
for value in (0, 1, 4, 100_000, 2**32 - 1):
    option(EITHER, n_rs_seq=value)
    option(EITHER, n_rs_seq=value, kind="mamba")
for value in (0, 1, 3, 2**32 - 1):
    option(EITHER, n_outputs_max=value)
option(EITHER, embedding=True)
option(EITHER, use_mmap=False, use_mlock=True)
option(ANSWER, use_mmap=False)
option(ANSWER, check_tensors=True)
option(EITHER, ctx_type=99)
option("UnsupportedFeatureError", "vocab_only", vocab_only=True)
option("UnsupportedFeatureError", "kv_unified", kv_unified=False)
option("ModelLoadError", "none.gguf", lora_path="none.gguf")
option("ModelLoadError", models.tiny("mamba").name, lora_path=str(models.tiny("mamba")))
option(ANSWER, progress_callback=lambda progress, data: True)
option("ModelLoadError", progress_callback=lambda progress, data: False)
option("OptionTypeError", "progress_callback", progress_callback=5)
option("UnknownOptionError", "n_ctx", n_contex=5)
option("OptionError", "kv_overrides", kv_overrides={"x" * 200: 1})
option("OptionTypeError", "kv_overrides", kv_overrides=5)
for key, value in {
    "llama.block_count": 0, "llama.block_count ": 10_000, "llama.embedding_length": 7, "llama.attention.head_count": 0,
    "llama.attention.head_count_kv": 0, "llama.attention.head_count_kv ": 3, "llama.rope.dimension_count": 7,
    "llama.context_length": 0, "llama.vocab_size": 5, "tokenizer.ggml.eos_token_id": 10**6,
    "tokenizer.ggml.bos_token_id": 2**32 - 1, "llama.attention.layer_norm_rms_epsilon": -1.0,
}.items():  # fmt: skip
    option(EITHER, kv_overrides={key.strip(): value}, loads=True)


# -- sizes of prompts ----------------------------------------------------------------------------------------------


def long(n: int) -> list[int]:
    return [1, *(5 + (7 * i) % 280 for i in range(n - 1))]


@case(ANSWER)
def a_prompt_of_one_token() -> None:
    with load() as model:
        right(model, tokens=[70])


@case(ANSWER)
def a_prompt_that_leaves_room_for_one_token() -> None:
    with load(n_ctx=100) as model:
        assert greedy(model, long(99), 10) == expected(tokens=long(99), n=1)


@case("ContextOverflowError", "n_ctx=101", "100")
def a_prompt_as_long_as_the_context() -> None:
    with load(n_ctx=100) as model:
        greedy(model, long(100), 1)


@case(ANSWER)
def a_forward_pass_as_long_as_the_context() -> None:
    with load(n_ctx=100) as model:
        assert model(torch.tensor([long(100)])).logits.shape[1] == 100


@case("ContextOverflowError", "n_ctx=101", "100")
def a_forward_pass_longer_than_the_context() -> None:
    with load(n_ctx=100) as model:
        model(torch.tensor([long(101)]))


@case("ContextOverflowError", "n_ctx", "100000")
def a_prompt_of_a_hundred_thousand_tokens() -> None:
    with load() as model:
        model(torch.tensor([long(100_000)]))


@case("ContextOverflowError", "n_ctx=1001")
def a_continuation_longer_than_the_context() -> None:
    with load(n_ctx=1000) as model:
        cache = LlamaCppCache(model)
        model(torch.tensor([long(990)]), cache=cache)
        try:
            model(torch.tensor([long(11)]), cache=cache)
        finally:
            assert cache.tokens(0) == long(990)
            model(torch.tensor([long(10)]), cache=cache)


@case("CacheFullError", "n_cells", "256")
def a_prompt_longer_than_the_cells() -> None:
    with load(n_ctx=1000, n_cells=256) as model:
        greedy(model, long(300))


@case("CacheFullError", "n_cells")
def more_rows_than_fit_into_the_cells() -> None:
    with load(n_ctx=256, n_cells=256) as model:
        model(torch.tensor([[n, *long(150)] for n in range(5, 8)]))


@case(ANSWER)
def a_full_buffer_can_be_used_again() -> None:
    with load(n_ctx=1000, n_cells=256) as model:
        for _ in range(3):
            try:
                greedy(model, long(300))
            except Exception as error:
                assert type(error).__name__ == "CacheFullError"
        right(model)


@case(ANSWER)
def all_logits_of_a_prompt_longer_than_a_batch() -> None:
    with load(n_ctx=512, n_batch=16, n_ubatch=8) as model, load(n_ctx=512) as other:
        ids = torch.tensor([long(300)])
        torch.testing.assert_close(model(ids).logits, other(ids).logits, atol=0.05, rtol=0)


@case(EITHER)
def three_hundred_rows() -> None:
    with load(n_ctx=512, n_cells=2048) as model:
        ids = torch.tensor([[1, 5 + n % 280, 70] for n in range(300)])
        output = model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output[0, 3:].tolist() == expected(tokens=ids[0].tolist(), n=2)


@case(EITHER)
def three_hundred_beams() -> None:
    with load() as model:
        greedy(model, num_beams=300)


@case(EITHER)
def forty_rows_on_a_recurrent_model() -> None:
    with load("mamba") as model:
        ids = torch.tensor([[1, 5 + n, 70] for n in range(40)])
        output = model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output[7, 3:].tolist() == expected("mamba", ids[7].tolist(), 2)


@case(ANSWER)
def beams_on_a_recurrent_and_a_hybrid_model() -> None:
    for kind in ("mamba", "hybrid"):
        with load(kind, n_seq_max=2) as model:
            assert len(greedy(model, num_beams=5)) == 4


# -- token ids -----------------------------------------------------------------------------------------------------


def bad_token(token: int) -> None:
    def forward() -> None:
        with load() as model:
            model(torch.tensor([[1, token, 5]]))

    def generate() -> None:
        with load() as model:
            greedy(model, [1, 5, token])

    def continued() -> None:
        with load() as model:
            cache = LlamaCppCache(model)
            model(torch.tensor([PROMPT]), cache=cache)
            try:
                model(torch.tensor([[5, token]]), cache=cache)
            finally:
                assert cache.tokens(0) == PROMPT
                right(model)

    for how in (forward, generate, continued):
        CASES[f"token {token} in {how.__name__}"] = Case(how, "InvalidInputError", (str(token), "295"))


for bad in (-1, -100, -(2**31), 296, 2**31 - 1, 2**31, 2**32 + 5, 2**40, 2**63 - 1, -(2**63)):
    bad_token(bad)


@case(ANSWER)
def bad_tokens_under_the_mask() -> None:
    with load() as model:
        ids = torch.tensor([[-100, 2**40, *PROMPT]])
        mask = torch.tensor([[0, 0, *[1] * len(PROMPT)]])
        output = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert output[0, ids.shape[1] :].tolist() == expected()


@case("InvalidInputError", "empty")
def no_tokens() -> None:
    with load() as model:
        model(torch.zeros(1, 0, dtype=torch.long))


@case("InvalidInputError", "empty")
def no_rows() -> None:
    with load() as model:
        model(torch.zeros(0, 3, dtype=torch.long))


@case("Exception")
def generating_from_no_tokens() -> None:
    with load() as model:
        model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=3, bos_token_id=None)


@case("Exception")
def generating_from_no_rows() -> None:
    with load() as model:
        model.generate(torch.zeros(0, 3, dtype=torch.long), max_new_tokens=3)


@case(ANSWER)
def an_empty_text() -> None:
    with load() as model:
        ids = model.tokenizer("", return_tensors="pt").input_ids
        assert ids.tolist() == [[1]]
        right(model, tokens=[1])


@case("InvalidInputError", "row 0")
def a_mask_of_zeros() -> None:
    with load() as model:
        model(torch.tensor([PROMPT]), attention_mask=torch.zeros(1, len(PROMPT)))


for shape in ((1, 9), (1, 11), (2, 10), (10,), (1, 1, 10), (1, 1, 10, 10)):

    def wrong_mask(shape: tuple[int, ...] = shape) -> None:
        with load() as model:
            model(torch.tensor([PROMPT]), attention_mask=torch.ones(shape))

    CASES[f"a mask of shape {shape}"] = Case(wrong_mask, "InvalidInputError", ("attention_mask",))


# -- embeddings, logits_to_keep, lengths ---------------------------------------------------------------------------


for number in ("nan", "inf", "-inf", "1e38"):

    def wild_embeds(number: float = float(number)) -> None:
        with load() as model:
            assert model(inputs_embeds=torch.full((1, 4, 64), number)).logits.shape == (1, 4, 296)
            right(model)

    CASES[f"embeddings of {number}"] = Case(wild_embeds, ANSWER)


@case("InvalidInputError", "63", "64")
def embeddings_of_another_width() -> None:
    with load() as model:
        model(inputs_embeds=torch.zeros(1, 4, 63))


@case(ANSWER)
def embeddings_and_tokens_in_turn() -> None:
    with load() as model:
        for _ in range(3):
            model(inputs_embeds=torch.ones(1, 300, 64)[:, :200])
            right(model)
            model.forget()


for kept in (-1, -(10**9), 10**9, [10], [-11], [2**40], []):

    def keeps(kept: Any = kept) -> None:
        with load() as model:
            keep = kept if isinstance(kept, int) else torch.tensor(kept, dtype=torch.long)
            model(torch.tensor([PROMPT]), logits_to_keep=keep)
            right(model)

    CASES[f"logits_to_keep={kept}"] = Case(keeps, "Exception or answer")

for number in (0, -1, 10**12):

    def generates(number: int = number) -> None:
        with load() as model:
            greedy(model, n=number)

    CASES[f"max_new_tokens={number}"] = Case(generates, "Exception or answer")


@case("Exception")
def a_processor_that_gives_nan() -> None:
    with load() as model:
        nan = LogitsProcessorList([lambda ids, scores: scores * float("nan")])
        try:
            model.generate(torch.tensor([PROMPT]), do_sample=True, max_new_tokens=4, logits_processor=nan)
        finally:
            right(model)


# -- life ----------------------------------------------------------------------------------------------------------


@case("ClosedError", "from_pretrained")
def a_closed_model() -> None:
    model = load()
    model.close()
    greedy(model)


@case("ClosedError", "from_pretrained")
def a_cache_of_a_closed_model() -> None:
    model = load()
    cache = LlamaCppCache(model)
    model(torch.tensor([PROMPT]), cache=cache)
    model.close()
    model(torch.tensor([[5]]), cache=cache)


@case(ANSWER)
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
    del cache
    gc.collect()


@case(ANSWER)
def everything_left_open_at_exit() -> None:
    """The interpreter ends with a model, a cache, a tokenizer and an output alive."""
    global kept_open
    model = load()
    cache = LlamaCppCache(model)
    output = model.generate(torch.tensor([PROMPT]), past_key_values=cache, return_dict_in_generate=True)
    kept_open = (model, cache, model.tokenizer, output)


@case(ANSWER)
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


@case(ANSWER)
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


@case("ClosedError")
def closed_by_a_processor_in_the_middle() -> None:
    model = load()

    def close(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == len(PROMPT) + 2:
            model.close()
        return scores

    greedy(model, logits_processor=LogitsProcessorList([close]))


@case("ClosedError")
def closed_by_prompt_progress() -> None:
    model = load(n_batch=16)

    def close(done: int, total: int) -> None:
        model.close()

    greedy(model, long(200), prompt_progress=close)


@case("ClosedError")
def closed_by_another_thread() -> None:
    model = load(n_ctx=0)
    timer = threading.Timer(0.3, model.close)
    timer.start()
    while True:
        greedy(model, n=50)


@case(ANSWER)
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


@case(ANSWER)
def control_c_in_the_middle() -> None:
    with load(n_ctx=0) as model:
        threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT)).start()
        try:
            while True:
                greedy(model, n=50)
        except KeyboardInterrupt:
            pass
        right(model)


@case("UnsupportedFeatureError", "cop")
def a_deep_copy_of_a_model() -> None:
    with load() as model:
        copy.deepcopy(model)


@case(ANSWER)
def many_models_one_after_the_other() -> None:
    for _ in range(30):
        with load() as model:
            greedy(model, n=1)


@case(ANSWER)
def models_that_nobody_closes() -> None:
    for _ in range(30):
        greedy(load(), n=1)
    gc.collect()


# -- files ---------------------------------------------------------------------------------------------------------


def file(expect: str, name: str, content: Callable[[], bytes | None]) -> None:
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "broken.gguf"
            data = content()
            if data is not None:
                path.write_bytes(data)
            with LlamaCppForCausalLM.from_pretrained(path, n_ctx=64) as model:
                greedy(model)

    CASES[f"a file that is {name}"] = Case(run, expect, ("broken.gguf",) if expect == "ModelLoadError" else ())


def whole() -> bytes:
    return models.tiny("llama").read_bytes()


def flipped(seed: int) -> bytes:
    """Random damage in the first kilobytes, where keys and tensor names are."""
    data = bytearray(whole())
    random = np.random.default_rng(seed)
    for place in random.integers(8, 9000, 3):
        data[place] = int(random.integers(256))
    return bytes(data)


file("ModelLoadError", "missing", lambda: None)
file("ModelLoadError", "empty", lambda: b"")
file("ModelLoadError", "garbage", lambda: b"not a model " * 1000)
file("ModelLoadError", "zeros", lambda: bytes(100_000))
file("ModelLoadError", "another version", lambda: whole()[:4] + b"\x63\0\0\0" + whole()[8:])
for share in (4, 8, 20, 24, 100, 5000, 20_000, 300_000, -1):
    file("ModelLoadError", f"cut at {share}", lambda share=share: whole()[:share])
for seed in range(12):
    file(EITHER, f"damaged {seed}", lambda seed=seed: flipped(seed))


@case("ModelLoadError")
def a_folder_without_a_model() -> None:
    with tempfile.TemporaryDirectory() as folder:
        LlamaCppForCausalLM.from_pretrained(folder)


for path in ("", ".", "/", "no/such/file.gguf", "no\0file.gguf", "a" * 5000, "../../etc", "x" * 300 + ".gguf"):

    def odd_path(path: str = path) -> None:
        LlamaCppForCausalLM.from_pretrained(path)

    CASES[f"the path {path[:12]!r} of {len(path)}"] = Case(odd_path, "ModelLoadError")


for path in (None, 5, b"x.gguf", ["x.gguf"]):

    def no_path(path: Any = path) -> None:
        LlamaCppForCausalLM.from_pretrained(path)

    CASES[f"the path {path!r}"] = Case(no_path, "Exception")


# -- a crash -------------------------------------------------------------------------------------------------------


def crash() -> None:
    import ctypes
    import sys

    print("on purpose", file=sys.stderr, flush=True)
    ctypes.string_at(0)


CRASH = {"a crash on purpose": Case(crash, ANSWER)}
