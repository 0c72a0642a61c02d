"""Many requests at once: none disturbs another, and what nobody wants any more ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import api_server
from api_server import Api, error_of, eventually
from transformers_llamacpp.server.host import ModelHost
from transformers_llamacpp.server.limits import Limits, ServeOptions

pytestmark = pytest.mark.once

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ban_eos_token": True, "temperature": 0}

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "The capital of France is", "temperature": 0},
    {"prompt": "The capital of Italy is", "temperature": 1.3, "seed": 1},
    {"prompt": "The capital of Italy is", "temperature": 1.3, "seed": 2, "n": 2},
    {"prompt": "one two three one two three one", "temperature": 0, "prompt_lookup_num_tokens": 4},
    {"prompt": "Once upon a time", "num_beams": 2},
    {"prompt": "Once upon a time", "penalty_alpha": 0.6},
    {"prompt": "The weather", "temperature": 0, "guidance_scale": 1.5, "negative_prompt": "rain"},
    {"prompt": "The weather", "temperature": 0, "logprobs": 2, "stop": ["."]},
    {"prompt": "A list:", "response_format": {"type": "json_object"}, "temperature": 0.8, "seed": 5},
]


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_concurrent_requests_write_what_they_write_alone(loaded: Api) -> None:
    bodies = [{"max_tokens": 8, **body} for body in REQUESTS]
    loaded.state.host.model.forget()
    alone = [texts(loaded.post("/v1/completions", body)) for body in bodies]
    loaded.state.host.model.forget()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda body: texts(loaded.post("/v1/completions", body)), bodies))
    assert together == alone


def waits(api: Api, name: str, number: int) -> bool:
    return eventually(lambda: getattr(api.state.gate, name) == number)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_work(loaded: Api, stream: bool) -> None:
    with pytest.raises(httpx.ReadTimeout):
        if stream:
            with httpx.stream("POST", f"{loaded.url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                assert loaded.state.host.calls == 1
                raise httpx.ReadTimeout("enough")
        httpx.post(f"{loaded.url}/v1/completions", json=LONG, timeout=httpx.Timeout(60, read=1.5))
    assert eventually(lambda: loaded.idle, 3), "it went on"


def test_a_client_that_goes_away_during_its_prompt(loaded: Api) -> None:
    loaded.state.host.model.forget()
    before = loaded.state.host.model.engine
    prompt = list(range(1000, 2000))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{loaded.url}/v1/completions", json={"prompt": prompt, "max_tokens": 2, "stream": True},
                   timeout=httpx.Timeout(60, read=0.4))  # fmt: skip
    assert eventually(lambda: loaded.idle, 3)
    answer = loaded.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0})
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached < 999, "it was stopped in the middle"
    assert before is loaded.state.host.model.engine


def test_one_of_several_goes_away(loaded: Api) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    expected = loaded.text(**body)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(loaded.text(**body))) for _ in range(2)]
    with httpx.stream("POST", f"{loaded.url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        for thread in threads:
            thread.start()
        assert next(line for line in lines if line)
    for thread in threads:
        thread.join()
    assert found == [expected, expected]


def test_a_queue_has_an_end(loaded: Api) -> None:
    """Four are written at once and four wait (see the fixture): the ninth is told so at once, and who waits may go."""
    with ThreadPoolExecutor(9) as pool:
        running = [pool.submit(loaded.post, "/v1/completions", LONG) for _ in range(4)]
        assert waits(loaded, "running", 4)
        clients = [httpx.Client(timeout=httpx.Timeout(60, read=2.0)) for _ in range(4)]
        waiting = [pool.submit(client.post, f"{loaded.url}/v1/completions", json=LONG) for client in clients]
        assert waits(loaded, "waiting", 4)
        began = time.monotonic()
        answer = loaded.post("/v1/completions", LONG)
        assert answer.status_code == 429 and time.monotonic() - began < 2
        assert error_of(answer)["code"] == "queue_full" and int(answer.headers["retry-after"]) >= 1
        for one in waiting:
            assert isinstance(one.exception(), httpx.ReadTimeout)
        assert waits(loaded, "waiting", 0), "they went away"
        loaded.post("/v1/internal/stop-generation")
        for one in running:
            assert one.result().status_code == 200


@pytest.mark.parametrize("action", ["unload", "load"])
def test_a_change_of_model_ends_what_runs_and_what_waits(loaded: Api, action: str) -> None:
    with ThreadPoolExecutor(7) as pool:
        running = [pool.submit(loaded.post, "/v1/completions", LONG) for _ in range(3)]
        streamed = pool.submit(loaded.post, "/v1/completions", {**LONG, "stream": True})
        assert waits(loaded, "running", 4)
        waiting = [pool.submit(loaded.post, "/v1/completions", LONG) for _ in range(2)]
        assert waits(loaded, "waiting", 2)
        body = {"model_name": "tiny.gguf"} if action == "load" else None
        assert loaded.post(f"/v1/internal/model/{action}", body).status_code == 200
        for one in [*running, *waiting]:
            answer = one.result(60)
            assert answer.status_code == 503 and error_of(answer)["code"] == "model_unloaded", answer.text
        last = streamed.result(60).text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "model_unloaded"
    assert loaded.state.host.name == ("tiny.gguf" if action == "load" else "")


def test_the_numbers_of_prometheus(loaded: Api) -> None:
    def numbers() -> dict[str, float]:
        lines = loaded.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line and line[0] != "#"}

    loaded.state.host.model.forget()
    before = numbers()
    for _ in range(2):
        loaded.text(prompt="The capital of France is", max_tokens=4, temperature=0)
    loaded.post("/v1/completions", {"prompt": 5})
    after = numbers()

    def grew(name: str) -> float:
        return after[f"transformers_llamacpp_{name}"] - before.get(f"transformers_llamacpp_{name}", 0)

    assert grew('tokens_total{kind="written"}') == 8
    assert grew('tokens_total{kind="prompt_evaluated"}') == 6 and grew('tokens_total{kind="prompt_reused"}') == 4
    assert grew('requests_total{route="/v1/completions",status="200"}') == 2
    assert grew('requests_total{route="/v1/completions",status="400"}') == 1
    assert grew("first_token_seconds_count") == 2 and grew("decodes_total") >= 8
    assert after["transformers_llamacpp_running"] == after["transformers_llamacpp_waiting"] == 0
    assert after["transformers_llamacpp_model_loaded"] == 1


def test_nothing_of_a_prompt_is_logged(loaded: Api, caplog: Any, capfd: Any) -> None:
    import logging

    caplog.set_level(logging.INFO)
    for body in ({"prompt": "xylophone zebra", "max_tokens": 3}, {"prompt": "xylophone zebra", "nothing": "quokka"},
                 {"prompt": "xylophone zebra", "num_beams": 2, "prompt_lookup_num_tokens": 3}):  # fmt: skip
        loaded.post("/v1/completions", body)
    written = caplog.text + "".join(capfd.readouterr())
    assert "xylophone" not in written and "zebra" not in written and "quokka" not in written


@pytest.fixture
def small(tiny_llama_path: Path) -> Iterator[Api]:
    """A model of random weights, a key, and narrow limits."""
    host = ModelHost(tiny_llama_path.parent, {"n_ctx": 256})
    host.load(tiny_llama_path.name, {})
    options = ServeOptions(Limits(max_tokens=20, max_choices=2), api_key="k3y", page=False)
    with api_server.running(host, options) as api:
        yield api
    host.unload()


def test_limits_and_a_key_with_the_real_client(small: Api) -> None:
    import openai

    assert len(small.client.completions.create(model="x", prompt="a b", logit_bias={"1": -100}).choices) == 1
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{small.url}/v1", api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="--max-tokens"):
        small.client.completions.create(model="x", prompt="a b", max_tokens=21)
    with pytest.raises(openai.BadRequestError, match="--max-choices"):
        small.client.completions.create(model="x", prompt="a b", n=3)
    fills = {"ban_eos_token": True, "auto_max_new_tokens": True}
    answer = small.client.completions.create(model="x", prompt="a b", extra_body=fills)
    assert answer.usage is not None and answer.usage.completion_tokens == 20, "what the server allows, where nothing is said"
    answer = small.client.completions.create(model="x", prompt="a b", extra_body={"ban_eos_token": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 20
    with pytest.raises(openai.BadRequestError, match=r"400 - tiny\S+ has no chat template"):
        small.client.chat.completions.create(model="x", messages=[{"role": "user", "content": "x"}])
