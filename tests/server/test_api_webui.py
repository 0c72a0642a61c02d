"""Requests as clients of text-generation-webui's API send them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from api_server import Api, error_of, eventually

pytestmark = pytest.mark.once

PROMPT = "The capital of France is"

WEBUI_DEFAULTS: dict[str, Any] = {
    "preset": None, "dynatemp_low": 1, "dynatemp_high": 1, "dynatemp_exponent": 1, "smoothing_factor": 0, "smoothing_curve": 1,
    "min_p": 0, "top_k": 0, "typical_p": 1, "xtc_threshold": 0.1, "xtc_probability": 0, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "tfs": 1, "top_a": 0, "top_n_sigma": 0, "adaptive_target": 0, "adaptive_decay": 0.9, "dry_multiplier": 0,
    "dry_allowed_length": 2, "dry_base": 1.75, "repetition_penalty": 1, "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0, "repetition_penalty_range": 1024, "penalty_alpha": 0, "guidance_scale": 1, "mirostat_mode": 0,
    "mirostat_tau": 5, "mirostat_eta": 0.1, "prompt_lookup_num_tokens": 0, "max_tokens_second": 0, "do_sample": True,
    "dynamic_temperature": False, "temperature_last": False, "auto_max_new_tokens": False, "ban_eos_token": False,
    "add_bos_token": True, "skip_special_tokens": True, "static_cache": False, "truncation_length": 0, "seed": -1,
    "sampler_priority": "repetition_penalty\ndry\ntemperature\ntop_k\ntop_p\nmin_p\nxtc",
    "custom_token_bans": "", "negative_prompt": "", "dry_sequence_breakers": '"\\n", ":"',
    "grammar_string": "", "best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": None, "logprobs": None,
    "max_tokens": 8, "n": 1, "presence_penalty": 0, "stop": None, "stream": False, "suffix": None, "temperature": 1, "top_p": 1,
    "user": None, "model": None,
}  # fmt: skip
"""What a client sends that fills in every field of the webui's own schema."""


