"""Group beam search: the texts of transformers 4.46.3, and everything `generate()` takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, TextStreamer

from golden_cases import decoding_cases, decoding_id, open_cases, open_id
from transformers_llamacpp import LlamaCppCache, compat

OPEN = open_cases("group_beam")
CASES = decoding_cases("groups")
CALL: dict[str, Any] = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "do_sample": False}
CALL |= {"max_new_tokens": 8, "eos_token_id": 255, "pad_token_id": 0}
PROMPTS = torch.tensor([[3, 7, 1, 9], [5, 5, 6, 2]])


@pytest.mark.parametrize("case", OPEN, ids=open_id)
def test_open_cases(smollm2_f32: Any, case: dict[str, Any]) -> None:
    prompt = torch.tensor([case["prompt_ids"]])
    output = smollm2_f32.generate(prompt, max_new_tokens=64, **case["kwargs"])
    assert output[0, prompt.shape[1] :].tolist() == case["new_ids"]
    assert smollm2_f32.last_stats.decode_calls == 64  # all beams of all groups in one


@pytest.mark.parametrize("case", CASES, ids=decoding_id)
def test_batches_ends_and_processors(smollm2_f32: Any, case: dict[str, Any]) -> None:
    model, ids = smollm2_f32, torch.tensor(case["ids"])
    out = model.generate(
        ids,
        attention_mask=torch.tensor(case["mask"]),
        return_dict_in_generate=True,
        output_scores=True,
        **case["kwargs"],
    )
    assert out.sequences[:, ids.shape[1] :].tolist() == case["new_ids"]
    torch.testing.assert_close(out.sequences_scores, torch.tensor(case["sequences_scores"]), atol=1e-3, rtol=2e-5)
    steps = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices, normalize_logits=False)
    length = (out.beam_indices >= 0).sum(dim=1) ** case["kwargs"].get("length_penalty", 1.0)
    torch.testing.assert_close(steps.sum(dim=1) / length, out.sequences_scores, atol=1e-3, rtol=0)
    compat.cache_of(out).close()


def test_a_batch_is_its_rows(tiny_llama: Any) -> None:
    together = tiny_llama.generate(PROMPTS, **CALL, num_return_sequences=2)
    alone = [tiny_llama.generate(prompt[None], **CALL, num_return_sequences=2) for prompt in PROMPTS]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("kind", ["tiny_swa", "tiny_mamba", "tiny_hybrid"])
def test_every_kind_of_memory(request: pytest.FixtureRequest, kind: str) -> None:
    """With the cache as without it, where every step evaluates whole texts."""
    model = request.getfixturevalue(kind)
    with_cache = model.generate(PROMPTS, **CALL)
    model.forget()
    assert torch.equal(model.generate(PROMPTS, **CALL, use_cache=False), with_cache)


def test_outputs(tiny_llama: Any) -> None:
    wanted = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    out = tiny_llama.generate(PROMPTS, **CALL, num_return_sequences=2, return_dict_in_generate=True, **wanted)
    assert out.sequences.shape == (4, 12) and out.beam_indices.shape == (4, 8)
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == 8
    assert out.scores[0].shape == out.logits[0].shape == (8, tiny_llama.config.vocab_size)
    assert (out.beam_indices[:2] < 4).all() and (out.beam_indices[2:] >= 4).all()
    first = torch.log_softmax(out.logits[0], dim=-1)
    torch.testing.assert_close(out.scores[0][0], first[0])  # the first group pays nothing
    penalty = first[2] - out.scores[0][2]
    assert sorted(set(penalty.mul(10).round().tolist())) == [0, 5]
    cache = compat.cache_of(out)
    assert cache.batch_size == 8 and cache.get_seq_length() == 11
    cache.close()
    plain = tiny_llama.generate(PROMPTS, **CALL, return_dict_in_generate=True)
    assert plain.scores is None and plain.sequences_scores is None and plain.beam_indices is None
    compat.cache_of(plain).close()


def test_a_passed_in_cache(tiny_llama: Any) -> None:
    expected = tiny_llama.generate(PROMPTS[:1], **CALL)
    cache = LlamaCppCache(tiny_llama)
    tiny_llama(PROMPTS[:1, :3], cache=cache)
    assert torch.equal(tiny_llama.generate(PROMPTS[:1], cache=cache, **CALL), expected)
    cache.close()


def test_what_may_follow_is_asked_for_the_right_text(tiny_llama: Any) -> None:
    allowed = {0: [11, 12, 13, 14, 15, 16], 1: [21, 22, 23, 24, 25, 26]}
    seen = set()

    def allow(text: int, ids: torch.Tensor) -> list[int]:
        seen.add((text, tuple(ids[:4].tolist())))
        return allowed[text]

    out = tiny_llama.generate(PROMPTS, **CALL, prefix_allowed_tokens_fn=allow, num_return_sequences=4)
    assert seen == {(0, (3, 7, 1, 9)), (1, (5, 5, 6, 2))}
    assert set(out[:4, 4:].reshape(-1).tolist()) <= set(allowed[0])
    assert set(out[4:, 4:].reshape(-1).tolist()) <= set(allowed[1])


class Groups(LogitsProcessor):
    """One that asks for the group, as the old library's own did."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, list[int]]] = []

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, current_tokens: torch.Tensor, beam_group_idx: int
    ) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0]
        self.calls.append((beam_group_idx, len(scores), current_tokens.tolist()))
        return scores


