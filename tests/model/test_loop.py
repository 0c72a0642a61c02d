"""The loop of our own does what transformers' does, for less; and when that runs instead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
)
from transformers.generation import SynthIDTextWatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from compare import one_number_a_row, padded
from transformers_llamacpp import InvalidInputError, LlamaCppCache, LlamaCppForCausalLM, UnsupportedFeatureError, generation
from transformers_llamacpp.compat import CACHE_NAME, cache_of
from transformers_llamacpp.decoding.loop import covers
from transformers_llamacpp.generation import plain_loop

ROWS = [[1, 60, 70, 80, 90], [1, 33, 44], [1, 200, 201, 202]]
IDS, MASK = padded(ROWS, fill=0)
ONE = torch.tensor([ROWS[0]])
CALL: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Nothing(LogitsProcessor):
    """Code that is not ours: it must see every row's full scores."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.is_contiguous() and scores.is_contiguous()
        self.seen.append((tuple(input_ids.shape), tuple(scores.shape), scores.dtype, input_ids[:, -1].tolist()))
        return scores


class Watch(StoppingCriteria):
    """Ends row 1 after seven columns."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        assert input_ids.is_contiguous()
        self.seen.append((input_ids.tolist(), None if scores is None else len(scores)))
        over = torch.zeros(len(input_ids), dtype=torch.bool)
        over[-1] = input_ids.shape[1] >= 7
        return over


class Tape(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append((value.tolist(), value.dtype))

    def end(self) -> None:
        self.heard.append("end")


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of our own loop."""
    calls: list[str] = []
    ours = generation.token_by_token

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("ours")
        return ours(*args, **kwargs)

    monkeypatch.setattr(generation, "token_by_token", counted)
    return calls


def written(stats: Any) -> int:
    """Tokens that were evaluated beside the prompt."""
    return int(stats.evaluated_tokens - (stats.prompt_tokens - stats.reused_tokens))


