"""Options in force: what a real model and context say when every parameter is set to a non-default."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_lora import write_lora
from transformers_llamacpp.backend import DecodeStatus
from transformers_llamacpp.batch import Batch
from transformers_llamacpp.errors import ModelLoadError, OptionError
from transformers_llamacpp.native import NativeBackend, NativeModel, build, check_option, library
from unit.params_table import FIELDS

pytestmark = pytest.mark.once

Open = Callable[..., NativeBackend]
KINDS = ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


@pytest.fixture
def open_native() -> Iterator[Open]:
    opened: list[NativeBackend] = []

    def open_one(path: Path, n_cells: int = 256, n_seq_max: int = 4, **options: Any) -> NativeBackend:
        checked = {"n_threads": 1, **{name: check_option(name, value) for name, value in options.items()}}
        model = NativeModel(path, build(checked))
        try:
            opened.append(NativeBackend(model, n_cells, n_seq_max))
        except BaseException:
            model.close()
            raise
        return opened[-1]

    yield open_one
    for backend in opened:
        backend.close()
        backend.model.close()


def answer(backend: NativeBackend, n: int = 4) -> np.ndarray:
    """Logits after the tokens 1 .. n, evaluated in batches as large as allowed."""
    size = min(n, backend.limits.n_batch)
    for first in range(0, n, size):
        tokens = np.arange(first + 1, min(n, first + size) + 1, dtype=np.int32)
        wanted = np.zeros(len(tokens), np.int8)
        wanted[-1] = 1
        batch = Batch(tokens, None, tokens - 1, np.zeros(len(tokens), np.int32), wanted, 1)
        assert backend.decode(batch) is DecodeStatus.OK
    return backend.logits(1)[0].copy()


def test_every_field_reads_back(open_native: Open, smollm2_path: Path) -> None:
    fields = {
        name: pair for name, pair in FIELDS.items() if name != "ctx_type"
    }  # MTP needs a model with such layers
    fields["use_extra_bufts"] = (False, False)
    backend = open_native(smollm2_path, **{name: value for name, (value, _) in fields.items()})
    found = backend.read_back()
    expected = {name: value for name, (_, value) in fields.items()}
    expected["n_rs_seq"] = 0  # llama.cpp's answer where the model has no recurrent state
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["kv_unified"] and found["n_ctx"] == backend.limits.n_cells == 256
    assert np.isfinite(answer(backend)).all()


def test_multi_token_prediction_needs_a_model_that_has_it(open_native: Open, smollm2_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="MTP"):
        open_native(smollm2_path, ctx_type=1)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_types(open_native: Open, smollm2_path: Path, kind: str) -> None:
    backend = open_native(smollm2_path, type_k=kind, type_v=kind, flash_attn=True)
    assert np.isfinite(answer(backend)).all()
    assert len(backend.state_save(0)) > 0


def test_a_quantised_v_cache_without_flash_attention_names_both(
    open_native: Open, smollm2_path: Path
) -> None:
    with pytest.raises(OptionError, match=r"type_v='q8_0'.*flash_attn=False"):
        open_native(smollm2_path, type_v="q8_0", flash_attn=False)
    open_native(smollm2_path, type_v="q8_0")  # llama.cpp decides, and switches it on


def test_a_cache_type_that_does_not_fit_the_heads_says_so(open_native: Open, tiny_llama_path: Path) -> None:
    for flash_attn in (True, False):  # without flash attention llama.cpp itself does not notice, and answers NaN
        with pytest.raises(OptionError, match="blocks of 32 numbers, and this model's heads have 16"):
            open_native(tiny_llama_path, type_k="q8_0", flash_attn=flash_attn)


@pytest.mark.parametrize(
    "options", [{"n_batch": 1}, {"n_batch": 3, "n_ubatch": 2}, {"n_outputs_max": 1}, {"n_batch": 2**32 - 1}]
)
def test_sizes_smaller_than_the_number_of_sequences(
    open_native: Open, tiny_llama_path: Path, options: dict[str, int]
) -> None:
    """llama.cpp asserts a row of logits for each sequence; our decodes are as small as was asked for."""
    backend = open_native(tiny_llama_path, n_seq_max=8, **options)
    limits = backend.limits
    assert limits.n_batch == min(options.get("n_batch", 256), 256)
    assert limits.n_outputs == min(limits.n_batch, options.get("n_outputs_max", 256))
    small = answer(backend)
    backend.clear()
    backend.grow(64)
    assert backend.limits.n_batch == limits.n_batch and backend.limits.n_outputs == limits.n_outputs
    np.testing.assert_allclose(answer(backend), small, atol=1e-3)
    np.testing.assert_allclose(answer(open_native(tiny_llama_path)), small, atol=1e-2)


def test_metadata_overrides_reach_the_model(open_native: Open, tiny_llama_path: Path) -> None:
    overrides = {"llama.context_length": 77, "llama.attention.layer_norm_rms_epsilon": 0.5}
    changed = open_native(tiny_llama_path, kv_overrides=overrides)
    assert changed.limits.n_ctx_train == 77
    assert not np.allclose(answer(changed), answer(open_native(tiny_llama_path)), atol=0.1)


def test_callbacks_are_called(open_native: Open, tiny_llama_path: Path) -> None:
    progress: list[float] = []
    asked: list[bool] = []
    backend = open_native(
        tiny_llama_path,
        progress_callback=lambda done, _: progress.append(done) or True,
        cb_eval=lambda tensor, ask, _: asked.append(ask) or False,
    )
    answer(backend)
    assert progress[-1] == 1.0 and len(asked) > 10


def test_a_progress_callback_can_stop_the_load(open_native: Open, tiny_llama_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        open_native(tiny_llama_path, progress_callback=lambda done, _: False)


def test_an_abort_callback_stops_the_decode(open_native: Open, tiny_llama_path: Path) -> None:
    stop = [False]
    backend = open_native(tiny_llama_path, abort_callback=lambda _: stop[0])
    whole = answer(backend)
    backend.clear()
    stop[0] = True
    tokens = np.arange(1, 5, dtype=np.int32)
    batch = Batch(tokens, None, tokens - 1, np.zeros(4, np.int32), np.array([0, 0, 0, 1], np.int8), 1)
    assert backend.decode(batch) is DecodeStatus.ABORTED
    stop[0] = False
    assert backend.seq_remove(0, 0, -1) and backend.pos_max(0) == -1
    np.testing.assert_array_equal(answer(backend), whole)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, tiny_llama_path: Path) -> Path:
    """A LoRA of rank 2 on one matrix of the tiny model."""
    return write_lora(tmp_path_factory.mktemp("lora") / "adapter.gguf", tiny_llama_path)


def test_a_lora_changes_the_answer_by_its_scale(
    open_native: Open, tiny_llama_path: Path, adapter: Path
) -> None:
    plain = answer(open_native(tiny_llama_path))
    lora = str(adapter)
    whole, half, none = (
        answer(open_native(tiny_llama_path, lora_path=lora, lora_scale=s)) for s in (1, 0.5, 0)
    )
    np.testing.assert_allclose(none, plain, atol=1e-3)
    assert np.abs(whole - plain).max() > np.abs(whole - half).max() > 0.01
    grown = open_native(tiny_llama_path, lora_path=str(adapter))
    grown.grow(8)
    np.testing.assert_allclose(answer(grown), whole, atol=1e-3)


def test_a_lora_that_is_none(open_native: Open, tiny_llama_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"lora_path=.* is no file"):
        open_native(tiny_llama_path, lora_path=str(tmp_path / "missing.gguf"))
    with pytest.raises(ModelLoadError, match="cannot load the LoRA"):
        open_native(tiny_llama_path, lora_path=str(tiny_llama_path))


def test_why_a_model_does_not_load(open_native: Open, tmp_path: Path, tiny_llama_path: Path) -> None:
    """llama.cpp's own reason is in the message, and only that."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_llama_path.read_bytes()[:300_000])
    with pytest.raises(ModelLoadError, match="corrupted or incomplete") as caught:
        open_native(cut)
    assert caught.value.path == str(cut) and "loaded meta data" not in str(caught.value)
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    with pytest.raises(ModelLoadError, match="is no GGUF file"):
        open_native(text)
    with pytest.raises(ModelLoadError, match="is no file"):
        open_native(tmp_path / "missing.gguf")


