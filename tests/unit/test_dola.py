"""DoLa without a model: which layers, and how two distributions are contrasted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from transformers_llamacpp.decoding.dola import _Forward, candidate_layers, contrast
from transformers_llamacpp.errors import InvalidInputError, ModelLoadError, UnsupportedFeatureError
from transformers_llamacpp.gguf_reader import tensor_places
from transformers_llamacpp.output_head import OutputHead, read_output_head
from transformers_llamacpp.request import Request


@pytest.mark.parametrize(
    ("layers", "n_layer", "tied", "expected"),
    [
        ("low", 30, True, range(2, 15, 2)),
        ("low", 32, False, range(0, 16, 2)),
        ("low", 40, False, range(0, 20, 2)),
        ("low", 60, True, range(2, 20, 2)),
        ("low", 4, True, [2]),
        ("low", 3, True, [2]),
        ("low", 2, True, [1]),
        ("low", 1, True, [0]),
        ("low", 1, False, [0]),
        ("high", 30, True, range(15, 30, 2)),
        ("high", 40, False, range(20, 40, 2)),
        ("high", 41, False, range(21, 41, 2)),
        ("high", 80, True, range(60, 80, 2)),
        ("high", 1, True, [0]),
        ([7, 3, 3, 40], 30, True, [3, 7]),
        ([0], 30, True, [0]),
    ],
    ids=str,
)
def test_candidate_layers(layers: Any, n_layer: int, tied: bool, expected: Any) -> None:
    assert candidate_layers(layers, n_layer, tied) == tuple(expected)


@pytest.mark.parametrize("layers", ["middle", "", [], [30, 31], [-1], [1.5], [True], ["low"], 3], ids=str)
def test_layers_that_are_none(layers: Any) -> None:
    with pytest.raises(InvalidInputError, match="from 0 to 29"):
        candidate_layers(layers, 30, True)


def by_definition(final: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    p, q = final.double().softmax(-1), early.double().softmax(-1)
    middle = (p + q) / 2
    divergences = [(float((m * (m / p).log()).sum() + (m * (m / x).log()).sum()) / 2) for m, x in zip(middle, q, strict=True)]
    chosen = q[int(np.argmax(divergences))]
    return torch.tensor([
        math.log(a / b) if a >= 0.1 * p.max() else -math.inf for a, b in zip(p, chosen, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("candidates", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_contrast_is_what_the_paper_says(candidates: int, seed: int) -> None:
    torch.manual_seed(seed)
    final, early = torch.randn(50) * 3, torch.randn(candidates, 50) * torch.rand(candidates, 1) * 6
    got = contrast(final, early)
    assert torch.isinf(got).any() and torch.isfinite(got).any()
    torch.testing.assert_close(got.double(), by_definition(final, early).double(), atol=1e-4, rtol=1e-5)


def test_a_distribution_with_zeros_is_no_nan() -> None:
    final, early = torch.tensor([0.0, 500.0, 499.0]), torch.tensor([[900.0, 0.0, 0.0], [0.0, 1.0, 2.0]])
    got = contrast(final, early)
    assert not torch.isnan(got).any() and torch.isfinite(got[1:]).all()


@pytest.mark.parametrize("biased", [False, True])
def test_early_logits_of_each_rows_newest_token(biased: bool) -> None:
    """Rows of four columns, padded on either side; only the layers 0 and 2 of three are candidates."""
    states, weight, bias = matrix(1, (3, 2, 4, 8)), matrix(2, (8, 5)), matrix(3, (5,)) if biased else None
    request = Request()

    def step() -> str:
        assert request.want_layers == (0, 2)
        request.layers = list(states)
        return "outputs"

    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 0, 1, 1, 1]])
    outputs, early = _Forward(request, (0, 2), OutputHead(weight, bias, True))(step, {"attention_mask": mask})
    assert outputs == "outputs" and request.want_layers == () and early.shape == (2, 2, 5)
    for row, column in enumerate((1, 3)):
        for place, layer in enumerate((0, 2)):
            expected = states[layer, row, column] @ weight + (0 if bias is None else bias)
            np.testing.assert_allclose(early[row, place], expected, rtol=1e-4, atol=1e-5)


# -- the head, out of a file -----------------------------------------------------------------------------------------

SHAPE = (48, 64)


def write(path: Path, split: int = 0, kind: gguf.GGMLQuantizationType | None = None, **tensors: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    if not split:  # GGUFWriter tells the first shard only
        writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b"])
    for name, values in tensors.items():
        data = values if kind is None or values.ndim == 1 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name.replace("_dot_", "."), data, raw_dtype=None if data is values else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def matrix(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_head_of_its_own_with_a_bias(tmp_path: Path) -> None:
    file = write(
        tmp_path / "m.gguf", other=matrix(0, (3,)), token_embd_dot_weight=matrix(1), output_dot_weight=matrix(2),
        output_dot_bias=matrix(3, (48,)),
    )  # fmt: skip
    head = read_output_head(file, SHAPE)
    assert not head.tied and head.bias is not None
    np.testing.assert_array_equal(head.weight, matrix(2).T)
    np.testing.assert_array_equal(head.bias, matrix(3, (48,)))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q8_0", "Q5_1"])
def test_a_tied_quantised_head(tmp_path: Path, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    file = write(tmp_path / "m.gguf", kind=type_, token_embd_dot_weight=matrix(1), other=matrix(0, (3,)))
    head = read_output_head(file, SHAPE)
    assert head.tied and head.bias is None and head.weight.dtype == np.float32
    expected = gguf.quants.dequantize(gguf.quants.quantize(matrix(1), type_), type_)
    np.testing.assert_array_equal(head.weight, expected.T)


def test_every_tensor_is_where_gguf_says(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", a=matrix(0, (5,)), b=matrix(1), c=matrix(2, (3, 2, 32)))
    reader = gguf.GGUFReader(file)
    places = tensor_places(file)
    assert len(places) == len(reader.tensors) == 3
    for tensor in reader.tensors:
        assert (places[tensor.name].offset, places[tensor.name].kind) == (tensor.data_offset, tensor.tensor_type)
        assert places[tensor.name].shape == tuple(tensor.data.shape)


def test_a_head_in_the_last_shard(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", split=1, token_embd_dot_weight=matrix(1), a=matrix(0), output_dot_weight=matrix(2))
    shards = sorted(tmp_path.glob("*-of-*.gguf"))
    assert len(shards) == 3 and "output.weight" not in tensor_places(shards[0])
    head = read_output_head(shards[0], SHAPE)
    assert not head.tied
    np.testing.assert_array_equal(head.weight, matrix(2).T)


def test_a_file_without_a_head_that_fits(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", token_embd_dot_weight=matrix(1))
    with pytest.raises(UnsupportedFeatureError, match=r"\(48, 64\); \(48, 32\)"):
        read_output_head(file, (48, 32))
    with pytest.raises(UnsupportedFeatureError, match="None"):
        read_output_head(write(tmp_path / "n.gguf", other=matrix(1)), SHAPE)


@pytest.mark.parametrize(("name", "fits"), [("blk.0.attn_q.weight.lora_a", True), ("output.weight.lora_a", False)])
def test_a_lora_that_changes_the_head(tmp_path: Path, name: str, fits: bool) -> None:
    file = write(tmp_path / "m.gguf", output_dot_weight=matrix(1))
    lora = write(tmp_path / "lora.gguf", **{name: matrix(0)})
    if fits:
        assert read_output_head(file, SHAPE, str(lora)).bias is None
        return
    with pytest.raises(UnsupportedFeatureError, match="LoRA"):
        read_output_head(file, SHAPE, str(lora))


def test_a_type_nobody_knows(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", output_dot_weight=matrix(1))
    data = bytearray(file.read_bytes())
    at = data.index(b"output.weight") + len("output.weight") + 4 + 16
    for kind, reason in ((200, "type 200"), (24, "I8")):  # I8 is a type that has no dequantiser
        data[at] = kind
        file.write_bytes(data)
        with pytest.raises(UnsupportedFeatureError, match=reason):
            read_output_head(file, SHAPE)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", output_dot_weight=matrix(1))
    file.write_bytes(file.read_bytes()[:150])
    with pytest.raises(ModelLoadError, match="cut off"):
        read_output_head(file, SHAPE)
