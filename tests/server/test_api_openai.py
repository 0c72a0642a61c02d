"""OpenAI's routes with OpenAI's own client."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest
import torch
from pydantic import BaseModel

from api_server import Api

pytestmark = pytest.mark.once

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def complete(api: Api, **arguments: Any) -> Any:
    wanted = {"model": "f32.gguf", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **arguments}
    return api.client.completions.create(**wanted)


def chat(api: Api, **arguments: Any) -> Any:
    wanted = {"model": "f32.gguf", "messages": QUESTION, "max_tokens": 8, "temperature": 0, **arguments}
    return api.client.chat.completions.create(**wanted)


def reference(api: Api, **arguments: Any) -> str:
    """What `generate()` itself writes."""
    model = api.state.host.model
    ids = model.tokenizer(PROMPT, return_tensors="pt").input_ids
    output = model.generate(ids, **{"max_new_tokens": 6, "do_sample": False, **arguments})
    return str(model.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def test_models(loaded: Api) -> None:
    assert [model.id for model in loaded.client.models.list()] == ["f32.gguf"]
    assert loaded.client.models.retrieve("tiny.gguf").owned_by == "user"
    with pytest.raises(openai.NotFoundError) as caught:
        loaded.client.models.retrieve("none.gguf")
    assert caught.value.code == "model_not_found"


def test_a_completion_is_what_generate_writes(loaded: Api) -> None:
    answer = complete(loaded)
    (choice,) = answer.choices
    assert choice.text == reference(loaded) and "Paris" in choice.text
    assert choice.finish_reason == "length" and choice.index == 0 and choice.logprobs is None
    assert (answer.object, answer.model) == ("text_completion", "f32.gguf")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 6, 11)


def test_what_a_prompt_shares_is_not_evaluated_again(loaded: Api) -> None:
    loaded.state.host.model.forget()
    assert complete(loaded).usage.prompt_tokens_details.cached_tokens == 0
    assert complete(loaded).usage.prompt_tokens_details.cached_tokens == 4


def test_a_chat(loaded: Api) -> None:
    answer = chat(loaded, max_tokens=40)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and "Paris" in choice.message.content
    assert choice.finish_reason == "stop" and answer.object == "chat.completion"
    assert chat(loaded, max_tokens=None, max_completion_tokens=3).usage.completion_tokens == 3


def test_parts_and_roles_of_messages(loaded: Api) -> None:
    plain = chat(loaded, messages=[{"role": "system", "content": "Be brief."}, *QUESTION])
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
    same = chat(loaded, messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert same.choices[0].message.content == plain.choices[0].message.content


def test_a_stream_is_the_whole_in_pieces(loaded: Api) -> None:
    whole = chat(loaded)
    chunks = list(chat(loaded, stream=True, stream_options={"include_usage": True}))
    *deltas, last = chunks
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None and chunk.object == "chat.completion.chunk" for chunk in deltas)
    assert deltas[0].choices[0].delta.role == "assistant" and deltas[0].choices[0].delta.content == ""
    assert deltas[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1 and len(deltas) > 4
    texts = [chunk.choices[0].text for chunk in complete(loaded, stream=True)]
    assert "".join(texts) == complete(loaded).choices[0].text and len(texts) > 4
    raw = loaded.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "stream": True}).text
    assert raw.startswith("data: {") and raw.endswith("data: [DONE]\n\n")


def test_several_texts_of_a_prompt(loaded: Api) -> None:
    answer = complete(loaded, n=3, temperature=1.5, seed=11)
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 5 and answer.usage.completion_tokens == 18
    streamed = ["", "", ""]
    for chunk in complete(loaded, n=3, temperature=1.5, seed=11, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    assert complete(loaded, n=2).choices[0].text == complete(loaded, n=2).choices[1].text, "greedy"


def test_several_prompts(loaded: Api) -> None:
    prompts = [PROMPT, "Water boils at"]
    answer = complete(loaded, prompt=prompts, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[::2]] == [complete(loaded, prompt=one).choices[0].text for one in prompts]
    ids = loaded.state.host.model.tokenizer.encode(PROMPT)
    assert complete(loaded, prompt=ids).choices[0].text == complete(loaded).choices[0].text
    assert complete(loaded, prompt=[ids, ids]).usage.prompt_tokens == 10


def test_stop_strings_are_never_shown(loaded: Api) -> None:
    whole = complete(loaded, max_tokens=24).choices[0].text
    stop = whole[9:14]
    answer = complete(loaded, max_tokens=24, stop=[stop, "never"], logprobs=0)
    assert answer.choices[0].text == whole[: whole.index(stop)] and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 24
    assert answer.choices[0].logprobs.text_offset[-1] < len(answer.choices[0].text)
    shown = ""
    for chunk in complete(loaded, max_tokens=24, stop=stop, stream=True):
        shown += chunk.choices[0].text
        assert whole.index(stop) >= len(shown)
    assert shown == answer.choices[0].text


def test_a_seed_decides(loaded: Api) -> None:
    sample = {"temperature": 1.2, "max_tokens": 12}
    first, *others = (complete(loaded, seed=7, **sample).choices[0].text for _ in range(3))
    torch.manual_seed(5)
    assert all(other == first for other in others)
    assert complete(loaded, seed=8, **sample).choices[0].text != first
    assert complete(loaded, seed=7, n=2, **sample).choices[1].text == complete(loaded, seed=8, **sample).choices[0].text


def test_logprobs_are_those_of_the_model(loaded: Api) -> None:
    """At temperature 1 and before any processor, whatever the request samples with."""
    model = loaded.state.host.model
    answer = chat(loaded, logprobs=True, top_logprobs=3, temperature=2, top_p=0.5, presence_penalty=1, seed=3)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    inputs = model.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = [model.tokenizer.encode(entry.token, add_special_tokens=False)[0] for entry in content]
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens])], dim=1)
    rows = torch.log_softmax(model(ids, use_cache=False).logits[0, -len(tokens) - 1 : -1], dim=-1)
    for entry, row, token in zip(content, rows, tokens, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=0.02)
        assert bytes(entry.bytes).decode() == entry.token
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=0.02)


def test_logprobs_of_a_stream(loaded: Api) -> None:
    whole = chat(loaded, logprobs=True, top_logprobs=2)
    streamed = [
        entry
        for chunk in chat(loaded, logprobs=True, top_logprobs=2, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.choices[0].logprobs.content]


def test_echo_with_logprobs_scores_a_text(loaded: Api) -> None:
    """What evaluation harnesses ask for: the prompt's own log-probabilities, and no new token."""
    answer = complete(loaded, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == PROMPT and answer.usage.completion_tokens == 0
    model = loaded.state.host.model
    ids = model.tokenizer(PROMPT, return_tensors="pt").input_ids
    rows = torch.log_softmax(model(ids, use_cache=False).logits[0], dim=-1)
    expected = [float(rows[place, token]) for place, token in enumerate(ids[0, 1:].tolist())]
    first, *others = choice.logprobs.token_logprobs
    assert first is None and others == pytest.approx(expected, abs=0.02)
    assert choice.logprobs.text_offset == [0, 3, 11, 14, 21]
    more = complete(loaded, echo=True, logprobs=1, max_tokens=2).choices[0]
    assert more.text.startswith(PROMPT) and len(more.logprobs.tokens) == 7
    assert more.logprobs.text_offset[5] == len(PROMPT)
    assert "".join(chunk.choices[0].text for chunk in complete(loaded, echo=True, max_tokens=2, stream=True)) == more.text


def test_bias_and_penalties(loaded: Api) -> None:
    token = loaded.state.host.model.tokenizer.encode(" Paris")[0]
    assert "Paris" not in complete(loaded, logit_bias={str(token): -100}).choices[0].text
    assert complete(loaded, logit_bias={str(token): 100}).choices[0].text == " Paris" * 6
    once = complete(loaded, logit_bias={str(token): 15}, frequency_penalty=2, max_tokens=12).choices[0].text
    assert 1 < once.count(" Paris") < 12
    plain = complete(loaded, max_tokens=30).choices[0].text
    assert complete(loaded, presence_penalty=2, max_tokens=30).choices[0].text != plain


def test_the_best_of_several(loaded: Api) -> None:
    answer = complete(loaded, best_of=4, n=2, temperature=1.5, seed=1, logprobs=0)
    every = complete(loaded, n=4, temperature=1.5, seed=1, logprobs=0)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    best = sorted(every.choices, key=mean, reverse=True)[:2]
    assert [choice.text for choice in answer.choices] == [choice.text for choice in best]
    assert answer.usage.completion_tokens == 24, "all that were written"
    assert complete(loaded, best_of=2, temperature=1.5).choices[0].logprobs is None


def test_structured_output(loaded: Api) -> None:
    class City(BaseModel):
        name: str
        inhabitants: int
        coastal: bool

    answer = loaded.client.chat.completions.parse(
        model="f32.gguf", messages=QUESTION, response_format=City, temperature=0, max_tokens=120
    )
    city = answer.choices[0].message.parsed
    assert isinstance(city, City) and answer.choices[0].finish_reason == "stop"
    for seed in range(3):
        sampled = loaded.client.chat.completions.parse(
            model="f32.gguf", messages=QUESTION, response_format=City, temperature=1.5, seed=seed, max_tokens=300,
            extra_body={"top_k": 20},
        )  # fmt: skip
        assert isinstance(sampled.choices[0].message.parsed, City)


@pytest.mark.parametrize("way", [{"n": 2}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"guidance_scale": 1.2}])
def test_structured_output_however_it_is_written(loaded: Api, way: dict[str, Any]) -> None:
    import json

    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer", "maximum": 99}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
    n = way.pop("n", 1)
    for choice in chat(loaded, response_format=wanted, max_tokens=40, n=n, extra_body=way).choices:
        found = json.loads(choice.message.content)
        assert found["a"] in ("x", "yy") and found["b"] <= 99 and choice.finish_reason == "stop"


