"""Continuous batching: calls of every decoding method at once, in shared decodes, each with the answer it has alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from transformers_llamacpp.errors import ContextOverflowError, GenerationCancelled

pytestmark = pytest.mark.once

NEW = 12
TEXTS = [[1, 4093 + 37 * index, 314, 260, 2240 + index, 282, 1073 + 11 * index, 411] for index in range(16)]
LOOP = [40, 41, 42, 43, 44, 45, 40, 41, 42, 43]
PAIR = [TEXTS[3], TEXTS[4]]


class Foreign(LogitsProcessor):
    """A user's own."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - torch.arange(scores.shape[-1]) % 7


METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy too": {"rows": [TEXTS[1]]},
    "rows": {"rows": PAIR},
    "sampling": {"do_sample": True, "top_k": 40, "top_p": 0.95, "temperature": 0.8, "seeds": 7},
    "sampling, twice": {
        "do_sample": True, "min_p": 0.05, "repetition_penalty": 1.1, "seeds": [3, 4], "num_return_sequences": 2,
    },
    "a user's processor": {"logits_processor": LogitsProcessorList([Foreign()])},
    "scores": {"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "beams": {"num_beams": 3},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "guidance": {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([TEXTS[9]])},
    "lookup": {"rows": [LOOP], "prompt_lookup_num_tokens": 4},
    "lookup and guidance": {"rows": [LOOP], "prompt_lookup_num_tokens": 4, "guidance_scale": 1.5},
    "dola": {"dola_layers": "low", "repetition_penalty": 1.2},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "no cache": {"use_cache": False, "max_new_tokens": 6},
    "a long prompt": {"rows": [[1, *(400 + (17 * at) % 3000 for at in range(300))]]},
}  # fmt: skip


@pytest.fixture
def model(load: Any, smollm2_f32_path: Path) -> Any:
    return load(smollm2_f32_path, type_k="f32", type_v="f32", flash_attn=False, n_ctx=512, n_cells=8192)


def call(model: Any, method: dict[str, Any], text: list[int], **more: Any) -> torch.Tensor:
    method = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0} | method | more
    output = model.generate(torch.tensor(method.pop("rows", [text])), **method)
    return output if isinstance(output, torch.Tensor) else output.sequences


