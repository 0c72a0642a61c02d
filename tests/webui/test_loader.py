"""The loader in a running webui, seen from its API and its command line."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import psutil
import pytest
import torch

import tiny_gguf
from tiny_lora import write_lora
from transformers_llamacpp import LlamaCppForCausalLM
from webui import folders
from webui.driver import Webui, WebuiEnded

pytestmark = pytest.mark.once

FLAGS = ("--extensions", "llamacpp_hf", "--threads", "1", "--threads-batch", "1", "--batch-size", "64", "--ubatch-size", "64")
LOADER = {"loader": "llamacpp_HF"}
PROMPT = "The capital of France is"
STORY = "A fox saw a crow. The crow had a piece of cheese. " * 6 + "A fox saw a"
GREEDY = {"temperature": 0, "max_tokens": 16}
STATS = re.compile(
    r"llamacpp_HF: (?:prompt (?P<prompt>\d+) tokens, (?P<reused>\d+) reused(?: \(\w+\))?|ended before its prompt was read); "
    r"(?P<new>\d+) new tokens; (?P<decodes>\d+) decodes of (?P<tokens>\d+) tokens"
    r"(?:; (?P<accepted>\d+) of (?P<drafted>\d+) drafted tokens accepted)?"
)


class Stats:
    """What the webui's log says of the answers."""

    def __init__(self, webui: Webui) -> None:
        self.webui = webui
        self.known = len(self.all())

    def all(self) -> list[dict[str, int]]:
        found = STATS.finditer(" ".join(self.webui.log().split()))  # its lines are broken anywhere
        return [{name: int(number or 0) for name, number in row.groupdict().items()} for row in found]

    def next(self, limit: float = 20.0) -> dict[str, int]:
        """Of the answer after those that are known."""
        end = time.monotonic() + limit
        while len(rows := self.all()) <= self.known:
            assert time.monotonic() < end, f"no more statistics\n{self.webui.log()[-2000:]}"
            time.sleep(0.05)
        self.known += 1
        return rows[self.known - 1]


def make_folder(folder: Path, *models: Path) -> Path:
    folders.make(folder)
    folders.install(folder)
    for model in models:
        folders.add_model(folder, model)
    return folder


@pytest.fixture(scope="module")
def webui(
    start_webui_for_module: Callable[..., Webui], tmp_path_factory: pytest.TempPathFactory,
    smollm2_f32_path: Path, smollm2_q4_0_path: Path, tiny_llama_path: Path,
) -> Webui:  # fmt: skip
    folder = make_folder(tmp_path_factory.mktemp("loader") / "webui", smollm2_f32_path, smollm2_q4_0_path, tiny_llama_path)
    (folder / "user_data" / "models" / "tiny").mkdir()
    folders.link(tiny_llama_path, folder / "user_data" / "models" / "tiny" / "model.gguf")
    folders.link(tiny_llama_path, folder / "user_data" / "models" / "tiny" / "mmproj-model.gguf")
    folders.add_model(folder, tiny_llama_path, "größe_模型.gguf")
    before = folders.hashes(folder)
    webui = start_webui_for_module(*FLAGS, "--nowebui", "--model", smollm2_f32_path.name, "--loader", "llamacpp_HF",
                                   "--ctx-size", "1024", folder=folder)  # fmt: skip
    webui.before = before  # type: ignore[attr-defined]
    return webui


@pytest.fixture
def loaded(webui: Webui, smollm2_f32_path: Path) -> Iterator[Webui]:
    """With the F32 model, whatever the test before left."""
    if webui.info()["model_name"] != smollm2_f32_path.name:
        webui.load(smollm2_f32_path.name, **LOADER, ctx_size=1024)
    yield webui


@pytest.fixture(scope="module")
def plain(smollm2_f32_path: Path) -> Iterator[Callable[..., str]]:
    """The same model without a webui: greedy text of a prompt, cold."""
    model = LlamaCppForCausalLM.from_pretrained(smollm2_f32_path, n_ctx=1024, n_threads=1, n_batch=64)

    def text(prompt: str, tokens: int = 16, **options: Any) -> str:
        model.forget()
        ids = with_bos(model, prompt)
        options = {"do_sample": False, **options}
        if "negative" in options:
            options["negative_prompt_ids"] = with_bos(model, options.pop("negative"))
        output = model.generate(ids, max_new_tokens=tokens, **options)
        return model.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

    yield text
    model.close()


