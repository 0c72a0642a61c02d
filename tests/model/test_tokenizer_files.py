"""Where a tokenizer comes from and where it goes: files, pickles, copies, threads, closed models."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import tiny_vocab_gguf
import transformers_llamacpp
from tokenizer_cases import EVERY, NASTY, path, tokenizer
from transformers_llamacpp.errors import ClosedError, ModelLoadError, TokenizerError
from transformers_llamacpp.native.vocab import open_vocab
from transformers_llamacpp.tokenizer import LlamaCppTokenizer

TEXT = "Zoë said <|im_end|> 你好 \n the end"


@pytest.mark.parametrize("name", EVERY)
def test_saved_and_loaded_again(name: str, tmp_path: Path) -> None:
    tok = LlamaCppTokenizer.from_pretrained(path(name), truncation_side="left")
    files = tok.save_pretrained(tmp_path / "saved")
    assert all(Path(file).is_file() for file in files)
    assert (tmp_path / "saved" / "tokenizer.gguf").stat().st_size <= path(name).stat().st_size + 64
    again = LlamaCppTokenizer.from_pretrained(tmp_path / "saved")
    assert type(again) is type(tok)
    for text in NASTY:
        assert again.encode(text) == tok.encode(text)
    assert again.special_tokens_map == tok.special_tokens_map
    assert again.all_special_ids == tok.all_special_ids
    assert again.chat_template == tok.chat_template
    assert (again.padding_side, again.truncation_side) == ("left", "left")
    assert again.model_max_length == tok.model_max_length
    config = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "LlamaCppTokenizer"
    assert str(path(name).parent) not in json.dumps(config), "no path of this machine"


def test_settings_survive_saving(tmp_path: Path) -> None:
    source = tiny_vocab_gguf.write(
        "bpe-gpt-2", tmp_path / "t.gguf", chat_template="D", named_templates={"tool_use": "T"}
    )
    tok = LlamaCppTokenizer.from_pretrained(source, pad_token="<|endoftext|>", add_bos_token=True)
    tok.padding_side = "right"
    tok.additional_special_tokens = ["Ġthe"]
    tok.save_pretrained(tmp_path / "saved")
    source.unlink()
    again = LlamaCppTokenizer.from_pretrained(tmp_path / "saved")
    assert again.pad_token == "<|endoftext|>" and again.add_bos_token and again.padding_side == "right"
    assert again.chat_template == {"default": "D", "tool_use": "T"}
    assert "Ġthe" in again.all_special_tokens and again.encode("x")[0] == again.bos_token_id
    again.save_pretrained(tmp_path / "saved")  # into the folder it came from
    assert LlamaCppTokenizer.from_pretrained(tmp_path / "saved").encode(TEXT) == again.encode(TEXT)
    with pytest.raises(TokenizerError, match="gone"):
        tok.save_pretrained(tmp_path / "other")


def test_folder_beside_a_model(tmp_path: Path) -> None:
    tiny_vocab_gguf.write("spm", tmp_path / "model.gguf")
    assert LlamaCppTokenizer.from_pretrained(str(tmp_path)).encode(TEXT) == tokenizer("spm").encode(TEXT)
    tiny_vocab_gguf.write("rwkv", tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="gguf_file"):
        LlamaCppTokenizer.from_pretrained(tmp_path)
    chosen = LlamaCppTokenizer.from_pretrained(tmp_path, gguf_file="other.gguf")
    assert chosen.encode(TEXT) == tokenizer("rwkv").encode(TEXT)


def test_clear_errors_for_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        LlamaCppTokenizer.from_pretrained(tmp_path / "nowhere.gguf")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ModelLoadError, match=r"text\.gguf"):
        LlamaCppTokenizer.from_pretrained(tmp_path / "text.gguf")
    with pytest.raises(TokenizerError, match="no vocabulary"):
        LlamaCppTokenizer.from_pretrained(tiny_vocab_gguf.write("none", tmp_path / "none.gguf"))
    whole = path("spm").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        LlamaCppTokenizer.from_pretrained(tmp_path / "cut.gguf")
    from transformers_llamacpp.tokenizer_files import copy_vocabulary

    for bad in ("cut.gguf", "text.gguf"):
        with pytest.raises(TokenizerError, match=r"cut off|not a GGUF"):
            copy_vocabulary(tmp_path / bad, tmp_path / "out.gguf")
    assert not list(tmp_path.glob("*.part")) and not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", ["smollm2", "spm", "rwkv"])
def test_pickle_and_copies(name: str) -> None:
    tok = tokenizer(name)
    tok.get_vocab()
    data = pickle.dumps(tok)
    assert len(data) < 50_000, "a pickle names the file and does not carry the vocabulary"
    for twin in (pickle.loads(data), copy.deepcopy(tok), copy.copy(tok)):
        assert twin.encode(TEXT) == tok.encode(TEXT) and twin.chat_template == tok.chat_template
        assert twin.all_special_ids == tok.all_special_ids
    twin = copy.deepcopy(tok)
    assert twin.vocab is tok.vocab
    twin.pad_token_id = 5
    assert tok.pad_token_id != 5
    encoded = tok(["a b", "c"], padding=True)
    again = pickle.loads(pickle.dumps(encoded))
    assert again.encodings[0].offsets == encoded.encodings[0].offsets
    assert again.tokens(1) == encoded.tokens(1) and again["input_ids"] == encoded["input_ids"]


def test_pickle_of_a_file_that_changed(tmp_path: Path) -> None:
    file = tiny_vocab_gguf.write("spm", tmp_path / "t.gguf")
    data = pickle.dumps(LlamaCppTokenizer.from_pretrained(file))
    tiny_vocab_gguf.write("rwkv", file)
    with pytest.raises(TokenizerError, match="tokens now"):
        pickle.loads(data)


def test_threads() -> None:
    tok = LlamaCppTokenizer.from_pretrained(path("gemma"))
    expected = [tokenizer("gemma").encode(text * 5) for text in NASTY]
    decoded = [tokenizer("gemma").decode(ids, skip_special_tokens=True) for ids in expected]

    def work(_: int) -> None:
        for text, ids, back in zip(NASTY, expected, decoded, strict=True):
            assert tok.encode(text * 5) == ids
            assert tok.decode(ids, skip_special_tokens=True) == back
        assert len(tok.get_vocab()) == len(tok) and len(tok.all_special_ids) > 6000

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))


def test_over_a_model_that_is_loaded_already(tmp_path: Path) -> None:
    file = tiny_vocab_gguf.write("bpe-qwen2", tmp_path / "t.gguf", chat_template="C")
    vocab = open_vocab(file)
    tok = LlamaCppTokenizer.from_vocab(vocab, vocab.metadata(), name_or_path=str(file))
    assert tok.vocab is vocab and tok.chat_template == "C" and tok.name_or_path == str(file)
    ids = tok.encode(TEXT)
    vocab.close()
    vocab.close()
    with pytest.raises(ClosedError, match="from_pretrained"):
        vocab.tokenize(TEXT)
    assert tok.encode(TEXT) == ids, "the tokenizer opens its vocabulary again"
    assert tok.vocab is not vocab
    pathless = LlamaCppTokenizer.from_vocab(open_vocab(file))
    pathless.vocab.path = None
    with pytest.raises(TokenizerError, match="path"):
        pathless.save_pretrained(tmp_path / "saved")
    with pytest.raises(TokenizerError, match="pickled"):
        pickle.dumps(pathless)
    pathless.vocab.close()
    with pytest.raises(ClosedError):
        pathless.encode("x")


def test_closing_while_another_thread_tokenizes() -> None:
    for _ in range(5):
        vocab = open_vocab(path("spm"))

        def work(vocab=vocab) -> int:  # type: ignore[no-untyped-def]
            done = 0
            try:
                while True:
                    vocab.tokenize(TEXT * 50)
                    done += 1
            except ClosedError:
                return done

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(work) for _ in range(4)]
            time.sleep(0.05)
            vocab.close()
            assert all(job.result() > 0 for job in jobs)


def test_auto_tokenizer_is_left_alone(smollm2_path: Path) -> None:
    auto = AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    assert not isinstance(auto, LlamaCppTokenizer)
    assert auto.encode("Hello there") == tokenizer("smollm2").encode("Hello there")


def test_making_one_over_a_loaded_vocabulary_is_quick(gemma_path: Path) -> None:
    vocab = open_vocab(gemma_path)
    metadata = vocab.metadata()
    LlamaCppTokenizer.from_vocab(vocab, metadata)
    started = time.perf_counter()
    tok = LlamaCppTokenizer.from_vocab(vocab, metadata)
    assert tok.pad_token_id == 0 and tok.encode("a") and tok.decode([5], skip_special_tokens=True)
    assert time.perf_counter() - started < 0.05, "no loop over 262,144 tokens"


CHILD = """
import sys, types
package = types.ModuleType("transformers_llamacpp")  # without its __init__: importing torch takes seconds
package.__path__ = [{package!r}]
sys.modules[package.__name__] = package
from transformers_llamacpp.errors import TokenizerError
from transformers_llamacpp.native.vocab import open_vocab
vocab = open_vocab(sys.argv[1])
for text in {texts}:
    try:
        print(len(vocab.tokenize(text)) > 0)
    except TokenizerError as error:
        print("error", str(error)[:60].encode("ascii", "replace").decode())
