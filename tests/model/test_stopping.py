"""Every stopping criterion, and the streamers."""

from __future__ import annotations

import inspect
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationMixin,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

PROMPT = [504, 1463, 282, 260, 4469, 7057, 5634, 351]  # The history of the Roman Empire begins with
PLAIN = [260, 14465, 282, 7268, 281, 216, 39, 37, 35, 15023, 411, 7810]  # … the founding of Rome in 753 BCE by Rom
IDS = torch.tensor([PROMPT])

COVERED = {"max_length", "max_time", "stop_strings", "_eos_token_tensor"}
ASSISTANTS_OWN = {"is_assistant", "assistant_confidence_threshold"}


def new(output: torch.Tensor, row: int = 0) -> list[int]:
    return output[row, len(PROMPT) :].tolist()


def greedy(model: Any, **kwargs: Any) -> torch.Tensor:
    return model.generate(IDS, do_sample=False, **{"max_new_tokens": 12, **kwargs})


def test_no_criterion_of_this_release_is_left_out() -> None:
    source = inspect.getsource(GenerationMixin._get_stopping_criteria)
    assert set(re.findall(r"generation_config\.(\w+)", source)) == COVERED | ASSISTANTS_OWN


@pytest.mark.parametrize("n", [1, 2, 12])
def test_max_new_tokens(smollm2_f32: Any, n: int) -> None:
    assert new(greedy(smollm2_f32, max_new_tokens=n)) == PLAIN[:n]
    assert smollm2_f32.last_stats.new_tokens == n
    assert smollm2_f32.last_stats.evaluated_tokens == len(PROMPT) + n - 1


def test_max_length(smollm2_f32: Any) -> None:
    assert new(greedy(smollm2_f32, max_new_tokens=None, max_length=len(PROMPT) + 5)) == PLAIN[:5]


def test_max_time(smollm2_f32: Any) -> None:
    started = time.perf_counter()
    output = greedy(smollm2_f32, max_new_tokens=1500, max_time=0.5)
    assert 1 <= len(new(output)) < 1500
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize(("end", "length"), [(7268, 4), ([7268], 4), ([15023, 282], 3)], ids=str)
def test_end_tokens(smollm2_f32: Any, end: Any, length: int) -> None:
    assert new(greedy(smollm2_f32, eos_token_id=end)) == PLAIN[:length]
    assert smollm2_f32.last_stats.new_tokens == length


def test_the_models_own_end_token_stops_and_none_does_not(smollm2_f32: Any) -> None:
    ids = torch.tensor([[1604, 3987, 46477, 24, 94, 727, 472, 1620, 14362, 260, 304, 29, 373, 24681, 46477, 1230, 7996,
                         198]])  # fmt: skip
    kwargs = {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "max_new_tokens": 6}
    assert smollm2_f32.generate(ids, **kwargs)[0, ids.shape[1] :].tolist() == [3725, 2]
    assert smollm2_f32.generate(ids, eos_token_id=-1, **kwargs).shape[1] == ids.shape[1] + 6


@pytest.mark.parametrize(
    ("strings", "length"), [("Rome", 4), (["Rome"], 4), ([" of R", "BCE"], 4), ("75", 8), (["nowhere"], 12)], ids=str
)
def test_stop_strings(smollm2_f32: Any, strings: Any, length: int) -> None:
    output = greedy(smollm2_f32, stop_strings=strings, tokenizer=smollm2_f32.tokenizer)
    assert new(output) == PLAIN[:length]


class After(StoppingCriteria):
    """Stops each row after its own number of tokens."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] - len(PROMPT) >= self.lengths


def test_criteria_of_the_users_own(smollm2_f32: Any) -> None:
    assert new(greedy(smollm2_f32, stopping_criteria=StoppingCriteriaList([After(3)]))) == PLAIN[:3]
    both = StoppingCriteriaList([MaxLengthCriteria(len(PROMPT) + 5), MaxTimeCriteria(60.0)])
    assert new(greedy(smollm2_f32, stopping_criteria=both)) == PLAIN[:5]


def test_rows_stop_one_by_one(smollm2_f32: Any) -> None:
    output = smollm2_f32.generate(
        IDS.repeat(2, 1), do_sample=False, max_new_tokens=8, pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([After(3, 6)]),
    )  # fmt: skip
    assert new(output, 0) == [*PLAIN[:3], 0, 0, 0]
    assert new(output, 1) == PLAIN[:6]


def test_a_context_that_is_full_stops_as_max_length_does(load: Any, tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, n_ctx=40)
    output = model.generate(torch.tensor([[1, *range(10, 40)]]), do_sample=False, max_new_tokens=50, eos_token_id=None)
    assert output.shape == (1, 40)


def test_an_error_in_a_criterion_comes_out_and_the_model_goes_on(smollm2_f32: Any) -> None:
    def broken(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] == len(PROMPT) + 3:
            raise RuntimeError("broken on purpose")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    with pytest.raises(RuntimeError, match="on purpose"):
        greedy(smollm2_f32, stopping_criteria=StoppingCriteriaList([broken]))
    smollm2_f32.engine.check()
    assert new(greedy(smollm2_f32)) == PLAIN
    assert smollm2_f32.last_stats.reused_tokens >= len(PROMPT) - 1


# -- streamers -----------------------------------------------------------------------------------------------------


def test_a_text_streamer_prints_the_text(smollm2_f32: Any, capsys: pytest.CaptureFixture[str]) -> None:
    output = greedy(smollm2_f32, streamer=TextStreamer(smollm2_f32.tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip("\n") == smollm2_f32.tokenizer.decode(new(output))


def test_an_iterator_streamer_gives_the_same_text_in_pieces(smollm2_f32: Any) -> None:
    streamer = TextIteratorStreamer(smollm2_f32.tokenizer, skip_prompt=True, timeout=120)
    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(greedy(smollm2_f32, streamer=streamer)))
    thread.start()
    pieces = [piece for piece in streamer if piece]
    thread.join()
    assert "".join(pieces) == smollm2_f32.tokenizer.decode(new(outputs[0])) == smollm2_f32.tokenizer.decode(PLAIN)
    assert len(pieces) > 5


def test_streaming_never_gives_half_a_character(smollm2_f32: Any) -> None:
    """Forced text whose characters are several tokens each."""
    tokenizer = smollm2_f32.tokenizer
    text = " naïve 東京 👩‍👩‍👧 ça va ✓"
    forced = tokenizer(text, add_special_tokens=False).input_ids
    assert len(forced) > len(text)  # some characters take more than one token
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=120)

    def only(batch: int, tokens: torch.Tensor) -> list[int]:
        return [forced[len(tokens) - len(PROMPT)]]

    kwargs = {"streamer": streamer, "max_new_tokens": len(forced), "prefix_allowed_tokens_fn": only}
    thread = threading.Thread(target=lambda: greedy(smollm2_f32, **kwargs))
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
