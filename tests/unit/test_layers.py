"""Hidden states between the layers, without a model: which nodes are believed, and how the engine asks for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transformers_llamacpp.batch import Job, plan
from transformers_llamacpp.engine import PLAIN_CALLS, Engine, Usage, Wanted
from transformers_llamacpp.errors import DecodeError, UnsupportedFeatureError
from transformers_llamacpp.native.graph import Node, layer_inputs
from transformers_llamacpp.native.layers import LayerRecorder
from transformers_llamacpp.rows import Feed, feed
from unit.naive import expected_logits, ids, job, make

pytestmark = pytest.mark.once

A, B = [5, 6, 7, 8, 9], [3, 4]


# -- the graph -------------------------------------------------------------------------------------------------------


Line = tuple[str, bool, str, str]
"""Name, whether it has the shape of hidden states, operation, and the names of its sources."""

LLAMA: tuple[Line, ...] = (
    ("embd", True, "GET_ROWS", "token_embd.weight inp_tokens"),
    ("norm-0", True, "RMS_NORM", "embd"),
    ("Qcur-0", True, "MUL_MAT", "norm-0"),
    ("ffn_inp-0", True, "ADD", "Qcur-0 embd"),
    ("norm-0", True, "RMS_NORM", "ffn_inp-0"),
    ("l_out-0", True, "ADD", "norm-0 ffn_inp-0"),
    ("norm-1", True, "RMS_NORM", "l_out-0"),
    ("Kcur-1 (view)", False, "VIEW", "norm-1"),
    ("l_out-1", True, "ADD", "norm-1 l_out-0"),
    ("norm-2", True, "RMS_NORM", "l_out-1"),
    ("node_77", False, "GET_ROWS", "l_out-1 inp_out_ids"),
    ("l_out-2", False, "ADD", "norm-2 node_77"),
    ("result_norm", False, "RMS_NORM", "l_out-2"),
)
"""Three layers as llama.cpp names them."""


def graph(*lines: Line) -> list[Node]:
    """A name stands for the node before that had it last; names of copies for what they are copies of."""
    nodes: list[Node] = []
    places: dict[str, int] = {}
    for place, (name, is_state, operation, sources) in enumerate(lines or LLAMA):
        known = tuple((places.get(source, 1000 + place), source) for source in sources.split())
        nodes.append(Node(place, name, is_state, operation, known))
        places[name] = place
    return nodes


def llama(**changes: str) -> list[Node]:
    """With other sources, by name (`_` for `-`); an empty text leaves the node out."""
    by_name = {name.replace("__", "-"): value for name, value in changes.items()}
    lines = [(name, state, operation, by_name.get(name, sources)) for name, state, operation, sources in LLAMA]
    return graph(*(line for line in lines if line[3]))


def shape(name: str) -> list[Node]:
    return graph(*((one, state and one != name, operation, sources) for one, state, operation, sources in LLAMA))


def test_the_inputs_of_three_layers() -> None:
    assert layer_inputs(graph(), 3) == ["embd", "l_out-0", "l_out-1"]
    assert layer_inputs(graph(), 2) == ["embd", "l_out-0"]


def test_layer_0_reads_what_was_made_of_the_embeddings() -> None:
    scaled = [(name, state, operation, sources.replace("embd", "inp_scaled")) for name, state, operation, sources in LLAMA[1:]]
    assert layer_inputs(graph(LLAMA[0], ("inp_scaled", True, "SCALE", "embd"), *scaled), 3)[0] == "inp_scaled"


def test_a_norm_of_the_embeddings_is_not_the_residual() -> None:
    """Bloom: named as part of layer 0, with a bias that is added."""
    first = [("norm-0", True, "NORM", "embd"), ("norm_w-0", True, "MUL", "norm-0"), ("inp_norm-0", True, "ADD", "norm_w-0")]
    rest = [(name, state, operation, sources.replace("embd", "inp_norm-0")) for name, state, operation, sources in LLAMA[1:]]
    assert layer_inputs(graph(LLAMA[0], *first, *rest), 3)[0] == "inp_norm-0"


def test_one_layer_adds_the_rows_that_are_outputs() -> None:
    nodes = graph(LLAMA[0], LLAMA[1], ("node_5", False, "GET_ROWS", "embd out_ids"), ("l_out-0", False, "ADD", "node_5 norm-0"))
    assert layer_inputs(nodes, 1) == ["embd"]


def test_names_of_copies_on_other_devices() -> None:
    assert layer_inputs(llama(norm__1="CUDA1#l_out-0#0", norm__2="CUDA1#l_out-1#0"), 3) == ["embd", "l_out-0", "l_out-1"]
    assert layer_inputs(llama(ffn_inp__0="Qcur-0 CUDA0#embd#0"), 3)[0] == "embd"


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (llama(l_out__1=""), "0 nodes 'l_out-1'"),
        (graph(*LLAMA, LLAMA[5]), "2 nodes 'l_out-0'"),
        (shape("l_out-0"), "'l_out-0' of this architecture is no hidden state"),
        (llama(norm__2="l_out-0"), "layer 2 of this architecture does not read 'l_out-1'"),
        (llama(embd="", norm__0="other", ffn_inp__0=""), "first layer"),
        (shape("embd"), "first layer"),
        (graph(LLAMA[0], *LLAMA), "first layer"),
        (graph(*((a.replace("embd", "node_3"), b, c, d.replace("embd", "node_3")) for a, b, c, d in LLAMA)), "first layer"),
        ([], "first layer"),
    ],
    ids=["missing", "twice", "shape", "not read", "no start", "start's shape", "two starts", "unnamed", "empty"],
)
def test_a_graph_that_is_not_believed(nodes: list[Node], reason: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=reason) as error:
        layer_inputs(nodes, 3)
    assert "hidden_states[-1]" in str(error.value) and error.value.feature == "output_hidden_states"


# -- the recorder ----------------------------------------------------------------------------------------------------


@pytest.fixture
def recorder() -> LayerRecorder:
    recorder = LayerRecorder(3, 4)
    recorder._names = [b"embd", b"l_out-0", b"l_out-1"]
    return recorder


def test_a_layer_that_did_not_come_is_an_error(recorder: LayerRecorder) -> None:
    with recorder.recording((0, 1), np.array([0]), 2, None):
        pass
    with pytest.raises(UnsupportedFeatureError, match="parts"):
        recorder.states()
    recorder.forget()
    with pytest.raises(UnsupportedFeatureError, match="did not record"):
        recorder.states()


def test_a_callback_that_was_cut_short_is_no_answer(recorder: LayerRecorder) -> None:
    """An exception before our own `try` makes ggml skip the rest of the graph without a word."""
    with pytest.raises(DecodeError, match="interrupted"), recorder.recording((0,), np.array([0]), 2, None):
        recorder._wanted[0] += 1  # asked about, and never told that it is done


# -- the engine ------------------------------------------------------------------------------------------------------


def states(text: list[int], layers: tuple[int, ...], engine: Engine) -> np.ndarray:
    """What the fake says of the last token of `text`: `(layers, 4)`."""
    last = expected_logits(text, engine.backend)[:4]  # type: ignore[arg-type]
    return last[None] + np.array(layers, np.float32)[:, None] + 1


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("n_batch", [2, 8])
def test_jobs_get_their_layers(n_batch: int, recurrent: bool) -> None:
    engine = make(n_batch=n_batch, recurrent=recurrent)
    jobs = [job(engine.new(), A, [0, 3, 4]), job(engine.new(), B)]
    engine.evaluate(jobs, Usage(), Wanted(layers=(0, 2)))
    for one, text, outputs in zip(jobs, (A, B), ([0, 3, 4], [1]), strict=True):
        assert one.layers is not None and one.layers.shape == (len(outputs), 2, 4)
        for row, at in enumerate(outputs):
            np.testing.assert_array_equal(one.layers[row], states(text[: at + 1], (0, 2), engine))
    step = [job(one.sequence, [2]) for one in jobs]
    usage = Usage()
    engine.evaluate(step, usage, Wanted(layers=(1,)))
    assert usage.decode_calls == (2 if recurrent else 1)
    for one, text in zip(step, (A, B), strict=True):
        assert one.layers is not None
        np.testing.assert_array_equal(one.layers[0], states([*text, 2], (1,), engine))
    plain = job(jobs[0].sequence, [1])
    engine.evaluate([plain], Usage())
    assert plain.layers is None
    engine.check()


def test_alone_is_one_job_a_batch() -> None:
    engine = make()
    jobs = [job(engine.new(), text) for text in (A, B, A)]
    for number, one in enumerate(jobs):
        one.sequence.seq_id = number
    assert [[piece.index for piece in pieces] for _, pieces in plan(jobs, 3, 8, alone=True)] == [[0], [0], [1], [2], [2]]
    assert [[piece.index for piece in pieces] for _, pieces in plan(jobs, 8, 8)] == [[0, 1, 2], [2]]


def test_the_context_changes_when_layers_are_wanted_and_when_they_are_not_for_long() -> None:
    engine = make(n_ctx=400, n_cells=400)
    backend: Any = engine.backend
    sequence = engine.new()
    engine.evaluate([job(sequence, A)], Usage())
    assert not backend.records_layers and backend.remade == 0
    for _ in range(2):
        engine.evaluate([job(sequence, [1])], Usage(), Wanted(layers=(0,)))
    assert backend.records_layers and backend.remade == 1
    for calls in (PLAIN_CALLS, 1, PLAIN_CALLS):
        for _ in range(calls):
            engine.evaluate([job(sequence, [2])], Usage())
        assert backend.records_layers
        engine.evaluate([job(sequence, [1])], Usage(), Wanted(layers=(0,)))
    for _ in range(PLAIN_CALLS + 1):
        engine.evaluate([job(sequence, [2])], Usage())
    assert not backend.records_layers and backend.remade == 2


@pytest.mark.parametrize("layers", [(), (0, 1)], ids=str)
def test_a_new_context_that_comes_up_empty(layers: tuple[int, ...]) -> None:
    engine = make()
    backend: Any = engine.backend
    sequence = engine.new()
    engine.evaluate([job(sequence, A)], Usage(), Wanted(layers=() if layers else (0,)))
    engine._plain_calls = PLAIN_CALLS
    backend.fail_grow(lost=True)
    usage, done = Usage(), job(sequence, B)
    engine.evaluate([done], usage, Wanted(layers=layers))
    assert usage.evaluated_tokens == len(A) + len(B) and backend.remade == (1 if layers else 2)
    assert done.logits is not None
    np.testing.assert_array_equal(done.logits[0], expected_logits(A + B, backend))
    if layers:
        assert done.layers is not None
        np.testing.assert_array_equal(done.layers[0], states(A + B, layers, engine))
    engine.check()


# -- rows ------------------------------------------------------------------------------------------------------------


def padded_feed(**kwargs: Any) -> Feed:
    """`A` and twice `B`, on the left and on the right of their padding."""
    rows = np.array([A, [0, 0, 0, *B], [*B, 0, 0, 0]], np.int32)
    mask = np.array([[1] * 5, [0, 0, 0, 1, 1], [1, 1, 0, 0, 0]], np.bool_)
    return Feed(rows, None, mask, kwargs.pop("kept", np.array([4])), 3, 5, **kwargs)


def test_layers_of_all_columns() -> None:
    engine = make()
    new = padded_feed(want_hidden=True, want_layers=(0, 1))
    hidden = feed(engine, [None] * 3, new, Usage()).hidden
    assert hidden is not None and new.layers is not None and len(new.layers) == 2
    for layer, answer in enumerate(new.layers):
        assert answer.shape == (3, 5, 4)
        np.testing.assert_array_equal(answer != 0, hidden != 0)
        np.testing.assert_allclose(answer, np.where(hidden != 0, hidden + layer + 1, 0), rtol=1e-6)
        for end in range(1, 6):
            np.testing.assert_array_equal(answer[0, end - 1], states(A[:end], (layer,), engine)[0])


@pytest.mark.parametrize("kept", [[4], [4, 0, 2]], ids=str)
def test_layers_of_the_kept_columns(kept: list[int]) -> None:
    engine = make()
    new = padded_feed(want_layers=(1,), kept=np.array(kept))
    feed(engine, [None] * 3, new, Usage())
    assert new.layers is not None
    [answer] = new.layers
    assert answer.shape == (3, len(kept), 4)
    texts = {0: (A[:1], None, B[:1]), 2: (A[:3], None, B), 4: (A, B, B)}
    for place, column in enumerate(kept):
        for row, text in enumerate(texts[column]):
            expected = np.zeros(4) if text is None else states(text, (1,), engine)[0]
            np.testing.assert_array_equal(answer[row, place], expected)


def test_a_known_beginning_is_reused_where_its_layers_are_not_wanted() -> None:
    engine = make()
    sequences = feed(engine, [None], Feed(ids(*A)[None], None, None, np.array([4]), 1, 5), Usage()).sequences
    engine.release(sequences)
    for want_hidden, reused in ((False, 4), (True, 0)):
        usage = Usage()
        new = Feed(ids(*A)[None], None, None, np.array([4]), 1, 5, want_hidden=want_hidden, want_layers=(0,))
        feed(engine, [None], new, usage)
        assert usage.reused_tokens == reused and new.layers is not None
        np.testing.assert_array_equal(new.layers[0][0, -1], states(A, (0,), engine)[0])


def test_a_job_without_outputs_has_no_layers() -> None:
    engine = make()
    none = Job(engine.new(), ids(*A), np.zeros(5, np.int8))
    engine.evaluate([none], Usage(), Wanted(layers=(0,)))
    assert none.layers is None and none.logits is None