def with_bos(model: Any, text: str) -> torch.Tensor:
    """Whatever the GGUF says, the webui puts it first."""
    ids = model.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    return torch.cat([torch.tensor([[model.tokenizer.bos_token_id]]), ids], dim=1)


def test_the_command_line_loads_with_it(webui: Webui, smollm2_f32_path: Path) -> None:
    assert webui.info()["model_name"] == smollm2_f32_path.name
    log = " ".join(webui.log().split())
    assert f'Loading "{smollm2_f32_path.name}" with llamacpp_HF' in log and "1024 tokens" in log


def test_the_text_is_that_of_the_library(loaded: Webui, plain: Callable[..., str]) -> None:
    stats = Stats(loaded)
    assert loaded.complete(PROMPT, **GREEDY) == plain(PROMPT)
    first = stats.next()
    assert first["new"] == first["decodes"] == 16 and first["tokens"] == first["prompt"] - first["reused"] + 15
    loaded.complete(PROMPT, **GREEDY)
    again = stats.next()
    assert again["reused"] == again["prompt"] - 1 and again["tokens"] == 16


@pytest.mark.parametrize(
    ("request_", "options", "width"),
    [
        ({"do_sample": False, "top_k": 4, "penalty_alpha": 0.6}, {"penalty_alpha": 0.6, "top_k": 4}, 4),
        ({"temperature": 0, "sampler_priority": ["penalty_alpha=0.5", "contrastive_k=6"]},
         {"penalty_alpha": 0.5, "top_k": 6}, 6),
        ({"temperature": 0, "do_sample": False, "penalty_alpha": 0.6}, {"penalty_alpha": 0.6, "top_k": 4}, 4),
        ({"temperature": 0, "guidance_scale": 1.5, "negative_prompt": "Berlin is"},
         {"guidance_scale": 1.5, "negative": "Berlin is"}, 2),
        ({"temperature": 0, "sampler_priority": ["guidance_scale=1.5", "negative_prompt=Berlin is"]},
         {"guidance_scale": 1.5, "negative": "Berlin is"}, 2),
    ],
    ids=["contrastive", "contrastive entry", "contrastive at temperature 0", "guidance", "guidance entry"],
)  # fmt: skip
def test_what_passes_caches_around(
    loaded: Webui, plain: Callable[..., str], request_: dict[str, Any], options: dict[str, Any], width: int
) -> None:
    stats = Stats(loaded)
    assert loaded.complete(PROMPT, max_tokens=16, **request_) == plain(PROMPT, **options)
    seen = stats.next()
    steps = seen["decodes"] - 1
    # the prompts may be in memory but for their last token
    assert steps in (seen["new"] - 1, seen["new"]) and width * steps <= seen["tokens"] <= width * steps + seen["prompt"]


def test_beams(loaded: Webui, plain: Callable[..., str]) -> None:
    stats = Stats(loaded)
    found = loaded.complete(PROMPT, max_tokens=12, do_sample=False, sampler_priority=["num_beams=3", "early_stopping=yes"])
    assert found == plain(PROMPT, 12, num_beams=3, early_stopping=True)
    assert stats.next()["tokens"] > 2 * 12


@pytest.mark.parametrize("entries", [(), ("draft_model=SmolLM2-135M-Instruct.Q4_0.gguf", "num_assistant_tokens=5")])
@pytest.mark.parametrize("lookup", [0, 6])
def test_drafts_change_nothing_but_the_number_of_decodes(
    loaded: Webui, plain: Callable[..., str], entries: tuple[str, ...], lookup: int
) -> None:
    stats = Stats(loaded)
    request = {"temperature": 0, "max_tokens": 32, "prompt_lookup_num_tokens": lookup}
    request |= {"sampler_priority": [*entries]} if entries else {}
    assert loaded.complete(STORY, **request) == plain(STORY, 32)
    seen = stats.next()
    assert seen["new"] == 32
    if lookup or entries:
        assert 0 < seen["accepted"] <= seen["drafted"] and seen["decodes"] < 32
    else:
        assert seen["drafted"] == 0 and seen["decodes"] >= 32  # one for each token, one or two for the prompt


