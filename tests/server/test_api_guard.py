"""Who may do what: keys, pages of other sites, sizes, and every field that is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from api_server import error_of
from transformers_llamacpp import cli
from transformers_llamacpp.server.app import create_app
from transformers_llamacpp.server.host import ModelHost
from transformers_llamacpp.server.limits import Limits, ServeOptions

pytestmark = pytest.mark.once

KEY = "s3cret"
ROUTES = (
    ("GET", "/v1/models"), ("GET", "/v1/models/x"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"), ("GET", "/metrics"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/v1/internal/health"),
    ("POST", "/v1/internal/encode"), ("POST", "/v1/internal/model/unload"), ("GET", "/v1/internal/model/list"), ("GET", "/"),
)  # fmt: skip


def load_none(source: str, options: Mapping[str, Any]) -> Any:
    raise AssertionError("nothing is loaded here")


@pytest.fixture
def empty_host(tmp_path: Path) -> ModelHost:
    return ModelHost(tmp_path, {}, load_none)


def client_of(host: ModelHost, **options: Any) -> TestClient:
    return TestClient(create_app(host, ServeOptions(page=False, **options)), base_url="http://127.0.0.1")


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nothing_without_the_key(empty_host: ModelHost, method: str, path: str) -> None:
    client = client_of(empty_host, api_key=KEY)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {KEY}x"}, {"authorization": KEY},
                    {"authorization": "Basic !"}, {"authorization": "Bearer "}):  # fmt: skip
        answer = client.request(method, path, headers=headers)
        assert answer.status_code == 401, (headers, answer.text)
        assert error_of(answer)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"].startswith("Bearer" if path.startswith("/v1/") else "Basic")
    for headers in ({"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY} "}):
        assert client.request(method, path, headers=headers).status_code != 401
    assert client.request(method, path, auth=("anybody", KEY)).status_code != 401


def test_health_needs_no_key_and_says_little(empty_host: ModelHost) -> None:
    answer = client_of(empty_host, api_key=KEY).get("/health")
    assert answer.status_code == 503 and answer.json() == {"status": "no model"}


def test_the_page_is_behind_the_key_too(empty_host: ModelHost) -> None:
    client = TestClient(create_app(empty_host, ServeOptions(api_key=KEY)), base_url="http://127.0.0.1")
    assert client.get("/").status_code == 401
    assert client.get("/", auth=("", KEY)).status_code == 200


def test_pages_of_other_sites(empty_host: ModelHost) -> None:
    """A browser sends simple requests of any page without asking first; none of them may unload the model."""
    client = client_of(empty_host)
    for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
                    {"origin": "http://127.0.0.1:9"}):  # fmt: skip
        answer = client.post("/v1/internal/model/unload", headers=headers)
        assert answer.status_code == 403 and error_of(answer)["code"] == "cross_origin"
    assert client.post("/v1/internal/model/unload", headers={"origin": "http://127.0.0.1"}).status_code == 200
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/docs", headers=link).status_code == 200, "a link to the server may be followed"


def test_cors_only_where_asked_for(empty_host: ModelHost) -> None:
    origin = {"origin": "https://app.example"}
    ask = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    closed, opened = client_of(empty_host), client_of(empty_host, cors_origins=("https://app.example",), api_key=KEY)
    assert "access-control-allow-origin" not in closed.options("/v1/models", headers=ask).headers
    answer = opened.options("/v1/models", headers=ask)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin["origin"]
    answer = opened.get("/v1/models", headers={**origin, "authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin["origin"]
    assert opened.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403


def test_large_bodies(empty_host: ModelHost) -> None:
    client = client_of(empty_host, limits=Limits(max_body=1000))
    body = json.dumps({"prompt": "x" * 1000}).encode()
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 413 and "--max-body" in error_of(answer)["message"]

    def pieces() -> Iterator[bytes]:  # sent without a length
        yield body[:600]
        yield body[600:]

    answer = client.post("/v1/completions", content=pieces(), headers=headers)
    assert answer.status_code == 413 and error_of(answer)["code"] == "request_too_large"


def test_what_is_no_request(empty_host: ModelHost) -> None:
    client = client_of(empty_host)
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=b'{"prompt": ', headers=headers)
    assert answer.status_code == 400 and error_of(answer)["code"] == "invalid_json"
    answer = client.post("/v1/completions", content=b"[" * 100_000, headers=headers)
    assert answer.status_code == 400
    for content in (b"", b"[]", b"3", b"null", b"\xff\xfe"):
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400 and error_of(answer), content
    answer = client.get("/v1/nothing")
    assert answer.status_code == 404 and "/v1/nothing" in error_of(answer)["message"]
    answer = client.get("/v1/completions")
    assert answer.status_code == 405 and error_of(answer)["code"] == "method_not_allowed"
    answer = client.post("/v1/completions", content=b'{"prompt": "x"}')
    assert answer.status_code == 415 and "Content-Type" in error_of(answer)["message"]
    answer = client.post("/v1/completions", json={"prompt": "x", "temprature": 1})
    assert "did you mean temperature" in error_of(answer)["message"]
    answer = client.post("/v1/completions", json={"prompt": "x", "num_return_sequences": 2})
    assert "its name here is n" in error_of(answer)["message"]


def test_without_a_model(empty_host: ModelHost) -> None:
    client = client_of(empty_host)
    for path, body in (
        ("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": "x"}), ("/v1/internal/encode", {"text": "x"}),
    ):  # fmt: skip
        answer = client.post(path, json=body)
        assert answer.status_code == 503 and error_of(answer)["code"] == "no_model", path
        assert "retry-after" in answer.headers


BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("no_such_field", 1, "unknown_field"), ("temprature", 1, "unknown_field"), ("num_return_sequences", 2, "unknown_field"),
    ("output_scores", True, "unknown_field"), ("temperature", "0.5", "invalid_type"), ("temperature", -1, "invalid_value"),
    ("top_p", 1.5, "invalid_value"), ("top_k", 1.5, "invalid_type"), ("top_k", True, "invalid_type"),
    ("n", 0, "invalid_value"), ("n", "2", "invalid_type"), ("max_tokens", -1, "invalid_value"), ("stop", 5, "invalid_type"),
    ("seed", 1.5, "invalid_type"), ("seed", -2, "invalid_value"), ("stream", "yes", "invalid_type"),
    ("logit_bias", {"x": 1, "1": "a"}, "invalid_type"), ("penalty_alpha", 2, "invalid_value"),
    ("num_beams", 0, "invalid_value"),
    ("guidance_scale", [], "invalid_type"), ("negative_prompt", 1, "invalid_type"), ("presence_penalty", 3, "invalid_value"),
    ("prompt_lookup_num_tokens", 1000, "invalid_value"), ("assistant_model", 3, "invalid_type"),
    ("do_sample", 1, "invalid_type"),
    ("suppress_tokens", [-1], "invalid_value"), ("bad_words_ids", [[]], "invalid_value"), ("early_stopping", 3, "invalid_type"),
    ("response_format", {"type": "xml"}, "invalid_value"), ("typical_p", 0, "invalid_value"),
    ("dola_layers", 3, "invalid_type"),
    ("mirostat_mode", 2, "unsupported"), ("dry_multiplier", 0.8, "unsupported"), ("xtc_probability", 0.5, "unsupported"),
    ("sampler_priority", ["top_q"], "invalid_value"), ("preset", "Big O", "unsupported"), ("suffix", "x", "unsupported"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "code"), BAD_FIELDS)
def test_a_bad_field_is_named(empty_host: ModelHost, name: str, value: Any, code: str) -> None:
    answer = client_of(empty_host).post("/v1/completions", json={"prompt": "x", name: value})
    error = error_of(answer)
    assert answer.status_code == 400 and error["code"] == code, error
    assert (error["param"] or "").split(".")[0] == name and name in error["message"], error


def test_numbers_that_are_none(empty_host: ModelHost) -> None:
    for text in ("NaN", "Infinity", "1e999"):
        answer = client_of(empty_host).post(
            "/v1/completions", content=f'{{"prompt": "x", "temperature": {text}}}', headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400 and error_of(answer)["param"] == "temperature"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": "x", "foo": 1}], "messages.0.foo"),
        ([{"content": "x"}], "messages.0.role"),
    ],
)
def test_bad_messages_are_named(empty_host: ModelHost, messages: Any, param: str) -> None:
    answer = client_of(empty_host).post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400 and error_of(answer)["param"] == param


def test_the_document_describes_every_field(empty_host: ModelHost) -> None:
    from transformers_llamacpp.options import option

    client = client_of(empty_host)
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["ChatRequest"]["properties"]
    assert fields["top_k"]["description"] == option("top_k").help
    assert fields["num_beams"]["description"] == option("num_beams").help
    for name in ("CompletionRequest", "ChatRequest"):
        bare = [one for one, field in schemas[name]["properties"].items() if "$ref" not in str(field) and not field.get(
            "description")]  # fmt: skip
        assert set(bare) <= {"stream_options", "parallel_tool_calls"}, bare
    page = client.get("/docs").text
    assert "/v1/chat/completions" in page and "penalty_alpha" in page and "http://" not in page and "https://" not in page


@pytest.mark.parametrize(
    "arguments", [["--host", "0.0.0.0"], ["--max-choices", "0"], ["--api-key", "schlüssel"], ["--host", "nowhere.example"]]
)
def test_flags_that_cannot_be(arguments: list[str], tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv(cli.KEY_VARIABLE, raising=False)
    assert cli.main(["serve", "--model-dir", str(tmp_path), *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
