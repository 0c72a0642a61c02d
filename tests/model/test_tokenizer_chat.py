"""Chat templates from a GGUF."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import tiny_vocab_gguf
from tokenizer_cases import path, tokenizer
from transformers_llamacpp.errors import TokenizerError
from transformers_llamacpp.tokenizer import LlamaCppTokenizer

CHAT = [
    {"role": "system", "content": "Be brief. ‘é’"},
    {"role": "user", "content": "Hi <|im_end|> there"},
    {"role": "assistant", "content": "Hello!"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
CLEVER = (
    "{{ bos_token }}{% for m in messages %}[{{ loop.index }} {{ m.role | upper }}] {{ m.content | trim }}"
    "{{ eos_token }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}[A]{% endif %}{{ extra }}"
)


def make(tmp_path: Path, kind: str = "bpe-llama-bpe", **options: object) -> LlamaCppTokenizer:
    return LlamaCppTokenizer.from_pretrained(tiny_vocab_gguf.write(kind, tmp_path / "t.gguf", **options))  # type: ignore[arg-type]


def reference(template: object, tok: LlamaCppTokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers with the same template and names."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")),
        chat_template=template,
        bos_token=tok.bos_token,
        eos_token=tok.eos_token,
    )


@pytest.mark.parametrize("template", [tiny_vocab_gguf.CHATML, tiny_vocab_gguf.BOS_TEMPLATE, CLEVER])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_renders(tmp_path: Path, template: str, prompt: bool) -> None:
    tok = make(tmp_path, chat_template=template)
    assert tok.chat_template == template
    other = reference(template, tok)
    for options in ({}, {"tools": TOOLS}, {"extra": "!"}):
        ours = tok.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt, **options)
        assert ours == other.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt, **options)
        ids = tok.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False, **options)
        assert ids == tok.vocab.tokenize(ours, add_special=False, parse_special=True)
    final = tok.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)
    assert final == other.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)


def test_the_real_template() -> None:
    tok = tokenizer("smollm2")
    text = tok.apply_chat_template(CHAT[1:2], tokenize=False, add_generation_prompt=True)
    assert text == reference(tok.chat_template, tok).apply_chat_template(
        CHAT[1:2], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>assistant\n")
    batch = tok.apply_chat_template(
        [CHAT[1:2], CHAT], padding=True, return_tensors="pt", return_dict=True, add_generation_prompt=True
    )
    assert batch.input_ids.shape == batch.attention_mask.shape
    assert tok.decode(batch.input_ids[0][batch.attention_mask[0].bool()]) == text


@pytest.mark.parametrize("kind", ["bpe-llama-bpe", "spm", "spm-bare"])
def test_bos_is_never_doubled(tmp_path: Path, kind: str) -> None:
    tok = make(tmp_path, kind, chat_template=tiny_vocab_gguf.BOS_TEMPLATE)
    assert tok.add_bos_token
    rendered = tok.apply_chat_template(CHAT, tokenize=False)
    assert rendered.startswith(tok.bos_token)
    ids = tok.apply_chat_template(CHAT, return_dict=False)
    for found in (ids, tok(rendered)["input_ids"], tok.encode(rendered, add_special_tokens=False)):
        assert found[0] == tok.bos_token_id and found.count(tok.bos_token_id) == 1
        assert found == ids
    assert tok([rendered, "x"])["input_ids"][0] == ids
    assert tok.apply_chat_template(CHAT, return_dict=False, tokenizer_kwargs={}) == ids
    bare = make(tmp_path, kind, chat_template=tiny_vocab_gguf.CHATML)
    assert bare.bos_token_id not in bare.apply_chat_template(CHAT, return_dict=False), "the template is in charge"
    assert bare(bare.apply_chat_template(CHAT, tokenize=False))["input_ids"].count(bare.bos_token_id) == 1


def test_no_template_is_an_error_when_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="transformers_llamacpp"):
        tok = make(tmp_path)
    assert tok.chat_template is None and not caplog.records
    with pytest.raises(TokenizerError, match="chat_template="):
        tok.apply_chat_template(CHAT)
    assert tok.apply_chat_template(CHAT, chat_template="{{ messages|length }}", tokenize=False) == "3"
    tok.chat_template = "{{ messages[0].role }}"
    assert tok.apply_chat_template(CHAT, tokenize=False) == "system"


def test_a_broken_template_is_a_warning_at_load_and_an_error_when_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="transformers_llamacpp"):
        tok = make(tmp_path, chat_template="{% for m in messages %}{{ m.role }")
    assert len(caplog.records) == 1 and "does not compile" in caplog.text
    assert tok.encode("hello")
    with pytest.raises(TokenizerError, match="chat_template="):
        tok.apply_chat_template(CHAT)
    assert tok.apply_chat_template(CHAT, chat_template="ok", tokenize=False) == "ok"


def test_named_templates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = {"tool_use": "T{{ tools|length }}", "rag": "R{% broken"}
    with caplog.at_level(logging.WARNING, logger="transformers_llamacpp"):
        tok = make(tmp_path, chat_template="D", named_templates=named)
    assert tok.chat_template == {"default": "D", **named}
    assert "'rag'" in caplog.text
    assert tok.apply_chat_template(CHAT, tokenize=False) == "D"
    assert tok.apply_chat_template(CHAT, tools=TOOLS, tokenize=False) == "T1"
    assert tok.apply_chat_template(CHAT, chat_template="tool_use", tools=TOOLS, tokenize=False) == "T1"
    with pytest.raises(TokenizerError, match="does not compile"):
        tok.apply_chat_template(CHAT, chat_template="rag", tokenize=False)


def test_template_given_by_the_caller_wins(tmp_path: Path) -> None:
    file = tiny_vocab_gguf.write("bpe-gpt-2", tmp_path / "t.gguf", chat_template="{% broken")
    tok = LlamaCppTokenizer.from_pretrained(file, chat_template="mine")
    assert tok.apply_chat_template(CHAT, tokenize=False) == "mine"


def test_mask_of_assistant_tokens(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    tok = make(tmp_path, chat_template=template)
    encoded = tok.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    spoken = [t for t, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tok.decode(spoken).strip() == "Hello!"


def test_control_tokens_of_the_user_stay_text_where_transformers_can_do_that(tmp_path: Path) -> None:
    tok = make(tmp_path, chat_template=tiny_vocab_gguf.CHATML)
    if "sanitize_control_tokens" not in inspect.signature(tok.apply_chat_template).parameters:
        with pytest.raises(TypeError, match="sanitize_control_tokens"):
            tok("x", sanitize_control_tokens_=True, sanitize_control_tokens=True, unknown=1)
        return
    ids = tok.apply_chat_template(CHAT, sanitize_control_tokens=True, return_dict=False)
    end = tok.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 3, "one for each message, none for the user's text"
    assert tok.decode(ids) == tok.apply_chat_template(CHAT, tokenize=False)


def test_the_real_model_without_a_template() -> None:
    assert LlamaCppTokenizer.from_pretrained(path("gemma")).chat_template is None
