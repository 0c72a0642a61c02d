"""DoLa against what transformers 4.46.3 generated (`test_golden.py` has more), against the paper's formula on PyTorch's
hidden states, and against itself."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

import tiny_gguf
from compare import close, padded, same_tokens
from golden_cases import dola_cases
from plain_guidance import PlainGuidance
from transformers_llamacpp import InvalidInputError, LlamaCppCache
from transformers_llamacpp.compat import cache_of
from transformers_llamacpp.decoding.dola import candidate_layers

pytestmark = pytest.mark.once

A = [504, 1463, 282, 260, 4469, 7057, 5634, 351]  # The history of the Roman Empire begins with
B = [1604, 3987, 46477, 24, 94]
C = [2683, 359, 253, 30879, 284, 551, 44222, 11173, 30]
N = 8
LAYERS = ["low", "high", [0, 3, 29], [12]]


@pytest.fixture
def model(smollm2_f32: Any) -> Any:
    return smollm2_f32


@pytest.fixture
def scores_of(torch_reference: Any) -> Callable[..., torch.Tensor]:
    """`scores_of(tokens, layers)`: DoLa's scores of the next token, worked out with PyTorch."""

    def of(tokens: list[int], layers: Any) -> torch.Tensor:
        with torch.no_grad():
            output = torch_reference(torch.tensor([tokens]), output_hidden_states=True)
            states = [output.hidden_states[layer][0, -1] for layer in candidate_layers(layers, 30, True)]
            early = torch.stack([torch_reference.lm_head(state) for state in states]).double().softmax(-1)
            p = output.logits[0, -1].double().softmax(-1)
        middle = (p + early) / 2
        kl = torch.nn.functional.kl_div
        divergence = [
            kl(a.log(), m, reduction="sum") + kl(b.log(), m, reduction="sum")
            for m, a, b in zip(middle, [p] * len(early), early, strict=True)
        ]
        chosen = early[int(torch.stack(divergence).argmax())]
        return torch.where(p >= 0.1 * p.max(), p.log() - chosen.log(), -math.inf)

    return of


def greedy(scores_of: Any, prompt: list[int], layers: Any, n: int = N) -> tuple[list[int], list[torch.Tensor]]:
    tokens, scores = list(prompt), []
    for _ in range(n):
        scores.append(scores_of(tokens, layers))
        tokens.append(int(scores[-1].argmax()))
    return tokens[len(prompt) :], scores


def generate(model: Any, rows: list[list[int]], layers: Any, **kwargs: Any) -> Any:
    ids, mask = padded(rows)
    kwargs = {"max_new_tokens": N, "do_sample": False, "pad_token_id": 2, "eos_token_id": None} | kwargs
    return model.generate(ids, attention_mask=mask, dola_layers=layers, **kwargs)


def new(model: Any, rows: list[list[int]], layers: Any, **kwargs: Any) -> list[list[int]]:
    """The generated tokens of each row."""
    output = generate(model, rows, layers, **kwargs)
    return output[:, max(map(len, rows)) :].tolist()  # type: ignore[no-any-return]


SEED, RECORDED = dola_cases()


@pytest.mark.parametrize("case", RECORDED, ids=[f"{case['ids'][0]}-{case['kwargs']}" for case in RECORDED])
def test_new_ids_equal_those_of_transformers_4_46(model: Any, case: dict[str, Any]) -> None:
    torch.manual_seed(SEED)
    ids = torch.tensor([case["ids"]])
    got = model.generate(ids, attention_mask=torch.ones_like(ids), **case["kwargs"])
    assert got[0, ids.shape[1] :].tolist() == case["new_ids"]


# -- equal to the paper ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_it_is_what_the_paper_says(model: Any, scores_of: Any, layers: Any) -> None:
    expected, scores = greedy(scores_of, A, layers)
    output = generate(model, [A], layers, return_dict_in_generate=True, output_scores=True)
    got = output.sequences[0, len(A) :].tolist()
    same_tokens(expected, got, lambda i: abs(float(scores[i][expected[i]] - scores[i][got[i]])))
    finite = torch.isfinite(scores[0])
    assert torch.equal(torch.isfinite(output.scores[0][0]), finite) and 0 < finite.sum() < 1000
    torch.testing.assert_close(output.scores[0][0][finite].double(), scores[0][finite], atol=5e-3, rtol=1e-4)


def test_it_is_not_greedy_search(model: Any) -> None:
    assert new(model, [A], "high") != model.generate(torch.tensor([A]), max_new_tokens=N, do_sample=False)[:, len(A) :].tolist()


def test_sampling_draws_from_the_scores(model: Any) -> None:
    torch.manual_seed(5)
    output = generate(model, [A, C], [12, 20], do_sample=True, top_k=0, return_dict_in_generate=True, output_scores=True)
    torch.manual_seed(5)
    for step, scores in enumerate(output.scores):
        drawn = torch.multinomial(torch.softmax(scores, dim=-1), 1)[:, 0]
        assert drawn.tolist() == output.sequences[:, len(C) + step].tolist()
    torch.manual_seed(5)
    assert torch.equal(generate(model, [A, C], [12, 20], do_sample=True, top_k=0), output.sequences)


