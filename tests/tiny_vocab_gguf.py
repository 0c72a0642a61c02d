"""Tiny GGUF files with a random vocabulary and no tensors, one for each way llama.cpp cuts text.

    spm      SentencePiece: byte fallback, a space put before the first word   ("llama")
    spm-bare the same without the space prefix, as Gemma has it
    bpe-*    byte-level BPE, once for each `tokenizer.ggml.pre` in `BPE_PRES`    ("gpt2")
    wpm      WordPiece, lower case, accents stripped                            ("bert")
    ugm      Unigram with an unknown token and no byte fallback                 ("t5")
    rwkv     greedy longest match over bytes                                    ("rwkv")

llama.cpp loads them with `vocab_only`. The pieces are drawn with a fixed seed from the words of `SEED_TEXT`, so that
real text meets long tokens, short ones and single bytes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf

BPE_PRES = ("gpt-2", "llama-bpe", "qwen2", "deepseek-llm", "deepseek-v3", "tekken", "falcon", "gpt-4o", "chatglm-bpe")
KINDS = ("spm", "spm-bare", *(f"bpe-{pre}" for pre in BPE_PRES), "wpm", "ugm", "rwkv")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}: {{ message['content'] }}<|im_end|>"
    "{% endfor %}"
)

SEED_TEXT = (
    "the quick brown fox jumps over the lazy dog while Zoë's naïve façade costs 1234567 euros; "
    "hello world and the answer is, of course, forty-two! an other token here "
    "мир и дружба 你好世界 こんにちは 안녕하세요 🙂👩‍👩‍👧 x = y + 1\n\tdef main(): return 'tokens'"
)
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
USER_DEFINED = ["<tool>", "[UserDefined]"]

_TYPE = gguf.TokenType


def write(
    kind: str,
    path: Path,
    *,
    chat_template: str | None = None,
    named_templates: dict[str, str] | None = None,
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    drop_bytes: Sequence[int] = (),
    context_length: int = 512,
) -> Path:
    """Write the vocabulary of `kind` (one of `KINDS`, or "none": a model without one) to `path`, and return `path`.

    `add_bos` and `add_eos` are written only when given; `drop_bytes` leaves out the tokens of these bytes (an
    incomplete vocabulary, as broken conversions make them).
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"tiny-vocab-{kind}")
    writer.add_context_length(context_length)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    if kind == "none":
        writer.add_tokenizer_model("none")
    else:
        _WRITERS[kind.split("-")[0]](writer, kind, set(drop_bytes))
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if add_eos is not None:
        writer.add_add_eos_token(add_eos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, template in (named_templates or {}).items():
        writer.add_string(f"tokenizer.chat_template.{name}", template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _words(seed: str) -> list[str]:
    """The words of `SEED_TEXT` and random parts of them, each once, in a fixed order."""
    generator = random.Random(hashlib.sha256(seed.encode()).digest())
    found: dict[str, None] = {}
    for word in SEED_TEXT.split():
        found[word] = None
        for _ in range(6):
            start = generator.randrange(len(word))
            found[word[start : start + generator.randint(1, 4)]] = None
    return list(found)


def _write_spm(writer: gguf.GGUFWriter, kind: str, dropped: set[int]) -> None:
    tokens = ["<unk>", "<s>", "</s>"]
    types = [_TYPE.UNKNOWN, _TYPE.CONTROL, _TYPE.CONTROL]
    for byte in range(256):
        if byte not in dropped:
            tokens.append(f"<0x{byte:02X}>")
            types.append(_TYPE.BYTE)
    pieces = dict.fromkeys(["▁", "▁▁", "▁the", "▁h", "he", "ll", *_words(kind), *("▁" + w for w in _words(kind + "▁"))])
    if dropped:
        pieces = {piece: None for piece in pieces if not set(piece.encode()) & dropped}
    _finish(writer, "llama", tokens, types, list(pieces), CONTROL, USER_DEFINED, pre="default")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(kind == "spm")


def byte_to_char() -> dict[int, str]:
    """GPT-2's printable spelling of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in spelled:
            spelled[byte] = chr(256 + len(spelled) - len(printable))
    return spelled


def _write_bpe(writer: gguf.GGUFWriter, kind: str, dropped: set[int]) -> None:
    spelled = byte_to_char()
    tokens = [spelled[byte] for byte in range(256) if byte not in dropped]
    merges: list[str] = []
    known = set(tokens)
    for word in [*_words(kind), *(" " + word for word in _words(kind + " "))]:
        left = ""
        for char in (spelled[byte] for byte in word.encode()):
            if left and char in known and left in known:
                if left + char not in known:
                    merges.append(f"{left} {char}")
                    known.add(left + char)
                    tokens.append(left + char)
                left += char
            else:
                left = char
    types = [_TYPE.NORMAL] * len(tokens)
    _finish(writer, "gpt2", tokens, types, [], [*CONTROL, "<|begin|>"], USER_DEFINED, pre=kind.removeprefix("bpe-"))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) + 3)
    writer.add_eos_token_id(len(tokens) + 2)


def _write_wpm(writer: gguf.GGUFWriter, kind: str, dropped: set[int]) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    types = [_TYPE.CONTROL, _TYPE.UNKNOWN, _TYPE.CONTROL, _TYPE.CONTROL, _TYPE.CONTROL]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'\"()[]-_=+<>|/你好"
    words = [
        word for word in ("hello", "world", "the", "token", "cafe", "naive", "12") if not set(word.encode()) & dropped
    ]
    pieces = [*("▁" + letter for letter in letters), *letters, *("▁" + word for word in words), "llo", "ing", "s2"]
    _finish(writer, "bert", tokens, types, list(dict.fromkeys(pieces)), [], [])
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_eos_token_id(3)
    writer.add_mask_token_id(4)


def _write_ugm(writer: gguf.GGUFWriter, kind: str, dropped: set[int]) -> None:
    tokens = ["<pad>", "</s>", "<unk>"]
    types = [_TYPE.CONTROL, _TYPE.CONTROL, _TYPE.UNKNOWN]
    pieces = dict.fromkeys(["▁", *"abcdefghijklmnopqrstuvwxyz.,!?'0123456789éüß你好", *("▁" + w for w in _words(kind))])
    _finish(writer, "t5", tokens, types, list(pieces), CONTROL, USER_DEFINED)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)


def _write_rwkv(writer: gguf.GGUFWriter, kind: str, dropped: set[int]) -> None:
    spelled = ["<s>"]  # id 0 is never produced by the text, as in RWKV's own vocabulary
    words = [word.encode() for word in _words(kind)] + [b" the", b"\n\n", b"\xf0\x9f", b"\xff\xfe"]
    spelled += [_rwkv_spelling(bytes([byte])) for byte in range(256) if byte not in dropped]
    spelled += [_rwkv_spelling(word) for word in dict.fromkeys(words) if len(word) > 1]
    types = [_TYPE.CONTROL] + [_TYPE.NORMAL] * (len(spelled) - 1)
    _finish(writer, "rwkv", spelled, types, [], [], [])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def _rwkv_spelling(raw: bytes) -> str:
    plain = {9: "\\t", 10: "\\n", 13: "\\r", 92: "\\\\"}
    return "".join(plain.get(b, chr(b) if 32 <= b < 127 else f"\\x{b:02x}") for b in raw)


def _finish(
    writer: gguf.GGUFWriter,
    model: str,
    tokens: list[str],
    types: list[gguf.TokenType],
    pieces: list[str],
    control: list[str],
    user_defined: list[str],
    pre: str | None = None,
) -> None:
    pieces = [piece for piece in pieces if piece not in tokens]
    every = [*tokens, *pieces, *control, *user_defined]
    kinds = [*types, *[_TYPE.NORMAL] * len(pieces), *[_TYPE.CONTROL] * len(control)]
    kinds += [_TYPE.USER_DEFINED] * len(user_defined)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(every)
    writer.add_token_types(kinds)
    # Longer pieces score higher, and no two alike: the order of merges is never left to chance.
    writer.add_token_scores([len(text) - index / 10_000 for index, text in enumerate(every)])


_WRITERS: dict[str, Callable[[gguf.GGUFWriter, str, set[int]], None]] = {
    "spm": _write_spm,
    "bpe": _write_bpe,
    "wpm": _write_wpm,
    "ugm": _write_ugm,
    "rwkv": _write_rwkv,
}