def test_json_objects(loaded: Api) -> None:
    text = chat(loaded, response_format={"type": "json_object"}, max_tokens=12).choices[0].message.content
    assert text.startswith("{")


def test_embeddings(loaded: Api) -> None:
    texts = ["A cat sat on the mat.", "A dog lay on the rug.", "Interest rates rose by two percent."]
    answer = loaded.client.embeddings.create(model="f32.gguf", input=texts)  # the client asks for base64
    vectors = torch.tensor([one.embedding for one in answer.data])
    assert vectors.shape == (3, 576) and torch.allclose(vectors.norm(dim=1), torch.ones(3), atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    floats = loaded.client.embeddings.create(model="f32.gguf", input=texts[0], encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(vectors[0].tolist(), abs=1e-3)
    model = loaded.state.host.model
    ids = model.tokenizer(texts[0], return_tensors="pt").input_ids
    states = model(ids, output_hidden_states="last", use_cache=False).hidden_states[-1][0]
    mean = torch.nn.functional.normalize(states.mean(dim=0), dim=0)
    assert torch.allclose(mean, vectors[0], atol=1e-3)
    assert answer.usage.prompt_tokens == sum(len(model.tokenizer.encode(text)) for text in texts)


def test_the_asynchronous_client(loaded: Api) -> None:
    async def ask() -> tuple[str, str]:
        async with loaded.async_client as client:
            answer = await client.chat.completions.create(model="x", messages=QUESTION, max_tokens=6, temperature=0)  # type: ignore[arg-type]
            stream = await client.chat.completions.create(
                model="x", messages=QUESTION, max_tokens=6, temperature=0, stream=True  # type: ignore[arg-type]
            )
            return answer.choices[0].message.content or "", "".join([c.choices[0].delta.content or "" async for c in stream])

    whole, streamed = asyncio.run(ask())
    assert whole and whole == streamed


def test_errors_reach_the_client_as_its_own(loaded: Api) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(loaded, extra_body={"no_such_field": 1})
    assert caught.value.param == "no_such_field" and caught.value.code == "unknown_field"
    with pytest.raises(openai.BadRequestError) as caught:
        complete(loaded, prompt="word " * 2000)
    assert caught.value.code == "context_length_exceeded" and "1024" in caught.value.message
    with pytest.raises(openai.BadRequestError, match="tool calls are not supported"):
        chat(loaded, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError, match="not loaded"):
        chat(loaded, model="tiny.gguf")


def test_a_text_ends_where_the_context_does(loaded: Api) -> None:
    model = loaded.state.host.model
    ids = model.tokenizer.encode("One two three. " * 300)[:1020]
    answer = complete(loaded, prompt=ids, max_tokens=None)
    assert answer.choices[0].finish_reason == "length" and answer.usage.total_tokens == 1024
    assert math.isclose(answer.usage.completion_tokens, 4)
