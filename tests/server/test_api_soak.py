"""The server under everything at once: right texts, clear errors, and nothing left behind."""

from __future__ import annotations

import gc
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import torch

from api_server import Api, error_of, eventually
from compare import SHARE, cold_logits, same_tokens
from transformers_llamacpp.decoding.numbers import Numbers
from transformers_llamacpp.server.api.job import Job

pytestmark = pytest.mark.once

TOKENS = 6
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ban_eos_token": True, "temperature": 0}

BODIES: list[dict[str, Any]] = [
    *({"prompt": f"Number {n} is", "temperature": 0} for n in range(4)),
    {"prompt": "The capital of Italy is", "temperature": 1.3, "seed": 1},
    {"prompt": "The weather", "temperature": 0.9, "seed": 7},
    {"prompt": "one two three one two three one", "temperature": 0, "prompt_lookup_num_tokens": 4},
    {"prompt": "The capital of France is", "temperature": 0, "logprobs": 2},
    {"prompt": "word " * 120, "temperature": 0},
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 7}, "top_p"),
    ({"nothing": 1}, "nothing"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"temperature": 0.5, "seed": 1, "num_beams": 2, "do_sample": True}, "seed"),
]

MORE_MEMORY = 200 << 20
"""Bytes that 200 requests may leave behind: far less than the weights, which two reloads read twice."""


class Serial:
    """What a body writes alone: the tokens, and what is wrong with another text."""

    def __init__(self, model: Any, body: dict[str, Any]) -> None:
        self.body, self.ids = body, model.tokenizer.encode(body["prompt"])
        self.sampled = body["temperature"] > 0
        options = {"temperature": body["temperature"], "top_k": 0, "top_p": 1.0, "seeds": body["seed"]} if self.sampled else {}
        ids = torch.tensor([self.ids])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=self.sampled, **options
        )
        self.tokens: list[int] = output[0, len(self.ids) :].tolist()
        self.ends: list[int] = model.generation_config.eos_token_id
        self.shown = [token for token in self.tokens if token not in self.ends]
        self.text = b"".join(map(model.native.vocab.piece, self.shown)).decode()

    def judge(self, model: Any, text: str) -> None:
        """Fails unless `text` is the same, or the first difference is a numerical tie."""
        if text == self.text:
            return
        vocab, rest, place = model.native.vocab, text.encode(), 0
        while place < len(self.shown) and rest.startswith(piece := vocab.piece(self.shown[place])):
            rest, place = rest[len(piece) :], place + 1
        assert place < len(self.tokens), f"{self.body}: {text!r} goes on where {self.text!r} stops"
        logits = cold_logits(model, [*self.ids, *self.tokens[:place]])[-1]
        words = [token for token in range(vocab.n_tokens) if vocab.piece(token) and rest.startswith(vocab.piece(token))]
        other = max(words if rest else self.ends, key=lambda token: float(logits[token]))

        def gap(index: int) -> float:
            if not self.sampled:
                return abs(float(logits[self.tokens[place]] - logits[other]))
            numbers = Numbers([self.body["seed"]])
            number = [numbers.next(0) for _ in range(place + 1)][-1]
            total = torch.softmax(logits.double() / self.body["temperature"], dim=-1).cumsum(dim=-1)
            begin = float(total[other - 1]) if other else 0.0
            return max(begin - number, number - float(total[other])) * SHARE

        same_tokens(self.tokens, [*self.tokens[:place], other], gap, str(self.body))