@pytest.mark.parametrize("lookup", [0, 6])
@pytest.mark.parametrize("stop", [None, [" cheese"]])
def test_what_is_streamed_is_the_text(loaded: Webui, plain: Callable[..., str], lookup: int, stop: list[str] | None) -> None:
    request = {"prompt": STORY, "temperature": 0, "max_tokens": 32, "prompt_lookup_num_tokens": lookup, "stop": stop}
    events = list(loaded.stream("/v1/completions", request))
    text = "".join(event["choices"][0]["text"] for event in events)
    expected = plain(STORY, 32)
    assert " cheese" in expected
    assert text == (expected.partition(stop[0])[0] if stop else expected)
    assert loaded.complete(**request) == text
    assert len(events) > 5


def test_a_chat_counts_its_prompt(loaded: Webui) -> None:
    request = {"messages": [{"role": "user", "content": "Name a river."}], **GREEDY}
    answer = loaded.post("/v1/chat/completions", request)
    assert answer["usage"]["prompt_tokens"] > 5 and answer["choices"][0]["message"]["content"]
    streamed = "".join(
        event["choices"][0]["delta"].get("content") or "" for event in loaded.stream("/v1/chat/completions", request)
    )
    assert streamed == answer["choices"][0]["message"]["content"]


def test_logits_echo_and_grammar(loaded: Webui) -> None:
    assert len(loaded.post("/v1/internal/logits", {"prompt": PROMPT, "top_logits": 7})) == 7
    assert len(loaded.post("/v1/internal/logits", {"prompt": PROMPT, "top_logits": 7, "use_samplers": True})) == 7
    choice = loaded.post("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 2, **GREEDY})["choices"][0]
    known = [value for value in choice["logprobs"]["token_logprobs"] if value is not None]
    assert choice["text"].startswith(PROMPT) and len(known) >= 20 and all(value <= 0 for value in known)
    for lookup in (0, 4):
        found = loaded.complete(
            "Yes or no?", max_tokens=8, grammar_string='root ::= "yes" | "no"', prompt_lookup_num_tokens=lookup
        )
        assert found in ("yes", "no")
    ids = loaded.post("/v1/internal/encode", {"text": PROMPT})["tokens"]
    assert loaded.post("/v1/internal/decode", {"tokens": ids})["text"] == PROMPT


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({"sampler_priority": ["num_beam=3"]}, "Did you mean num_beams"),
        ({"sampler_priority": ["num_beams=3"], "prompt_lookup_num_tokens": 4}, "beam search and speculation"),
        ({"sampler_priority": ["num_beams=3", "contrastive_search=on"]}, "contrastive search and beam search"),
        ({"sampler_priority": ["draft_model=nowhere.gguf"]}, "nowhere.gguf"),
        ({"prompt": "word " * 1500, "truncation_length": 100000}, "ctx-size"),
    ],
)
def test_what_cannot_be_done_is_an_error_and_no_empty_answer(loaded: Webui, request_: dict[str, Any], told: str) -> None:
    request = {"prompt": PROMPT, **GREEDY, **request_}
    assert told in loaded.post("/v1/completions", request, status=400)["error"]["message"]
    events = list(loaded.stream("/v1/completions", request))
    assert told in events[-1]["error"]["message"]
    assert loaded.complete(PROMPT, **GREEDY)


