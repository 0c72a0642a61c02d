"""`model(...)`: the tensor contract of DESIGN 1.1, against transformers' PyTorch model with the same weights."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from compare import close, padded
from transformers_llamacpp import (
    ContextOverflowError,
    InvalidInputError,
    LlamaCppCache,
    LlamaCppError,
)
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


# -- logits --------------------------------------------------------------------------------------------------------


def test_logits_of_every_position_equal_pytorchs(model: Any, logits: Any) -> None:
    output = model(torch.tensor([A]))
    assert output.logits.shape == (1, len(A), 49152)
    assert output.logits.device.type == "cpu"
    close(output.logits[0], logits(A))


def test_the_output_is_the_callers_own(model: Any) -> None:
    """llama.cpp writes every decode's logits to the same memory; what was returned must not change with it."""
    first = model(torch.tensor([A])).logits
    before = first.clone()
    model(torch.tensor([C]))
    assert torch.equal(first, before)


def test_a_known_prefix_still_gives_all_rows(model: Any, logits: Any) -> None:
    model(torch.tensor([A]))
    close(model(torch.tensor([A])).logits[0], logits(A))
    close(model(torch.tensor([A[:3] + C])).logits[0], logits(A[:3] + C))


@pytest.mark.parametrize("keep", [1, 3, 0, 8, 100])
def test_logits_to_keep_counts_from_the_end(model: Any, logits: Any, keep: int) -> None:
    expected = logits(A, logits_to_keep=keep)
    got = model(torch.tensor([A]), logits_to_keep=keep).logits[0]
    assert got.shape == expected.shape
    close(got, expected)


@pytest.mark.parametrize("columns", [[0], [7], [2, 5], [5, 2], [-1], [3, 3]], ids=str)
def test_logits_to_keep_takes_columns(model: Any, logits: Any, columns: list[int]) -> None:
    close(model(torch.tensor([A]), logits_to_keep=torch.tensor(columns)).logits[0], logits(A)[columns])


def test_logits_to_keep_asks_only_for_these_rows(model: Any) -> None:
    """What is not wanted may come from memory: with one row kept, all but the last token is reused."""
    model(torch.tensor([A]))
    cache = cache_of(model(torch.tensor([A]), logits_to_keep=1))
    assert cache.tokens(0) == A
    model.generate(torch.tensor([A]), max_new_tokens=1, do_sample=False)
    assert model.last_stats.evaluated_tokens == 1


def test_int32_ids_and_a_bool_mask_will_do(model: Any, logits: Any) -> None:
    got = model(torch.tensor([A], dtype=torch.int32), attention_mask=torch.ones(1, len(A), dtype=torch.bool))
    close(got.logits[0], logits(A))


def test_return_dict_false_is_a_tuple(model: Any, logits: Any) -> None:
    output = model(torch.tensor([A]), return_dict=False)
    assert isinstance(output, tuple)
    close(output[0][0], logits(A))


# -- loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [A, [-100, -100, -100, *A[3:]], [*A[:5], -100, -100, -100], C[:8]],
    ids=["all", "prompt ignored", "end ignored", "others"],
)
def test_loss_is_transformers_loss(model: Any, torch_reference: Any, labels: list[int]) -> None:
    ids, targets = torch.tensor([A]), torch.tensor([labels])
    with torch.no_grad():
        expected = torch_reference(ids, labels=targets).loss
    close(model(ids, labels=targets).loss, expected)


def test_loss_of_a_batch_and_by_num_items(model: Any, torch_reference: Any) -> None:
    ids = torch.tensor([A, C[:8]])
    labels = torch.tensor([A, [-100, *C[1:8]]])
    for more in ({}, {"num_items_in_batch": 7}):
        with torch.no_grad():
            expected = torch_reference(ids, labels=labels, **more).loss
        close(model(ids, labels=labels, **more).loss, expected)