def at_once(work: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    barrier, found = threading.Barrier(len(work)), {}

    def run(name: str) -> None:
        barrier.wait(30)
        try:
            found[name] = work[name]()
        except BaseException as error:
            found[name] = error

    threads = [threading.Thread(target=run, args=(name,), name=name) for name in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert found.keys() == work.keys(), "a call never came back"
    return found


def test_every_method_as_alone(model: Any) -> None:
    def one(index: int, name: str) -> torch.Tensor:
        return call(model, METHODS[name], TEXTS[index % len(TEXTS)])

    expected = {name: one(index, name) for index, name in enumerate(METHODS)}
    model.forget()
    decodes = Counted(model)
    found = at_once({name: (lambda index=index, name=name: one(index, name)) for index, name in enumerate(METHODS)})
    for name, sequences in expected.items():
        assert isinstance(found[name], torch.Tensor), found[name]
        assert found[name].tolist() == sequences.tolist(), name
    assert decodes.shared > 10
    model.engine.check()
    model.forget()
    assert model.engine.held().cells == 0


class Counted:
    """How many decodes had tokens of more than one call."""

    def __init__(self, model: Any) -> None:
        self.shared = self.made = 0
        serve = model.engine.scheduler._serve

        def counting(parts: list[Any]) -> None:
            self.made += 1
            self.shared += len({part.ask.caller for part in parts}) > 1
            serve(parts)

        model.engine.scheduler._serve = counting


@pytest.mark.parametrize("n", [2, 8])
def test_streams_share_nearly_every_decode(model: Any, n: int) -> None:
    expected = [call(model, {}, TEXTS[index]) for index in range(n)]
    model.forget()
    decodes = Counted(model)
    found = at_once({str(index): (lambda index=index: call(model, {}, TEXTS[index])) for index in range(n)})
    for index in range(n):
        assert found[str(index)].tolist() == expected[index].tolist()
    assert decodes.shared >= NEW - 5 and decodes.made <= 3 * NEW


class Quick:
    """A streamer that whichever call decodes may call."""

    never_waits = True

    def __init__(self, fails_at: int | None = None) -> None:
        self.tokens: list[int] = []
        self.threads: list[int] = []
        self.fails_at, self.ended = fails_at, False

    def put(self, value: torch.Tensor) -> None:
        if len(self.tokens) == self.fails_at:
            raise InterruptedError("nobody reads")
        self.tokens += value.reshape(-1).tolist()
        self.threads.append(threading.get_ident())

    def end(self) -> None:
        self.ended = True


STREAMED = ["greedy", "rows", "sampling", "sampling, twice", "a user's processor", "scores", "no cache"]


@pytest.mark.parametrize("method", STREAMED)
def test_streamers_that_never_wait(model: Any, method: str) -> None:
    alone, streamers = [Quick() for _ in range(5)], [Quick() for _ in range(5)]
    expected = [call(model, METHODS[method], TEXTS[index], streamer=alone[index]) for index in range(5)]
    model.forget()
    decodes = Counted(model)

    def one(index: int) -> torch.Tensor:
        return call(model, METHODS[method], TEXTS[index], streamer=streamers[index])

    found = at_once({str(index): (lambda index=index: one(index)) for index in range(5)})
    for index in range(5):
        assert found[str(index)].tolist() == expected[index].tolist()
        assert streamers[index].tokens == alone[index].tokens and streamers[index].ended
    assert decodes.shared >= 5
    model.engine.check()


def test_one_thread_hands_out_the_tokens_of_all(model: Any) -> None:
    streamers = [Quick() for _ in range(6)]
    at_once({str(i): (lambda i=i: call(model, {}, TEXTS[i], streamer=streamers[i], max_new_tokens=40)) for i in range(6)})
    made = [threads for streamer in streamers for threads in streamer.threads[2:]]
    assert max(map(made.count, made)) > 0.7 * len(made)


def test_a_streamer_that_fails(model: Any) -> None:
    streamers = [Quick(), Quick(len(TEXTS[1]) + 5), Quick()]
    expected = [call(model, {}, TEXTS[index]).tolist() for index in range(3)]
    model.forget()
    found = at_once({str(i): (lambda i=i: call(model, {}, TEXTS[i], streamer=streamers[i])) for i in range(3)})
    assert isinstance(found["1"], InterruptedError)
    assert found["0"].tolist() == expected[0] and found["2"].tolist() == expected[2]
    assert streamers[1].tokens == expected[1][0][: len(TEXTS[1]) + 5]
    model.engine.check()
    assert call(model, {}, TEXTS[1]).tolist() == expected[1]


@pytest.mark.parametrize("culprit", range(4))
@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, GeneratorExit, KeyboardInterrupt])
def test_whatever_a_streamer_raises_is_its_own_calls(model: Any, kind: type[BaseException], culprit: int) -> None:
    class Raising(Quick):
        def put(self, value: torch.Tensor) -> None:
            if len(self.tokens) == len(TEXTS[0]) + 5:
                raise kind("nobody reads")
            super().put(value)

    expected = [call(model, {}, TEXTS[index]).tolist() for index in range(4)]
    model.forget()
    streamers = [Raising() if index == culprit else Quick() for index in range(4)]
    found = at_once({str(i): (lambda i=i: call(model, {}, TEXTS[i], streamer=streamers[i])) for i in range(4)})
    for index in range(4):
        if index == culprit:
            assert type(found[str(index)]) is kind and found[str(index)].args == ("nobody reads",)
        else:
            assert not isinstance(found[str(index)], BaseException), found
            assert found[str(index)].tolist() == expected[index]
    model.engine.check()


def test_rows_that_end_at_different_places(model: Any) -> None:
    """A row that ended leaves the decode, whoever makes the steps."""
    free = call(model, METHODS["rows"], [], max_new_tokens=30).tolist()
    ends = free[0][len(PAIR[0]) + 7]
    method = METHODS["rows"] | {"eos_token_id": ends, "max_new_tokens": 30}
    expected = call(model, method, [])
    model.forget()
    streamers = [Quick() for _ in range(3)]
    found = at_once({str(i): (lambda i=i: call(model, method, [], streamer=streamers[i])) for i in range(3)})
    assert all(found[name].tolist() == expected.tolist() for name in found)
    assert streamers[0].tokens == streamers[1].tokens == streamers[2].tokens


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts the threads of this process where Linux lists them")
def test_a_call_leaves_no_threads(model: Any) -> None:
    """OpenMP's belong to the thread that called it, and live as long."""

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    call(model, {}, TEXTS[0])
    before, go = threads(), threading.Event()
    done = threading.Barrier(5)

    def lasting(index: int) -> None:
        call(model, {}, TEXTS[index])
        done.wait(60)
        go.wait(60)

    several = [threading.Thread(target=lasting, args=(index,)) for index in range(4)]
    for thread in several:
        thread.start()
    done.wait(60)
    model.engine.write_back.join()
    until = time.monotonic() + 5  # the system takes a moment
    while threads() > before + 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert threads() <= before + 4
    go.set()
    for thread in several:
        thread.join()


def test_stats_are_each_calls_own(model: Any) -> None:
    def stats(index: int) -> Any:
        method = {"return_dict_in_generate": True, "do_sample": False, "eos_token_id": None, "max_new_tokens": 6 + index}
        return model.generate(torch.tensor([TEXTS[index]]), **method).stats

    for index, found in at_once({str(index): (lambda index=index: stats(index)) for index in range(5)}).items():
        assert (found.prompt_tokens, found.new_tokens) == (8, 6 + int(index))
        assert found.evaluated_tokens == found.prompt_tokens - found.reused_tokens + found.new_tokens - 1