def test_a_client_that_leaves_ends_the_evaluation_of_its_prompt(loaded: Webui) -> None:
    stats = Stats(loaded)
    prompt = " ".join(str(number) for number in range(10000, 10170))  # about 1000 tokens, 16 decodes
    events = loaded.stream("/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0})
    next(events)
    time.sleep(0.3)
    events.close()
    loaded.complete(PROMPT, **GREEDY)
    seen = stats.next()
    assert seen["new"] == 0 and seen["tokens"] < 900
    assert stats.next()["new"] == 16


def test_stop_ends_the_evaluation_of_a_prompt(loaded: Webui) -> None:
    stats = Stats(loaded)
    prompt = " ".join(str(number) for number in range(20000, 20170))
    events = loaded.stream("/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0})
    next(events)
    time.sleep(0.3)
    loaded.post("/v1/internal/stop-generation")
    rest = list(events)
    assert all("error" not in event for event in rest)
    seen = stats.next()
    assert seen["new"] == 0 and seen["tokens"] < 900
    assert loaded.complete(PROMPT, **GREEDY)


def test_a_seed_gives_its_text_also_after_an_answer_that_was_stopped(loaded: Webui) -> None:
    request = {"prompt": PROMPT, "temperature": 1, "seed": 7, "max_tokens": 12}
    alone = loaded.complete(**request)
    for seed in range(6):
        loaded.complete("A long story about a king:", temperature=1, seed=seed, max_tokens=60, stop=[" the", " a", " of"])
        assert loaded.complete(**request) == alone


def test_names_that_are_no_patterns(loaded: Webui, tiny_llama_path: Path) -> None:
    """The webui finds a model's saved settings with its name as a regular expression."""
    remembered = loaded.user_data / "llamacpp_hf" / "loaders.json"
    remembered.parent.mkdir(exist_ok=True)
    remembered.write_text('{"(": "llamacpp_HF", "tiny (1).gguf$": "llamacpp_HF"}', encoding="utf-8")
    folders.add_model(loaded.folder, tiny_llama_path, "tiny (1).gguf")
    try:
        loaded.load("tiny (1).gguf")
        assert loaded.info()["model_name"] == "tiny (1).gguf"
        assert loaded.post("/v1/completions", {"prompt": "a", **GREEDY})["choices"]
        assert 'Loading "tiny (1).gguf" with llamacpp_HF' in " ".join(loaded.log().split())
    finally:
        (loaded.user_data / "models" / "tiny (1).gguf").unlink()
        remembered.unlink()


def test_a_load_that_fails_says_why_until_one_succeeds(loaded: Webui, tiny_llama_path: Path) -> None:
    told = loaded.load(tiny_llama_path.name, status=500, **LOADER, cache_type="fp8")["detail"]
    assert "cache_type='fp8'" in told and tiny_llama_path.name in told
    messages = [{"role": "user", "content": "a"}]
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": messages})):
        assert "fp8" in loaded.post(path, {**body, **GREEDY}, status=500)["error"]["message"]
    told = loaded.load(tiny_llama_path.name, status=500, **LOADER, model_draft="nowhere.gguf")["detail"]
    assert "nowhere.gguf" in told
    assert "nowhere.gguf" in loaded.load("nowhere.gguf", status=500, **LOADER)["detail"]
    (loaded.user_data / "models" / "text.gguf").write_text("no model", encoding="utf-8")
    told = loaded.load("text.gguf", status=500, **LOADER)["detail"]
    assert "text.gguf could not be loaded" in told and "not a GGUF file" in told and "nowhere" not in told
    (loaded.user_data / "models" / "text.gguf").unlink()
    loaded.load(tiny_llama_path.name, **LOADER)
    assert loaded.post("/v1/completions", {"prompt": "a", **GREEDY})["choices"]


@pytest.mark.parametrize("name", ["tiny", "größe_模型.gguf"])
def test_a_folder_with_a_projector_and_a_name_of_any_letters(loaded: Webui, name: str) -> None:
    loaded.load(name, **LOADER)
    assert loaded.info()["model_name"] == name
    assert loaded.post("/v1/completions", {"prompt": "a", **GREEDY})["choices"]


def test_a_split_model(loaded: Webui, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its first shard, as the webui's menu has it, and by a folder with all of them."""
    writer = gguf.GGUFWriter
    monkeypatch.setattr(gguf, "GGUFWriter", lambda *arguments: writer(*arguments, split_max_tensors=9))
    folder = loaded.user_data / "models" / "split"
    folder.mkdir()
    tiny_gguf.write("llama", folder / "split.gguf")
    shards = sorted(file.name for file in folder.iterdir())
    assert len(shards) > 2
    try:
        for name in (f"split/{shards[0]}", "split"):
            loaded.load(name, **LOADER)
            assert loaded.post("/v1/completions", {"prompt": "a", **GREEDY})["choices"]
    finally:
        shutil.rmtree(folder)


def test_flags_reach_the_model(loaded: Webui, smollm2_q4_0_path: Path, smollm2_f32_path: Path) -> None:
    """A draft model, guidance cells, a sliding context, other cache types, two loads after one another."""
    stats = Stats(loaded)
    loaded.load(smollm2_f32_path.name, **LOADER, ctx_size=128, model_draft=smollm2_q4_0_path.name, draft_max=3)
    loaded.post("/v1/completions", {"prompt": STORY + STORY, **GREEDY, "truncation_length": 100000}, status=400)
    stats.next()
    loaded.complete(PROMPT, temperature=0, max_tokens=24)
    seen = stats.next()
    assert 0 < seen["accepted"] <= seen["drafted"] and seen["decodes"] < 24
    loaded.load(smollm2_q4_0_path.name, **LOADER, ctx_size=64, streaming_llm=True)
    told = loaded.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 64}, status=400)["error"]["message"]
    assert "max_new_tokens=64" in told and "truncation_length=64" in told
    loaded.complete(PROMPT, temperature=0, max_tokens=100, ban_eos_token=True, truncation_length=200)
    seen = stats.next()
    assert seen["new"] == 100 and seen["drafted"] == 0  # beyond n_ctx, and without the draft model of the load before
    loaded.load(smollm2_q4_0_path.name, **LOADER, ctx_size=64, cfg_cache=True, cache_type="q8_0/q4_0")
    guidance = {"guidance_scale": 1.5, "negative_prompt": PROMPT + " not"}
    loaded.complete(PROMPT, temperature=0, max_tokens=40, ban_eos_token=True, **guidance)
    assert stats.next()["new"] == 40


def test_a_lora_is_a_load(loaded: Webui, tiny_llama_path: Path) -> None:
    folder = loaded.user_data / "loras"
    folder.mkdir(exist_ok=True)
    write_lora(folder / "small.gguf", tiny_llama_path)
    try:
        loaded.load(tiny_llama_path.name, **LOADER)
        prompt = {"prompt": "a b c d", **GREEDY, "ban_eos_token": True}
        plain = loaded.complete(**prompt)
        loaded.post("/v1/internal/lora/load", {"lora_names": ["small.gguf"]})
        assert loaded.complete(**prompt) != plain and loaded.info()["lora_names"] == ["small.gguf"]
        loaded.post("/v1/internal/lora/load", {"lora_names": ["missing.gguf"]}, status=400)
        assert loaded.complete(**prompt) != plain  # as before
        loaded.post("/v1/internal/lora/load", {"lora_names": []})
        assert loaded.complete(**prompt) == plain
    finally:
        (folder / "small.gguf").unlink()


def test_twenty_loads_leave_nothing_behind(loaded: Webui, tiny_llama_path: Path) -> None:
    process = psutil.Process(loaded.process.pid)  # type: ignore[union-attr]
    sizes = []
    for _ in range(20):
        loaded.load(tiny_llama_path.name, **LOADER, ctx_size=4096)
        loaded.complete("a b c " * 200, **GREEDY)
        loaded.post("/v1/internal/model/unload")
        sizes.append((process.memory_info().rss, process.num_threads(), process.num_fds()))
    rss, threads, files = zip(*sizes, strict=True)
    assert max(rss[10:]) - rss[9] < 10 << 20, [size >> 20 for size in rss]
    assert threads[-1] <= threads[4] + 1 and files[-1] <= files[4] + 2


def test_unloading_ends_an_answer(loaded: Webui) -> None:
    events = loaded.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ban_eos_token": True})
    for _ in range(4):
        next(events)
    loaded.post("/v1/internal/model/unload")
    rest = list(events)
    assert len(rest) < 890
    assert loaded.info()["model_name"] == "None"


def test_a_request_that_waits_while_the_model_goes_is_told(loaded: Webui) -> None:
    events = loaded.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ban_eos_token": True})
    next(events)
    next(events)
    answers: list[Any] = []

    def wait() -> None:
        answers.append(loaded.post("/v1/completions", {"prompt": PROMPT, **GREEDY}, status=503))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.5)
    loaded.post("/v1/internal/model/unload")
    thread.join(30)
    list(events)
    assert answers and "unloaded" in answers[0]["error"]["message"]
    assert "No model is loaded" in loaded.post("/v1/completions", {"prompt": "a", **GREEDY}, status=503)["error"]["message"]


