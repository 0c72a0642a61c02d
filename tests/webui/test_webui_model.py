"""The model as the webui calls it, without a webui: streaming from a stopping criterion, stops, end tokens, drafts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from transformers_llamacpp import LlamaCppForCausalLM
from transformers_llamacpp.errors import ClosedError, ContextOverflowError, ModelLoadError
from transformers_llamacpp.webui.call import Feed, WebuiCall
from transformers_llamacpp.webui.model import WebuiModel
from transformers_llamacpp.webui.settings import Settings

pytestmark = pytest.mark.once

OPTIONS = {"n_ctx": 1024, "n_threads": 1, "n_batch": 64, "n_ubatch": 64}
PROMPT = list(range(40, 72))


class Stream(StoppingCriteria):
    """As the webui streams: a criterion that is shown the text and never stops it."""

    def __init__(self, callback_func: Any) -> None:
        self.callback_func = callback_func

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        raise AssertionError("it would be shown texts that are given up again")


class StopEverything(StoppingCriteria):
    def __init__(self) -> None:
        self.on = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        return self.on


class Stopped(Exception):
    pass


def open_model(path: Path, **options: Any) -> Any:
    def find_draft(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in (path.name, "other.gguf"):
            raise ModelLoadError(f"there is no {name}")
        return path, {"n_ctx": 1024, "n_threads": 1}

    return WebuiModel.open(path, OPTIONS | options, Settings(), find_draft)


@pytest.fixture(scope="module")
def opened(tiny_llama_path: Path) -> Iterator[Any]:
    model = open_model(tiny_llama_path)
    yield model
    model.unload()


@pytest.fixture
def model(opened: Any) -> Any:
    opened.forget()
    opened.settings.reset()
    opened.assistant_model = None
    return opened


def call(model: Any, prompt: list[int] | None = None, **given: Any) -> Any:
    """The arguments are those of `generate_reply_HF`, as far as they matter here."""
    arguments: dict[str, Any] = {
        "inputs": torch.tensor([PROMPT if prompt is None else prompt]), "eos_token_id": [model.tokenizer.eos_token_id],
        "max_new_tokens": 24, "do_sample": False, "top_k": 0, "penalty_alpha": 0, "guidance_scale": 1, "use_cache": True,
        "stopping_criteria": StoppingCriteriaList(), "logits_processor": LogitsProcessorList(),
    }  # fmt: skip
    return model.generate(**(arguments | given))


def streamed(model: Any, **given: Any) -> tuple[list[list[int]], Any]:
    """The texts a reader was shown, and the final one."""
    shown: list[list[int]] = []
    criteria = StoppingCriteriaList([StopEverything(), Stream(lambda ids: shown.append(ids.tolist()))])
    output = call(model, stopping_criteria=criteria, **given)
    return shown, output


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"do_sample": True, "temperature": 0.7},
        {"prompt_lookup_num_tokens": 5},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"guidance_scale": 1.5},
        {"sampler_priority": ["dola_layers=low"]},
    ],
    ids=["greedy", "sampled", "lookup", "contrastive", "guidance", "dola"],
)
def test_each_token_is_shown_once_and_none_is_taken_back(model: Any, given: dict[str, Any]) -> None:
    prompt = PROMPT[:8] * 6
    if "sampler_priority" in given:
        prompt = PROMPT
    shown, output = streamed(model, prompt=prompt, eos_token_id=[], **given)
    final = output[0].tolist()
    new = [token for token in final[len(prompt) :] if token not in model.generation_config.eos_token_id]
    assert [len(text) for text in shown] == list(range(len(prompt) + 1, len(prompt) + len(new) + 1))
    assert all(text == final[: len(text)] for text in shown) and shown


def test_beams_are_shown_when_they_are_chosen(model: Any) -> None:
    shown, output = streamed(model, sampler_priority=["num_beams=3"])
    final = [token for token in output[0].tolist() if token not in model.generation_config.eos_token_id]
    assert shown == [final]
    plain = LlamaCppForCausalLM.generate(model, torch.tensor([PROMPT]), max_new_tokens=24, num_beams=3, do_sample=False)
    assert output.tolist() == plain.tolist()


def test_the_reader_may_leave_at_any_token(model: Any) -> None:
    def leave(ids: torch.Tensor) -> None:
        if len(ids) == len(PROMPT) + 5:
            raise Stopped

    request = WebuiCall()
    criteria = StoppingCriteriaList([Stream(leave)])
    with pytest.raises(Stopped):
        call(model, stopping_criteria=criteria, logits_processor=LogitsProcessorList([request]))
    assert request.stats is not None and request.stats.decode_calls == request.stats.new_tokens == 5
    model.engine.check()


@pytest.mark.parametrize("how", ["event", "closed", "everything"])
def test_a_long_prompt_can_be_stopped(model: Any, how: str) -> None:
    """Stopped after the first of sixteen decodes: the next one does not come, and that is no error."""
    event, everything = threading.Event(), StopEverything()
    request = WebuiCall(event)
    decodes = 0

    def count(going_on: Any, evaluated: int, total: int) -> bool:
        nonlocal decodes
        decodes += 1
        if how == "event":
            event.set()
        elif how == "closed":
            request.close()
        else:
            everything.on = True
        return going_on(evaluated, total)

    watch = model._watch
    model._watch = lambda criteria, ids: functools.partial(count, watch(criteria, ids))
    criteria = StoppingCriteriaList([everything])
    try:
        output = call(
            model, prompt=PROMPT * 31, logits_processor=LogitsProcessorList([request]), stopping_criteria=criteria
        )
    finally:
        del model._watch
    assert output[0].tolist() == PROMPT * 31 and request.error is None
    assert decodes == 1 and request.stats is not None and request.stats.evaluated_tokens == 64


@pytest.mark.parametrize("entries", [[], ["num_beams=3"]])
def test_an_answer_that_is_not_streamed_can_be_stopped(model: Any, entries: list[str]) -> None:
    request, steps = WebuiCall(), 0

    def count(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 4:
            request.close()
        return scores

    banned = model.generation_config.eos_token_id
    call(
        model, sampler_priority=[*entries, "min_new_tokens=20"], logits_processor=LogitsProcessorList([request, count]),
        suppress_tokens=banned,
    )  # fmt: skip
    assert steps == 4 and request.error is None


def test_a_failure_and_the_statistics_travel_with_the_request(model: Any) -> None:
    request = WebuiCall()
    with pytest.raises(ContextOverflowError):
        call(model, prompt=PROMPT * 33, logits_processor=LogitsProcessorList([request]))
    assert isinstance(request.error, ContextOverflowError)
    request = WebuiCall()
    call(model, logits_processor=LogitsProcessorList([request]))
    assert request.error is None and request.stats == model.last_stats and request.stats.prompt_tokens == len(PROMPT)
    assert model.last_prompt_token_count == len(PROMPT)


def test_all_end_tokens_end_and_are_hidden(model: Any) -> None:
    end = model.tokenizer.eos_token_id
    text = call(model, eos_token_id=[], max_new_tokens=12)[0].tolist()[len(PROMPT) :]
    other = next(token for token in text if token != end)
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [end, other]
    try:
        shown, output = streamed(model)
        assert output[0].tolist()[len(PROMPT) :] == text[: text.index(other) + 1]
        assert all(other not in ids[len(PROMPT) :] for ids in shown)
        banned = call(model, suppress_tokens=[end])[0].tolist()[len(PROMPT) :]
        assert other not in banned and len(banned) == 24  # who bans the end means all of them
    finally:
        model.generation_config.eos_token_id = before


def test_contrastive_search_decodes_k_and_guidance_two_tokens_at_a_time(model: Any) -> None:
    contrastive = {"contrastive_search": True, "contrastive_k": 5}  # its last token is decoded to be chosen
    for panel, tokens, decodes in (({}, 1, 11), (contrastive, 5, 12), ({"guidance_scale": 1.5}, 2, 11)):
        model.forget()
        model.settings.reset()
        model.settings.set(**panel)
        call(model, max_new_tokens=11, eos_token_id=[], do_sample=True, suppress_tokens=model.generation_config.eos_token_id)
        stats = model.last_stats
        sides = len(PROMPT) + (1 if "guidance_scale" in panel else 0)
        assert stats.decode_calls == decodes
        assert stats.evaluated_tokens - sides == (decodes - 1) * tokens


def test_drafts_come_from_the_panel_the_request_or_the_load(model: Any, tiny_llama_path: Path) -> None:
    plain = call(model)[0].tolist()
    name = tiny_llama_path.name
    assert model.last_stats.drafted_tokens == 0
    for given, panel in (
        ({"sampler_priority": [f"draft_model={name}"]}, {}),
        ({}, {"draft_model": name}),
    ):
        model.settings.reset()
        model.settings.set(**panel)
        assert call(model, **given)[0].tolist() == plain
        assert 0 < model.last_stats.accepted_tokens <= model.last_stats.drafted_tokens
    model.settings.reset()
    model.use_draft(name, 3)
    assert call(model)[0].tolist() == plain and model.last_stats.drafted_tokens
    model.settings.set(speculation="off")
    assert call(model)[0].tolist() == plain and model.last_stats.drafted_tokens == 0
    model.settings.reset()
    model.settings.set(contrastive_search=True)
    call(model)
    assert model.last_stats.drafted_tokens == 0
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf"):
        call(model, sampler_priority=["draft_model=nowhere.gguf"])


def test_another_draft_model_may_come_while_one_drafts(model: Any, tiny_llama_path: Path) -> None:
    plain = call(model)[0].tolist()
    model.settings.set(draft_model=tiny_llama_path.name)

    def change(ids: torch.Tensor) -> None:
        if len(ids) == len(PROMPT) + 3:
            model.draft("other.gguf")

    assert call(model, stopping_criteria=StoppingCriteriaList([Stream(change)]))[0].tolist() == plain
    assert model.last_stats.drafted_tokens > 0
    model.settings.reset()


def test_a_request_that_is_over_waits_for_its_last_decode(model: Any) -> None:
    """The next request seeds torch's random numbers; nobody else may draw from them then."""
    request, released = WebuiCall(), threading.Event()
    criteria = StoppingCriteriaList([Stream(lambda ids: (request.close(), released.wait(20)))])
    thread = threading.Thread(target=lambda: call(
        model, stopping_criteria=criteria, logits_processor=LogitsProcessorList([request])
    ))  # fmt: skip
    thread.start()
    while not request.stopped():
        pass
    threading.Timer(0.3, released.set).start()
    request.leave()
    assert released.is_set()
    thread.join(20)
    # transformers 5.24 asks the stopping criteria before it shows a token, 5.6 after
    assert request.stats is not None and request.stats.new_tokens in (1, 2)
    never = WebuiCall()
    never.leave()
    assert call(model, logits_processor=LogitsProcessorList([never]))[0].tolist() == PROMPT