def ends_of(model: Any, n: int = 3) -> list[int]:
    """End tokens that stop the rows at different lengths: one that each greedy continuation has."""
    model.forget()
    text = model.generate(IDS, attention_mask=MASK, **CALL)[:, IDS.shape[1] :].tolist()
    return [row[2 + 3 * index] for index, row in enumerate(text[:n])]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "scores and logits": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "logits": {"return_dict_in_generate": True, "output_logits": True, "top_k": 5},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "return_dict_in_generate": True, "output_scores": True},
    "min length": {"min_new_tokens": 9, "eos": 2},
    "one end": {"eos": 1},
    "three ends": {"eos": 3},
    "three ends, dict": {"eos": 3, "return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "bad words": {"bad_words_ids": [[60], [70, 80]], "suppress_tokens": [90]},
    "return sequences": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    "max_time": {"max_time": 600.0, "eos": 2},
    "forced": {"forced_eos_token_id": 7, "eos": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_transformers_own_loop(tiny_llama: Any, loops: list[str], name: str) -> None:
    call = CALL | {"attention_mask": MASK} | CASES[name]
    if "eos" in call:
        call["eos_token_id"] = ends_of(tiny_llama, call.pop("eos"))
    tiny_llama.forget()
    loops.clear()
    got = tiny_llama.generate(IDS, **call)
    assert loops == ["ours"]
    stats = tiny_llama.last_stats
    tiny_llama.forget()
    with plain_loop():
        expected = tiny_llama.generate(IDS, **call)
    assert loops == ["ours"]
    if not call.get("return_dict_in_generate"):
        assert torch.equal(got, expected) and got.dtype == expected.dtype
        assert stats.new_tokens == tiny_llama.last_stats.new_tokens
        return
    assert torch.equal(got.sequences, expected.sequences)
    assert got.keys() == expected.keys() and written(stats) == written(tiny_llama.last_stats)
    for kind in ("scores", "logits"):
        ours, theirs = getattr(got, kind), getattr(expected, kind)
        assert (ours is None) == (theirs is None)
        for a, b in zip(ours or (), theirs or (), strict=True):
            assert a.dtype == b.dtype and torch.equal(a == -torch.inf, b == -torch.inf)
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert cache_of(got).get_seq_length() == cache_of(expected).get_seq_length() == got.sequences.shape[1] - 1


def test_the_same_is_asked_and_streamed(tiny_llama: Any, loops: list[str]) -> None:
    """Processors, criteria and streamers of the user get what transformers' loop gives them, in the same order."""
    ends = ends_of(tiny_llama, 1)
    logs = []
    for plain in (False, True):
        tiny_llama.forget()
        nothing, watch, tape = Nothing(), Watch(), Tape()
        call = CALL | {"eos_token_id": ends, "attention_mask": MASK[:2], "streamer": tape}
        call |= {"logits_processor": [nothing], "stopping_criteria": StoppingCriteriaList([watch])}
        if plain:
            with plain_loop():
                output = tiny_llama.generate(IDS[:2], **call)
        else:
            output = tiny_llama.generate(IDS[:2], **call)
        logs.append((output.tolist(), nothing.seen, watch.seen, tape.heard, written(tiny_llama.last_stats)))
    assert loops == ["ours", "ours"] or loops == ["ours"]
    assert logs[0] == logs[1]
    assert len(logs[0][1]) > 2 and logs[0][3][-1] == "end"


def test_criteria_and_streamer_in_the_order_of_the_release(tiny_llama: Any) -> None:
    orders = []
    for plain in (False, True):
        order: list[str] = []

        class Hear(Tape):
            def put(self, value: torch.Tensor) -> None:
                order.append("streamer")  # noqa: B023

        def ask(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            order.append("criterion")  # noqa: B023
            return torch.zeros(1, dtype=torch.bool)

        call = CALL | {"streamer": Hear(), "stopping_criteria": StoppingCriteriaList([ask]), "max_new_tokens": 2}
        if plain:
            with plain_loop():
                tiny_llama.generate(ONE, **call)
        else:
            tiny_llama.generate(ONE, **call)
        orders.append(order)
    assert orders[0] == orders[1] and len(orders[0]) == 5


def test_a_row_that_has_ended_is_not_decoded(tiny_llama: Any) -> None:
    ends = ends_of(tiny_llama)
    tiny_llama.forget()
    output = tiny_llama.generate(IDS, attention_mask=MASK, **CALL | {"eos_token_id": ends})
    new = output[:, IDS.shape[1] :].tolist()
    lengths = [next((at + 1 for at, token in enumerate(row) if token in ends), len(row)) for row in new]
    assert len(set(lengths)) > 1, "the rows are to end at different places"
    stats = tiny_llama.last_stats
    assert written(stats) == sum(n - 1 for n in lengths)
    assert all(token == 0 for row, n in zip(new, lengths, strict=True) for token in row[n:])
    tiny_llama.engine.check()
    ended = [token for token in output[int(np.argmin(lengths))].tolist() if token]
    tiny_llama.generate(torch.tensor([ended]), **CALL)  # what ended early is still known
    assert tiny_llama.last_stats.reused_tokens >= len(ended) - 2


def test_goes_on_from_a_cache(tiny_llama: Any, loops: list[str]) -> None:
    whole = tiny_llama.generate(ONE, **CALL | {"max_new_tokens": 20})
    tiny_llama.forget()
    cache = LlamaCppCache(tiny_llama)
    first = tiny_llama.generate(ONE, **CALL | {"max_new_tokens": 8, CACHE_NAME: cache})
    second = tiny_llama.generate(first, **CALL | {CACHE_NAME: cache})
    assert torch.equal(second, whole) and loops == ["ours"] * 3
    assert tiny_llama.last_stats.evaluated_tokens == 12
    cache.close()


def test_starts_from_embeddings(tiny_llama: Any, loops: list[str]) -> None:
    embeds = torch.randn((1, 5, tiny_llama.config.hidden_size), generator=torch.Generator().manual_seed(1))
    got = tiny_llama.generate(inputs_embeds=embeds, **CALL)
    with plain_loop():
        assert torch.equal(tiny_llama.generate(inputs_embeds=embeds, **CALL), got)
    assert loops == ["ours"] and got.shape == (1, 12)


# -- sampling ------------------------------------------------------------------------------------------------------


SAMPLE = CALL | {"do_sample": True, "top_k": 0}


def sampled(model: Any, seed: int, **kwargs: Any) -> list[list[int]]:
    model.forget()
    torch.manual_seed(seed)
    output = model.generate(IDS, attention_mask=MASK, **SAMPLE | kwargs)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    return sequences[:, IDS.shape[1] :].tolist()


def test_a_seed_gives_one_text(tiny_llama: Any) -> None:
    """Whatever else is asked for: scores, or code that is not ours."""
    text = sampled(tiny_llama, 3)
    assert text == sampled(tiny_llama, 3) != sampled(tiny_llama, 4)
    assert text == sampled(tiny_llama, 3, return_dict_in_generate=True, output_scores=True, output_logits=True)
    assert text == sampled(tiny_llama, 3, logits_processor=[Nothing()])
    cut = sampled(tiny_llama, 3, top_k=20, top_p=0.9)
    assert cut == sampled(tiny_llama, 3, top_k=20, top_p=0.9, logits_processor=[Nothing()])


@pytest.mark.parametrize("call", [{}, {"top_k": 12, "temperature": 1.7}, {"top_p": 0.6}, {"min_p": 0.1}], ids=str)
def test_the_distribution_is_transformers_own(tiny_llama: Any, call: dict[str, Any]) -> None:
    """3,000 first tokens of each loop: a two-sample chi-square over the tokens that are frequent enough."""
    counts = []
    for loop in (nullcontext, plain_loop):
        torch.manual_seed(11)
        drawn: list[int] = []
        for _ in range(12):
            with loop():
                output = tiny_llama.generate(ONE.repeat(250, 1), **SAMPLE | {"max_new_tokens": 1} | call)
            drawn += output[:, -1].tolist()
        counts.append(np.bincount(drawn, minlength=tiny_llama.config.vocab_size))
    ours, theirs = counts
    seen = (ours + theirs) >= 20
    ours = np.append(ours[seen], ours[~seen].sum())
    theirs = np.append(theirs[seen], theirs[~seen].sum())
    total = ours + theirs
    ours, theirs, total = ours[total > 0], theirs[total > 0], total[total > 0]
    freedom = len(total) - 1
    statistic = float((((ours - theirs) ** 2) / total).sum())
    assert freedom >= 3
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 8, (statistic, freedom)  # far beyond what chance does


def test_seeds_decide_each_row_alone(tiny_llama: Any) -> None:
    """Alone or in a batch, with drafts or without, whatever torch's own numbers are."""
    together = sampled(tiny_llama, 1, seeds=[5, 6, 7])
    assert together == sampled(tiny_llama, 2, seeds=[5, 6, 7]) and len({tuple(row) for row in together}) == 3
    for row, seed in enumerate([5, 6, 7]):
        for drafts in ({}, {"prompt_lookup_num_tokens": 3}):
            tiny_llama.forget()
            alone = tiny_llama.generate(torch.tensor([ROWS[row]]), seeds=seed, **SAMPLE | drafts)
            assert alone[0, len(ROWS[row]) :].tolist() == together[row]
    before = torch.get_rng_state()
    sampled_again = tiny_llama.generate(ONE, seeds=[5], **SAMPLE)
    assert torch.equal(torch.get_rng_state(), before) and sampled_again.shape == (1, 17)
    with pytest.raises(InvalidInputError, match="2 entries for 3 rows"):
        sampled(tiny_llama, 1, seeds=[5, 6])
    with pytest.raises(UnsupportedFeatureError, match="beams that sample"):
        sampled(tiny_llama, 1, seeds=[5, 6, 7], num_beams=2)


# -- code of others ------------------------------------------------------------------------------------------------


class Answers(LogitsProcessor):
    """What a processor should not answer."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        self.make = make

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return self.make(scores)


@pytest.mark.parametrize("make", [lambda x: x[:2], lambda x: x.repeat(2, 1), lambda x: x[None], lambda x: None, lambda x: 1.0])
def test_answers_of_another_shape_are_refused(tiny_llama: Any, make: Any) -> None:
    with pytest.raises(InvalidInputError, match="a logits processor answered with"):
        tiny_llama.generate(IDS, attention_mask=MASK, **CALL | {"logits_processor": [Answers(make)]})
    tiny_llama.engine.check()


@pytest.mark.parametrize("make", [lambda x: x[:1], lambda x: x[0]])
def test_one_row_of_scores_is_for_all(tiny_llama: Any, make: Any) -> None:
    call = CALL | {"attention_mask": MASK, "logits_processor": [Answers(make)], "eos_token_id": [295]}  # as in transformers
    got = tiny_llama.generate(IDS, **call)
    with plain_loop():
        assert torch.equal(tiny_llama.generate(IDS, **call), got)


@pytest.mark.parametrize("rows", [1, 3])
def test_what_others_write_into_the_text_counts(tiny_llama: Any, rows: int) -> None:
    """The text that is returned is the one that was read."""

    def ask(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if ids.shape[1] == 8:
            ids[:, -1] = 77
        return torch.zeros(len(ids), dtype=torch.bool)

    call = CALL | {"attention_mask": MASK[:rows], "stopping_criteria": StoppingCriteriaList([ask])}
    got = tiny_llama.generate(IDS[:rows], **call)
    assert (got[:, 7] == 77).all()
    with plain_loop():
        assert torch.equal(tiny_llama.generate(IDS[:rows], **call), got)


def test_criteria_answer_for_each_row(tiny_llama: Any) -> None:
    def ask(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return ids[:, -1:] == 236

    with pytest.raises(InvalidInputError, match=r"shape \(3, 3\); one for each row, \(3,\)"):
        tiny_llama.generate(IDS, attention_mask=MASK, **CALL | {"stopping_criteria": StoppingCriteriaList([ask])})


PER_ROW: dict[str, dict[str, Any]] = {
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
    "repetition_penalty": {"repetition_penalty": 1.8},
}


@pytest.mark.parametrize("name", PER_ROW)
@pytest.mark.parametrize("copies", [1, 2])
def test_processors_that_hold_something_for_each_row(tiny_llama: Any, name: str, copies: int) -> None:
    """While some rows have ended: they must not be given another row's."""
    call = CALL | {"attention_mask": MASK, "max_new_tokens": 20, **PER_ROW[name]}
    call |= {"eos_token_id": ends_of(tiny_llama), "num_return_sequences": copies, "do_sample": copies > 1, "top_k": 1}
    tiny_llama.forget()
    got = tiny_llama.generate(IDS, **call)
    tiny_llama.forget()
    with plain_loop():
        assert torch.equal(tiny_llama.generate(IDS, **call), got)


def test_no_token_is_left(tiny_llama: Any) -> None:
    nothing = [TopKLogitsWarper(1), NoRepeatNGramLogitsProcessor(1)]
    call = CALL | {"logits_processor": nothing, "max_new_tokens": 4}
    got = tiny_llama.generate(ONE, **call)
    with plain_loop():
        assert torch.equal(tiny_llama.generate(ONE, **call), got)
    everything = list(range(tiny_llama.config.vocab_size))
    with pytest.raises(RuntimeError, match="probability tensor contains either"):
        tiny_llama.generate(ONE, **SAMPLE | {"suppress_tokens": everything, "top_k": 5})


@pytest.mark.parametrize("pad", [-1, 10_000])
def test_padding_that_is_no_token(tiny_llama: Any, pad: int) -> None:
    """Whoever looks on: what rows that have ended are fed with means nothing."""
    ends = ends_of(tiny_llama)
    call = CALL | {"attention_mask": MASK, "eos_token_id": ends, "pad_token_id": pad}
    alone = tiny_llama.generate(IDS, **call)
    assert (alone == pad).any()
    assert torch.equal(tiny_llama.generate(IDS, **call | {"logits_processor": [Nothing()]}), alone)
    assert torch.equal(tiny_llama.generate(IDS, **call | {"return_dict_in_generate": True}).sequences, alone)


def test_the_seed_is_a_number_wherever_torch_makes_tensors(tiny_llama: Any) -> None:
    text = tiny_llama.generate(ONE, **SAMPLE | {"seeds": 3})
    torch.set_default_device("meta")
    try:
        assert torch.equal(tiny_llama.generate(ONE, **SAMPLE | {"seeds": 3}), text)
        tiny_llama.generate(ONE, **SAMPLE)
    finally:
        torch.set_default_device("cpu")


# -- steps through the model's forward pass ------------------------------------------------------------------------


class Subclass(LlamaCppForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that were plain decodes of the cache's rows."""
    calls: list[int] = []
    plain = LlamaCppCache.steps

    def counted(self: Any, tokens: Any, usage: Any, read: Any, after: Any) -> Any:
        def counting(logits: Any) -> Any:
            calls.append(1)
            return read(logits)

        return plain(self, tokens, usage, counting, after)

    monkeypatch.setattr(LlamaCppCache, "steps", counted)
    return calls


THROUGH_THE_MODEL: dict[str, dict[str, Any]] = {
    "without a cache": {"use_cache": False},
    "hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("name", THROUGH_THE_MODEL)
@pytest.mark.parametrize("sample", [False, True])
def test_steps_through_the_model(tiny_llama: Any, loops: list[str], steps: list[int], name: str, sample: bool) -> None:
    call = CALL | {"attention_mask": MASK, "do_sample": sample, "eos_token_id": 500} | THROUGH_THE_MODEL[name]
    torch.manual_seed(4)
    got = tiny_llama.generate(IDS, **call)
    assert loops == ["ours"] and steps == []
    tiny_llama.forget()
    torch.manual_seed(4)
    with plain_loop(), one_number_a_row():
        expected = tiny_llama.generate(IDS, **call)
    if name != "hidden states":
        assert torch.equal(got, expected)
        return
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.hidden_states, expected.hidden_states, strict=True):
        assert len(a) == len(b) == tiny_llama.config.num_hidden_layers + 1
        assert all(x.shape == y.shape and torch.allclose(x, y, atol=1e-4) for x, y in zip(a, b, strict=True))
    torch.manual_seed(4)
    plain = tiny_llama.generate(IDS, **{k: v for k, v in call.items() if k not in THROUGH_THE_MODEL[name]})
    assert torch.equal(plain, got.sequences) and steps, "what is asked for beside the text does not change it"


def test_changed_steps_are_called(tiny_llama: Any, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny_llama.generate(ONE, **CALL)
    assert len(steps) == 11
    steps.clear()
    kept: list[torch.Tensor] = []
    hook = tiny_llama.register_forward_hook(lambda module, args, output: kept.append(output.logits))
    biased = CALL | {"suppress_tokens": [70], "repetition_penalty": 1.2}
    tiny_llama.generate(ONE, **biased)
    assert steps == [] and len(kept) == 12
    assert all(torch.isfinite(logits).all() for logits in kept), "what a hook kept is what it was given"
    assert torch.equal(tiny_llama.generate(ONE, **CALL), expected)
    hook.remove()
    calls: list[int] = []
    forward = tiny_llama.forward
    with monkeypatch.context() as patch:
        patch.setattr(tiny_llama, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
        assert torch.equal(tiny_llama.generate(ONE, **CALL), expected) and steps == [] and len(calls) == 12
    with monkeypatch.context() as patch:
        patch.setattr(tiny_llama, "__class__", Subclass)
        assert torch.equal(tiny_llama.generate(ONE, **CALL), expected) and steps == []
    with mock.patch.object(LlamaCppForCausalLM, "forward", autospec=True, side_effect=LlamaCppForCausalLM.forward) as patched:
        assert torch.equal(tiny_llama.generate(ONE, **CALL), expected) and patched.call_count == 12
    tiny_llama.generate(ONE, **CALL)
    assert len(steps) == 11


def test_when_transformers_loop_runs(tiny_llama: Any, loops: list[str]) -> None:
    """Asked to, and where the loop is called by itself, outside of `generate()`; beams are transformers' own search."""
    with plain_loop():
        tiny_llama.generate(ONE, **CALL)
    tiny_llama.generate(ONE, **CALL | {"num_beams": 2})
    with mock.patch.object(GenerationMixin, "_sample", autospec=True, side_effect=GenerationMixin._sample) as patched:
        tiny_llama.generate(ONE, **CALL)
    assert loops == [] and patched.call_count == 1
    assert not covers(torch.empty((1, 3), dtype=torch.long, device="meta"))
    assert not covers(ONE)