def test_other_loaders_are_as_before(loaded: Webui, tiny_llama_path: Path) -> None:
    if not folders.checkout():  # the real one needs binaries of its own
        loaded.load(tiny_llama_path.name)
        assert loaded.post("/v1/completions", {"prompt": "a", **GREEDY})["choices"][0]["text"]
        assert "llamacpp_HF: prompt" not in loaded.log()[-300:]


def test_the_webuis_files_are_unchanged(webui: Webui) -> None:
    now = {path: content for path, content in webui.hashes().items() if not path.startswith("user_data/llamacpp_hf/")}
    assert now == webui.before  # type: ignore[attr-defined]


# -- starts of their own -----------------------------------------------------------------------------------------------


def test_without_llama_cpp_the_webui_starts_and_says_what_is_missing(
    start_webui: Callable[..., Webui], webui_folder: Path, tiny_llama_path: Path
) -> None:
    folders.install(webui_folder)
    folders.add_model(webui_folder, tiny_llama_path)
    code = "import sys, runpy; sys.modules['llama_cpp'] = None; sys.argv[0] = 'server.py'; sys.path[0] = ''; " \
           "runpy.run_path('server.py', run_name='__main__')"  # fmt: skip
    command = [folders.python(), "-c", code]
    webui = start_webui(*FLAGS[:2], "--nowebui", "--model", tiny_llama_path.name, "--loader", "llamacpp_HF", command=command)
    assert "pip install 'llama-cpp-python" in " ".join(webui.log().split())
    told = webui.load(tiny_llama_path.name, status=500, **LOADER)["detail"]
    assert "pip install 'llama-cpp-python" in told
    assert "llama-cpp-python" in webui.post("/v1/completions", {"prompt": "a"}, status=500)["error"]["message"]


