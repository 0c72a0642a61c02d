"""The doors of transformers: auto classes, pipelines, hub repositories; and the end of a model's life."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel, pipeline

from child import environment
from transformers_llamacpp import (
    ClosedError,
    LlamaCppConfig,
    LlamaCppForCausalLM,
    ModelLoadError,
    UnknownOptionError,
    UnsupportedFeatureError,
)

PROMPT = "The history of the Roman Empire begins with"
GREEDY = " the founding of Rome in 753 BCE"
N_GREEDY = 10


def say(model: Any) -> str:
    ids = model.tokenizer(PROMPT, return_tensors="pt").input_ids
    return model.tokenizer.decode(model.generate(ids, max_new_tokens=N_GREEDY, do_sample=False)[0, ids.shape[1] :])


def test_it_is_a_transformers_model(smollm2_f32: Any) -> None:
    assert isinstance(smollm2_f32, PreTrainedModel)
    assert isinstance(smollm2_f32, GenerationMixin)
    assert smollm2_f32.config.vocab_size == 49152
    assert (smollm2_f32.config.hidden_size, smollm2_f32.config.num_hidden_layers) == (576, 30)
    assert smollm2_f32.config.max_position_embeddings == 2048
    assert smollm2_f32.dtype == torch.float32
    assert smollm2_f32.device.type == "cpu"
    assert smollm2_f32.can_generate()
    assert smollm2_f32.eval() is smollm2_f32
    assert smollm2_f32.to("cpu") is smollm2_f32


def test_the_generation_config_is_the_files(smollm2_f32: Any, gemma_f32: Any) -> None:
    """Every end-of-generation token llama.cpp reports, pad and bos."""
    for model, ends in ((smollm2_f32, {2}), (gemma_f32, {1, 106})):
        config = model.generation_config
        assert ends <= set(config.eos_token_id) == set(model.native.vocab.eog_ids)
        assert config.bos_token_id == model.native.vocab.bos_id
        assert config.pad_token_id is not None


# -- auto classes --------------------------------------------------------------------------------------------------


def test_auto_model_with_a_llamacpp_config_is_ours(smollm2_f32_path: Path) -> None:
    config = LlamaCppConfig(n_ctx=512, n_threads=2)
    with AutoModelForCausalLM.from_pretrained(
        smollm2_f32_path.parent, gguf_file=smollm2_f32_path.name, quantization_config=config
    ) as model:
        assert type(model) is LlamaCppForCausalLM
        assert model.quantization_config == config
        assert model.config.max_position_embeddings == 512
        assert say(model) == GREEDY


def test_auto_model_without_one_is_transformers_own(torch_reference: Any) -> None:
    assert type(torch_reference).__name__ == "LlamaForCausalLM"
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained("no-such-user/no-such-repo", gguf_file="x.gguf")


def test_what_torch_models_take_is_no_obstacle(tiny_llama_path: Path) -> None:
    with AutoModelForCausalLM.from_pretrained(
        str(tiny_llama_path.parent), gguf_file=tiny_llama_path.name, quantization_config=LlamaCppConfig(n_ctx=64),
        dtype=torch.float16, device_map="auto", low_cpu_mem_usage=True, trust_remote_code=False,
    ) as model:  # fmt: skip
        assert model.generate(torch.tensor([[1, 70, 80]]), max_new_tokens=2).shape[0] == 1


def test_options_by_name_and_a_folder_with_one_gguf(tiny_llama_path: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_llama_path, tmp_path / "model.gguf")
    (tmp_path / "README.md").write_text("not a model")
    with LlamaCppForCausalLM.from_pretrained(tmp_path, n_ctx=128, n_threads=1) as model:
        assert model.config.max_position_embeddings == 128
        assert model.quantization_config.n_threads == 1
    shutil.copy(tiny_llama_path, tmp_path / "second.gguf")
    with pytest.raises(ModelLoadError, match="gguf_file"):
        LlamaCppForCausalLM.from_pretrained(tmp_path)
    with LlamaCppForCausalLM.from_pretrained(tmp_path, gguf_file="second.gguf", n_ctx=64) as model:
        assert model.config.max_position_embeddings == 64


def test_an_unknown_option_names_the_nearest(tiny_llama_path: Path) -> None:
    with pytest.raises(TypeError, match="n_ctx") as error:
        LlamaCppForCausalLM.from_pretrained(tiny_llama_path, n_ctxx=128)
    assert isinstance(error.value, UnknownOptionError)
    assert "n_ctx" in error.value.nearest


# -- pipelines -----------------------------------------------------------------------------------------------------


def test_text_generation_pipeline(smollm2_f32: Any) -> None:
    generator = pipeline("text-generation", model=smollm2_f32, tokenizer=smollm2_f32.tokenizer)
    output = generator(PROMPT, max_new_tokens=N_GREEDY, do_sample=False)
    assert output == [{"generated_text": PROMPT + GREEDY}]
    output = generator(PROMPT, max_new_tokens=N_GREEDY, do_sample=False, return_full_text=False)
    assert output == [{"generated_text": GREEDY}]


def test_a_pipeline_chats_and_batches(smollm2_f32: Any) -> None:
    generator = pipeline("text-generation", model=smollm2_f32, tokenizer=smollm2_f32.tokenizer)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    answer = generator(chat, max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert answer[:1] == chat
    assert answer[1]["role"] == "assistant"
    assert "Paris" in answer[1]["content"]
    prompts = [PROMPT, "Once upon a time"]
    together = generator(prompts, max_new_tokens=N_GREEDY, do_sample=False, batch_size=2)
    assert together[0] == [{"generated_text": PROMPT + GREEDY}]
    assert together[1] == generator(prompts[1], max_new_tokens=N_GREEDY, do_sample=False)


# -- hub repositories ----------------------------------------------------------------------------------------------

IN_A_CHILD = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from transformers_llamacpp import LlamaCppConfig, LlamaCppForCausalLM, ModelLoadError
repo = "some-user/some-model-GGUF"
answers = {}
for name, load in {
    "ours": lambda: LlamaCppForCausalLM.from_pretrained(repo, n_ctx=64),
    "by file": lambda: LlamaCppForCausalLM.from_pretrained(repo, gguf_file="tiny.gguf", n_ctx=64),
    "auto": lambda: AutoModelForCausalLM.from_pretrained(
        repo, gguf_file="tiny.gguf", quantization_config=LlamaCppConfig(n_ctx=64)),
    "other file": lambda: LlamaCppForCausalLM.from_pretrained(repo, gguf_file="no.gguf"),
    "other repository": lambda: LlamaCppForCausalLM.from_pretrained("some-user/another-GGUF"),
}.items():
    try:
        with load() as model:
            ids = model.generate(torch.tensor([[1, 70, 80]]), max_new_tokens=3, do_sample=False, eos_token_id=None)
            answers[name] = ids[0].tolist()
    except ModelLoadError as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""


def lay_out_hub_cache(home: Path, gguf: Path) -> None:
    """What `huggingface_hub` leaves behind after a download."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    folder = home / "hub" / "models--some-user--some-model-GGUF"
    for part in ("refs", "blobs", f"snapshots/{revision}"):
        (folder / part).mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    shutil.copy(gguf, folder / "snapshots" / revision / "tiny.gguf")