def test_what_is_in_memory_is_told_while_a_prompt_is_read(model: Any) -> None:
    """The webui's page asks for it on its event loop: waiting for a decode would freeze every tab."""
    call(model)
    before = model.engine.held()
    assert before.texts == 1 and before.cells == len(PROMPT) + 23
    seen = []

    def ask() -> None:
        thread = threading.Thread(target=lambda: seen.append(model.engine.held()))
        thread.start()
        thread.join(20)

    def during(evaluated: int, total: int) -> bool:
        ask()  # between two decodes: as it is now
        with model.engine.lock:  # as in the middle of one: as it was last
            ask()
        return True

    LlamaCppForCausalLM.generate(model, torch.tensor([PROMPT[::-1]]), max_new_tokens=1, prompt_progress=during)
    assert len(seen) == 2
    assert seen[0].texts == 2 and seen[0].cells == before.cells + len(PROMPT)
    assert seen[1] == seen[0]
    assert model.engine.held().texts == 2


def test_prompt_logits_are_those_of_a_forward_pass(model: Any) -> None:
    ids = torch.tensor([PROMPT])
    logits = model.get_prompt_logits(ids)
    assert logits.shape == (1, len(PROMPT), model.config.vocab_size)
    assert torch.equal(logits, model(input_ids=ids).logits)


def test_unloading_ends_what_runs(tiny_llama_path: Path) -> None:
    model = open_model(tiny_llama_path)
    draft = model.draft(tiny_llama_path.name)
    started, errors = threading.Event(), []

    def run() -> None:
        criteria = StoppingCriteriaList([Stream(lambda ids: started.set())])
        try:
            call(model, max_new_tokens=900, eos_token_id=[], stopping_criteria=criteria,
                 suppress_tokens=model.generation_config.eos_token_id)  # fmt: skip
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    model.unload()
    thread.join(60)
    assert not thread.is_alive() and len(errors) == 1
    assert model.engine.closed and draft.engine.closed
    model.unload()


def test_a_feed_grows_without_touching_what_was_shown() -> None:
    shown: list[torch.Tensor] = []
    feed = Feed([shown.append], frozenset({7}))
    feed.put(torch.arange(3)[None])
    for token in [*range(1000, 1600), 7]:
        feed.put(torch.tensor([token]))
    assert len(shown) == 600
    assert all(text.tolist() == [0, 1, 2, *range(1000, 1000 + index + 1)] for index, text in enumerate(shown))