class Soak:
    """`one(at)` makes request `at`, whatever kind it is. `texts`: what was written to the end, by body."""

    def __init__(self, api: Api, kinds: list[str], seed: int) -> None:
        self.api, self.kinds = api, kinds
        self.draws = [random.Random(seed * 1000 + at) for at in range(len(kinds))]
        self.texts: list[tuple[int, str]] = []

    def one(self, at: int) -> None:
        getattr(self, self.kinds[at])(self.draws[at])

    def reload(self, draw: random.Random) -> None:
        assert self.api.post("/v1/internal/model/load", {"model_name": "f32.gguf"}).status_code == 200

    def bad(self, draw: random.Random) -> None:
        fields, name = draw.choice(BAD)
        answer = self.api.post("/v1/completions", {**BODIES[0], "max_tokens": TOKENS, **fields})
        if answer.status_code not in (429, 503):  # nothing of it was looked at
            assert answer.status_code == 400 and error_of(answer)["param"] == name, answer.text

    def leave(self, draw: random.Random) -> None:
        """Before there is an answer."""
        with pytest.raises(httpx.ReadTimeout):
            patience = httpx.Timeout(60, read=draw.uniform(0.02, 0.5))
            httpx.post(f"{self.api.url}/v1/completions", json=LONG, timeout=patience)
            raise httpx.ReadTimeout("a reload, or a full queue, was quicker")

    def hang_up(self, draw: random.Random) -> None:
        """In the middle of a stream."""
        with httpx.stream("POST", f"{self.api.url}/v1/completions", json={**LONG, "stream": True}, timeout=120) as answer:
            for _ in zip(range(draw.randint(1, 6)), answer.iter_lines(), strict=False):
                pass

    def _asked(self, body: dict[str, Any]) -> Any:
        """As clients do: where the queue is full or a model is loaded, again a little later, but not for ever."""
        for _ in range(20):
            answer = self.api.post("/v1/completions", body)
            assert answer.status_code in (200, 429, 503), answer.text
            if answer.status_code == 200:
                break
            time.sleep(0.1)
        return answer

    def whole(self, draw: random.Random) -> None:
        n = draw.randrange(len(BODIES))
        answer = self._asked({**BODIES[n], "max_tokens": TOKENS})
        if answer.status_code == 200:
            (choice,) = answer.json()["choices"]
            self.texts.append((n, choice["text"]))
            if "logprobs" in BODIES[n]:
                assert "".join(choice["logprobs"]["tokens"]) == choice["text"]

    def stream(self, draw: random.Random) -> None:
        n = draw.randrange(len(BODIES))
        answer = self._asked({**BODIES[n], "max_tokens": TOKENS, "stream": True})
        if answer.status_code != 200:
            return
        events = [line.removeprefix("data: ") for line in answer.text.strip().split("\n\n")]
        parsed = [json.loads(event) for event in events if event != "[DONE]"]
        if events[-1] != "[DONE]":  # a reload came in between
            assert parsed[-1]["error"]["code"] == "model_unloaded"
            return
        self.texts.append((n, "".join(one["choices"][0]["text"] for one in parsed)))
        if "logprobs" in BODIES[n]:
            told = [token for one in parsed for token in one["choices"][0]["logprobs"]["tokens"]]
            assert "".join(told) == self.texts[-1][1], "no token was lost where chunks hold several"


def rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def workers() -> dict[str, int]:
    """Threads by what their names begin with."""
    names = [thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()]
    return {name: names.count(name) for name in names}


def test_two_hundred_requests_of_every_kind(loaded: Api) -> None:
    """Texts, streams, bad fields, clients that leave and two reloads, six at a time where four are written at once."""
    order = random.Random(3)
    weights = {"whole": 4, "stream": 4, "bad": 2, "leave": 1, "hang_up": 2}
    kinds = order.choices([*weights], [*weights.values()], k=200)
    kinds[66] = kinds[133] = "reload"
    soak = Soak(loaded, kinds, 3)
    serial = [Serial(loaded.state.host.model, body) for body in BODIES]
    with ThreadPoolExecutor(6) as pool:
        first = [pool.submit(soak.one, at) for at in range(30)]  # what is made once is there after these
        for done in first:
            done.result(300)
        memory, threads = rss(), workers()
        for done in [pool.submit(soak.one, at) for at in range(30, len(kinds))]:
            done.result(300)
    assert eventually(lambda: loaded.idle), "a request is still running"
    model = loaded.state.host.model
    model.engine.write_back.join()
    model.engine.check()
    model.forget()
    held = model.engine.held()
    assert (held.texts, held.sequences, held.cells, held.host_bytes) == (0, 0, 0, 0)
    assert rss() - memory < MORE_MEMORY
    for name, number in workers().items():
        most = {"generate": 4, "tokenize": 4, "asyncio": 8, "uvloop": 8}.get(name, threads.get(name, 0))
        assert number <= most, f"{number} threads {name}"
    assert len(soak.texts) > 50 and {n for n, _ in soak.texts} == set(range(len(BODIES)))
    for n, text in soak.texts:
        serial[n].judge(model, text)
    serial[0].judge(model, loaded.text(**BODIES[0], max_tokens=TOKENS))


@pytest.fixture
def decodes(loaded: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """When each decode began."""
    backend, found = loaded.state.host.model.engine.backend, []

    def counted(name: str) -> None:
        original = getattr(backend, name)

        def decode(*args: Any, **kwargs: Any) -> Any:
            found.append(time.monotonic())
            return original(*args, **kwargs)

        monkeypatch.setattr(backend, name, decode)

    for name in ("decode", "decode_tokens"):
        counted(name)
    yield found


@pytest.mark.parametrize("body", [{}, {"logprobs": 1}, {"n": 2}, {"penalty_alpha": 0.6}, {"prompt_lookup_num_tokens": 3}])
def test_after_a_disconnect_there_is_one_decode_at_most(
    loaded: Api, decodes: list[float], body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[float] = []
    give_up = Job.give_up

    def noted(job: Job) -> None:
        give_up(job)
        gone.append(time.monotonic())

    monkeypatch.setattr(Job, "give_up", noted)
    with httpx.stream("POST", f"{loaded.url}/v1/completions", json={**LONG, **body, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ") and decodes
    assert eventually(lambda: loaded.idle)
    assert decodes and sum(at > gone[0] for at in decodes) <= 1
    before = len(decodes)
    time.sleep(0.2)
    assert len(decodes) == before
