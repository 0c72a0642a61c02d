"""Constrained beam search: the texts of transformers 4.46.3, and constraints of every kind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from golden_cases import decoding_cases, decoding_id
from transformers_llamacpp import compat
from transformers_llamacpp.decoding import Constraint, DisjunctiveConstraint, PhrasalConstraint

CASES = decoding_cases("constrained")
CALL: dict[str, Any] = {
    "num_beams": 4,
    "do_sample": False,
    "max_new_tokens": 10,
    "eos_token_id": 255,
    "pad_token_id": 0,
}
PROMPTS = torch.tensor([[3, 7, 1, 9], [5, 5, 6, 2]])


def contains(text: list[int], word: list[int]) -> bool:
    return any(text[at : at + len(word)] == word for at in range(len(text)))


@pytest.mark.parametrize("case", CASES, ids=decoding_id)
def test_the_old_librarys_texts(smollm2_f32: Any, case: dict[str, Any]) -> None:
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
    assert model.last_stats.decode_calls == len(out.scores)
    steps = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices, normalize_logits=False)
    length = (out.beam_indices >= 0).sum(dim=1)
    torch.testing.assert_close(steps.sum(dim=1) / length, out.sequences_scores, atol=1e-3, rtol=0)
    compat.cache_of(out).close()


@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_swa", "tiny_mamba", "tiny_hybrid"])
def test_words_occur_in_every_text(request: pytest.FixtureRequest, kind: str) -> None:
    model = request.getfixturevalue(kind)
    call = {**CALL, "num_beams": 6, "max_new_tokens": 12, "force_words_ids": [[40, 41], [[50, 51, 52], [50, 60]]]}
    out = model.generate(PROMPTS, **call)
    for text in out.tolist():
        assert contains(text[4:], [40, 41]), text
        assert contains(text[4:], [50, 51, 52]) or contains(text[4:], [50, 60]), text
    model.forget()
    assert torch.equal(model.generate(PROMPTS, **call, use_cache=False), out)


def test_words_and_constraints_are_the_same(tiny_llama: Any) -> None:
    by_words = tiny_llama.generate(PROMPTS, **CALL, force_words_ids=[[40, 41], [[50], [60, 61]]])
    objects = [PhrasalConstraint([40, 41]), DisjunctiveConstraint([[50], [60, 61]])]
    assert torch.equal(tiny_llama.generate(PROMPTS, **CALL, constraints=objects), by_words)
    assert torch.equal(tiny_llama.generate(PROMPTS, **CALL, constraints=objects), by_words)  # they are left unchanged
    both = tiny_llama.generate(PROMPTS, **CALL, constraints=objects[:1], force_words_ids=[[[50], [60, 61]]])
    assert torch.equal(both, by_words)


class Foreign:
    """A phrase as the old library wrote it: its protocol, none of our classes."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids, self.seqlen, self.at, self.completed = token_ids, len(token_ids), 0, False

    def advance(self) -> int | None:
        return None if self.completed else self.token_ids[self.at]

    def does_advance(self, token_id: int) -> bool:
        return not self.completed and token_id == self.token_ids[self.at]

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        stepped = self.does_advance(token_id)
        self.at = self.at + 1 if stepped else 0
        self.completed = self.at == self.seqlen
        return stepped, self.completed, not stepped

    def reset(self) -> None:
        self.at, self.completed = 0, False

    def remaining(self) -> int:
        return self.seqlen - self.at

    def copy(self, stateful: bool = False) -> Foreign:
        new = Foreign(self.token_ids)
        if stateful:
            new.at, new.completed = self.at, self.completed
        return new


def test_objects_of_others(tiny_llama: Any) -> None:
    ours = tiny_llama.generate(PROMPTS, **CALL, constraints=[PhrasalConstraint([40, 41, 42])])
    assert torch.equal(tiny_llama.generate(PROMPTS, **CALL, constraints=[Foreign([40, 41, 42])]), ours)


def test_a_constraint_of_ones_own(tiny_llama: Any) -> None:
    class Even(Constraint):
        """Two even tokens, whichever."""

        seqlen = 2

        def __init__(self) -> None:
            self.made = 0

        def advance(self) -> int | list[int] | None:
            return None if self.made == 2 else list(range(100, 140, 2))

        def does_advance(self, token_id: int) -> bool:
            return self.made < 2 and token_id in range(100, 140, 2)

        def update(self, token_id: int) -> tuple[bool, bool, bool]:
            stepped = self.does_advance(token_id)
            self.made = self.made + 1 if stepped else 0
            return stepped, self.made == 2, not stepped

        def reset(self) -> None:
            self.made = 0

        def remaining(self) -> int:
            return 2 - self.made

        def copy(self, stateful: bool = False) -> Even:
            new = Even()
            new.made = self.made if stateful else 0
            return new

    out = tiny_llama.generate(PROMPTS, **CALL, constraints=[Even()])
    for text in out.tolist():
        assert any({a, b} <= set(range(100, 140, 2)) for a, b in itertools.pairwise(text[4:]))


def test_what_the_prompt_has_is_done_and_its_padding_is_not(tiny_llama: Any) -> None:
    ids, mask = torch.tensor([[40, 40, 3, 7], [5, 40, 6, 2]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    out = tiny_llama.generate(ids, attention_mask=mask, **CALL, force_words_ids=[[40]])
    assert 40 in out[0, 4:].tolist()
    free = tiny_llama.generate(ids[1:], do_sample=False, **{k: v for k, v in CALL.items() if k != "do_sample"})
    assert out[1, 4:].tolist()[: free.shape[1] - 4] == free[0, 4:].tolist()


def test_a_batch_is_its_rows(tiny_llama: Any) -> None:
    call = {**CALL, "force_words_ids": [[40, 41]], "num_return_sequences": 2}
    together = tiny_llama.generate(PROMPTS, **call)
    assert torch.equal(together, torch.cat([tiny_llama.generate(prompt[None], **call) for prompt in PROMPTS]))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"force_words_ids": []}, "force_words_ids is a list of words"),
        ({"force_words_ids": [[]]}, "force_words_ids is a list of words"),
        ({"force_words_ids": [40]}, "force_words_ids is a list of words"),
        ({"force_words_ids": [[-1]]}, "none of them negative"),
        ({"force_words_ids": [[[40], [40, 41]]]}, "is the beginning of another"),
        ({"force_words_ids": [[10**6]]}, "wants token 1000000"),
        ({"constraints": []}, "empty list"),
        ({"constraints": [[40, 41]]}, "is no constraint: it has no seqlen"),
        ({"force_words_ids": [[40]], "num_beams": 1}, "num_beams=1"),
        ({"force_words_ids": [[40]], "do_sample": True}, "does not sample"),
        ({"force_words_ids": [[40]], "num_beam_groups": 2, "diversity_penalty": 1.0}, "num_beam_groups=1"),
        ({"force_words_ids": [[40]], "streamer": object()}, "nothing to stream"),
    ],
)
def test_errors_come_before_anything_is_computed(tiny_llama: Any, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_llama.generate(PROMPTS, **{**CALL, **extra})
    assert tiny_llama.last_stats.decode_calls == 0