def test_verbose_shows_the_log(
    open_native: Open,
    tiny_llama_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(library._state, "verbose", False)
    with caplog.at_level(logging.DEBUG, logger=library.logger.name):
        open_native(tiny_llama_path)
        assert not [r for r in caplog.records if r.levelno < logging.WARNING and "n_ctx_train" in r.message]
        open_native(tiny_llama_path, verbose=True)
    assert [r for r in caplog.records if r.levelno == logging.INFO and "n_ctx_train" in r.message]


# -- threads by default --------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`machine(cpus, **files)`: what a Linux machine tells; `siblings` says which numbers are one core."""

    def make(cpus: int, siblings: Any = None, **files: str) -> int:
        names = {"quota": "/sys/fs/cgroup/cpu.max", "large": "/sys/devices/cpu_core/cpus"}
        names |= {"quota1": "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "period1": "/sys/fs/cgroup/cpu/cpu.cfs_period_us"}
        told = {names[name]: text for name, text in files.items()}
        if siblings is not None:
            for cpu in range(cpus):
                told[f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings(cpu)
        monkeypatch.setattr(library.os, "sched_getaffinity", lambda _: set(range(cpus)), raising=False)
        monkeypatch.setattr(library, "_read", lambda path: told.get(path, ""))
        library.default_threads.cache_clear()
        return int(library.default_threads())

    yield make
    monkeypatch.undo()
    library.default_threads.cache_clear()


def test_threads_by_default(machine: Any) -> None:
    def alone(cpu: int) -> str:
        return str(cpu)

    def pairs(cpu: int) -> str:
        return f"{cpu % 8},{cpu % 8 + 8}"

    assert machine(2, alone) == 2
    assert machine(16, pairs) == 8, "hyper-threads are no cores"
    assert machine(4) == 4 and machine(12) == 6, "where the system does not tell"
    assert machine(16, pairs, quota="max 100000") == 8
    assert machine(16, pairs, quota="250000 100000") == 3, "a container's share"
    assert machine(16, pairs, quota1="-1", period1="100000") == 8
    assert machine(16, pairs, quota1="50000", period1="100000") == 1
    assert machine(16, alone, large="0-5") == 6, "large cores only"
    assert machine(2, alone, large="4-7") == 2, "where this process may use none of them"
    assert machine(8, alone, quota="nonsense") == 8