def plain(api: Api, **arguments: Any) -> str:
    """What `generate()` writes."""
    model = api.state.host.model
    ids = model.tokenizer(PROMPT, return_tensors="pt").input_ids
    output = model.generate(ids, **{"max_new_tokens": 8, "do_sample": False, "assistant_model": False, **arguments})
    return str(model.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_request_with_every_field(loaded: Api) -> None:
    assert loaded.text(prompt=PROMPT, **{**WEBUI_DEFAULTS, "seed": 3}) == loaded.text(
        prompt=PROMPT, temperature=1, max_tokens=8, seed=3
    )
    chat = {key: value for key, value in WEBUI_DEFAULTS.items() if key not in ("best_of", "echo", "suffix", "logprobs")}
    chat |= {
        "messages": [{"role": "user", "content": "Hi"}], "mode": "instruct", "instruction_template": None, "character": None,
        "bot_name": None, "name1": "You", "continue_": False, "enable_thinking": True, "reasoning_effort": "medium",
        "chat_instruct_command": "Continue <|prompt|>", "tools": None, "function_call": None,
    }  # fmt: skip
    answer = loaded.post("/v1/chat/completions", chat)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"


def test_greedy_in_both_ways(loaded: Api) -> None:
    expected = plain(loaded)
    assert loaded.text(prompt=PROMPT, max_tokens=8, temperature=0) == expected
    assert loaded.text(prompt=PROMPT, max_tokens=8, do_sample=False, temperature=0.7, top_k=20) == expected
    assert loaded.text(prompt=PROMPT, max_new_tokens=8, do_sample=False) == expected
    assert loaded.text(prompt=PROMPT, max_length=13, do_sample=False) == expected


@pytest.mark.parametrize(
    ("request_", "arguments"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": False}, {"penalty_alpha": 0.6, "top_k": 4}),
        ({"penalty_alpha": 0.6}, {"penalty_alpha": 0.6, "top_k": 4}),
        ({"num_beams": 3, "length_penalty": 0.5}, {"num_beams": 3, "length_penalty": 0.5}),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
         {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}),
        ({"prompt_lookup_num_tokens": 4, "temperature": 0}, {}),
        ({"dola_layers": "high", "temperature": 0}, {"dola_layers": "high"}),
        ({"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "temperature": 0},
         {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3}),
        ({"ban_eos_token": True, "temperature": 0, "min_new_tokens": 8}, {"min_new_tokens": 8}),
    ],
)  # fmt: skip
def test_ways_of_decoding(loaded: Api, request_: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert loaded.text(prompt=PROMPT, max_tokens=8, **request_) == plain(loaded, **arguments)


def test_guidance(loaded: Api) -> None:
    negative = torch.tensor([loaded.state.host.model.tokenizer.encode("London is nice.")])
    expected = plain(loaded, guidance_scale=1.7, negative_prompt_ids=negative)
    bos = loaded.state.host.model.tokenizer.bos_token_id
    with_bos = plain(loaded, guidance_scale=1.7, negative_prompt_ids=torch.cat([torch.tensor([[bos]]), negative], dim=1))
    found = loaded.text(prompt=PROMPT, max_tokens=8, temperature=0, guidance_scale=1.7, negative_prompt="London is nice.")
    assert found == with_bos
    assert loaded.text(prompt=PROMPT, max_tokens=8, temperature=0, guidance_scale=1.7) == plain(loaded, guidance_scale=1.7)
    assert expected


def test_an_assistant_by_name(loaded: Api, every_round: None) -> None:
    expected = plain(loaded)
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = loaded.post("/v1/completions", {**body, "assistant_model": "f32.gguf", "num_assistant_tokens": 3}).json()
    assert answer["choices"][0]["text"] == expected
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0 and details["rejected_prediction_tokens"] == 0
    assert loaded.text(**body, assistant_model=False) == expected
    refused = loaded.post("/v1/completions", {**body, "assistant_model": "../f32.gguf"})
    assert refused.status_code == 400 and error_of(refused)["param"] == "assistant_model"
    loaded.post("/v1/internal/model/unload")
    loaded.state.host.load("f32.gguf", {})


def test_the_webuis_own_parameters(loaded: Api) -> None:
    tokenizer = loaded.state.host.model.tokenizer
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    paris = tokenizer.encode(" Paris")[0]
    assert "Paris" not in loaded.text(**body, custom_token_bans=f"{paris}, {paris}")
    cut = loaded.post("/v1/completions", {**body, "prompt": "word " * 50 + PROMPT, "truncation_length": 13}).json()
    assert cut["usage"]["prompt_tokens"] == 5
    assert cut["choices"][0]["text"] == loaded.text(**{**body, "prompt": f" {PROMPT}"})
    grammar = 'root ::= " " ("Rome" | "Oslo") "."'
    assert loaded.text(**body, grammar_string=grammar) in (" Rome.", " Oslo.")
    chat = {**body, "prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "max_tokens": 40}
    shown = loaded.post("/v1/completions", {**chat, "ban_eos_token": True}).json()
    assert shown["usage"]["completion_tokens"] == 40
    special = {"logit_bias": {str(tokenizer.encode("<|im_start|>")[0]): 100}, "max_tokens": 2}
    assert loaded.text(**{**body, **special}) == ""
    assert loaded.text(**{**body, **special}, skip_special_tokens=False) == "<|im_start|><|im_start|>"
    repeated = loaded.text(**{**body, "max_tokens": 24}, repetition_penalty=1.5, repetition_penalty_range=4)
    assert repeated != loaded.text(**{**body, "max_tokens": 24}, repetition_penalty=1.5)
    assert loaded.text(**body, epsilon_cutoff=3, do_sample=None) == plain(loaded)
    assert loaded.text(**body, n_sink=None) == plain(loaded)
    refused = loaded.post("/v1/completions", {**body, "n_sink": 4})
    assert refused.status_code == 400 and "loaded with None" in error_of(refused)["message"]


def test_continuing_an_answer(loaded: Api) -> None:
    messages = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "One, two, three,"}]
    answer = loaded.post("/v1/chat/completions", {"messages": messages, "continue_": True, "temperature": 0, "max_tokens": 3})
    assert "four" in answer.json()["choices"][0]["message"]["content"]
    prompt = loaded.post("/v1/internal/chat-prompt", {"messages": messages, "continue_": True}).json()["prompt"]
    assert prompt.endswith("One, two, three,")
    refused = loaded.post("/v1/chat/completions", {"messages": messages[:1], "continue_": True})
    assert error_of(refused)["param"] == "continue_"


def test_contradictions_are_told(loaded: Api) -> None:
    for fields, param in (
        ({"penalty_alpha": 0.6, "do_sample": True}, "penalty_alpha"), ({"temperature": 0, "do_sample": True}, "temperature"),
        ({"num_beams": 2, "n": 3}, "n"), ({"num_beams": 2, "do_sample": True, "seed": 1}, "seed"),
        ({"sampler_priority": ["top_k", "temperature"], "temperature": 0.5, "top_k": 5}, "sampler_priority"),
        ({"temperature_last": True, "temperature": 0.5, "min_p": 0.1}, "temperature_last"),
        ({"max_tokens": 0}, "max_tokens"), ({"n": 9}, "n"), ({"prompt": ["x"] * 9}, "prompt"), ({"prompt": ""}, "prompt"),
        ({"prompt": [1_000_000]}, "prompt"), ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"suppress_tokens": [1_000_000]}, "suppress_tokens"), ({"force_words_ids": [[5]]}, "force_words_ids"),
        ({"custom_token_bans": "1,x"}, "custom_token_bans"), ({"best_of": 2, "stream": True}, "best_of"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"), ({"grammar_string": "root ::= ("},
                                                                                        "grammar_string"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}},
         "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"), ({"instruction_template_str": "x"}, None),
    ):  # fmt: skip
        answer = loaded.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, **fields})
        assert answer.status_code == 400, (fields, answer.text)
        assert param is None or error_of(answer)["param"] == param, (fields, answer.text)