@pytest.mark.parametrize("layers", ["low", "high", [3]], ids=str)
def test_batched_rows_equal_the_rows_alone(model: Any, layers: Any) -> None:
    for tokens, got in zip((A, B, C), new(model, [A, B, C], layers), strict=True):
        alone = generate(model, [tokens], layers, return_dict_in_generate=True, output_scores=True)
        expected = alone.sequences[0, len(tokens) :].tolist()
        scores = [step[0] for step in alone.scores]
        same_tokens(expected, got, lambda i: abs(float(scores[i][expected[i]] - scores[i][got[i]])))  # noqa: B023


@pytest.mark.parametrize("kind", tiny_gguf.KINDS)
def test_every_kind_of_memory(kind: str, request: pytest.FixtureRequest) -> None:
    """In steps with a cache, in a batch, and from the whole text each time: the same."""
    tiny = request.getfixturevalue(f"tiny_{kind}")
    rows = [[1, 70, 80, 90, 100], [1, 60, 61], [1, *range(40, 64)]]
    expected = [new(tiny, [row], "high", repetition_penalty=1.2)[0] for row in rows]
    tiny.forget()
    assert new(tiny, rows, "high", repetition_penalty=1.2) == expected
    assert [new(tiny, [row], "high", repetition_penalty=1.2, use_cache=False)[0] for row in rows] == expected


# -- what goes with it -----------------------------------------------------------------------------------------------


def test_the_parts_of_the_output(model: Any, scores_of: Any) -> None:
    wanted = ("output_scores", "output_logits", "output_hidden_states")
    ids = generate(model, [A, B], "high")
    output = generate(model, [A, B], "high", return_dict_in_generate=True, **dict.fromkeys(wanted, True))
    assert torch.equal(output.sequences, ids)
    assert len(output.scores) == len(output.logits) == len(output.hidden_states) == N
    plain = model(torch.tensor([A]), output_hidden_states=True)
    close(output.logits[0][0], plain.logits[0, -1])
    for ours, theirs in zip(output.hidden_states[0], plain.hidden_states, strict=True):
        close(ours[0], theirs[0], atol=2e-4 * float(theirs.abs().max()))
    assert output.hidden_states[1][0].shape == (2, 1, 576)
    assert cache_of(output).get_seq_length() == len(A) + N - 1
    assert output.stats.evaluated_tokens == len(A) + len(B) + 2 * (N - 1)


def test_a_right_padded_prompt_is_read_at_its_last_token(model: Any) -> None:
    ids, mask = padded([A, B], "right")
    for more in ({}, {"output_hidden_states": True}):
        got = model.generate(
            ids, attention_mask=mask, dola_layers="high", max_new_tokens=1, return_dict_in_generate=True, output_scores=True,
            do_sample=False, pad_token_id=2, eos_token_id=None, **more,
        )  # fmt: skip
        for row, tokens in enumerate((A, B)):
            alone = generate(model, [tokens], "high", max_new_tokens=1, return_dict_in_generate=True, output_scores=True)
            expected = alone.scores[0][0]
            finite = torch.isfinite(expected)
            torch.testing.assert_close(got.scores[0][row][finite], expected[finite], atol=5e-3, rtol=1e-4)


def test_processors_see_the_contrasted_scores(model: Any) -> None:
    plain = generate(model, [A], "high", return_dict_in_generate=True, output_scores=True)
    seen: list[torch.Tensor] = []

    class OnlyFive(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(scores.clone())
            scores.fill_(-torch.inf)
            scores[:, 5] = 0.0
            return scores

    assert new(model, [A], "high", logits_processor=LogitsProcessorList([OnlyFive()])) == [[5] * N]
    finite = torch.isfinite(plain.scores[0])
    assert torch.equal(torch.isfinite(seen[0]), finite)
    close(seen[0][finite], plain.scores[0][finite], atol=5e-3)


def test_it_stops_where_it_should(model: Any) -> None:
    tokens = new(model, [A, C], "high")
    assert new(model, [A], "high", eos_token_id=tokens[0][3])[0] == tokens[0][: tokens[0].index(tokens[0][3]) + 1]
    padded_rows = new(model, [A, C], "high", eos_token_id=tokens[0][2])
    stop = tokens[0].index(tokens[0][2])
    assert padded_rows[0][stop + 1 :] == [2] * (len(padded_rows[0]) - stop - 1)
    assert padded_rows[1] == tokens[1][: len(padded_rows[1])]

    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= len(A) + 3)

    assert new(model, [A], "high", stopping_criteria=[AfterThree()])[0] == tokens[0][:3]


def test_a_streamer_gets_every_token(model: Any) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Streamer()
    output = generate(model, [A], "low", streamer=streamer)
    assert streamer.ended and streamer.got == output[0].tolist()


