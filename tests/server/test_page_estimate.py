"""What a load will take is what llama.cpp says it took."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from transformers_llamacpp.errors import ModelLoadError
from transformers_llamacpp.native import NativeModel, build
from transformers_llamacpp.server.page.estimate import Estimate, estimate, facts_of, free_memory
from transformers_llamacpp.server.page.texts import estimate_html, facts_html

pytestmark = pytest.mark.once

LOAD = """
import sys
from transformers_llamacpp import LlamaCppConfig, LlamaCppForCausalLM
options = eval(sys.argv[2])
LlamaCppForCausalLM.from_pretrained(sys.argv[1], quantization_config=LlamaCppConfig(verbose=True, **options)).close()
"""


def said(path: Path, options: dict[str, Any]) -> dict[str, float]:
    """MiB by kind of buffer, as llama.cpp's log has it."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), repr(options)], capture_output=True, text=True, timeout=120, check=True,
        errors="replace",
    )  # fmt: skip
    found: dict[str, float] = {}
    for kind, size in re.findall(r" (KV|RS|output|compute) buffer size = +([\d.]+) MiB", done.stderr):
        found[kind] = found.get(kind, 0.0) + float(size)
    return found


CASES = [
    ("smollm2_q4_0_path", {"n_ctx": 4096}),
    ("smollm2_q4_0_path", {"n_ctx": 8192, "n_ubatch": 128, "n_seq_max": 4}),
    ("smollm2_q4_0_path", {"n_ctx": 2048, "type_k": "q8_0", "type_v": "q8_0", "flash_attn": True}),
    ("tiny_swa_path", {"n_ctx": 4096}),
    ("tiny_swa_path", {"n_ctx": 4096, "swa_full": False}),
    ("tiny_hybrid_path", {"n_ctx": 4096}),
]


@pytest.mark.parametrize(("file", "options"), CASES, ids=lambda value: str(value) if isinstance(value, dict) else value)
def test_as_much_as_llama_cpp_takes(file: str, options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(file)
    real, guess = said(path, options), estimate(facts_of(str(path)), options)
    assert guess.cells / 2**20 == pytest.approx(real.get("KV", 0.0), abs=0.02)
    together = real["output"] + real["compute"]
    assert guess.compute / 2**20 == pytest.approx(together, rel=0.05, abs=1.0)
    assert guess.exact == ("RS" not in real)


@pytest.mark.parametrize("file", ["smollm2_q4_0_path", "gemma_path", "tiny_swa_path", "tiny_hybrid_path", "tiny_mamba_path"])
def test_facts_are_those_of_llama_cpp(file: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(file)
    facts, native = facts_of(str(path)), NativeModel(path, build({"n_gpu_layers": 0}))
    try:
        assert facts.parameters == native.n_params and facts.n_vocab == native.vocab.n_tokens
        assert facts.n_ctx_train == native.n_ctx_train and facts.n_embd == native.n_embd
        assert len(facts.key_heads) == native.n_layer and facts.recurrent == native.has_state
        assert any(facts.key_heads) == native.has_cells
        assert facts.has_template == ("tokenizer.chat_template" in native.metadata)
        assert facts.file_bytes >= native.n_bytes
        if native.has_cells:
            assert facts.key_width == native.n_embd_head_k
    finally:
        native.close()


def test_files_that_are_no_models(tmp_path: Path, smollm2_q4_0_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("not a model")
    (tmp_path / "cut.gguf").write_bytes(smollm2_q4_0_path.read_bytes()[:5000])
    for name in ("notes.gguf", "cut.gguf", "gone.gguf"):
        with pytest.raises(ModelLoadError):
            facts_of(str(tmp_path / name))


def test_what_is_shown(tiny_llama_path: Path) -> None:
    facts = facts_of(str(tiny_llama_path))
    shown = facts_html(facts)
    assert "llama F32" in shown and "no chat template" in shown
    guess = Estimate(3 << 30, 1 << 30, 512 << 20, 4096, False)
    assert "About 4.5 GiB" in estimate_html(guess, None, None) and "recurrent state" in estimate_html(guess, None, None)
    assert "will not fit" in estimate_html(guess, None, 4 << 30) and "will not fit" not in estimate_html(guess, None, 5 << 30)
    assert "will not fit" in estimate_html(guess, guess, 5 << 30), "the draft model counts too"


@pytest.mark.skipif(sys.platform != "linux", reason="asked of /proc")
def test_free_memory() -> None:
    free = free_memory()
    assert free is not None and 1 << 20 < free < 1 << 50