def test_a_hub_repository_comes_from_the_local_cache(tmp_path: Path, tiny_llama: Any, tiny_llama_path: Path) -> None:
    lay_out_hub_cache(tmp_path, tiny_llama_path)
    clean = environment(HF_HOME=str(tmp_path))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ENDPOINT"):
        clean.pop(name, None)
    child = subprocess.run([sys.executable, "-c", IN_A_CHILD], env=clean, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
    answers = json.loads(child.stdout.splitlines()[-1])
    expected = tiny_llama.generate(
        torch.tensor([[1, 70, 80]]), max_new_tokens=3, do_sample=False, eos_token_id=None
    )[0].tolist()
    assert [answers[name] for name in ("ours", "by file", "auto")] == [expected] * 3
    assert "no.gguf" in answers["other file"]
    assert "some-user/another-GGUF" in answers["other repository"]


# -- life ----------------------------------------------------------------------------------------------------------


def test_closing_twice_is_fine_and_using_a_closed_model_is_not(tiny_llama_path: Path) -> None:
    model = LlamaCppForCausalLM.from_pretrained(tiny_llama_path, n_ctx=64)
    model.close()
    model.close()
    ids = torch.tensor([[1, 70, 80]])
    for use in (
        lambda: model(ids),
        lambda: model.generate(ids, max_new_tokens=2),
        lambda: model.forget(),
        lambda: model.tokenizer("a"),
    ):
        with pytest.raises(ClosedError, match="from_pretrained"):
            use()


def test_leaving_the_block_closes(tiny_llama_path: Path) -> None:
    with LlamaCppForCausalLM.from_pretrained(tiny_llama_path, n_ctx=64) as model:
        tokenizer = model.tokenizer
        ids = tokenizer("the", return_tensors="pt").input_ids
    with pytest.raises(ClosedError):
        model(ids)


def test_what_a_gguf_cannot_do_is_said(smollm2_f32: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFeatureError):
        smollm2_f32.save_pretrained(tmp_path)


def test_two_models_at_once_do_not_mix(load: Any, tiny_llama_path: Path, tiny_mamba_path: Path) -> None:
    ids = torch.tensor([[1, 70, 80, 90]])
    kwargs = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    alone = [load(path).generate(ids, **kwargs).tolist() for path in (tiny_llama_path, tiny_mamba_path)]
    models = [load(path) for path in (tiny_llama_path, tiny_mamba_path)]
    for _ in range(2):
        assert [model.generate(ids, **kwargs).tolist() for model in models] == alone