def test_an_old_entry_in_the_saved_settings_is_remembered_elsewhere(
    start_webui: Callable[..., Webui], webui_folder: Path, tiny_llama_path: Path
) -> None:
    """`loader: llamacpp_HF` in config-user.yaml, as webuis of before April 2025 wrote it, kills a plain start."""
    folders.install(webui_folder)
    name = folders.add_model(webui_folder, tiny_llama_path)
    saved = webui_folder / "user_data" / "models" / "config-user.yaml"
    saved.write_text(f"{name}$:\n  loader: llamacpp_HF\n  ctx_size: 512\n", encoding="utf-8")
    with pytest.raises(WebuiEnded, match="KeyError"):
        start_webui("--nowebui", "--model", name, folder=webui_folder)
    webui = start_webui(*FLAGS, "--nowebui", folder=webui_folder)  # without --model, so that it lives long enough
    assert "llamacpp_HF" not in saved.read_text(encoding="utf-8") and "512" in saved.read_text(encoding="utf-8")
    webui.load(name)  # and the choice holds, for the API too
    assert webui.post("/v1/completions", {"prompt": "a", **GREEDY})["choices"]
    assert 'with llamacpp_HF' in " ".join(webui.log().split())
    webui.stop()
    again = start_webui(*FLAGS, "--nowebui", "--model", name, folder=webui_folder)
    assert "512 tokens" in " ".join(again.wait_log("llamacpp_HF").split())