"""


def child(file: Path, texts: str) -> list[str]:
    package = Path(transformers_llamacpp.__file__).parent
    code = textwrap.dedent(CHILD).format(texts=texts, package=str(package))
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr[-500:]}"
    return done.stdout.splitlines()


@pytest.mark.once
@pytest.mark.parametrize("pre", tiny_vocab_gguf.BPE_PRES)
def test_long_runs_of_one_kind_do_not_end_the_process(pre: str) -> None:
    texts = "['a' * 60000, ' ' * 60000, '7' * 60000, '你' * 60000, '!' * 60000, '\\n' * 60000, 'é' * 60000]"
    assert child(path(f"bpe-{pre}"), texts) == ["True"] * 7


@pytest.mark.once
def test_a_run_too_long_for_any_stack_is_an_error() -> None:
    assert child(path("bpe-tekken"), "['a' * 3_000_000, 'ok']")[0].startswith("error 3000000 characters")


@pytest.mark.once
@pytest.mark.parametrize("kind", ["spm", "spm-bare", "bpe-gpt-2", "bpe-llama-bpe", "wpm", "ugm", "rwkv"])
def test_incomplete_vocabularies_do_not_end_the_process(kind: str, tmp_path: Path) -> None:
    file = tiny_vocab_gguf.write(kind, tmp_path / "t.gguf", drop_bytes=[0, 0xC3, 0xF0, ord("h"), ord("Q")])
    lines = child(file, "['Q', 'é', '\\0', '😀', 'the h', 'x']")
    assert lines[-1] == "True"
    if kind in ("spm", "rwkv"):
        assert [line.split()[0] for line in lines[:5]] == ["error"] * 5
