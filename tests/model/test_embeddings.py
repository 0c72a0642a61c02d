"""`inputs_embeds` and hidden states, against transformers' PyTorch model with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compare import close, padded
from transformers_llamacpp import UnsupportedFeatureError
from transformers_llamacpp.compat import CACHE_NAME, cache_of

A = [504, 1463, 282, 260, 4469, 7057, 5634, 351]  # The history of the Roman Empire begins with
B = [1604, 3987, 46477, 24, 94]
C = [2683, 359, 253, 30879, 284, 551, 44222, 11173, 30]


@pytest.fixture
def model(smollm2_f32: Any) -> Any:
    return smollm2_f32


@pytest.fixture
def logits(torch_reference: Any) -> Any:
    """`logits(tokens)`: what PyTorch says about every position of one row."""

    def of(tokens: list[int], **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            return torch_reference(torch.tensor([tokens]), **kwargs).logits[0]

    return of


# -- inputs_embeds -------------------------------------------------------------------------------------------------


def test_inputs_embeds_equal_input_ids(model: Any, torch_reference: Any, logits: Any) -> None:
    embeds = torch_reference.get_input_embeddings()(torch.tensor([A])).detach()
    close(model(inputs_embeds=embeds).logits[0], logits(A))


def test_inputs_embeds_in_a_padded_batch(model: Any, torch_reference: Any, logits: Any) -> None:
    ids, mask = padded([A, B], "left")
    embeds = torch_reference.get_input_embeddings()(ids).detach()
    got = model(inputs_embeds=embeds, attention_mask=mask).logits
    close(got[0], logits(A))
    close(got[1, len(A) - len(B) :], logits(B))


def test_tokens_go_on_after_embeds(model: Any, torch_reference: Any, logits: Any) -> None:
    embeds = torch_reference.get_input_embeddings()(torch.tensor([A])).detach()
    cache = cache_of(model(inputs_embeds=embeds))
    close(model(torch.tensor([C]), **{CACHE_NAME: cache}).logits[0], logits(A + C)[len(A) :])


def test_embeds_are_never_taken_for_a_known_prefix(model: Any, torch_reference: Any, logits: Any) -> None:
    embedding = torch_reference.get_input_embeddings()
    model(inputs_embeds=embedding(torch.tensor([C])).detach())
    close(model(inputs_embeds=embedding(torch.tensor([A])).detach(), logits_to_keep=1).logits[0], logits(A)[-1:])
    close(model(torch.tensor([A]), logits_to_keep=1).logits[0], logits(A)[-1:])


def test_generating_from_embeds(model: Any, torch_reference: Any) -> None:
    embeds = torch_reference.get_input_embeddings()(torch.tensor([A])).detach()
    expected = model.generate(torch.tensor([A]), max_new_tokens=6, do_sample=False)[0, len(A) :]
    got = model.generate(inputs_embeds=embeds, max_new_tokens=6, do_sample=False)[0]
    assert got.tolist() == expected.tolist()


# -- hidden states, attentions -------------------------------------------------------------------------------------


def test_the_last_hidden_state_equals_pytorchs(model: Any, torch_reference: Any) -> None:
    ids, mask = padded([A, B], "left")
    with torch.no_grad():
        expected = torch_reference(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    output = model(ids, attention_mask=mask, output_hidden_states="last")
    assert len(output.hidden_states) == len(expected) == 31
    got = output.hidden_states[-1]
    assert got.shape == expected[-1].shape
    close(got[mask.bool()], expected[-1][mask.bool()], atol=5e-3)
    close(output.logits[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()])


def test_hidden_states_do_not_go_missing_when_the_prefix_is_known(model: Any, torch_reference: Any) -> None:
    model(torch.tensor([A]))
    with torch.no_grad():
        expected = torch_reference(torch.tensor([A]), output_hidden_states=True).hidden_states[-1]
    got = model(torch.tensor([A]), output_hidden_states=True, logits_to_keep=1)
    assert got.logits.shape[1] == 1
    close(got.hidden_states[-1], expected, atol=5e-3)


def test_a_plain_call_after_hidden_states_is_plain(model: Any, logits: Any) -> None:
    model(torch.tensor([A]), output_hidden_states=True)
    output = model(torch.tensor([C]))
    assert output.hidden_states is None
    close(output.logits[0], logits(C))


@pytest.mark.parametrize("layer", [0, 1, 15, 29, -2, -31])
def test_where_only_the_last_was_wanted_others_are_an_error_and_no_zeros(model: Any, layer: int) -> None:
    states = model(torch.tensor([A]), output_hidden_states="last").hidden_states
    with pytest.raises(UnsupportedFeatureError, match="last"):
        states[layer]


def test_going_through_all_hidden_states_is_an_error_then(model: Any) -> None:
    states = model(torch.tensor([A]), output_hidden_states="last").hidden_states
    assert len(states) == 31
    with pytest.raises(UnsupportedFeatureError):
        list(states)
    with pytest.raises(IndexError):
        states[31]


def test_attentions_are_an_error(model: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match="attention") as error:
        model(torch.tensor([A]), output_attentions=True)
    assert error.value.feature == "output_attentions"