def test_one_is_stopped_one_is_wrong_one_is_cancelled(model: Any) -> None:
    class Stop(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 13)

    class Broken(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            raise ZeroDivisionError("on purpose")

    expected = call(model, {}, TEXTS[0])
    model.forget()
    long = [1, *(400 + (17 * at) % 3000 for at in range(500))]
    found = at_once({
        "plain": lambda: call(model, {}, TEXTS[0]),
        "stopped": lambda: call(model, {"stopping_criteria": StoppingCriteriaList([Stop()])}, TEXTS[0]),
        "wrong": lambda: call(model, {"stopping_criteria": StoppingCriteriaList([Broken()])}, TEXTS[2]),
        "too long": lambda: call(model, {"rows": [[*long, *long]]}, TEXTS[2]),
        "cancelled": lambda: call(model, {"rows": [long], "prompt_progress": lambda done, total: False}, TEXTS[2]),
    })  # fmt: skip
    assert found["plain"].tolist() == expected.tolist()
    assert found["stopped"].tolist() == expected[:, :13].tolist()
    assert isinstance(found["wrong"], ZeroDivisionError)
    assert isinstance(found["too long"], ContextOverflowError)
    assert isinstance(found["cancelled"], GenerationCancelled)
    model.engine.check()
    assert call(model, {}, TEXTS[0]).tolist() == expected.tolist()


@pytest.mark.parametrize("options", [{"n_cells": 512, "n_ctx": 256}, {"n_seq_max": 2, "n_cells": 512, "n_ctx": 256}])
@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 30])
def test_where_there_is_room_for_few(load: Any, tiny_llama_path: Path, options: dict[str, int], host_cache_bytes: int) -> None:
    """They push each other out of the buffer, and are right for all that."""
    model = load(tiny_llama_path, type_k="f32", type_v="f32", flash_attn=False, host_cache_bytes=host_cache_bytes, **options)
    texts = [[1, *(5 + (3 * at + index) % 280 for at in range(100 + index))] for index in range(8)]
    expected = [call(model, {}, text) for text in texts]
    model.forget()
    found = at_once({str(index): (lambda text=text: call(model, {}, text)) for index, text in enumerate(texts)})
    for index, sequences in enumerate(expected):
        assert isinstance(found[str(index)], torch.Tensor), found[str(index)]
        assert found[str(index)].tolist() == sequences.tolist()
    model.engine.check()


@pytest.mark.parametrize("name", ["tiny_mamba", "tiny_hybrid", "tiny_swa"])
def test_memories_that_cannot_go_back(request: pytest.FixtureRequest, name: str) -> None:
    model = request.getfixturevalue(name)
    methods = [{}, {"num_beams": 2}, {"do_sample": True, "top_k": 10, "seeds": 5}, {"rows": [[7, 8, 9] * 20]}]
    expected = [call(model, method, [5 + index, 6, 7, 8]) for index, method in enumerate(methods)]
    model.forget()
    found = at_once({
        str(index): (lambda index=index, method=method: call(model, method, [5 + index, 6, 7, 8]))
        for index, method in enumerate(methods)
    })  # fmt: skip
    for index, sequences in enumerate(expected):
        assert isinstance(found[str(index)], torch.Tensor), found[str(index)]
        assert found[str(index)].tolist() == sequences.tolist()


def test_two_models_and_their_drafts_at_once(load: Any, tiny_llama_path: Path, smollm2_f32_path: Path) -> None:
    """Both share one assistant, whose decodes are shared too."""
    exact = {"type_k": "f32", "type_v": "f32", "flash_attn": False}
    model, draft = load(tiny_llama_path, **exact), load(tiny_llama_path, **exact)
    texts = [[1, 5 + index, 9, 77, 5 + index] for index in range(4)]
    expected = [call(model, {}, text) for text in texts]
    model.forget()
    found = at_once({str(i): (lambda t=text: call(model, {"assistant_model": draft}, t)) for i, text in enumerate(texts)})
    for index, sequences in enumerate(expected):
        assert isinstance(found[str(index)], torch.Tensor), found[str(index)]
        assert found[str(index)].tolist() == sequences.tolist()


def test_a_call_that_ends_early_lets_the_others_go_on_at_once(model: Any) -> None:
    """Nobody waits for a call that has ended, or for one whose streamer takes its time."""

    class Dozing:
        def put(self, value: torch.Tensor) -> None:
            time.sleep(0.5)

        def end(self) -> None:
            pass

    began = time.monotonic()
    ends: dict[str, float] = {}

    def timed(name: str, **more: Any) -> torch.Tensor:
        found = call(model, {}, TEXTS[len(name)], **more)
        ends[name] = time.monotonic() - began
        return found

    at_once({
        "short": lambda: timed("short", max_new_tokens=2),
        "long": lambda: timed("long", max_new_tokens=40),
        "dozing": lambda: timed("dozing", streamer=Dozing()),
    })  # fmt: skip
    assert ends["long"] < ends["dozing"] and ends["dozing"] > NEW * 0.5