# -- padding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_the_rows_alone(model: Any, logits: Any, side: str) -> None:
    ids, mask = padded([A, B, C], side)
    got = model(ids, attention_mask=mask).logits
    for row, tokens in enumerate((A, B, C)):
        close(got[row][mask[row].bool()], logits(tokens))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_equal_pytorchs(model: Any, torch_reference: Any, side: str) -> None:
    ids, mask = padded([A, B], side)
    with torch.no_grad():
        expected = torch_reference(ids, attention_mask=mask).logits
    got = model(ids, attention_mask=mask).logits
    close(got[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("fill", [-100, -1, 60000])
def test_what_stands_under_the_mask_does_not_matter(model: Any, logits: Any, fill: int) -> None:
    ids, mask = padded([A, B], "left", fill)
    close(model(ids, attention_mask=mask).logits[1, len(A) - len(B) :], logits(B))


def test_a_padded_batch_goes_on_with_its_cache(model: Any, logits: Any) -> None:
    ids, mask = padded([A, B], "left")
    cache = cache_of(model(ids, attention_mask=mask, use_cache=True))
    assert cache.get_seq_length() == len(A)
    mask = torch.cat([mask, torch.ones(2, 2, dtype=mask.dtype)], dim=1)
    got = model(torch.tensor([C[:2], C[2:4]]), attention_mask=mask, **{CACHE_NAME: cache}).logits
    close(got[0], logits(A + C[:2])[-2:])
    close(got[1], logits(B + C[2:4])[-2:])
    assert cache.tokens(1) == B + C[2:4]


@pytest.mark.parametrize("mask", [[1, 1, 0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 0]], ids=str)
def test_a_mask_with_a_hole_is_an_error(model: Any, mask: list[int]) -> None:
    with pytest.raises(ValueError, match="hole") as error:
        model(torch.tensor([A]), attention_mask=torch.tensor([mask]))
    assert isinstance(error.value, InvalidInputError)


def test_a_row_that_is_all_padding_is_an_error(model: Any) -> None:
    with pytest.raises(InvalidInputError, match="row 1"):
        model(torch.tensor([A, A]), attention_mask=torch.tensor([[1] * 8, [0] * 8]))


def test_a_past_cannot_be_masked_afterwards(model: Any) -> None:
    cache = cache_of(model(torch.tensor([A])))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
    with pytest.raises(InvalidInputError):
        model(torch.tensor([[5]]), attention_mask=mask, **{CACHE_NAME: cache})
    assert cache.tokens(0) == A


# -- going on with a cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_goes_on_under_both_names(model: Any, logits: Any, name: str) -> None:
    cache = LlamaCppCache(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither name is deprecated here
        first = model(torch.tensor([A[:3]]), **{name: cache})
        assert cache_of(first) is cache
        second = model(torch.tensor([A[3:]]), **{name: cache})
    close(torch.cat([first.logits[0], second.logits[0]]), logits(A))
    assert cache.get_seq_length() == len(A)


def test_one_token_at_a_time(model: Any, logits: Any) -> None:
    cache = LlamaCppCache(model)
    rows = [model(torch.tensor([[token]]), cache=cache).logits[0] for token in A]
    close(torch.cat(rows), logits(A))


def test_use_cache_false_returns_none(model: Any) -> None:
    assert cache_of(model(torch.tensor([A]), use_cache=False)) is None
    assert cache_of(model(torch.tensor([A]))).get_seq_length() == len(A)


def test_position_ids_that_say_the_same_are_fine_and_others_an_error(model: Any, logits: Any) -> None:
    positions = torch.arange(len(A))[None]
    close(model(torch.tensor([A]), position_ids=positions).logits[0], logits(A))
    with pytest.raises(LlamaCppError, match="position_ids"):
        model(torch.tensor([A]), position_ids=positions + 3)


def test_a_copied_cache_goes_its_own_way(model: Any, logits: Any) -> None:
    cache = cache_of(model(torch.tensor([A])))
    other = copy.deepcopy(cache)
    close(model(torch.tensor([B]), cache=other).logits[0], logits(A + B)[len(A) :])
    close(model(torch.tensor([C]), cache=cache).logits[0], logits(A + C)[len(A) :])
    assert (cache.tokens(0), other.tokens(0)) == (A + C, A + B)


def test_reordered_rows_go_on_as_what_they_became(model: Any, logits: Any) -> None:
    cache = cache_of(model(torch.tensor([A, C[:8]])))
    cache.reorder_cache(torch.tensor([1, 1]))
    got = model(torch.tensor([[5], [6]]), cache=cache).logits
    close(got[0], logits([*C[:8], 5])[-1:])
    close(got[1], logits([*C[:8], 6])[-1:])


def test_another_librarys_cache_is_an_error(model: Any) -> None:
    with pytest.raises(InvalidInputError, match="LlamaCppCache"):
        model(torch.tensor([A]), **{CACHE_NAME: DynamicCache()})


def test_another_models_cache_is_an_error(model: Any, tiny_llama: Any) -> None:
    with pytest.raises(InvalidInputError, match="another model"):
        model(torch.tensor([A]), cache=LlamaCppCache(tiny_llama))


def test_a_batch_of_another_size_is_an_error(model: Any) -> None:
    cache = cache_of(model(torch.tensor([A])))
    with pytest.raises(InvalidInputError, match="1 rows and the input 2"):
        model(torch.tensor([[5], [6]]), cache=cache)


# -- inputs that cannot mean anything ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "what"),
    [
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, "empty"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "empty"),
        ({"input_ids": torch.tensor([1, 2])}, "shape"),
        ({"input_ids": torch.zeros(1, 2)}, "type"),
        ({"input_ids": torch.tensor([[1, 49152]])}, "49152"),
        ({"input_ids": torch.tensor([[1, -1]])}, "-1"),
        ({"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 3)}, "attention_mask"),
        ({"input_ids": torch.tensor([[1, 2]]), "inputs_embeds": torch.zeros(1, 2, 576)}, "either"),
        ({"inputs_embeds": torch.zeros(1, 2, 575)}, "576"),
        ({"inputs_embeds": torch.zeros(2, 576)}, "shape"),
        ({}, "input_ids"),
    ],
    ids=[
        "no rows", "no columns", "one dimension", "floats", "id too large", "negative id", "mask too long",
        "ids and embeds", "narrow embeds", "flat embeds", "nothing",
    ],
)  # fmt: skip
def test_an_input_that_cannot_mean_anything(model: Any, kwargs: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        model(**kwargs)


def test_a_prompt_longer_than_the_context(model: Any) -> None:
    with pytest.raises(ContextOverflowError, match="n_ctx=2049") as error:
        model(torch.full((1, 2049), 5))
    assert (error.value.needed, error.value.n_ctx) == (2049, 2048)


def test_an_unknown_argument_is_a_type_error(model: Any) -> None:
    with pytest.raises(TypeError, match="logit_to_keep"):
        model(torch.tensor([A]), logit_to_keep=1)
