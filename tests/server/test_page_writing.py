"""A text for the page is the text of the API, with everything that can be seen of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import api_server
from transformers_llamacpp.errors import ContextOverflowError, InvalidInputError, LlamaCppError
from transformers_llamacpp.server.page.methods import request_fields
from transformers_llamacpp.server.page.sessions import Sessions
from transformers_llamacpp.server.page.texts import error_html
from transformers_llamacpp.server.page.trace import Trace
from transformers_llamacpp.server.page.writing import PageJob, Progress, as_request, chat_text_of, write

pytestmark = pytest.mark.once

PROMPT = "The rivers of France are the Seine, the Loire, the Rhône and the"
CHAT = [{"role": "user", "content": "What is 2+2?"}]


def job_for(api: api_server.Api) -> PageJob:
    return PageJob(api.state.host.changes)


def written(api: api_server.Api, kind: str, fields: dict[str, Any], top: int = 3) -> tuple[Progress, Trace]:
    """The end of it."""
    job = job_for(api)
    *_, last = write(api.state.host, kind, fields, top, job)
    assert job.trace is not None
    return last, job.trace


WAYS: dict[str, dict[str, Any]] = {
    "sampling": {"seed": 3},
    "greedy": {"method": "greedy"},
    "contrastive": {"method": "contrastive"},
    "beams": {"method": "beams", "num_beams": 3},
    "groups": {"method": "beams", "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "guidance": {"method": "greedy", "guidance_scale": 2.0, "negative_prompt": "Germany"},
    "guided beams": {"method": "beams", "num_beams": 2, "guidance_scale": 2.0, "negative_prompt": "Germany"},
    "prompt lookup": {"method": "greedy", "speculation": "prompt lookup"},
    "draft model": {"seed": 3, "speculation": "draft model", "draft_model": "f32.gguf"},
    "both": {"method": "greedy", "speculation": "both", "draft_model": "f32.gguf"},
    "dola": {"method": "greedy", "dola_layers": "low"},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_api_s(loaded: api_server.Api, every_round: None, way: str) -> None:
    fields = {"prompt": PROMPT, **request_fields({"max_new_tokens": 10, **WAYS[way]}, loaded.state.host.sources())}
    last, trace = written(loaded, "completion", fields)
    assert last.text == loaded.text(**fields)
    assert last.new_tokens == 10 if last.finish == "length" else last.finish == "end" and last.new_tokens <= 10
    assert "".join(token.text for token in trace.tokens) == last.text
    for token in trace.tokens:
        assert token.probability is not None and 0 < token.probability <= 1
        assert sum(one.chosen for one in token.alternatives) == 1 and 3 <= len(token.alternatives) <= 7
        assert (token.guided is not None) == (way == "guidance")
    if way == "greedy":
        assert all(token.alternatives[0].chosen for token in trace.tokens)
    if way == "guidance":
        assert any(token.changed for token in trace.tokens)
    if way in ("prompt lookup", "both", "draft model"):
        assert last.stats.drafted_tokens > 0
    assert fields.get("num_beams") or (trace.times == sorted(trace.times) and len(trace.times) == last.new_tokens)


def test_nothing_is_kept_where_nothing_is_wanted(loaded: api_server.Api) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 4, "do_sample": False}
    (plain, none), (same, some) = written(loaded, "completion", fields, 0), written(loaded, "completion", fields, 5)
    assert plain.text == same.text and len(none.tokens) == len(some.tokens) == 4
    assert not any(token.alternatives for token in none.tokens) and all(len(token.alternatives) == 5 for token in some.tokens)


def test_a_chat_ends_by_itself_and_goes_on(loaded: api_server.Api) -> None:
    fields = {"messages": CHAT, "do_sample": False}
    whole, _ = written(loaded, "chat", {**fields, "max_tokens": 60})
    assert whole.finish == "end" and whole.stats.new_tokens < 60
    half, _ = written(loaded, "chat", {**fields, "max_tokens": 6})
    assert half.finish == "length" and whole.text.startswith(half.text)
    messages = [*CHAT, {"role": "assistant", "content": half.text}]
    rest, _ = written(loaded, "chat", {"messages": messages, "do_sample": False, "max_tokens": 60, "continue_": True})
    assert half.text + rest.text == whole.text


def test_progress_of_a_prompt_and_of_beams(loaded: api_server.Api) -> None:
    job, seen = job_for(loaded), []
    prompt = " ".join(f"Item {number} costs {number * 7 % 100} coins." for number in range(40))
    for progress in write(loaded.state.host, "completion", {"prompt": prompt, "max_tokens": 30, "num_beams": 2}, 0, job):
        seen.append(progress)
    assert any(0 < progress.evaluated < progress.total for progress in seen)
    leading = [progress for progress in seen if progress.leading]
    assert leading and all(progress.text or progress.new_tokens < 3 for progress in leading) and not seen[-1].leading
    assert job.cells is not None and job.cells.used > 300


@pytest.mark.parametrize("finish", ["stopped by the user", "closed"])
def test_a_text_that_is_ended(loaded: api_server.Api, finish: str) -> None:
    job = job_for(loaded)
    running = write(loaded.state.host, "completion", {"prompt": PROMPT, "max_tokens": 500}, 2, job)
    for progress in running:
        if progress.new_tokens > 2:
            break
    if finish == "closed":
        running.close()
    else:
        job.end()
        *_, progress = running
        assert progress.finish == "stopped" and progress.text
    assert loaded.idle


def test_a_prompt_that_is_stopped(loaded: api_server.Api) -> None:
    job = job_for(loaded)
    loaded.state.host.model.forget()
    fields = {"prompt": "Some words that nobody has said before. " * 100, "max_tokens": 5}
    for progress in write(loaded.state.host, "completion", fields, 2, job):
        if progress.evaluated:
            job.end()
    assert progress.finish == "stopped" and progress.stats is None and progress.evaluated < progress.total


def test_a_context_that_gets_full(loaded: api_server.Api) -> None:
    prompt = "word " * 1015
    last, _ = written(loaded, "completion", {"prompt": prompt, "max_tokens": 500, "ban_eos_token": True})
    assert last.finish == "context" and last.stats.new_tokens < 20
    with pytest.raises(ContextOverflowError, match="n_ctx"):
        written(loaded, "completion", {"prompt": prompt * 2, "max_tokens": 5})


def test_a_model_that_is_taken_away(loaded: api_server.Api) -> None:
    host, job = loaded.state.host, job_for(loaded)
    running = write(host, "completion", {"prompt": PROMPT, "max_tokens": 900}, 0, job)
    next(running)
    other = threading.Thread(target=host.unload)
    other.start()
    with pytest.raises(LlamaCppError, match="unloaded"):
        list(running)
    other.join(20)
    with pytest.raises(LlamaCppError, match="no model is loaded"):
        list(write(host, "completion", {"prompt": PROMPT, "max_tokens": 9}, 0, job_for(loaded)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "", "max_tokens": 3}, "prompt is empty"),
        ({"prompt": PROMPT, "max_tokens": 3, "num_beams": 4, "num_beam_groups": 3}, "num_beam"),
        ({"prompt": PROMPT, "max_tokens": 3, "assistant_model": "gone.gguf"}, "no model"),
        ({"prompt": PROMPT, "max_tokens": 3, "assistant_model": "notes.gguf"}, "GGUF"),
    ],
)
def test_what_cannot_be_is_said(loaded: api_server.Api, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LlamaCppError, match=message) as told:
        written(loaded, "completion", fields)
    shown = error_html(told.value)
    assert str(loaded.state.host.model_dir) not in shown and message in shown, "where files lie is nobody's business"


def test_fields_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="max_tokens"):
        as_request("chat", {"messages": CHAT, "max_tokens": "many"})
    with pytest.raises(InvalidInputError, match="colour"):
        as_request("completion", {"prompt": "x", "colour": "red"})


def test_a_chat_as_the_model_reads_it(loaded: api_server.Api) -> None:
    text = chat_text_of(loaded.state.host, as_request("chat", {"messages": CHAT}))
    assert "What is 2+2?" in text and text.endswith("<|im_start|>assistant\n")
    with pytest.raises(LlamaCppError, match="role"):
        chat_text_of(loaded.state.host, as_request("chat", {"messages": [{"role": "wizard", "content": "x"}]}))


def test_one_text_at_a_time_for_each_tab(loaded: api_server.Api) -> None:
    sessions = Sessions(loaded.state.host)
    first = sessions.begin("a")
    assert first is not None and sessions.begin("a") is None and sessions.begin("b") is not None and sessions.busy("a")
    sessions.stop("a")
    assert first.stopped and first.stop.is_set()
    sessions.end("a")
    sessions.stop("a")
    assert not sessions.busy("a") and sessions.begin("a") is not None