def test_orders_of_samplers_that_make_no_difference(loaded: Api) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "sampler_priority": ["top_k", "min_p", "temperature"]}
    for fields in ({"temperature": 0.5}, {"temperature": 1, "top_k": 5},
                   {"temperature": 0, "top_k": 5, "temperature_last": True},
                   {"temperature": 0.5, "top_k": 0, "min_p": 0, "temperature_last": True}):  # fmt: skip
        assert loaded.post("/v1/completions", {**body, **fields}).status_code == 200


def test_what_generate_refuses_is_a_400(loaded: Api) -> None:
    for fields in ({"num_beams": 2, "prompt_lookup_num_tokens": 3}, {"cache_implementation": "static"},
                   {"watermarking_config": {"no_such": 1}}, {"dola_layers": "middle"},
                   {"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 0.1},
                   {"num_assistant_tokens_schedule": "x", "assistant_model": "f32.gguf"}):  # fmt: skip
        answer = loaded.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, **fields})
        assert answer.status_code == 400, (fields, answer.text)
        assert error_of(answer)["param"] in fields


def test_tokens(loaded: Api) -> None:
    text = "Hello, wörld! 你好"
    encoded = loaded.post("/v1/internal/encode", {"text": text}).json()
    assert encoded["length"] == len(encoded["tokens"]) > 3
    assert loaded.post("/v1/internal/token-count", {"text": text}).json() == {"length": encoded["length"]}
    assert loaded.post("/v1/internal/decode", {"tokens": encoded["tokens"]}).json() == {"text": text}
    assert error_of(loaded.post("/v1/internal/decode", {"tokens": [10**6]}))["param"] == "tokens"


def test_logits(loaded: Api) -> None:
    model = loaded.state.host.model
    row = torch.softmax(model(model.tokenizer(PROMPT, return_tensors="pt").input_ids, use_cache=False).logits[0, -1], dim=-1)
    found = loaded.post("/v1/internal/logits", {"prompt": PROMPT, "top_logits": 4}).json()
    assert list(found) == model.tokenizer.convert_ids_to_tokens(row.topk(4).indices.tolist())
    assert list(found.values()) == pytest.approx(row.topk(4).values.tolist(), abs=0.01)
    sampled = {"prompt": PROMPT, "use_samplers": True, "top_k": 2, "temperature": 0.5}
    kept = loaded.post("/v1/internal/logits", sampled).json()
    assert len(kept) == 2 and sum(kept.values()) == pytest.approx(1, abs=1e-4)
    assert len(loaded.post("/v1/internal/logits", {"prompt": PROMPT}).json()) == 50


