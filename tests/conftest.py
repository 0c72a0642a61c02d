"""Models for every test, and the engine's own bookkeeping checked after each.

``*_path`` fixtures are files (see ``models.py``). ``smollm2_f32`` and the like are loaded once a session and
shared, but forgotten before each test, so that every test starts cold. A test that needs other options asks
``load``.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import browser as browsers
import models

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job, where all children would ignore Ctrl-C too
    signal.signal(signal.SIGINT, signal.default_int_handler)

THREADS = int(os.environ.get("TRANSFORMERS_LLAMACPP_TEST_THREADS", "2"))
"""One where other work keeps the cores busy: llama.cpp's threads wait for each other at every tensor."""

OPTIONS = {"n_ctx": 2048, "n_threads": THREADS, "n_threads_batch": THREADS}

F32 = {"type_k": "f32", "type_v": "f32", "flash_attn": False}
"""Keys and values in F32 too (flash attention rounds them to F16 on its way): then the logits equal PyTorch's to 1e-4,
and a difference means something."""


def _file(make: Callable[[], Path]) -> Path:
    try:
        return make()
    except models.MissingModelError as error:
        pytest.fail(str(error), pytrace=False)  # never a skip: a test that did not run has shown nothing


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return _file(models.smollm2)


@pytest.fixture(scope="session")
def smollm2_f32_path() -> Path:
    return _file(models.smollm2_f32)


@pytest.fixture(scope="session")
def smollm2_q4_0_path() -> Path:
    return _file(models.smollm2_q4_0)


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    return _file(models.gemma)


@pytest.fixture(scope="session")
def gemma_f32_path() -> Path:
    return _file(models.gemma_f32)


@pytest.fixture(scope="session")
def tiny_llama_path() -> Path:
    return _file(lambda: models.tiny("llama"))


@pytest.fixture(scope="session")
def tiny_swa_path() -> Path:
    return _file(lambda: models.tiny("swa"))


@pytest.fixture(scope="session")
def tiny_mamba_path() -> Path:
    return _file(lambda: models.tiny("mamba"))


@pytest.fixture(scope="session")
def tiny_hybrid_path() -> Path:
    return _file(lambda: models.tiny("hybrid"))


@pytest.fixture(scope="session")
def torch_reference() -> Any:
    """The weights of `smollm2_f32` in transformers' own PyTorch model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    return AutoModelForCausalLM.from_pretrained(_file(models.smollm2_torch), dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    yield from browsers.launched()


class _Loaded:
    """Models by file, loaded when first asked for, closed at the end of the session."""

    def __init__(self) -> None:
        self.models: dict[Path, Any] = {}

    def get(self, path: Path) -> Any:
        if path not in self.models:
            self.models[path] = _load(path, **F32)
        model = self.models[path]
        model.forget()
        return model

    def close(self) -> None:
        while self.models:
            self.models.popitem()[1].close()


def _load(path: Path, **options: Any) -> Any:
    from transformers_llamacpp import LlamaCppConfig, LlamaCppForCausalLM

    config = LlamaCppConfig(**{**OPTIONS, **options})
    return LlamaCppForCausalLM.from_pretrained(path, quantization_config=config)


@pytest.fixture(scope="session")
def _loaded() -> Iterator[_Loaded]:
    loaded = _Loaded()
    yield loaded
    loaded.close()


@pytest.fixture
def smollm2_f32(_loaded: _Loaded, smollm2_f32_path: Path) -> Any:
    return _loaded.get(smollm2_f32_path)


@pytest.fixture
def gemma_f32(_loaded: _Loaded, gemma_f32_path: Path) -> Any:
    return _loaded.get(gemma_f32_path)


@pytest.fixture
def tiny_llama(_loaded: _Loaded, tiny_llama_path: Path) -> Any:
    return _loaded.get(tiny_llama_path)


@pytest.fixture
def tiny_swa(_loaded: _Loaded, tiny_swa_path: Path) -> Any:
    return _loaded.get(tiny_swa_path)


@pytest.fixture
def tiny_mamba(_loaded: _Loaded, tiny_mamba_path: Path) -> Any:
    return _loaded.get(tiny_mamba_path)


@pytest.fixture
def tiny_hybrid(_loaded: _Loaded, tiny_hybrid_path: Path) -> Any:
    return _loaded.get(tiny_hybrid_path)


def _loading() -> Iterator[Callable[..., Any]]:
    mine: list[Any] = []

    def load_and_keep(path: Path, **options: Any) -> Any:
        mine.append(_load(path, **options))
        return mine[-1]

    yield load_and_keep
    for model in mine:
        model.close()


@pytest.fixture
def load() -> Iterator[Callable[..., Any]]:
    """``load(path, **options)``: a model of the test's own, closed when the test ends."""
    yield from _loading()


@pytest.fixture(scope="module")
def load_for_module() -> Iterator[Callable[..., Any]]:
    """The same for all tests of a file."""
    yield from _loading()


@pytest.fixture
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are made in every round, whatever they cost, so that what is counted is exact."""
    from transformers_llamacpp.decoding import speculation
    from transformers_llamacpp.decoding.drafting.pace import FixedPace

    monkeypatch.setattr(speculation, "Pace", FixedPace)


@pytest.fixture
def twin(load: Callable[..., Any], tiny_llama_path: Path) -> Any:
    """An assistant that drafts what `tiny_llama` says; of the test's own, which may change its settings."""
    return load(tiny_llama_path, **F32)


_live: weakref.WeakSet[Any] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def _engines_in_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, every open model's engine proves that what it believes is what llama.cpp holds."""
    if "unit" in request.path.parts:  # no native library there
        yield
        return
    _watch()
    yield
    for model in list(_live):
        model.engine.check()  # nothing to prove once it is closed


def _watch() -> None:
    from transformers_llamacpp import LlamaCppForCausalLM

    construct = LlamaCppForCausalLM.__init__
    if getattr(construct, "watched", False):
        return

    def watched_construct(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _live.add(self)

    watched_construct.watched = True  # type: ignore[attr-defined]
    LlamaCppForCausalLM.__init__ = watched_construct  # type: ignore[method-assign]