def test_a_processor_that_asks_for_the_group(tiny_llama: Any) -> None:
    mine = Groups()
    out = tiny_llama.generate(PROMPTS, **CALL, logits_processor=[mine])
    assert torch.equal(out, tiny_llama.generate(PROMPTS, **CALL))
    assert [call[:2] for call in mine.calls] == [(0, 4), (1, 4)] * 8
    assert mine.calls[0][2] == [0] * 8 and mine.calls[1][2][2:4] == [0, 0] and any(mine.calls[1][2][:2])


def test_padding_and_a_penalty_for_repetition(tiny_llama: Any) -> None:
    """Processors that know something of each row are shown all rows."""
    ids, mask = torch.tensor([[0, 0, 3, 7], [5, 5, 6, 2]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    call = {**CALL, "repetition_penalty": 1.5}
    together = tiny_llama.generate(ids, attention_mask=mask, **call)
    alone = tiny_llama.generate(ids[1:], **call)
    assert torch.equal(together[1:, : alone.shape[1]], alone)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_beams": 5}, "num_beams=5 cannot be divided"),
        ({"diversity_penalty": 0.0}, "above 0"),
        ({"diversity_penalty": -1.0}, "above 0"),
        ({"do_sample": True}, "does not sample"),
        ({"num_beam_groups": 1}, "num_beam_groups to 2"),
        ({"num_return_sequences": 5}, "num_return_sequences"),
        ({"streamer": object()}, "nothing to stream"),
    ],
)
def test_errors_come_before_anything_is_computed(tiny_llama: Any, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_llama.generate(PROMPTS, **{**CALL, **extra})
    assert tiny_llama.last_stats.decode_calls == 0



def test_one_beam_leaves_groups_unused(tiny_llama: Any) -> None:
    greedy = tiny_llama.generate(PROMPTS, do_sample=False, max_new_tokens=4)
    assert torch.equal(tiny_llama.generate(PROMPTS, do_sample=False, max_new_tokens=4, num_beam_groups=2), greedy)


def test_a_streamer_by_its_place(smollm2_f32: Any) -> None:
    streamer = TextStreamer(smollm2_f32.tokenizer)
    with pytest.raises(ValueError, match="nothing to stream"):
        smollm2_f32.generate(torch.tensor([[3]]), None, None, None, None, None, None, streamer, **CALL)