def test_models_come_and_go(loaded: Api) -> None:
    names = loaded.get("/v1/internal/model/list").json()["model_names"]
    assert sorted(names) == ["f32.gguf", "notes.gguf", "tiny.gguf"]
    arguments = {"loader": "llamacpp_HF", "ctx_size": 512, "threads": 1, "cache_type": "fp16", "gpu_layers": 0}
    assert loaded.post("/v1/internal/model/load", {"model_name": "tiny.gguf", "args": arguments}).json() == "OK"
    info = loaded.get("/v1/internal/model/info").json()
    assert info == {"model_name": "tiny.gguf", "lora_names": [], "loader": "llamacpp_HF"}
    assert loaded.state.host.model.config.max_position_embeddings == 512
    assert loaded.get("/v1/models").json()["data"][0]["id"] == "tiny.gguf"
    for name, status in (("../f32.gguf", 404), ("/etc/passwd", 404), ("none.gguf", 404), ("notes.gguf", 400)):
        answer = loaded.post("/v1/internal/model/load", {"model_name": name})
        assert answer.status_code == status and error_of(answer)["param"] == "model_name"
        assert str(loaded.state.host.model_dir) not in answer.text, "where the files lie is nobody's business"
        assert loaded.get("/v1/internal/model/info").json()["model_name"] == "tiny.gguf"
    assert loaded.post("/v1/internal/model/unload").json() == "OK"
    assert loaded.post("/v1/internal/model/unload").json() == "OK", "again"
    assert loaded.get("/v1/internal/model/info").json()["model_name"] == "None"
    assert loaded.get("/health").status_code == 503 and loaded.get("/v1/models").json()["data"] == []
    assert loaded.post("/v1/completions", {"prompt": "x"}).status_code == 503


def test_a_draft_model_of_the_load(loaded: Api, every_round: None) -> None:
    load = {"model_name": "tiny.gguf", "args": {"model_draft": "tiny.gguf", "draft_max": 3, "ctx_size": 256, "threads": 1}}
    wrong = {**load, "args": {"model_draft": "../f32.gguf"}}
    answer = loaded.post("/v1/internal/model/load", wrong)
    assert answer.status_code == 404 and error_of(answer)["param"] == "args.model_draft"
    assert loaded.post("/v1/internal/model/load", load).status_code == 200
    body = {"prompt": [1, 5, 9], "max_tokens": 12, "temperature": 0, "ban_eos_token": True}
    drafted = loaded.post("/v1/completions", body).json()
    assert drafted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert loaded.text(**body, assistant_model=False) == drafted["choices"][0]["text"]


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"ctx_sise": 5}, "args.ctx_sise"), ({"ctx_size": "big"}, "args.ctx_size"), ({"cache_type": "q9"}, "args.cache_type"),
        ({"n_threads": 0}, "args.n_threads"), ({"state_dir": "/tmp"}, "args.state_dir"),
        ({"lora_path": "/x"}, "args.lora_path"), ({"model_draft": 5}, "args.model_draft"), ({"draft_max": 0}, "args.draft_max"),
        ({"trust_remote_code": True}, "args.trust_remote_code"),
    ],
)  # fmt: skip
def test_options_of_a_load_are_checked(loaded: Api, arguments: dict[str, Any], param: str) -> None:
    answer = loaded.post("/v1/internal/model/load", {"model_name": "tiny.gguf", "args": arguments})
    assert answer.status_code == 400 and error_of(answer)["param"] == param
    assert loaded.state.host.name == "f32.gguf", "and nothing was unloaded"


def test_stop_generation(loaded: Api) -> None:
    import threading

    answers: list[Any] = []
    body = {"prompt": "Once upon a time", "max_tokens": 900, "ban_eos_token": True, "temperature": 0}
    thread = threading.Thread(target=lambda: answers.append(loaded.post("/v1/completions", body)))
    thread.start()
    assert eventually(lambda: loaded.state.host.calls == 1)
    assert loaded.post("/v1/internal/stop-generation").json() == "OK"
    thread.join(30)
    (choice,) = answers[0].json()["choices"]
    assert answers[0].status_code == 200 and choice["finish_reason"] == "stop"
    assert answers[0].json()["usage"]["completion_tokens"] < 900


def test_a_stream_as_the_webui_sends_it(loaded: Api) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True, "mode": "instruct"}
    lines = [line for line in loaded.post("/v1/chat/completions", body).text.split("\n\n") if line]
    assert all(re.match(r"data: (\{.*\}|\[DONE\])$", line) for line in lines) and lines[-1] == "data: [DONE]"
    parsed = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert parsed[0]["choices"][0]["delta"]["role"] == "assistant"
    assert parsed[-1]["choices"][0]["finish_reason"] in ("stop", "length")