def test_going_on_with_a_cache(model: Any) -> None:
    whole = new(model, [A], "high")[0]
    cache = LlamaCppCache(model)
    half = generate(model, [A], "high", max_new_tokens=3, cache=cache)[0].tolist()
    model.forget()
    rest = generate(model, [half], "high", max_new_tokens=N - 3, cache=cache)[0].tolist()
    assert rest == A + whole
    assert model.last_stats.evaluated_tokens == N - 3
    assert cache.tokens(0) == rest[:-1]


def test_a_known_prompt_is_not_evaluated_again(model: Any) -> None:
    generate(model, [A], "high")
    generate(model, [A], "high")
    assert model.last_stats.reused_tokens == len(A) - 1


def test_several_returned_texts(model: Any) -> None:
    torch.manual_seed(3)
    output = generate(model, [A], [12, 20], do_sample=True, num_return_sequences=3, temperature=2.0)
    assert output.shape == (3, len(A) + N) and len({tuple(row) for row in output.tolist()}) > 1
    assert model.last_stats.evaluated_tokens == len(A) + 3 * (N - 1)


def test_embeddings_instead_of_tokens(model: Any, torch_reference: Any) -> None:
    embeds = torch_reference.get_input_embeddings()(torch.tensor([A])).detach()
    got = model.generate(inputs_embeds=embeds, dola_layers=[0, 3, 29], max_new_tokens=4, do_sample=False)
    assert got[0].tolist() == new(model, [A], [0, 3, 29])[0][:4]


def test_other_calls_at_the_same_time(model: Any) -> None:
    """Contexts change under calls that know nothing of it."""
    expected = [new(model, [A], "high")[0], model.generate(torch.tensor([C]), max_new_tokens=N, do_sample=False)[0].tolist()]
    got: list[Any] = [None, None]

    def dola() -> None:
        got[0] = new(model, [A], "high")[0]

    def plain() -> None:
        got[1] = model.generate(torch.tensor([C]), max_new_tokens=N, do_sample=False)[0].tolist()

    model.engine.backend.record_layers(False)
    threads = [threading.Thread(target=target) for target in (plain, dola)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected


@pytest.mark.parametrize(
    ("kwargs", "what"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens drafts for one text"),
        ({"num_beams": 2, "force_words_ids": [[5]]}, "constraints"),
        ({"dola_layers": "middle"}, "'middle'"),
        ({"dola_layers": 0}, "dola_layers=0 names no layer"),
        ({"dola_layers": True}, "dola_layers=True names no layer"),
        ({"dola_layers": [30]}, "from 0 to 29"),
    ],
    ids=["beams", "contrastive", "lookup", "constraints", "no word", "zero", "true", "no layer"],
)
def test_what_does_not_go_together(model: Any, kwargs: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        generate(model, [A], kwargs.pop("dola_layers", "high"), **kwargs)


@pytest.mark.parametrize("scale", [0.5, 1.5])
def test_guidance(model: Any, scale: float) -> None:
    plain = PlainGuidance(model, scale, len(A), None)
    expected = new(model, [A], "high", logits_processor=LogitsProcessorList([plain]))
    assert new(model, [A], "high", guidance_scale=scale) == expected


# -- the head --------------------------------------------------------------------------------------------------------


def test_the_head_is_the_one_llama_cpp_computes_with(model: Any) -> None:
    head = model.native.output_head()
    assert head.tied and head.bias is None and head.weight.shape == (576, 49152)
    output = model(torch.tensor([A]), output_hidden_states="last")
    close(output.hidden_states[-1][0] @ torch.from_numpy(head.weight), output.logits[0])
    assert model.native.output_head() is head


def test_a_quantised_head_is_the_same_up_to_rounding(load: Callable[..., Any], smollm2_q4_0_path: Path) -> None:
    model = load(smollm2_q4_0_path)
    output = model(torch.tensor([A]), output_hidden_states="last")
    mine = output.hidden_states[-1][0] @ torch.from_numpy(model.native.output_head().weight)
    assert float((mine - output.logits[0]).norm() / output.logits[0].norm()) < 0.02
    assert len(new(model, [A, B], "high")) == 2


def test_the_head_goes_with_the_model(load: Callable[..., Any], tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path)
    assert not model.native.output_head().tied
    model.close()
    assert model.native._head is None


def test_a_split_model(load: Callable[..., Any], tiny_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter
    monkeypatch.setattr(gguf, "GGUFWriter", lambda *arguments: writer(*arguments, split_max_tensors=9))
    tiny_gguf.write("llama", tmp_path / "m.gguf")
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 3
    split = load(shards[0], type_k="f32", type_v="f32", flash_attn=False)
    np.testing.assert_array_equal(split.native.output_head().weight, tiny_llama.native.output_head().weight)
    row = [1, 70, 80, 90, 100]
    assert new(split, [row], "low") == new(tiny_llama, [row], "low")


def test_the_head_is_read_once_for_several_threads(
    load: Callable[..., Any], tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers_llamacpp.native import model as module

    reads: list[Path] = []
    read = module.read_output_head
    monkeypatch.setattr(module, "read_output_head", lambda path, *rest: (reads.append(path), read(path, *rest))[1])
    model = load(tiny_llama_path)
    threads = [threading.Thread(target=model.native.output_head) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reads == [tiny_llama_path]
