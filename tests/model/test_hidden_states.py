"""`output_hidden_states=True`: what goes into every layer, against PyTorch, against models cut off after a few layers, and
against itself in other batches, chunks and orders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader

import tiny_architectures
import tiny_gguf
from compare import close, padded
from transformers_llamacpp import InvalidInputError, LlamaCppCache, UnsupportedFeatureError
from transformers_llamacpp.engine import PLAIN_CALLS
from transformers_llamacpp.hidden import LastHiddenState
from transformers_llamacpp.native.graph import no_layers
from transformers_llamacpp.native.layers import LayerRecorder

pytestmark = pytest.mark.once

A = [504, 1463, 282, 260, 4469, 7057, 5634, 351]  # The history of the Roman Empire begins with
B = [1604, 3987, 46477, 24, 94]
C = [2683, 359, 253, 30879, 284, 551, 44222, 11173, 30]

KINDS = tuple(tiny_gguf.KINDS)
LONG = [tiny_gguf.BOS, *np.random.default_rng(3).integers(3, tiny_gguf.N_VOCAB, 39).tolist()]
SHORT, MIDDLE = LONG[:1] + LONG[20:27], LONG[:1] + LONG[5:25]

F32 = {"type_k": "f32", "type_v": "f32", "flash_attn": False}


def states_of(model: Any, rows: list[list[int]], side: str = "left", **kwargs: Any) -> list[list[torch.Tensor]]:
    """For each row its hidden states without the padding: `n_layer + 1` tensors `(length, width)`."""
    ids, mask = padded(rows, side)
    hidden = model(ids, attention_mask=mask, output_hidden_states=True, **kwargs).hidden_states
    assert type(hidden) is tuple and len(hidden) == model.config.num_hidden_layers + 1
    for states in hidden:
        assert states.shape[:2] == ids.shape and states.dtype == torch.float32
        assert not states[~mask.bool()].any()
    return [[states[row][mask[row].bool()] for states in hidden] for row in range(len(rows))]


def same(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-4) -> None:
    assert len(got) == len(expected)
    for layer, (a, b) in enumerate(zip(got, expected, strict=True)):
        distance = float((a - b).norm() / b.norm())
        assert distance < tolerance, f"hidden_states[{layer}] is off by {distance:.1e}"


@pytest.fixture
def model(smollm2_f32: Any) -> Any:
    return smollm2_f32


@pytest.fixture(params=KINDS)
def tiny(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture
def torch_states(torch_reference: Any) -> Callable[[list[int]], list[torch.Tensor]]:
    def of(tokens: list[int]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [x[0] for x in torch_reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states]

    return of


# -- equal to PyTorch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_layer_equals_pytorchs(model: Any, torch_states: Any, side: str) -> None:
    for got, tokens in zip(states_of(model, [A, B, C], side), (A, B, C), strict=True):
        same(got, torch_states(tokens))


def test_a_text_that_goes_on(model: Any, torch_states: Any) -> None:
    cache = LlamaCppCache(model)
    parts = [model(torch.tensor([part]), cache=cache, output_hidden_states=True).hidden_states for part in (A[:3], A[3:], C)]
    same([torch.cat(states, dim=1)[0] for states in zip(*parts, strict=True)], torch_states(A + C))


def test_one_token_for_each_of_several_rows(model: Any, torch_states: Any) -> None:
    ids, mask = padded([A, B, C])
    cache = LlamaCppCache(model)
    model(ids, attention_mask=mask, cache=cache)
    mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
    hidden = model(torch.tensor([[7], [8], [9]]), attention_mask=mask, cache=cache, output_hidden_states=True).hidden_states
    for row, tokens in enumerate(([*A, 7], [*B, 8], [*C, 9])):
        same([states[row] for states in hidden], [states[-1:] for states in torch_states(tokens)])


def test_a_known_prefix_has_its_hidden_states_too(model: Any, torch_states: Any) -> None:
    model(torch.tensor([A]))
    output = model(torch.tensor([A]), output_hidden_states=True, logits_to_keep=1)
    assert output.logits.shape[1] == 1
    same([states[0] for states in output.hidden_states], torch_states(A))


def test_rows_that_are_equal_or_share_a_beginning(model: Any, torch_states: Any) -> None:
    rows = [A, A[:4] + C, A]
    for got, tokens in zip(states_of(model, rows, "right"), rows, strict=True):
        same(got, torch_states(tokens))


def test_embeddings_instead_of_tokens(model: Any, torch_reference: Any, torch_states: Any) -> None:
    embeds = torch_reference.get_input_embeddings()(torch.tensor([A])).detach()
    hidden = model(inputs_embeds=embeds, output_hidden_states=True).hidden_states
    assert torch.equal(hidden[0], embeds)
    same([states[0] for states in hidden], torch_states(A))


def test_what_generate_returns(model: Any, torch_reference: Any) -> None:
    ids, mask = padded([A, B])
    kwargs = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    kwargs |= {"return_dict_in_generate": True, "output_hidden_states": True}
    expected, got = (each.generate(ids, **kwargs) for each in (torch_reference, model))
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.hidden_states) == len(expected.hidden_states) == 4
    for step, (ours, theirs) in enumerate(zip(got.hidden_states, expected.hidden_states, strict=True)):
        seen = mask.bool() if step == 0 else torch.ones(2, 1, dtype=torch.bool)
        same([states[seen] for states in ours], [states[seen] for states in theirs])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 2}, {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}, {"do_sample": True},
        {"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "high"},
    ],
    ids=["beams", "groups", "sampling", "contrastive", "dola"],
)  # fmt: skip
def test_every_method_returns_all_layers(model: Any, torch_states: Any, kwargs: dict[str, Any]) -> None:
    kwargs |= {"max_new_tokens": 2, "return_dict_in_generate": True}
    output = model.generate(torch.tensor([A]), output_hidden_states=True, **kwargs)
    assert len(output.hidden_states) == 2
    same([states[0] for states in output.hidden_states[0]], torch_states(A))
    first = int(output.sequences[0, len(A)])
    if "num_beams" not in kwargs:  # which beam the second step's rows come from is not told
        same([states[0] for states in output.hidden_states[1]], [states[-1:] for states in torch_states([*A, first])])
    last = model.generate(torch.tensor([A]), output_hidden_states="last", **kwargs).hidden_states
    close(last[0][-1][0], torch_states(A)[-1], atol=5e-3)
    with pytest.raises(UnsupportedFeatureError, match="last"):
        last[1][3]


# -- every kind of memory --------------------------------------------------------------------------------------------


def cut_off(model: Any, cut: Any, rows: list[list[int]], n_layer: int) -> None:
    """`cut` is `model` without the layers from `n_layer` on: it ends with the norm of what went into the first of them."""
    weights = tensors(model)
    weight, bias = (weights.get(f"output_norm.{part}") for part in ("weight", "bias"))
    for before, after in zip(states_of(model, rows), states_of(cut, rows), strict=True):
        state = before[n_layer].double()
        if bias is not None:
            state = state - state.mean(dim=-1, keepdim=True)
        norm = state / torch.sqrt((state**2).mean(dim=-1, keepdim=True) + 1e-5) * torch.tensor(weight)
        same([after[-1]], [(norm if bias is None else norm + torch.tensor(bias)).float()])
        same(after[:n_layer], before[:n_layer])


@pytest.mark.parametrize(
    ("kind", "n_layer"),
    [(kind, n_layer) for kind in KINDS for n_layer in (1, 2, 3) if (kind, n_layer) != ("hybrid", 1)],
)  # of a hybrid's attention layers one must be left, or llama.cpp's memory of it has no buffer
def test_a_model_cut_off_before_a_layer_ends_with_the_norm_of_its_input(
    kind: str, n_layer: int, load: Callable[..., Any], request: pytest.FixtureRequest, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole = request.getfixturevalue(f"tiny_{kind}")
    monkeypatch.setattr(tiny_gguf, "N_LAYER", n_layer)
    tiny_gguf.write(kind, tmp_path / "cut.gguf")
    cut = load(tmp_path / "cut.gguf", **F32)
    cut_off(whole, cut, [LONG, SHORT], n_layer)


@pytest.mark.parametrize("kind", tiny_architectures.ARCHITECTURES)
def test_other_architectures(kind: str, load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(tiny_architectures.write(kind, tmp_path / "whole.gguf"), **F32)
    weights = {name: torch.tensor(data) for name, data in tensors(whole).items()}
    first = weights["token_embd.weight"][SHORT]
    if kind == "gpt2":
        first = first + weights["position_embd.weight"][: len(SHORT)]
    elif kind == "bloom":
        norm = weights["token_embd_norm.weight"], weights["token_embd_norm.bias"]
        first = torch.nn.functional.layer_norm(first, (64,), *norm, 1e-5)
    elif kind == "granite":
        first = first * 3
    same(states_of(whole, [SHORT])[0][:1], [first])
    for n_layer in (1, 2, 3):
        monkeypatch.setattr(tiny_gguf, "N_LAYER", n_layer)
        cut_off(whole, load(tiny_architectures.write(kind, tmp_path / f"{n_layer}.gguf"), **F32), [LONG, SHORT], n_layer)
    output = whole(torch.tensor([SHORT]), output_hidden_states="last")
    head = whole.native.output_head()
    logits = output.hidden_states[-1][0] @ torch.from_numpy(head.weight)
    close(output.logits[0], logits if head.bias is None else logits + torch.from_numpy(head.bias))
    assert (head.tied, head.bias is not None) == (kind == "gpt2", kind == "phi2")


def test_the_first_is_the_embeddings(tiny: Any) -> None:
    scale = 8 if "swa" in tiny.name_or_path else 1  # Gemma: sqrt(hidden_size)
    expected = torch.from_numpy(tensors(tiny)["token_embd.weight"][LONG].copy()) * scale
    [states] = states_of(tiny, [LONG])
    same(states[:1], [expected])


def test_batched_rows_equal_the_rows_alone(tiny: Any) -> None:
    rows = [LONG, SHORT, MIDDLE]
    for side in ("left", "right"):
        tiny.forget()
        for got, tokens in zip(states_of(tiny, rows, side), rows, strict=True):
            tiny.forget()
            same(got, states_of(tiny, [tokens])[0])


def test_a_step_of_several_rows_equals_the_rows_alone(tiny: Any) -> None:
    rows = [LONG, SHORT, MIDDLE]
    ids, mask = padded(rows)
    cache = LlamaCppCache(tiny)
    tiny(ids, attention_mask=mask, cache=cache)
    mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
    hidden = tiny(torch.tensor([[50], [60], [70]]), attention_mask=mask, cache=cache, output_hidden_states=True).hidden_states
    for row, token in enumerate((50, 60, 70)):
        expected = states_of(tiny, [[*rows[row], token]])[0]
        same([states[row] for states in hidden], [states[-1:] for states in expected])


@pytest.mark.parametrize("sizes", [{"n_ubatch": 4}, {"n_batch": 8, "n_ubatch": 8}, {"n_batch": 8, "n_ubatch": 3}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_the_whole(
    kind: str, sizes: dict[str, int], load: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    whole = request.getfixturevalue(f"tiny_{kind}")
    chunked = load(Path(whole.name_or_path), **F32, **sizes)
    rows = [LONG, SHORT]
    for got, expected in zip(states_of(chunked, rows), states_of(whole, rows), strict=True):
        same(got, expected)


def test_gemma_scales_its_embeddings(gemma_f32: Any) -> None:
    [states] = states_of(gemma_f32, [[2, 669, 5279, 529, 7001, 563]])
    embeddings = tensors(gemma_f32)["token_embd.weight"][[2, 669, 5279, 529, 7001, 563]]
    same(states[:1], [torch.from_numpy(embeddings.copy()) * 640**0.5])


def tensors(model: Any) -> dict[str, Any]:
    if "gemma" not in model.name_or_path:
        return {tensor.name: tensor.data for tensor in GGUFReader(model.name_or_path).tensors}
    from transformers_llamacpp.gguf_reader import tensor_places

    path = Path(model.name_or_path)  # a vocabulary that takes GGUFReader 13 seconds
    place = tensor_places(path)["token_embd.weight"]
    return {"token_embd.weight": np.memmap(path, np.float32, "r", place.offset, place.shape)}


# -- what it costs others --------------------------------------------------------------------------------------------


def test_a_plain_call_has_a_plain_context(load: Callable[..., Any], tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, **F32)
    model(torch.tensor([LONG]))
    model(torch.tensor([LONG]), output_hidden_states="last")
    model.generate(torch.tensor([SHORT]), max_new_tokens=3, penalty_alpha=0.6, top_k=4)
    assert not model.engine.backend.records_layers


def test_what_is_held_stays_held_when_the_context_changes(tiny: Any) -> None:
    """Both ways: to one that records, and back when nobody has asked for a while."""
    tiny.engine.backend.record_layers(False)
    expected = tiny(torch.tensor([LONG])).logits[0]
    tiny.forget()
    cache = LlamaCppCache(tiny)
    tiny(torch.tensor([LONG[:10]]), cache=cache)
    states_of(tiny, [SHORT])
    assert tiny.engine.backend.records_layers
    middle = tiny(torch.tensor([LONG[10:30]]), cache=cache).logits[0]
    for _ in range(PLAIN_CALLS):
        tiny(torch.tensor([SHORT]), logits_to_keep=1)
    assert not tiny.engine.backend.records_layers
    end = tiny(torch.tensor([LONG[30:]]), cache=cache).logits[0]
    close(torch.cat([middle, end]), expected[10:])
    assert cache.tokens(0) == LONG
    assert len(states_of(tiny, [SHORT])[0]) == 5


def test_more_sequences_than_the_context_has(load: Callable[..., Any], tiny_llama_path: Path) -> None:
    """A context that grows goes on recording."""
    model = load(tiny_llama_path, n_seq_max=1, **F32)
    rows = [SHORT, MIDDLE, SHORT[:5], MIDDLE[:9]]
    for got, tokens in zip(states_of(model, rows), rows, strict=True):
        model.forget()
        same(got, states_of(model, [tokens])[0])


# -- where there are none --------------------------------------------------------------------------------------------


def only_the_last(model: Any, reason: str) -> None:
    expected = model(torch.tensor([LONG]), output_hidden_states="last").hidden_states[-1]
    for _ in range(2):
        hidden = model(torch.tensor([LONG]), output_hidden_states=True).hidden_states
        assert isinstance(hidden, LastHiddenState)
        close(hidden[-1], expected)
        for layer in (0, 2, -2):
            with pytest.raises(UnsupportedFeatureError, match=reason) as error:
                hidden[layer]
            assert "hidden_states[-1]" in str(error.value)


def test_an_architecture_that_does_not_show_its_layers(
    load: Callable[..., Any], tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any) -> list[str]:
        raise no_layers("no names here")

    monkeypatch.setattr("transformers_llamacpp.native.layers.layer_inputs", unknown)
    model = load(tiny_llama_path, **F32)
    cache = LlamaCppCache(model)
    model(torch.tensor([SHORT]), cache=cache)
    only_the_last(model, "no names here")
    assert not model.engine.backend.records_layers and cache.tokens(0) == SHORT
    with pytest.raises(UnsupportedFeatureError, match="no names here"):
        model.generate(torch.tensor([SHORT]), max_new_tokens=2, dola_layers="high")


def test_a_callback_of_the_users_own(load: Callable[..., Any], tiny_llama_path: Path) -> None:
    seen: list[bool] = []

    def callback(_tensor: Any, ask: bool, _data: Any) -> bool:
        seen.append(ask)
        return False

    import llama_cpp

    mine = llama_cpp.ggml_backend_sched_eval_callback(callback)
    model = load(tiny_llama_path, cb_eval=mine, **F32)
    only_the_last(model, "cb_eval")
    assert seen


def test_a_layer_that_comes_in_another_shape_is_an_error(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    states_of(tiny_llama, [SHORT])
    monkeypatch.setattr(tiny_llama.engine.backend._recorder._ggml, "n_rows", lambda _: 1)
    cache = LlamaCppCache(tiny_llama)
    with pytest.raises(UnsupportedFeatureError, match="1 rows, where the batch has 8 tokens"):
        tiny_llama(torch.tensor([SHORT]), cache=cache, output_hidden_states=True)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_exception_while_llama_cpp_computes_comes_through(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    expected = states_of(tiny_llama, [SHORT])[0]

    def fails(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LayerRecorder, "_read", fails)
        with pytest.raises(error):
            tiny_llama(torch.tensor([SHORT]), output_hidden_states=True)
    tiny_llama.engine.check()
    same(states_of(tiny_llama, [SHORT])[0], expected)


def test_an_interrupt_while_the_context_is_made_again_loses_nothing(
    load: Callable[..., Any], tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_llama_path, **F32)
    expected = model(torch.tensor([LONG])).logits[0]
    model.forget()
    cache = LlamaCppCache(model)
    model(torch.tensor([LONG[:20]]), cache=cache)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LayerRecorder, "_node", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(torch.tensor([SHORT]), output_hidden_states=True)
    assert not model.engine.backend.records_layers
    close(model(torch.tensor([LONG[20:]]), cache=cache).logits[0], expected[20:])
    assert len(states_of(model, [SHORT])[0]) == 5


@pytest.mark.parametrize("value", ["first", 3, [1]], ids=str)
def test_other_wishes_are_errors(tiny_llama: Any, value: Any) -> None:
    with pytest.raises(InvalidInputError, match="output_hidden_states"):
        tiny_llama(torch.tensor([SHORT]), output_hidden_states=value)
