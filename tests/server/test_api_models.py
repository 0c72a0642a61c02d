"""Other models than the one of the other tests: a vocabulary of SentencePiece, memories that cannot go back, a full context
that slides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import api_server
from api_server import Api
from transformers_llamacpp.server.host import ModelHost
from transformers_llamacpp.server.limits import ServeOptions

pytestmark = pytest.mark.once

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "rank": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "rank"],
    "additionalProperties": False,
}


@pytest.fixture
def serve() -> Iterator[Callable[..., Api]]:
    with ExitStack() as stack:

        def serve_file(path: Path, **options: Any) -> Api:
            host = ModelHost(path.parent, {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, **options})
            host.load(path.name, {})
            stack.callback(host.unload)
            return stack.enter_context(api_server.running(host, ServeOptions(page=False)))

        yield serve_file


def test_sentencepiece(serve: Callable[..., Api], gemma_path: Path) -> None:
    api = serve(gemma_path)
    model = api.state.host.model
    ids = model.tokenizer("The sky is", return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=8, do_sample=False)[0]
    whole, prompt = (model.tokenizer.decode(one, skip_special_tokens=True) for one in (output, ids[0]))
    body = {"prompt": "The sky is", "max_tokens": 8, "temperature": 0}
    assert prompt + api.text(**body) == whole
    assert api.text(**body, echo=True) == whole, "the token that texts begin with is not shown"
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    for seed in range(2):
        text = api.text(prompt="A city as JSON: ", max_tokens=60, seed=seed, top_k=50, response_format=wanted)
        found = json.loads(text)
        assert set(found) == {"city", "rank"} and len(found["city"]) <= 12 and 0 <= found["rank"] <= 9
    characters = {"prompt": "Emoji: 😀 🎉", "max_tokens": 12, "temperature": 0, "grammar_string": 'root ::= "🦊é你" "\\n" "🎉"'}
    assert api.text(**characters) == "🦊é你\n🎉", "characters of several tokens"
    shown = api.post("/v1/completions", {**characters, "stream": True}).text
    assert "\ufffd" not in shown


@pytest.mark.parametrize("kind", ["mamba", "hybrid", "swa"])
def test_memories_that_cannot_go_back(serve: Callable[..., Api], kind: str, request: pytest.FixtureRequest) -> None:
    api = serve(request.getfixturevalue(f"tiny_{kind}_path"))
    body = {"prompt": [1, 5, 9, 5, 9, 7], "max_tokens": 8, "temperature": 0, "ban_eos_token": True, "logprobs": 1, "echo": True}
    first = api.post("/v1/completions", {**body, "n": 2}).json()
    assert first["choices"][0]["text"] == first["choices"][1]["text"]
    assert len(first["choices"][0]["logprobs"]["tokens"]) == 14
    again = api.post("/v1/completions", body).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_a_context_that_slides_has_no_end(serve: Callable[..., Api], tiny_llama_path: Path) -> None:
    api = serve(tiny_llama_path, n_ctx=64, n_sink=4)
    answer = api.post("/v1/completions", {"prompt": [1, 5, 9], "max_tokens": 200, "ban_eos_token": True, "n_sink": 4}).json()
    assert answer["usage"]["completion_tokens"] == 200


def test_more_texts_than_there_are_cells_for(serve: Callable[..., Api], tiny_llama_path: Path) -> None:
    """Eight texts of 100 tokens at once in 128 cells: whoever is not computed leaves the buffer meanwhile."""
    from concurrent.futures import ThreadPoolExecutor

    api = serve(tiny_llama_path, n_ctx=128, type_k="f32", type_v="f32", flash_attn=False)
    bodies = [{"prompt": [1, 5, at], "max_tokens": 100, "ban_eos_token": True, "temperature": 0} for at in range(8)]
    alone = [api.post("/v1/completions", body).json()["choices"][0]["text"] for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: api.post("/v1/completions", body), bodies))
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [100] * 8
    assert [answer.json()["choices"][0]["text"] for answer in answers] == alone
